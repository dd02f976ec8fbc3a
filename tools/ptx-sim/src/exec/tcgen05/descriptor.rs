//! Descriptors of `tcgen05`: where a matrix lies in shared memory, and what an instruction multiplies (PTX ISA,
//! Shared memory descriptor, Canonical Layouts, Instruction Descriptor and Zero-Column Mask Descriptor).
use crate::error::Fault;
use crate::exec::descriptor::{Swizzle, Tile};

/// Bytes of the unit that swizzling moves as a whole.
pub(super) const CHUNK: u64 = 16;

fn field(bits: u64, first: u32, count: u32) -> u64 {
    bits >> first & ((1 << count) - 1)
}

fn fault(name: &str, descriptor: u64, problem: String) -> Fault {
    Fault::Descriptor { descriptor, problem: format!("{name}: {problem}") }
}

/// Reads the descriptor of a matrix in shared memory (Table "Shared memory descriptor layout").
pub(super) fn shared_matrix(bits: u64, transposed: bool) -> Result<Tile, Fault> {
    let fault = |problem: String| fault("shared memory", bits, problem);
    let mode = field(bits, 61, 3);
    let swizzle = match mode {
        0 => Swizzle::None,
        2 => Swizzle::Bytes128,
        4 => Swizzle::Bytes64,
        6 => Swizzle::Bytes32,
        // 128-byte swizzling with 32-byte atoms serves transposed matrices of 32-bit elements alone (PTX ISA, Valid
        // Combinations of Type-Size, Major-ness and Swizzling).
        1 => return Err(fault("swizzling mode 1 is not for elements of 16 bits".into())),
        _ => return Err(fault(format!("swizzling mode {mode} is invalid"))),
    };
    if field(bits, 46, 3) != 1 {
        return Err(fault(format!("bits 46 to 48 are {:#05b}, expected 0b001", field(bits, 46, 3))));
    }
    if field(bits, 52, 1) != 0 {
        return Err(fault("absolute leading dimensions (bit 52) do not exist on sm_100a".into()));
    }
    if field(bits, 53, 8) != 0 || field(bits, 14, 2) != 0 || field(bits, 30, 2) != 0 {
        return Err(fault("bits outside all fields are set".into()));
    }
    let bytes = |first| field(bits, first, 14) * CHUNK;
    Ok(Tile { start: bytes(0), leading: bytes(16), stride: bytes(32), base: field(bits, 49, 3), swizzle, transposed })
}

/// What `tcgen05.mma` of `.kind::f16` multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    pub m: u32,
    pub n: u32,
    /// Of A and B; else f16.
    pub bf16: bool,
    /// D is f16; else f32.
    pub half_d: bool,
    pub negate_a: bool,
    pub negate_b: bool,
    /// MN-major in shared memory.
    pub transpose_a: bool,
    pub transpose_b: bool,
}

impl Instruction {
    /// Reads the descriptor (Table "Instruction descriptor format").
    pub fn new(bits: u32, group: u8, weight_stationary: bool) -> Result<Self, Fault> {
        let word = u64::from(bits);
        let fault = |problem: String| fault("instruction", word, problem);
        let flag = |bit| field(word, bit, 1) == 1;
        if flag(2) || field(word, 0, 2) != 0 {
            return Err(fault("sparsity (bits 0 to 2) needs tcgen05.mma.sp".into()));
        }
        if flag(3) || flag(6) || flag(23) || flag(29) {
            return Err(fault("bits 3, 6, 23 and 29 must be 0".into()));
        }
        if !weight_stationary && field(word, 30, 2) != 0 {
            return Err(fault("a maximum shift (bits 30 and 31) needs .ws".into()));
        }
        let (d, a, b) = (field(word, 4, 2), field(word, 7, 3), field(word, 10, 3));
        // PTX ISA, Matrix Shape: D of f16 comes from A and B of f16.
        if d > 1 || a > 1 || b > 1 || a != b || d == 0 && a == 1 {
            return Err(fault(format!("types {d} of D, {a} of A and {b} of B are none of .kind::f16")));
        }
        let (n, m) = (8 * field(word, 17, 6) as u32, 16 * field(word, 24, 5) as u32);
        check_shape(m, n, group, weight_stationary).map_err(fault)?;
        Ok(Self {
            m,
            n,
            bf16: a == 1,
            half_d: d == 0,
            negate_a: flag(13),
            negate_b: flag(14),
            transpose_a: flag(15),
            transpose_b: flag(16),
        })
    }
}

