//! Launches of a body with shared memory, mbarriers and a tensor map.
#![allow(dead_code, reason = "each test target uses a part")]
use ptx_sim::{Adversary, Fault, Launch, Memory, Param, SimError, TensorElem, TensorMap, TensorSwizzle, parse};

/// A launch of a body. `%rd1` is the output of 4096 words, `%rd9` the address of the tensor map, `%r1` the thread, `buf`
/// 8 KB, `bar` 4 mbarriers, `%r2` the first of them and `%r3` the buffer.
pub struct Run {
    pub threads: u32,
    pub ctas: u32,
    pub seed: u64,
    pub map: TensorMap,
    pub registers: Option<u32>,
    pub adversary: Adversary,
}

pub const TENSOR: u64 = 0x4_0000_0000;

/// A matrix of 24 rows of 64 words, `100 * row + column`, in boxes of 8 rows of 32 words.
pub fn matrix() -> TensorMap {
    TensorMap {
        elem: TensorElem::Int(4),
        address: TENSOR,
        dims: vec![64, 24],
        strides: vec![256],
        boxes: vec![32, 8],
        steps: vec![1, 1],
        swizzle: TensorSwizzle::None,
        fill_nan: false,
    }
}

pub fn cell(row: i64, column: i64) -> u32 {
    if (0..24).contains(&row) && (0..64).contains(&column) { (100 * row + column) as u32 } else { 0 }
}

impl Default for Run {
    fn default() -> Self {
        Self { threads: 32, ctas: 1, seed: 1, map: matrix(), registers: None, adversary: Adversary::default() }
    }
}

impl Run {
    /// The output and the matrix afterwards.
    pub fn both(&self, body: &str) -> Result<(Vec<u32>, Vec<u32>), SimError> {
        let registers = self.registers.map_or(String::new(), |count| format!(".maxnreg {count}\n"));
        let text = format!(
            ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out, .param .align 64 .b8 map[128])\n{registers}{{\n\
             .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<9>;\n\
             .shared .align 1024 .b8 buf[8192]; .shared .align 8 .b8 bar[32];\n\
             ld.param.u64 %rd1, [out]; mov.b64 %rd8, map; cvta.param.u64 %rd9, %rd8;\n\
             mov.u32 %r1, %tid.x; mov.b32 %r2, bar; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0;\n\
             mov.u32 %r39, %cluster_ctarank;\n{body}\nret;\n}}\n"
        );
        let module = parse(&text).unwrap();
        let mut memory = Memory::new();
        let words = |values: Vec<u32>| values.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
        let cells = (0..24 * 64).map(|i| cell(i / 64, i % 64)).collect();
        let tensor = memory.alloc_at(TENSOR, &words(cells)).unwrap();
        let out = memory.alloc(&vec![0; 4 * 4096]);
        let params = vec![Param::Buffer(out), Param::Bytes(self.map.encode().unwrap().to_vec())];
        let launch = Launch {
            grid: [self.ctas, 1, 1],
            block: [self.threads, 1, 1],
            cluster: [self.ctas, 1, 1],
            params,
            seed: self.seed,
            adversary: self.adversary,
            max_instructions: 100_000,
            ..Launch::new(&module, "k")
        };
        launch.run(&memory)?;
        let read =
            |buffer| memory.read(buffer).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
        Ok((read(out), read(tensor)))
    }

    pub fn run(&self, body: &str) -> Result<Vec<u32>, SimError> {
        self.both(body).map(|(out, _)| out)
    }

    pub fn fault(&self, body: &str) -> Fault {
        self.run(body).expect_err("a fault").kind
    }
}

pub const SEEDS: [u64; 6] = [1, 2, 3, 4, 5, 6];
pub const INIT: &str =
    "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;";
pub const WAIT: &str = "TRY: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY;";
pub const LOAD: &str = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes";
