//! Lists of slots against those of the host.

use mla_kernels::compact_slots::{self, CompactSlotsArgs};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, upload};

/// What no list holds.
const UNWRITTEN: i32 = 77_777;

#[rstest]
fn compact_slots_keep_their_order(#[values(0, 1, 3, 7)] lists: usize, #[values(0, 1, 5, 256, 257, 2049)] width: usize) {
    let numbers = random(23, lists * width + lists);
    // Half of the entries are gaps, of different negative numbers.
    let slots: Vec<i32> = numbers[lists..].iter().map(|x| (x * 1000.0) as i32).collect();
    // Also lengths that are none, and longer than the list.
    let lengths: Vec<i32> = numbers[..lists].iter().map(|x| (x * 2.0 * width as f32) as i32).collect();
    for_each_client(|client| {
        let wanted = |list: usize| -> Vec<i32> {
            let length = lengths[list].clamp(0, width as i32) as usize;
            slots[list * width..][..length].iter().copied().filter(|&slot| slot >= 0).collect()
        };
        let compact = upload(client, &vec![UNWRITTEN; lists * width + 1]);
        let counts = upload(client, &vec![UNWRITTEN; lists + 1]);
        compact_slots::launch(
            client,
            CompactSlotsArgs {
                slots: arg(&upload(client, &[&slots[..], &[5]].concat()), lists * width),
                lengths: arg(&upload(client, &[&lengths[..], &[1]].concat()), lists),
                compact: arg(&compact, lists * width),
                counts: arg(&counts, lists),
                lists,
                width,
            },
        );
        let (compact, counts): (Vec<i32>, Vec<i32>) = (read(client, compact), read(client, counts));
        for list in 0..lists {
            let (wanted, own) = (wanted(list), &compact[list * width..][..width]);
            assert_eq!(counts[list] as usize, wanted.len());
            assert_eq!(own[..wanted.len()], wanted);
            assert!(own[wanted.len()..].iter().all(|&slot| slot == UNWRITTEN));
        }
        assert_eq!((counts[lists], compact[lists * width]), (UNWRITTEN, UNWRITTEN));
    });
}
