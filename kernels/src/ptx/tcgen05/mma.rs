//! Where the matrices of a product lie, products, and their completion.

use cubecl::prelude::*;

use super::Cubes;
use crate::ptx::read;
use crate::ptx::wgmma::Elem;

/// How a matrix lies in shared memory: in tiles whose rows have 128 bytes, with 128-byte swizzle, as in
/// [`crate::ptx::wgmma::Layout`] (9.7.16.4, "Canonical Layouts", and 9.7.16.5, "Shared Memory Descriptor").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// A row has 64 terms of a row of A or a column of B ("K-major"). The next 64 terms are in the next tile.
    Terms {
        /// Rows from one tile to the next.
        rows: usize,
    },
    /// A row has one term of 64 columns of B ("MN-major"). The next 64 columns are in the next tile.
    Across {
        /// Rows, that is terms, from one tile to the next.
        terms: usize,
    },
}

impl Layout {
    /// Bytes from the first step to this one.
    const fn offset(self, step: usize) -> usize {
        match self {
            Layout::Terms { rows } => step / 4 * rows * 128 + step % 4 * 32,
            Layout::Across { .. } => step * 16 * 128,
        }
    }

    /// Whether the instruction has to be told that the matrix is transposed.
    const fn transposed(self) -> bool {
        matches!(self, Layout::Across { .. })
    }

    /// A descriptor without the address (9.7.16.5, table "Shared memory descriptor"): lengths in units of 16 bytes; in bits
    /// 0-13 the address, 16-29 the leading dimension byte offset, 32-45 the stride dimension byte offset, 46-48 the
    /// constant 1, 49-51 the base offset (0 for tiles at multiples of 1024 bytes), 52 how the leading dimension is given
    /// (0: as an offset), 61-63 the swizzle (2 for 128 bytes).
    const fn descriptor(self) -> u64 {
        let leading = match self {
            // Not looked at with swizzle: a step lies within a row.
            Layout::Terms { .. } => 16,
            Layout::Across { terms } => terms * 128,
        };
        // From eight rows to the next eight.
        let stride = 8 * 128;
        2 << 61 | 1 << 46 | (stride >> 4) << 32 | (leading as u64 >> 4) << 16
    }
}

/// Where A comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// From shared memory.
    Shared(Layout),
    /// From tensor memory: two terms in a column, so that a step has eight columns.
    Tensor,
}

/// Products that are issued together: the same rows and columns over some steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mma {
    /// Who computes.
    pub(crate) cubes: Cubes,
    /// Rows of A and D, of both cubes together.
    pub(crate) m: usize,
    /// Columns of B and D. A pair has half of B's columns in each cube.
    pub(crate) n: usize,
    /// Steps of 16 terms.
    pub(crate) steps: usize,
    /// Type of A and B.
    pub(crate) elem: Elem,
    /// Where A is.
    pub(crate) a: Source,
    /// How B lies.
    pub(crate) b: Layout,
}

impl Mma {
    /// The instruction descriptor (9.7.16.6, table "Instruction descriptor format for .kind::f16"): bits 4-5 the type of D
    /// (1: f32), 7-9 and 10-12 those of A and B (0: f16, 1: bf16), 15 and 16 whether they are transposed, 17-22 the columns
    /// in eights, 24-28 the rows in sixteens. All others are 0: dense, nothing negated, no shift.
    const fn instruction(&self) -> u32 {
        let elem = match self.elem {
            Elem::F16 => 0,
            Elem::Bf16 => 1,
        };
        let transposed_a = match self.a {
            Source::Shared(layout) => layout.transposed(),
            Source::Tensor => false,
        };
        let (transposed_a, transposed_b) = (transposed_a as u32, self.b.transposed() as u32);
        let (n, m) = (self.n as u32 >> 3, self.m as u32 >> 4);
        1 << 4 | elem << 7 | elem << 10 | transposed_a << 15 | transposed_b << 16 | n << 17 | m << 24
    }

