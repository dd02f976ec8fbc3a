//! Kernels as NVRTC compiled them, against plain loops over the same data.
use half::bf16;
use proptest::prelude::*;
use ptx_sim::{Buffer, Fault, Launch, Memory, Module, Param, parse};

fn module(text: &str) -> Module {
    parse(text).unwrap()
}

fn words(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn read_words(memory: &Memory, buffer: Buffer) -> Vec<i32> {
    memory.read(buffer).chunks_exact(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn read_floats(memory: &Memory, buffer: Buffer) -> Vec<f32> {
    read_words(memory, buffer).into_iter().map(|bits| f32::from_bits(bits as u32)).collect()
}

/// The last parameter: scalars, then lengths that these kernels do not read.
fn info(scalars: &[u32], bytes: usize) -> Param {
    let mut info: Vec<u8> = scalars.iter().flat_map(|v| v.to_le_bytes()).collect();
    info.resize(bytes, 0xff);
    Param::Bytes(info)
}

fn buffers(list: &[Buffer], last: Param) -> Vec<Param> {
    list.iter().map(|b| Param::Buffer(*b)).chain([last]).collect()
}

/// A small generator of test data.
struct Data(u64);

impl Data {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }

    fn float(&mut self) -> f32 {
        self.below(2001) as f32 / 500.0 - 2.0
    }
}

fn launch<'a>(module: &'a Module, seed: u64) -> Launch<'a> {
    Launch { seed, ..Launch::new(module, &module.entries[0].name) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn page_table(seed in 0u64..1 << 40, batch in 1usize..40, capacity in 1usize..20, page_log in 0u32..5) {
        let module = module(include_str!("ptx/page_table.ptx"));
        let (requests, tokens, page) = (7usize, 90usize, 1i32 << page_log);
        let mut d = Data(seed);
        let map: Vec<i32> = (0..requests * tokens).map(|_| d.below(5000) as i32).collect();
        // Rows and starts that do not exist belong to padding.
        let rows: Vec<i32> = (0..batch).map(|_| d.below(requests as u64 + 2) as i32 - 1).collect();
        let lengths: Vec<i32> = (0..batch).map(|_| d.below(110) as i32 - 5).collect();
        let starts: Vec<i32> = (0..batch).map(|_| page * (d.below(4) as i32 - 1)).collect();
        let mut memory = Memory::new();
        let inputs = [&map, &rows, &lengths, &starts].map(|v| memory.alloc(&words(v)));
        let out = memory.alloc(&words(&vec![77; batch * capacity]));
        let scalars = [requests, tokens, batch, capacity, page as usize].map(|v| v as u32);
        let mut list = inputs.to_vec();
        list.push(out);
        let grid = [(batch * capacity).div_ceil(128) as u32, 1, 1];
        let run = Launch { grid, block: [128, 1, 1], params: buffers(&list, info(&scalars, 48)), ..launch(&module, seed) };
        run.run(&memory).unwrap();
        let expected: Vec<i32> = (0..batch * capacity).map(|i| {
            let (b, column) = (i / capacity, (i % capacity) as i32);
            let pages = if lengths[b] > 0 { (lengths[b] - 1) / page + 1 } else { 0 };
            let token = starts[b] + column * page;
            let fits = column < pages && (0..requests as i32).contains(&rows[b]) && starts[b] >= 0 && token < tokens as i32;
            if fits { map[rows[b] as usize * tokens + token as usize] / page } else { -1 }
        }).collect();
        prop_assert_eq!(read_words(&memory, out), expected);
    }

    #[test]
    fn write_rows(seed in 0u64..1 << 40, rows in 1usize..30, vectors in 1usize..40) {
        let module = module(include_str!("ptx/write_rows.bf16.ptx"));
        let (pool, width) = (40usize, vectors * 8);
        let mut d = Data(seed);
        let mut slots: Vec<i32> = (0..pool as i32).collect();
        (0..pool).for_each(|i| slots.swap(i, d.below(pool as u64) as usize));
        slots.truncate(rows);
        slots.iter_mut().for_each(|s| if d.below(5) == 0 { *s = [-1, pool as i32, i32::MAX][d.below(3) as usize] });
        let cells = |d: &mut Data, n: usize| -> Vec<u8> { (0..2 * n).map(|_| d.below(256) as u8).collect() };
        let (cache, latent) = (cells(&mut d, pool * width), cells(&mut d, rows * width));
        let mut memory = Memory::new();
        let target = memory.alloc(&cache);
        let list = [target, memory.alloc(&words(&slots)), memory.alloc(&latent)];
        let scalars = [pool, rows, vectors].map(|v| v as u32);
        let grid = [rows.div_ceil(8) as u32, 1, 1];
        let run = Launch { grid, block: [16, 8, 1], params: buffers(&list, info(&scalars, 32)), ..launch(&module, seed) };
        run.run(&memory).unwrap();
        let mut expected = cache;
        for (row, slot) in slots.iter().enumerate().filter(|(_, s)| (0..pool as i32).contains(s)) {
            let at = *slot as usize * width * 2;
            expected[at..at + width * 2].copy_from_slice(&latent[row * width * 2..][..width * 2]);
        }
        prop_assert_eq!(memory.read(target), expected);
    }

    #[test]
    fn compact_slots(seed in 0u64..1 << 40, rows in 1usize..4, width in 1usize..700) {
        let module = module(include_str!("ptx/compact_slots.ptx"));
        let mut d = Data(seed);
        let slots: Vec<i32> = (0..rows * width).map(|_| d.below(300) as i32 - 100).collect();
        let lengths: Vec<i32> = (0..rows).map(|_| d.below(2 * width as u64) as i32 - 3).collect();
        let mut memory = Memory::new();
        let inputs = [&slots, &lengths].map(|v| memory.alloc(&words(v)));
        let out = memory.alloc(&words(&vec![-7; rows * width]));
        let counts = memory.alloc(&words(&vec![-7; rows]));
        let list = [inputs[0], inputs[1], out, counts];
        // One CTA too many: it must do nothing.
        let run = Launch {
            grid: [rows as u32 + 1, 1, 1],
            block: [256, 1, 1],
            params: buffers(&list, info(&[rows as u32, width as u32], 24)),
            dynamic_shared: 1024,
            ..launch(&module, seed)
        };
        run.run(&memory).unwrap();
        let (mut expected, mut kept) = (vec![-7; rows * width], vec![0; rows]);
        for row in 0..rows {
            let length = (lengths[row].max(0) as usize).min(width);
            for slot in slots[row * width..][..length].iter().filter(|s| **s >= 0) {
                expected[row * width + kept[row] as usize] = *slot;
                kept[row] += 1;
            }
        }
        prop_assert_eq!(read_words(&memory, counts), kept);
        prop_assert_eq!(read_words(&memory, out), expected);
    }

    #[test]
    fn merge_state(seed in 0u64..1 << 40, rows in 1usize..9, vectors in 1usize..70, half in any::<bool>()) {
        let text = if half { include_str!("ptx/merge_state.bf16.ptx") } else { include_str!("ptx/merge_state.f32.ptx") };
        let module = module(text);
        let width = vectors * if half { 8 } else { 4 };
        let mut d = Data(seed);
        let empty = [f32::NEG_INFINITY, f32::INFINITY];
        let mut lses = || -> Vec<f32> {
            (0..rows).map(|_| if d.below(4) == 0 { empty[d.below(2) as usize] } else { 4.0 * d.float() }).collect()
        };
        let lse = [lses(), lses()];
        // The values of an empty part are never read into a sum.
        let outs: [Vec<f32>; 2] = [0, 1].map(|part| (0..rows * width).map(|i| {
            if lse[part][i / width].is_infinite() { f32::NAN } else { bf16::from_f32(d.float()).to_f32() }
        }).collect());
        let store = |values: &[f32]| -> Vec<u8> {
            if half { values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect() } else { floats(values) }
        };
        let mut memory = Memory::new();
        let mut list = Vec::new();
        for part in 0..2 {
            list.push(memory.alloc(&store(&outs[part])));
            list.push(memory.alloc(&floats(&lse[part])));
        }
        list.push(memory.alloc(&store(&vec![f32::NAN; rows * width])));
        list.push(memory.alloc(&floats(&vec![f32::NAN; rows])));
        let scalars = [rows as u32, vectors as u32, f32::NEG_INFINITY.to_bits()];
        let (grid, block) = if half { (rows.div_ceil(2), [64, 2, 1]) } else { (rows, [128, 1, 1]) };
        let run = Launch {
            grid: [grid as u32, 1, 1],
            block,
            params: buffers(&list, info(&scalars, 40)),
            ..launch(&module, seed)
        };
        run.run(&memory).unwrap();
        let got: Vec<f32> = if half {
            memory.read(list[4]).chunks_exact(2).map(|c| bf16::from_le_bytes([c[0], c[1]]).to_f32()).collect()
        } else {
            read_floats(&memory, list[4])
        };
        let got_lse = read_floats(&memory, list[5]);
        for row in 0..rows {
            let weight = |part: usize| if lse[part][row].is_infinite() { 0.0 } else { f64::from(lse[part][row]).exp() };
            let sum = weight(0) + weight(1);
            let expected = if sum > 0.0 { sum.ln() } else { f64::NEG_INFINITY };
            let close = |got: f32, want: f64, slack: f64| f64::from(got) == want || (f64::from(got) - want).abs() <= slack;
            prop_assert!(close(got_lse[row], expected, 4e-6), "lse {} for {}", got_lse[row], expected);
            for i in row * width..(row + 1) * width {
                let part = |p: usize| if weight(p) > 0.0 { weight(p) / sum * f64::from(outs[p][i]) } else { 0.0 };
                let want = part(0) + part(1);
                let slack = 4e-6 + if half { want.abs() / 256.0 } else { 0.0 };
                prop_assert!(close(got[i], want, slack), "out {} for {}", got[i], want);
            }
        }
    }
}

/// The output is an element short: the fault names the lane, the store's lines and the buffer.
#[test]
fn an_output_that_is_too_short_is_an_error() {
    let module = module(include_str!("ptx/page_table.ptx"));
    let mut memory = Memory::new();
    let inputs = [4, 1, 1, 1].map(|n| memory.alloc(&words(&vec![0; n])));
    let out = memory.alloc(&words(&[0, 0]));
    let mut list = inputs.to_vec();
    list.push(out);
    let run = Launch { block: [128, 1, 1], params: buffers(&list, info(&[1, 4, 1, 3, 1], 48)), ..launch(&module, 1) };
    let error = run.run(&memory).unwrap_err();
    assert!(matches!(error.kind, Fault::OutOfBounds { bytes: 4, .. }), "{error}");
    assert_eq!((error.place.lanes, error.place.line), (0b100, 152), "{error}");
    assert_eq!(error.place.cuda[0].to_string(), "default_program:124");
}