/// PTX ISA, Matrix Shape. Of M = 128 the table allows steps of 8; CUTLASS asserts that they are of 16.
fn check_shape(m: u32, n: u32, group: u8, weight_stationary: bool) -> Result<(), String> {
    let (rows, columns): (&[u32], bool) = match (group, weight_stationary) {
        (1, true) => (&[32, 64, 128], matches!(n, 64 | 128 | 256)),
        (1, false) => (&[64, 128], n.is_multiple_of(if m == 128 { 16 } else { 8 }) && (8..=256).contains(&n)),
        _ => (&[128, 256], n.is_multiple_of(16) && (16..=256).contains(&n)),
    };
    if rows.contains(&m) && columns {
        return Ok(());
    }
    let form = if weight_stationary { ".ws" } else { "" };
    Err(format!("no shape of M = {m} and N = {n} in .cta_group::{group}{form}"))
}

/// Which columns of B `.ws` takes as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ZeroColumns {
    bits: u64,
    /// Columns of a sub-mask.
    part: u32,
}

impl ZeroColumns {
    /// Reads the descriptor for a shape (Table "Zero-Column Mask descriptor layout").
    pub fn new(bits: u64, m: u32, n: u32) -> Result<Self, Fault> {
        let fault = |problem: String| fault("zero-column mask", bits, problem);
        if field(bits, 36, 3) != 0 || field(bits, 62, 2) != 0 {
            return Err(fault("reserved bits are set".into()));
        }
        let (shift, most) = (field(bits, 56, 6), if m == 32 { 16 } else { 32 });
        if shift > most {
            return Err(fault(format!("a column shift of {shift}, expected at most {most}")));
        }
        Ok(Self { bits, part: n * m.min(128) / 128 })
    }

    /// The column of B that is read for a column of D.
    pub fn shifted(self, column: u32) -> u32 {
        column + field(self.bits, 56, 6) as u32
    }

