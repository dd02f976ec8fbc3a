//! Products of matrices by a warpgroup: `wgmma`.
//!
//! PTX ISA 9.7.15, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//! `D[64, n] += A[64, k] B[k, n]`, where A and B are bf16 or f16, D is f32, and an instruction takes 16 terms (a step).
//! All 128 threads of the warpgroup execute everything here, without divergence.
//!
//! D is in registers: with `w` the warp in the warpgroup and `t` the thread in the warp, element `4 * i + 2 * j + h` of
//! the vector of `n / 2` numbers is in row `16 * w + t / 4 + 8 * j` and column `8 * i + 2 * (t % 4) + h`. A in
//! registers has four pairs for each step, of the same rows: pair `2 * i + j` has columns `8 * i + 2 * (t % 4)` and the
//! next of row `t / 4 + 8 * j`. So the accumulators of a product, packed pair by pair, are the A of the next.
//!
//! An accumulator is passed through: [`mma_ss()`] and [`mma_rs()`] give the vector of what is being computed, which is
//! for nothing but further products until [`wait()`] has given it back. The compiler sees moves between registers, and
//! ptxas removes them. What it cannot remove it serialises, and says C7510 or C7513 or C7514: wait for each product
//! before the next.
//! * Do not read, write or copy an accumulator between the product and the wait.
//! * Registers of A must be defined after the last wait for *all* products and not be changed before the wait for
//!   theirs. Pack them after `wait(_, 0)`, not while another product is under way, or pass them through [`pin()`]
//!   there.
//! * A branch between a product and its wait can have that effect, too: where a predicate does, as in
//!   [`crate::ptx::mbarrier::arrive_if()`], use that.

use cubecl::prelude::*;

use super::read;

/// The type of the factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Elem {
    /// `bf16`.
    Bf16,
    /// `f16`.
    F16,
}

impl Elem {
    /// As the instructions write it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Elem::Bf16 => "bf16",
            Elem::F16 => "f16",
        }
    }
}

/// How a matrix lies in shared memory: in tiles whose rows have 128 bytes, that is 64 numbers, with 128-byte swizzle,
/// each starting at a multiple of 1024 bytes, as tile loads make them. (PTX ISA 9.7.15.5.1.2, "Shared Memory Matrix
/// Layout".)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// A row has 64 terms of a row of A or a column of B ("K-major"). The next 64 terms are in the next tile, `rows`
    /// rows on.
    Terms {
        /// Rows from one tile to the next; at least as many as A has rows or B columns.
        rows: usize,
    },
    /// A row has one term of 64 rows of A or columns of B ("MN-major"). The next 64 are in the next tile, `terms` rows
    /// on.
    Across {
        /// Rows, that is terms, from one tile to the next.
        terms: usize,
    },
    /// Without swizzle: `[terms / 8][rows][8 terms]`, which stores of single pairs fill without bank conflicts.
    Cores {
        /// Rows of A or columns of B.
        rows: usize,
    },
}

impl Layout {
    /// Bytes from the first step to this one.
    const fn offset(self, step: usize) -> usize {
        match self {
            Layout::Terms { rows } => step / 4 * rows * 128 + step % 4 * 32,
            Layout::Across { .. } => step * 16 * 128,
            Layout::Cores { rows } => step * 2 * rows * 16,
        }
    }

    /// Bytes from the first column of B to this one, a multiple of 64.
    const fn columns(self, column: usize) -> usize {
        match self {
            Layout::Terms { .. } => column * 128,
            Layout::Across { terms } => column / 64 * terms * 128,
            Layout::Cores { .. } => column * 16,
        }
    }

    /// The immediate operand that says which of the two it is.
    const fn transposed(self) -> usize {
        match self {
            Layout::Terms { .. } | Layout::Cores { .. } => 0,
            Layout::Across { .. } => 1,
        }
    }