    /// The shapes that there are (9.7.16.2.1, "Matrix Shape"), as far as they are used here.
    fn check(&self) {
        let Mma { cubes, m, n, .. } = *self;
        let (rows, columns) = match cubes {
            Cubes::One => (m == 64 || m == 128, n.is_multiple_of(if m == 64 { 8 } else { 16 })),
            Cubes::Pair => (m == 128 || m == 256, n.is_multiple_of(32)),
        };
        assert!(rows && columns && (8..=256).contains(&n), "no product of {m} rows and {n} columns for {cubes:?}");
    }

    /// The instructions. Operands are D, A (a descriptor or an address), B's descriptor, and whether the first step adds to
    /// what is in D.
    fn text(&self) -> String {
        self.check();
        let (group, instruction) = (self.cubes.count(), self.instruction());
        let mut text = String::from("{\n.reg .pred more;\n.reg .b32 i, t;\n.reg .b64 a, b;\n");
        text += &format!("mov.b32 i, {instruction};\nsetp.ne.b32 more, %3, 0;\n");
        for step in 0..self.steps {
            let a = match self.a {
                Source::Shared(layout) => {
                    text += &format!("add.s64 a, %1, {};\n", layout.offset(step) >> 4);
                    "a"
                }
                Source::Tensor => {
                    text += &format!("add.u32 t, %1, {};\n", 8 * step);
                    "[t]"
                }
            };
            text += &format!("add.s64 b, %2, {};\n", self.b.offset(step) >> 4);
            text += &format!("tcgen05.mma.cta_group::{group}.kind::f16 [%0], {a}, b, i, more;\n");
            if step == 0 && self.steps > 1 {
                text += "setp.eq.b32 more, 0, 0;\n";
            }
        }
        text + "}"
    }
}

/// The descriptor of a matrix at this address of shared memory, divisible by 1024, or by 32 for a later step of
/// [`Layout::Terms`].
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] layout: Layout) -> u64 {
    u64::cast_from((address & 0x3ffffu32) >> 4u32) | comptime!(layout.descriptor())
}

/// Products with A from shared memory, into D in tensor memory: `tcgen05.mma` (9.7.16.10.9). With `more` 0 the first step
/// overwrites D.
///
/// One thread, of a pair one of the cube with rank 0: descriptors then stand for the same addresses in both cubes. What other
/// threads have stored into shared memory needs [`crate::ptx::fence::async_shared()`] on their side, what they have done in
/// tensor memory [`fence_before()`](super::fence_before) there and [`fence_after()`](super::fence_after) here; what tile loads have brought, a wait for their mbarrier.
#[cube]
pub(crate) fn mma_ss(d: u32, a: u64, b: u64, more: u32, #[comptime] mma: Mma) {
    let text = comptime!(mma.text());
    gpu_asm!(
        "{text} // {d} {a} {b} {more}",
        d = in(_) read::<u32>(d),
        a = in(_) read::<u64>(a),
        b = in(_) read::<u64>(b),
        more = in(_) read::<u32>(more),
        options(explicit_mem, reads_address_space shared)
    );
}

/// [`mma_ss()`] with A from tensor memory, at the lane of D.
#[cube]
pub(crate) fn mma_ts(d: u32, a: u32, b: u64, more: u32, #[comptime] mma: Mma) {
    let text = comptime!(mma.text());
    gpu_asm!(
        "{text} // {d} {a} {b} {more}",
        d = in(_) read::<u32>(d),
        a = in(_) read::<u32>(a),
        b = in(_) read::<u64>(b),
        more = in(_) read::<u32>(more),
        options(explicit_mem, reads_address_space shared)
    );
}

