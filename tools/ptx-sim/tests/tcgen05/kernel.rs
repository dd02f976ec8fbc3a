//! A kernel of one multiplication: A and B to shared memory, D and maybe A to tensor memory, `tcgen05.mma`, D back.
#![allow(dead_code, reason = "each test target uses a part")]
use half::{bf16, f16};
use ptx_sim::{Launch, Memory, Param, SimError, Stats, parse};

/// The inner dimension of all products here.
pub const K: usize = 64;
/// Columns of tensor memory that the kernel uses: D from 0, A from 64 on.
pub const COLUMNS: usize = 128;

/// How a matrix lies in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lay {
    /// Bytes of a line of the swizzling pattern; 16 without.
    pub width: usize,
    pub mn_major: bool,
}

impl Lay {
    /// The byte of an element (PTX ISA, Canonical Layouts, then Swizzling Modes).
    fn byte(self, rows: usize, row: usize, k: usize) -> usize {
        let w = self.width;
        let plain = match (self.mn_major, w) {
            // Columns of eight elements one after the other, and in them the rows.
            (false, 16) => k / 8 * rows * 16 + row * 16 + k % 8 * 2,
            // Tiles of a line's width.
            (false, _) => 2 * k / w * rows * w + row * w + 2 * k % w,
            // For eight rows, the K lines.
            (true, 16) => row / 8 * K * 16 + k * 16 + row % 8 * 2,
            (true, _) => 2 * row / w * K * w + k * w + 2 * row % w,
        };
        plain ^ ((plain / 128 % (w / 16)) * 16)
    }

    /// Leading and stride dimension byte offset, and the bytes from one step of 16 k to the next.
    fn offsets(self, rows: usize) -> (usize, usize, Box<dyn Fn(usize) -> usize>) {
        let w = self.width;
        match (self.mn_major, w) {
            (false, 16) => (rows * 16, 128, Box::new(move |step| step * 2 * rows * 16)),
            (false, _) => (16, 8 * w, Box::new(move |step| 32 * step / w * rows * w + 32 * step % w)),
            (true, 16) => (128, K * 16, Box::new(|step| step * 256)),
            (true, _) => (K * w, 8 * w, Box::new(move |step| step * 16 * w)),
        }
    }

    /// The descriptor of a step of a matrix at a byte of the tiles.
    fn descriptor(self, rows: usize, start: usize, step: usize) -> u64 {
        let (leading, stride, next) = self.offsets(rows);
        let mode = match self.width {
            16 => 0,
            32 => 6,
            64 => 4,
            _ => 2u64,
        };
        let unit = |bytes: usize| bytes as u64 >> 4;
        unit(start + next(step)) | unit(leading) << 16 | unit(stride) << 32 | 1 << 46 | mode << 61
    }
}

/// A product and how it is computed.
#[derive(Debug, Clone)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub group: usize,
    pub weight_stationary: bool,
    pub a: Lay,
    pub b: Lay,
    pub a_in_tensor_memory: bool,
    pub half: bool,
    pub half_d: bool,
    /// More bits of the instruction descriptor.
    pub bits: u32,
    /// Operands behind the instruction descriptor.
    pub last: &'static str,
    pub seed: u64,
}

pub const K_MAJOR: Lay = Lay { width: 128, mn_major: false };

impl Product {
    pub fn new(m: usize, n: usize) -> Self {
        Self {
            m,
            n,
            group: 1,
            weight_stationary: false,
            a: K_MAJOR,
            b: K_MAJOR,
            a_in_tensor_memory: false,
            half: false,
            half_d: false,
            bits: 0,
            last: "%p8",
            seed: 1,
        }
    }

    /// PTX ISA, Instruction descriptor.
    fn instruction(&self) -> u32 {
        let (elem, d) = (u32::from(!self.half), u32::from(!self.half_d));
        let majors = u32::from(self.a.mn_major) << 15 | u32::from(self.b.mn_major) << 16;
        d << 4 | elem << 7 | elem << 10 | majors | (self.n as u32 / 8) << 17 | (self.m as u32 / 16) << 24 | self.bits
    }

    /// Rows of A and B in one CTA's shared memory.
    fn rows(&self) -> (usize, usize) {
        (self.m / self.group, self.n / self.group)
    }

    fn b_start(&self) -> usize {
        self.rows().0 * K * 2
    }

    fn bytes(&self) -> usize {
        self.b_start() + self.rows().1 * K * 2
    }