    /// A descriptor without the address (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Matrix
    /// Descriptor"): all lengths in units of 16 bytes, in bits 0-13 the address, 16-29 the leading dimension byte
    /// offset, 32-45 the stride dimension byte offset, 49-51 the base offset (0 for tiles at multiples of 1024 bytes),
    /// 62-63 the swizzle (0 for none, 1 for 128 bytes).
    const fn descriptor(self) -> u64 {
        // The swizzle, bytes from eight rows to the next eight, and the leading dimension's.
        let (swizzle, stride, leading) = match self {
            // Not looked at with swizzle: a step lies within a row.
            Layout::Terms { .. } => (1, 8 * 128, 16),
            Layout::Across { terms } => (1, 8 * 128, terms * 128),
            // From eight terms to the next eight.
            Layout::Cores { rows } => (0, 8 * 16, rows * 16),
        };
        swizzle << 62 | (stride >> 4) << 32 | (leading as u64 >> 4) << 16
    }
}

/// Where A comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// From shared memory.
    Shared(Layout),
    /// From registers.
    Registers,
}

/// Products that are issued together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mma {
    /// Columns of B and D, a multiple of 8 up to 256.
    pub(crate) n: usize,
    /// Steps of 16 terms.
    pub(crate) steps: usize,
    /// Type of A and B.
    pub(crate) elem: Elem,
    /// Where A is.
    pub(crate) a: Source,
    /// How B lies.
    pub(crate) b: Layout,
    /// Into how many groups of equally many steps the products go, the first together with earlier ones that are in
    /// none. With 0, [`commit()`] has to follow.
    pub(crate) groups: usize,
    /// Instructions of a step, each for equally many columns. One of 256 columns names 154 registers, which a thread may
    /// have from a cube of three warpgroups on downwards, whatever `setmaxnreg` gives it.
    pub(crate) per_step: usize,
}

impl Mma {
    /// The instructions. Operands are the new accumulators, the old ones unless it starts at zero, A (a descriptor or
    /// four registers for each step, and maybe some that are not used), and B's descriptor. `lanes` is the number of
    /// accumulators, of which those past the last column are passed on, or zero, `a_count` that of A's operands.
    fn text(&self, lanes: usize, a_count: usize, zero: bool) -> String {
        let Mma { n, steps, elem, a, b, groups, per_step } = *self;
        assert!(n.is_multiple_of(8) && n <= 256 && lanes >= n / 2, "{n} columns in {lanes} registers");
        let width = n / per_step;
        assert!(per_step == 1 || width * per_step == n && width.is_multiple_of(64), "{n} columns in {per_step}");
        let range =
            |first: usize, count: usize| (first..first + count).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
        let mut text = String::from("{\n.reg .pred zero, more;\n.reg .b64 a, b;\n");
        text += "setp.ne.b32 zero, 0, 0;\nsetp.eq.b32 more, 0, 0;\n";
        let first_a = if zero {
            (n / 2..lanes).for_each(|i| text += &format!("mov.b32 %{i}, 0;\n"));
            lanes
        } else {
            for i in 0..lanes {
                text += &format!("mov.b32 %{i}, %{};\n", lanes + i);
            }
            2 * lanes
        };
        assert!(a_count >= if a == Source::Registers { 4 * steps } else { 1 }, "{a_count} operands of {steps} steps");
        text += "wgmma.fence.sync.aligned;\n";
        for step in 0..steps {
            for part in 0..per_step {
                let (first_b, column) = (first_a + a_count, part * width);
                text += &format!("add.s64 b, %{first_b}, {};\n", (b.offset(step) + b.columns(column)) >> 4);
                let (a, transposed) = match a {
                    Source::Shared(layout) => {
                        text += &format!("add.s64 a, %{first_a}, {};\n", layout.offset(step) >> 4);
                        ("a".into(), format!("{}, {}", layout.transposed(), b.transposed()))
                    }
                    Source::Registers => (format!("{{{}}}", range(first_a + 4 * step, 4)), b.transposed().to_string()),
                };
                let kind = elem.name();
                let accumulate = if zero && step == 0 { "zero" } else { "more" };
                text += &format!("wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} ");
                let sums = range(column / 2, width / 2);
                text += &format!("{{{sums}}}, {a}, b, {accumulate}, 1, 1, {transposed};\n");
            }
            if groups > 0 && (step + 1).is_multiple_of(steps / groups) {
                text += "wgmma.commit_group.sync.aligned;\n";
            }
        }
        text + "}"
    }
}

/// Registers passed from inputs to outputs.
fn passed(count: usize) -> String {
    (0..count).map(|i| format!("mov.b32 %{i}, %{};\n", count + i)).collect()
}

