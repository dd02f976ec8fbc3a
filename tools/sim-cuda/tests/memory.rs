//! Memory that runs out, as a program sees it.
mod common;
use common::Driver;

const OUT_OF_MEMORY: u32 = 2;

#[test]
fn more_than_is_left_is_out_of_memory() {
    let driver = Driver::new();
    let info = || {
        let (mut free, mut total) = (0, 0);
        assert_eq!(driver.cuMemGetInfo_v2(&mut free, &mut total), 0);
        (free, total)
    };
    let (mut kept, mut other) = (0, 0);
    assert_eq!(driver.cuMemAlloc_v2(&mut kept, 4096), 0);
    let (free, total) = info();
    assert_eq!(free, total - 4096);
    assert_eq!(driver.simCudaLeave(1000), 0);
    assert_eq!(info(), (1000, total), "the rest is somebody else's");
    assert_eq!(driver.cuMemAlloc_v2(&mut other, 1001), OUT_OF_MEMORY);
    assert_eq!(driver.cuMemAllocAsync(&mut other, 1001, driver.stream()), OUT_OF_MEMORY);
    assert_eq!(driver.cuMemAlloc_v2(&mut other, 1000), 0, "a failed call leaves nothing behind");
    assert_eq!(driver.cuMemFree_v2(kept), 0);
    assert_eq!(info(), (4096, total), "what is freed can be had again");
    assert_eq!(driver.simCudaLeave(u64::MAX), 0);
    assert_eq!(info(), (total - 1000, total));
}
