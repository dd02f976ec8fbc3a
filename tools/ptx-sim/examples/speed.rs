//! How fast the simulator is: `merge_state` in bf16 over 4096 rows of 512 values.
use ptx_sim::{Launch, Memory, Param, parse};
use std::time::Instant;

fn main() {
    let module = parse(include_str!("../tests/ptx/merge_state.bf16.ptx")).expect("our own PTX parses");
    let (rows, vectors) = (4096u32, 64u32);
    let mut memory = Memory::new();
    let values = vec![0x3f; (rows * vectors * 16) as usize];
    let lse = vec![0x3f; 4 * rows as usize];
    let mut params: Vec<Param> =
        [&values, &lse, &values, &lse, &values, &lse].map(|bytes| Param::Buffer(memory.alloc(bytes))).into();
    let mut info: Vec<u8> = [rows, vectors, 0xff80_0000].iter().flat_map(|v| v.to_le_bytes()).collect();
    info.resize(40, 0);
    params.push(Param::Bytes(info));
    let launch =
        Launch { grid: [rows / 2, 1, 1], block: [64, 2, 1], params, ..Launch::new(&module, &module.entries[0].name) };
    let start = Instant::now();
    let stats = launch.run(&memory).expect("the kernel runs");
    let seconds = start.elapsed().as_secs_f64();
    let rate = stats.warp_instructions as f64 / seconds / 1e6;
    println!("{} warp instructions in {seconds:.3} s: {rate:.1} million per second", stats.warp_instructions);
}