    /// The steps of the product.
    fn steps(&self) -> String {
        let (rows_a, rows_b) = self.rows();
        let (ws, group) = (if self.weight_stationary { "ws." } else { "" }, self.group);
        let step = |s: usize| {
            let (a, setup) = if self.a_in_tensor_memory {
                ("[%r13]", format!("add.s32 %r13, taddr, {};", 64 + 8 * s))
            } else {
                ("%rd6", format!("add.s64 %rd6, %rd8, {};", self.a.descriptor(rows_a, 0, s)))
            };
            let b = self.b.descriptor(rows_b, self.b_start(), s);
            let (i, last) = (self.instruction(), self.last);
            format!(
                "{setup} add.s64 %rd7, %rd8, {b}; mov.b32 %r14, {i};\n\
                 tcgen05.mma.{ws}cta_group::{group}.kind::f16 [taddr], {a}, %rd7, %r14, {last};\n"
            )
        };
        (0..K / 16).map(step).collect()
    }

    /// The kernel: 128 threads of each CTA.
    pub fn text(&self) -> String {
        let (bytes, g) = (self.bytes(), self.group);
        let words = |from: usize| (from..from + 4).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(", ");
        let all = format!("{{{}}}", (0..COLUMNS).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(", "));
        let each = |op: &dyn Fn(usize, String) -> String| {
            (0..COLUMNS).step_by(4).map(|i| op(4 * i, words(i))).collect::<String>()
        };
        let given = each(&|at, v| format!("ld.global.v4.b32 {{{v}}}, [%rd5+{at}];\n"));
        let results = each(&|at, v| format!("st.global.v4.b32 [%rd9+{at}], {{{v}}};\n"));
        let (cluster, everyone, commit) = if g == 1 {
            let commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];";
            ("", "bar.sync 0;", commit.to_string())
        } else {
            let commit = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64";
            let everyone = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;";
            (".reqnctapercluster 2, 1, 1", everyone, format!("mov.b16 %rs1, 3; {commit} [%r11], %rs1;"))
        };
        format!(
            ".version 9.0\n.target sm_100a\n.address_size 64\n\
.visible .entry k(.param .u64 image, .param .u64 given, .param .u64 out)\n.reqntid 128, 1, 1\n{cluster}\n{{
.reg .pred %p<9>; .reg .b16 %rs<3>; .reg .b32 %r<40>; .reg .b32 %v<{COLUMNS}>; .reg .b64 %rd<20>; .reg .b32 taddr, row;
.shared .align 1024 .b8 tiles[{bytes}]; .shared .align 8 .b8 bar[8]; .shared .align 4 .b8 slot[4];
ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [given]; ld.param.u64 %rd3, [out];
mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r15, %cluster_ctarank;
mul.wide.u32 %rd4, %r15, {bytes}; add.s64 %rd1, %rd1, %rd4;
shl.b32 %r16, %r15, 7; add.s32 %r16, %r16, %r1;
mul.wide.u32 %rd4, %r16, {row_bytes}; add.s64 %rd5, %rd2, %rd4; add.s64 %rd9, %rd3, %rd4;
mov.u32 %r3, tiles; mov.u32 %r10, slot; mov.u32 %r11, bar; shl.b32 %r4, %r1, 4;
COPY: setp.ge.u32 %p1, %r4, {bytes}; @%p1 bra COPIED;
cvt.u64.u32 %rd4, %r4; add.s64 %rd4, %rd1, %rd4; ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd4];
add.s32 %r9, %r3, %r4; st.shared.v4.b32 [%r9], {{%r5, %r6, %r7, %r8}};
add.s32 %r4, %r4, 2048; bra COPY;
COPIED: fence.proxy.async.shared::cta;
setp.ne.u32 %p2, %r2, 0; setp.ne.u32 %p3, %r1, 0; setp.eq.u32 %p8, %r1, %r1; @%p2 bra SET;
tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r10], {COLUMNS};
tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;
@%p3 bra SET; mbarrier.init.shared::cta.b64 [%r11], 1;
SET: // tensor memory is there
tcgen05.fence::before_thread_sync;
{everyone}
tcgen05.fence::after_thread_sync;
ld.shared.b32 taddr, [%r10]; shl.b32 row, %r2, 21; add.s32 row, row, taddr;
{given}
tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [row], {all};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; // filled
{everyone} // filled
tcgen05.fence::after_thread_sync; // filled
add.s32 %r17, %r15, %r1; setp.ne.u32 %p4, %r17, 0; @%p4 bra WAIT;
and.b32 %r12, %r3, 0x3ffff; shr.u32 %r12, %r12, 4; cvt.u64.u32 %rd8, %r12;
{steps}{commit}
WAIT: // for the product
TRY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r11], 0; @!%p5 bra TRY;
tcgen05.fence::after_thread_sync; // done
tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {all}, [row];
tcgen05.wait::ld.sync.aligned;
{results}
tcgen05.fence::before_thread_sync; // read
{everyone} // read
@%p2 bra END;
tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 taddr, {COLUMNS};
END: ret;
}}
",
            row_bytes = 4 * COLUMNS,
            steps = self.steps(),
        )
    }

    /// An element's bits.
    fn bits(&self, x: i32) -> u16 {
        if self.half { f16::from_f32(x as f32).to_bits() } else { bf16::from_f32(x as f32).to_bits() }
    }

    /// What the CTAs copy to their shared memory.
    fn image(&self, a: &[i32], b: &[i32]) -> Vec<u8> {
        let (rows_a, rows_b) = self.rows();
        let mut image = Vec::new();
        for cta in 0..self.group {
            let mut bytes = vec![0; self.bytes()];
            for (x, rows, lay, start) in [(a, rows_a, self.a, 0), (b, rows_b, self.b, self.b_start())] {
                for (row, k) in (0..rows).flat_map(|row| (0..K).map(move |k| (row, k))) {
                    let at = start + lay.byte(rows, row, k);
                    let bits = self.bits(x[(cta * rows + row) * K + k]);
                    bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                }
            }
            image.extend(bytes);
        }
        image
    }

    /// CTA, lane and column of an element of D (PTX ISA, Data Path Layout Organization).
    pub fn place(&self, row: usize, n: usize) -> (usize, usize, usize) {
        match (self.m, self.group, self.weight_stationary) {
            (256, 2, _) => (row / 128, row % 128, n),
            (128, 2, _) => (row / 64, row % 64 + n / (self.n / 2) * 64, n % (self.n / 2)),
            (64, _, true) => (0, row + n / (self.n / 2) * 64, n % (self.n / 2)),
            (32, _, true) => (0, row + n / (self.n / 4) * 32, n % (self.n / 4)),
            (64, _, false) => (0, row / 16 * 32 + row % 16, n),
            _ => (0, row, n),
        }
    }

    /// Tensor memory before: D, and A where the product takes it from there.
    fn given(&self, a: &[i32], d: &[i32]) -> Vec<u32> {
        let mut words = vec![0; self.group * 128 * COLUMNS];
        let mut put =
            |(cta, lane, column): (usize, usize, usize), word| words[(cta * 128 + lane) * COLUMNS + column] = word;
        for (row, n) in (0..self.m).flat_map(|row| (0..self.n).map(move |n| (row, n))) {
            let (cta, lane, column) = self.place(row, n);
            let x = d[row * self.n + n] as f32;
            put((cta, lane, column), if self.half_d { f16::from_f32(x).to_bits().into() } else { x.to_bits() });
            // A lane of D is computed from the same lane of A.
            for pair in 0..K / 2 {
                let word = |k| u32::from(self.bits(a[row * K + k]));
                put((cta, lane, 64 + pair), word(2 * pair) | word(2 * pair + 1) << 16);
            }
        }
        words
    }

    /// Runs the kernel, or what a test made of its text: D.
    pub fn run(&self, text: &str, operands: &Operands) -> Result<(Vec<f32>, Stats), SimError> {
        let module = parse(text).unwrap();
        let mut memory = Memory::new();
        let image = memory.alloc(&self.image(&operands.a, &operands.b));
        let words = self.given(&operands.a, &operands.d);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let (given, out) = (memory.alloc(&bytes), memory.alloc(&vec![0; bytes.len()]));
        let launch = Launch {
            grid: [self.group as u32, 1, 1],
            block: [128, 1, 1],
            params: vec![Param::Buffer(image), Param::Buffer(given), Param::Buffer(out)],
            seed: self.seed,
            max_instructions: 1 << 20,
            ..Launch::new(&module, "k")
        };
        let stats = launch.run(&memory)?;
        let out = memory.read(out);
        let d = (0..self.m).flat_map(|row| (0..self.n).map(move |n| (row, n))).map(|(row, n)| {
            let (cta, lane, column) = self.place(row, n);
            let at = 4 * ((cta * 128 + lane) * COLUMNS + column);
            let word = u32::from_le_bytes(out[at..at + 4].try_into().unwrap());
            if self.half_d { f16::from_bits(word as u16).to_f32() } else { f32::from_bits(word) }
        });
        Ok((d.collect(), stats))
    }
}

/// Whole numbers, so that all results are exact.
pub struct Operands {
    pub a: Vec<i32>,
    pub b: Vec<i32>,
    pub d: Vec<i32>,
}

impl Operands {
    pub fn new(p: &Product, most: u64) -> Self {
        let mut data = super::common::Data(p.seed);
        let mut some = |n: usize| (0..n).map(|_| data.below(2 * most + 1) as i32 - most as i32).collect();
        Self { a: some(p.m * K), b: some(p.n * K), d: some(p.m * p.n) }
    }

    /// `d + sign a b`, element by element; a function of row and column says what `d` and `b` are there.
    pub fn product(&self, p: &Product, sign: f32, d: impl Fn(f32, usize, usize) -> f32) -> Vec<f32> {
        let element = |row: usize, n: usize| {
            let sum: i32 = (0..K).map(|k| self.a[row * K + k] * self.b[n * K + k]).sum();
            d(self.d[row * p.n + n] as f32, row, n) + sign * sum as f32
        };
        (0..p.m).flat_map(|row| (0..p.n).map(move |n| (row, n))).map(|(row, n)| element(row, n)).collect()
    }
}