    /// Whether zeros stand in for a column. The table swaps the names of the spans; this is as in its examples.
    pub fn is_zero(self, column: u32) -> bool {
        if field(self.bits, 39, 1) == 0 {
            return false;
        }
        let (index, at) = (column / self.part, u64::from(column % self.part));
        let (zeros, used) = (field(self.bits, 40, 8) + 1, field(self.bits, 48, 8) + 1);
        let (first, start) = (field(self.bits, 32 + index, 1), field(self.bits, 8 * index, 8));
        let at = (at + start) % (zeros + used);
        if first == 1 { at < zeros } else { at >= used }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::collections::BTreeSet;

    /// The fields of the table: start, leading and stride in units of 16 bytes, the constant, the swizzling mode.
    fn matrix(start: u64, leading: u64, stride: u64, swizzle: u64) -> u64 {
        start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61
    }

    #[rstest]
    #[case(matrix(0, 0, 0, 3), "mode 3")]
    #[case(matrix(0, 0, 0, 1), "mode 1")]
    #[case(matrix(0, 0, 0, 2) & !(1 << 46), "0b000")]
    #[case(matrix(0, 0, 0, 2) | 1 << 52, "bit 52")]
    #[case(matrix(0, 0, 0, 2) | 1 << 53, "outside")]
    #[case(matrix(0, 0, 0, 2) | 1 << 14, "outside")]
    fn descriptors_with_wrong_bits_are_errors(#[case] bits: u64, #[case] problem: &str) {
        let error = shared_matrix(bits, false).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }

    /// Canonical layouts, K-major: T = 8 elements; ((8,m),(T,2)) with the strides of each mode.
    #[rstest]
    #[case(0, 16)]
    #[case(6, 32)]
    #[case(4, 64)]
    #[case(2, 128)]
    fn k_major_rows_are_a_pattern_apart(#[case] swizzle: u64, #[case] width: u64) {
        let m = shared_matrix(matrix(4096, 512, 2048, swizzle), false).unwrap();
        let lines = width / 16;
        for (row, part) in (0..32).flat_map(|r| [(r, 0), (r, 1)]) {
            let plain = row % 8 * width + row / 8 * 2048 + part * if swizzle == 0 { 512 } else { 16 };
            // A pattern repeats after 8 rows: chunk i of line j lies where chunk i ^ j would.
            let want = 4096 + (plain ^ ((plain >> 7 & (lines - 1)) * 16));
            assert_eq!(m.chunk(row, 16 * part), want, "row {row} part {part}");
        }
    }

    /// Row 3, second chunk, of a tile with 128-byte swizzling: Swizzle<3,4,3> of byte 3 * 128 + 16.
    #[test]
    fn swizzling_is_of_the_address() {
        let m = shared_matrix(matrix(1024, 16, 1024, 2), false).unwrap();
        assert_eq!(m.chunk(3, 16), 1024 + 3 * 128 + (1 ^ 3) * 16);
        // K steps move the start: the pattern stays where it is.
        let step = shared_matrix(matrix(1024 + 32, 16, 1024, 2), false).unwrap();
        assert_eq!(step.chunk(3, 16), 1024 + 3 * 128);
        // A pattern that starts at 1024 + 2 * 128 has a base offset of 2.
        let moved = shared_matrix(matrix(1024 + 256, 16, 1024, 2) | 2 << 49, false).unwrap();
        assert_eq!(moved.chunk(3, 16), 1024 + 256 + 3 * 128 + (1 ^ 3) * 16);
    }

    /// Canonical layouts, MN-major: ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO)) without swizzling, else
    /// ((T,w,m),(8,k)) : ((1,T,LBO),(wT,SBO)).
    #[test]
    fn mn_major_offsets_change_their_roles() {
        let plain = shared_matrix(matrix(0, 256, 4096, 0), true).unwrap();
        assert_eq!(plain.chunk(9, 16 * 3), 3 * 4096 + 16 + 256);
        let wide = shared_matrix(matrix(0, 8192, 1024, 2), true).unwrap();
        assert_eq!(wide.chunk(8 + 3, 16 * (8 + 5)), 8192 + 1024 + 3 * 128 + (5 ^ 3) * 16);
        let narrow = shared_matrix(matrix(0, 8192, 256, 6), true).unwrap();
        assert_eq!(narrow.chunk(4, 16 * 2), 8192 + ((4 * 32) ^ 16));
    }

    /// Every chunk of a 64 x 16 matrix has an address of its own, in each mode and major-ness.
    #[rstest]
    fn chunks_do_not_overlap(#[values((0, 16), (6, 32), (4, 64), (2, 128))] mode: (u64, u64)) {
        let (swizzle, width) = mode;
        let k = shared_matrix(matrix(0, 1024, 8 * width, swizzle), false).unwrap();
        let all: BTreeSet<u64> = (0..64).flat_map(|r| [k.chunk(r, 0), k.chunk(r, 16)]).collect();
        assert_eq!(all.len(), 128);
        let mn = shared_matrix(matrix(0, 16 * width, 8 * width, swizzle), true).unwrap();
        let mn = if swizzle == 0 { shared_matrix(matrix(0, 128, 256, 0), true).unwrap() } else { mn };
        let all: BTreeSet<u64> = (0..8).flat_map(|p| (0..16).map(move |k| mn.chunk(k, 16 * p))).collect();
        assert_eq!(all.len(), 128);
    }

    /// Type of D in bits 4-5, of A in 7-9, of B in 10-12, N >> 3 in 17-22, M >> 4 in 24-28.
    fn instruction(m: u32, n: u32) -> u32 {
        1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24
    }

    #[test]
    fn an_instruction_descriptor_has_these_fields() {
        let plain = Instruction::new(instruction(128, 240), 1, false).unwrap();
        let want = Instruction {
            m: 128,
            n: 240,
            bf16: true,
            half_d: false,
            negate_a: false,
            negate_b: false,
            transpose_a: false,
            transpose_b: false,
        };
        assert_eq!(plain, want);
        let negated = Instruction::new(instruction(128, 240) | 1 << 13 | 1 << 16, 1, false).unwrap();
        assert_eq!(negated, Instruction { negate_a: true, transpose_b: true, ..want });
        let other = Instruction::new(instruction(128, 240) | 1 << 14 | 1 << 15, 1, false).unwrap();
        assert_eq!(other, Instruction { negate_b: true, transpose_a: true, ..want });
        let half = Instruction::new(instruction(64, 8) & !(1 << 4 | 1 << 7 | 1 << 10), 1, false).unwrap();
        assert_eq!(half, Instruction { m: 64, n: 8, bf16: false, half_d: true, ..want });
    }

    #[rstest]
    #[case(1 << 0, "sparsity")]
    #[case(1 << 2, "sparsity")]
    #[case(1 << 3, "must be 0")]
    #[case(1 << 6, "must be 0")]
    #[case(1 << 23, "must be 0")]
    #[case(1 << 29, "must be 0")]
    #[case(1 << 30, "maximum shift")]
    #[case(1 << 5, "types")]
    #[case(1 << 8, "types")]
    fn instruction_descriptors_with_wrong_bits_are_errors(#[case] bit: u32, #[case] problem: &str) {
        let error = Instruction::new(instruction(128, 64) | bit, 1, false).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }

    /// Matrix Shape: M, N, `.cta_group`, `.ws` of `.kind::f16`.
    #[rstest]
    #[case(64, 8, 1, false, true)]
    #[case(64, 256, 1, false, true)]
    #[case(128, 8, 1, false, false)]
    #[case(128, 16, 1, false, true)]
    #[case(256, 64, 1, false, false)]
    #[case(32, 64, 1, false, false)]
    #[case(128, 16, 2, false, true)]
    #[case(256, 8, 2, false, false)]
    #[case(64, 64, 2, false, false)]
    #[case(32, 64, 1, true, true)]
    #[case(64, 96, 1, true, false)]
    fn shapes_are_those_of_the_table(
        #[case] m: u32,
        #[case] n: u32,
        #[case] group: u8,
        #[case] weight_stationary: bool,
        #[case] exists: bool,
    ) {
        assert_eq!(Instruction::new(instruction(m, n), group, weight_stationary).is_ok(), exists);
    }

    /// Sub-masks as the section prints them: the lowest column last.
    fn printed(zero: ZeroColumns, from: u32, columns: u32) -> String {
        (from..from + columns).rev().map(|c| if zero.is_zero(c) { '1' } else { '0' }).collect()
    }

    /// Examples 1 to 4 of the section.
    #[test]
    fn zero_column_masks_are_those_of_the_examples() {
        let spans = 2 << 40 | 3 << 48;
        let none = ZeroColumns::new(spans, 128, 64).unwrap();
        assert!((0..64).all(|c| !none.is_zero(c)));
        let one = ZeroColumns::new(spans | 1 << 39, 128, 64).unwrap();
        assert_eq!(printed(one, 0, 14), "11100001110000");
        let two = ZeroColumns::new(spans | 1 << 39 | 1 << 32, 64, 128).unwrap();
        assert_eq!(printed(two, 0, 17), "11100001110000111");
        assert_eq!(printed(two, 64, 18), "000011100001110000");
        let counts = 1 << 24 | 2 << 16 | 1 << 8;
        let four = ZeroColumns::new(spans | 1 << 39 | 3 << 32 | counts | 2 << 56, 32, 128).unwrap();
        assert_eq!(printed(four, 0, 14), "00001110000111");
        assert_eq!(printed(four, 32, 13), "0000111000011");
        assert_eq!(printed(four, 64, 12), "111000011100");
        assert_eq!(printed(four, 96, 13), "1110000111000");
        assert_eq!((four.shifted(0), four.shifted(127)), (2, 129));
    }
}