/// Lets the mbarrier `bar` have one arrival when all products that this thread has issued so far are complete:
/// `tcgen05.commit` (9.7.16.12).
///
/// The thread that has issued them. It implies [`fence_before()`](super::fence_before). Who waits may overwrite what they have read, and after
/// [`fence_after()`](super::fence_after) read D.
#[cube]
pub(crate) fn commit(bar: u32) {
    gpu_asm!(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{bar}];",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`commit()`] of a pair's products, to the mbarriers that both cubes have at this address: `.multicast::cluster`.
#[cube]
pub(crate) fn commit_pair(bar: u32) {
    gpu_asm!(
        "{{\n.reg .b16 both;\nmov.b16 both, 3;\n",
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{bar}], both;\n}}",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(word: u64, first: u32, count: u32) -> u64 {
        word >> first & ((1 << count) - 1)
    }

    const SCORES: Mma = Mma {
        cubes: Cubes::One,
        m: 64,
        n: 64,
        steps: 36,
        elem: Elem::Bf16,
        a: Source::Shared(Layout::Terms { rows: 64 }),
        b: Layout::Terms { rows: 64 },
    };

    #[test]
    fn the_descriptor_has_its_fields() {
        for (layout, leading) in [(Layout::Terms { rows: 64 }, 1), (Layout::Across { terms: 32 }, 32 * 128 / 16)] {
            let all = layout.descriptor();
            assert_eq!(bits(all, 0, 16), 0, "the address is added");
            assert_eq!(bits(all, 16, 14), leading);
            assert_eq!(bits(all, 32, 14), 64, "eight rows of 128 bytes");
            assert_eq!(bits(all, 46, 3), 0b001, "the constant");
            assert_eq!(bits(all, 49, 3), 0, "tiles start at multiples of 1024 bytes");
            assert_eq!(bits(all, 61, 3), 2, "128-byte swizzle");
            assert_eq!(all, 2 << 61 | 1 << 46 | 64 << 32 | leading << 16, "nothing else is set");
        }
    }

    #[test]
    fn the_instruction_has_its_fields() {
        let across = Layout::Across { terms: 64 };
        let output = Mma { n: 256, steps: 4, elem: Elem::F16, a: Source::Tensor, b: across, ..SCORES };
        let pair = Mma { cubes: Cubes::Pair, m: 128, n: 128, ..SCORES };
        for (mma, elem, across) in [(SCORES, 1, 0), (output, 0, 1), (pair, 1, 0)] {
            let all = u64::from(mma.instruction());
            assert_eq!(bits(all, 0, 4), 0, "dense");
            assert_eq!(bits(all, 4, 2), 1, "D is f32");
            assert_eq!((bits(all, 7, 3), bits(all, 10, 3)), (elem, elem), "types of A and B");
            assert_eq!(bits(all, 13, 2), 0, "nothing is negated");
            assert_eq!((bits(all, 15, 1), bits(all, 16, 1)), (0, across), "what is transposed");
            assert_eq!(bits(all, 17, 6) * 8, mma.n as u64);
            assert_eq!(bits(all, 24, 5) * 16, mma.m as u64);
            assert_eq!(bits(all, 6, 1) + bits(all, 23, 1) + bits(all, 29, 3), 0, "reserved, and the shift");
        }
        assert_eq!(SCORES.instruction(), 0x0410_0490, "as put together by hand");
    }

    #[test]
    fn steps_walk_through_the_tiles() {
        let terms = Layout::Terms { rows: 64 };
        assert_eq!([0, 1, 3, 4, 9].map(|step| terms.offset(step)), [0, 32, 96, 8192, 2 * 8192 + 32]);
        let across = Layout::Across { terms: 64 };
        assert_eq!([0, 1, 3].map(|step| across.offset(step)), [0, 2048, 6144]);
    }

    #[test]
    fn the_text_numbers_its_operands() {
        let text = Mma { steps: 5, ..SCORES }.text();
        assert_eq!(text.matches("tcgen05.mma.cta_group::1.kind::f16 [%0], a, b, i, more;").count(), 5);
        assert!(text.contains("mov.b32 i, 68158608;\nsetp.ne.b32 more, %3, 0;"));
        assert!(text.contains("add.s64 a, %1, 512;\nadd.s64 b, %2, 512;"), "the second tile: {text}");
        assert_eq!(text.matches("setp.eq.b32 more, 0, 0;").count(), 1, "only the first step may overwrite");
        let output = Mma { n: 256, steps: 2, a: Source::Tensor, b: Layout::Across { terms: 64 }, ..SCORES }.text();
        assert!(output.contains("add.u32 t, %1, 8;\nadd.s64 b, %2, 128;"), "{output}");
        assert!(output.contains("[%0], [t], b, i, more;"), "{output}");
    }

    #[test]
    #[should_panic(expected = "no product of 64 rows and 64 columns for Pair")]
    fn a_pair_has_no_product_of_64_rows() {
        Mma { cubes: Cubes::Pair, ..SCORES }.text();
    }
}