/// The descriptor of a matrix at this address of shared memory, divisible by 1024, or by 32 for a later step of
/// [`Layout::Terms`].
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] layout: Layout) -> u64 {
    u64::cast_from((address & 0x3ffffu32) >> 4u32) | comptime!(layout.descriptor())
}

/// Adds products with A from shared memory to `acc`: `wgmma.fence`, `wgmma.mma_async`, `wgmma.commit_group`.
///
/// The warpgroup. What threads have written to A and B with stores needs [`crate::ptx::fence::async_shared()`] and a
/// barrier before; what tile loads have, a wait for their mbarrier. The memory must not change before the wait for the
/// product.
#[cube]
pub(crate) fn mma_ss<N: Size>(acc: Vector<f32, N>, a: u64, b: u64, #[comptime] mma: Mma) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let text = comptime!(mma.text(lanes, 1, false));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "{text} // {sum} {acc} {a} {b}",
        sum = out(_) sum,
        acc = in(_) read::<Vector<f32, N>>(acc),
        a = in(_) read::<u64>(a),
        b = in(_) read::<u64>(b),
        options(explicit_mem, reads_address_space shared)
    );
    sum
}

/// [`mma_ss()`] that starts at zero.
#[cube]
pub(crate) fn mma_ss_zero<N: Size>(a: u64, b: u64, #[comptime] mma: Mma) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let text = comptime!(mma.text(lanes, 1, true));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "{text} // {sum} {a} {b}",
        sum = out(_) sum,
        a = in(_) read::<u64>(a),
        b = in(_) read::<u64>(b),
        options(explicit_mem, reads_address_space shared)
    );
    sum
}

/// Adds products with A from registers, the first `4 * steps` of `a`, to `acc`. Otherwise as [`mma_ss()`].
#[cube]
pub(crate) fn mma_rs<N: Size, A: Size>(
    acc: Vector<f32, N>,
    a: Vector<u32, A>,
    b: u64,
    #[comptime] mma: Mma,
) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let words = A::value().comptime();
    let text = comptime!(mma.text(lanes, words, false));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "{text} // {sum} {acc} {a} {b}",
        sum = out(_) sum,
        acc = in(_) read::<Vector<f32, N>>(acc),
        a = in(_) read::<Vector<u32, A>>(a),
        b = in(_) read::<u64>(b),
        options(explicit_mem, reads_address_space shared)
    );
    sum
}

/// [`mma_rs()`] that starts at zero.
#[cube]
pub(crate) fn mma_rs_zero<N: Size, A: Size>(a: Vector<u32, A>, b: u64, #[comptime] mma: Mma) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let words = A::value().comptime();
    let text = comptime!(mma.text(lanes, words, true));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "{text} // {sum} {a} {b}",
        sum = out(_) sum,
        a = in(_) read::<Vector<u32, A>>(a),
        b = in(_) read::<u64>(b),
        options(explicit_mem, reads_address_space shared)
    );
    sum
}

/// Orders this warpgroup's accesses to registers before the products that follow: `wgmma.fence` (PTX ISA 9.7.15.7.1).
///
/// Every product here begins with one.
#[cube]
pub(crate) fn fence() {
    gpu_asm!("wgmma.fence.sync.aligned;", options(explicit_mem));
}

/// Makes a group of all products that are in none: `wgmma.commit_group` (PTX ISA 9.7.15.7, "Asynchronous wgmma Proxy
/// Operations").
#[cube]
pub(crate) fn commit() {
    gpu_asm!("wgmma.commit_group.sync.aligned;", options(explicit_mem));
}

/// Waits until all but the last `pending` groups are complete, and gives the accumulators of one that is:
/// `wgmma.wait_group`.
///
/// With several accumulators, one call for each; all but the first cost nothing.
#[cube]
pub(crate) fn wait<N: Size>(acc: Vector<f32, N>, #[comptime] pending: u32) -> Vector<f32, N> {
    let lanes = N::value().comptime();
    let text = comptime!(passed(lanes));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "wgmma.wait_group.sync.aligned {pending};\n{text} // {sum} {acc}",
        sum = out(_) sum,
        acc = in(_) read::<Vector<f32, N>>(acc),
        options(explicit_mem, reads_address_space shared)
    );
    sum
}

