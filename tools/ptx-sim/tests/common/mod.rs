//! Runs a few instructions on the registers of whole warps.
#![allow(dead_code, reason = "each test target uses a part")]
pub mod shared;

use ptx_sim::{Launch, Memory, Param, SimError, Stats, parse};

/// Threads, and 32-bit registers `%i0` and on that each gets, `%o0` and on that each gives.
pub struct Registers {
    pub threads: u32,
    pub inputs: usize,
    pub outputs: usize,
    pub seed: u64,
}

impl Registers {
    /// Text of a kernel around a body.
    fn text(&self, body: &str) -> String {
        let (inputs, outputs) = (self.inputs.max(1), self.outputs);
        let each = |n: usize, f: &dyn Fn(usize) -> String| (0..n).map(f).collect::<String>();
        let loads = each(self.inputs, &|i| format!("ld.global.b32 %i{i}, [%rd3+{}];\n", 4 * i));
        let stores = each(outputs, &|i| format!("st.global.b32 [%rd4+{}], %o{i};\n", 4 * i));
        format!(
            ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
             .reg .pred %p<9>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .f32 %f<20>; .reg .b64 %rd<40>;\n\
             .reg .f64 %fd<20>; .reg .b32 %i<{inputs}>; .reg .b32 %o<{}>;\n\
             .shared .align 1024 .b8 buf[65536];\n\
             ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x;\n\
             mad.wide.u32 %rd3, %r1, {}, %rd1; mad.wide.u32 %rd4, %r1, {}, %rd2;\n{loads}\n{body}\n{stores}\nret;\n}}\n",
            outputs.max(1),
            4 * self.inputs,
            4 * outputs
        )
    }

    /// The outputs, by threads.
    pub fn run(&self, body: &str, values: &[u32]) -> Result<Vec<u32>, SimError> {
        self.run_with_stats(body, values).map(|(values, _)| values)
    }

    pub fn run_with_stats(&self, body: &str, values: &[u32]) -> Result<(Vec<u32>, Stats), SimError> {
        let module = parse(&self.text(body)).unwrap();
        let mut memory = Memory::new();
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        let input = memory.alloc(&bytes(values));
        let output = memory.alloc(&vec![0; 4 * self.outputs * self.threads as usize]);
        let stats = Launch {
            block: [self.threads, 1, 1],
            params: vec![Param::Buffer(input), Param::Buffer(output)],
            seed: self.seed,
            max_instructions: 1 << 20,
            ..Launch::new(&module, "k")
        }
        .run(&memory)?;
        Ok((memory.read(output).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect(), stats))
    }
}

/// `{%o4, %o5}`.
pub fn vector(name: &str, first: usize, count: usize) -> String {
    let all: Vec<_> = (first..first + count).map(|i| format!("%{name}{i}")).collect();
    format!("{{{}}}", all.join(", "))
}

/// A small generator of test data.
pub struct Data(pub u64);

impl Data {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }

    /// A whole number from -8 to 8: exact in every type, as are sums of some thousand products.
    pub fn whole(&mut self) -> i32 {
        self.below(17) as i32 - 8
    }
}