/// Waits until all but the last `pending` groups are complete, while accumulators stay under way.
///
/// Memory that the complete ones have read may change then.
#[cube]
pub(crate) fn wait_for_reads(#[comptime] pending: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {pending};", options(explicit_mem, reads_address_space shared));
}

/// Defines registers anew at this place, with the values that they have.
#[cube]
pub(crate) fn pin<A: Size>(values: Vector<u32, A>) -> Vector<u32, A> {
    let count = A::value().comptime();
    let text = comptime!(passed(count));
    let same: Vector<u32, A>;
    gpu_asm!(
        "{text} // {same} {values}",
        same = out(_) same,
        values = in(_) read::<Vector<u32, A>>(values),
        options(nomem)
    );
    same
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(descriptor: u64, first: u32, count: u32) -> u64 {
        descriptor >> first & ((1 << count) - 1)
    }

    #[test]
    fn the_descriptor_has_its_fields() {
        for (layout, leading) in [(Layout::Terms { rows: 192 }, 1), (Layout::Across { terms: 64 }, 64 * 128 / 16)] {
            let all = layout.descriptor();
            assert_eq!(bits(all, 0, 16), 0, "the address is added");
            assert_eq!(bits(all, 16, 14), leading);
            assert_eq!(bits(all, 32, 14), 64, "eight rows of 128 bytes");
            assert_eq!(bits(all, 49, 3), 0, "tiles start at multiples of 1024 bytes");
            assert_eq!(bits(all, 62, 2), 1, "128-byte swizzle");
            let fields = (1 << 62) | (64 << 32) | (leading << 16);
            assert_eq!(all, fields, "nothing else is set");
        }
    }

    #[test]
    fn steps_walk_through_the_tiles() {
        let terms = Layout::Terms { rows: 64 };
        assert_eq!([0, 1, 3, 4, 9].map(|step| terms.offset(step)), [0, 32, 96, 8192, 2 * 8192 + 32]);
        let cores = Layout::Cores { rows: 64 };
        assert_eq!([0, 1, 3].map(|step| cores.offset(step)), [0, 2048, 6144]);
        assert_eq!(cores.descriptor(), (8 << 32) | (64 << 16), "no swizzle, 128 and 1024 bytes");
        let across = Layout::Across { terms: 64 };
        assert_eq!([0, 1, 3].map(|step| across.offset(step)), [0, 2048, 6144]);
    }

    #[test]
    fn the_text_numbers_its_operands() {
        let b = Layout::Across { terms: 32 };
        let mma = Mma { n: 8, steps: 2, elem: Elem::F16, a: Source::Registers, b, groups: 1, per_step: 1 };
        let text = mma.text(4, 8, false);
        assert!(text.contains("mov.b32 %3, %7;"));
        assert!(text.contains("add.s64 b, %16, 128;"));
        assert!(text.contains("m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%12, %13, %14, %15}, b, more, 1, 1, 1;"));
        assert!(mma.text(4, 16, false).contains("add.s64 b, %24, 128;"), "some of A are not used");
        let a = Source::Shared(Layout::Terms { rows: 64 });
        let text = Mma { a, groups: 0, ..mma }.text(4, 1, true);
        assert!(text.contains("add.s64 a, %4, 2;") && text.contains("add.s64 b, %5, 128;"));
        assert!(text.contains("{%0, %1, %2, %3}, a, b, zero, 1, 1, 0, 1;"));
        assert!(!text.contains("mov") && !text.contains("commit"));
        let wider = Mma { n: 96, a, ..mma }.text(64, 1, true);
        assert!(wider.contains("mov.b32 %48, 0;") && wider.contains("mov.b32 %63, 0;") && !wider.contains("%47, 0"));
        let two = Mma { n: 128, a, per_step: 2, ..mma }.text(64, 1, true);
        assert!(two.contains("m64n64k16") && !two.contains("m64n128k16"));
        assert!(two.contains("add.s64 b, %65, 0;") && two.contains("add.s64 b, %65, 256;"), "64 columns: 32 terms on");
        assert!(two.contains("add.s64 b, %65, 128;") && two.contains("add.s64 b, %65, 384;"));
        assert!(two.contains("{%32, ") && two.contains(", %63}, a, b"));
    }
}
