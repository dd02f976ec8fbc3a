//! Which cells of tensor memory a thread's registers hold in `tcgen05.ld` and `.st` (PTX ISA, Data Movement Shape,
//! Matrix fragments, and Packing and Unpacking).
use crate::ir::tcgen05::{Fragment, Shape};

/// A cell's lane and column, from those of the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub lane: u32,
    pub column: u32,
}

/// Lanes that the shape covers.
pub(super) fn lanes(shape: Shape) -> u32 {
    if shape == Shape::L32B32 { 32 } else { 16 }
}

/// The first cell of a thread's register: with packing, its upper half is the next column.
pub(super) fn cell(fragment: Fragment, thread: u32, register: u32) -> Cell {
    let (t, r) = (thread, register);
    // `wide` columns are those of the fragment: with packing, each is two of tensor memory.
    let (lane, wide, split) = match fragment.shape {
        Shape::L32B32 => (t, r, 0),
        Shape::L16B32x2 => (t % 16, r, fragment.split * (t / 16)),
        Shape::L16B64 => (t / 4 + 8 * (t & 1), 2 * r + (t >> 1 & 1), 0),
        Shape::L16B128 => (t / 4 + 8 * (r & 1), 4 * (r / 2) + t % 4, 0),
        Shape::L16B256 => (t / 4 + 8 * (r >> 1 & 1), 8 * (r / 4) + 2 * (t % 4) + (r & 1), 0),
    };
    let column = if fragment.packed { 2 * wide } else { wide } + split;
    Cell { lane, column }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::collections::BTreeSet;

    fn of(shape: Shape, packed: bool) -> Fragment {
        Fragment { shape, split: 64, packed }
    }

    /// Registers of `.x4` for all shapes: every cell of 16 or 32 lanes once, and no other.
    #[rstest]
    #[case(Shape::L32B32, 4, 32, 4)]
    #[case(Shape::L16B64, 4, 16, 8)]
    #[case(Shape::L16B128, 8, 16, 16)]
    #[case(Shape::L16B256, 16, 16, 32)]
    fn a_fragment_covers_its_rectangle(
        #[case] shape: Shape,
        #[case] registers: u32,
        #[case] lanes: u32,
        #[case] columns: u32,
    ) {
        let all: BTreeSet<(u32, u32)> = (0..32)
            .flat_map(|t| (0..registers).map(move |r| cell(of(shape, false), t, r)))
            .map(|c| (c.lane, c.column))
            .collect();
        let want: BTreeSet<(u32, u32)> = (0..lanes).flat_map(|l| (0..columns).map(move |c| (l, c))).collect();
        assert_eq!(all, want);
    }

    /// Matrix fragments of `.16x256b` and `.16x128b`: as those of `mma`, four threads to a row, then eight rows on.
    #[test]
    fn threads_of_a_row_are_neighbours() {
        let at = |shape, t, r| {
            let c = cell(of(shape, false), t, r);
            (c.lane, c.column)
        };
        assert_eq!(
            (0..5).map(|r| at(Shape::L16B256, 5, r)).collect::<Vec<_>>(),
            [(1, 2), (1, 3), (9, 2), (9, 3), (1, 10)]
        );
        assert_eq!((0..3).map(|r| at(Shape::L16B128, 5, r)).collect::<Vec<_>>(), [(1, 1), (9, 1), (1, 5)]);
        assert_eq!((0..4).map(|t| at(Shape::L16B64, t, 0)).collect::<Vec<_>>(), [(0, 0), (8, 0), (0, 1), (8, 1)]);
        assert_eq!(at(Shape::L16B64, 31, 1), (15, 3));
    }

    /// `.16x32bx2` has its second half `immHalfSplitoff` columns on.
    #[test]
    fn halves_are_split() {
        let c = cell(of(Shape::L16B32x2, false), 17, 3);
        assert_eq!((c.lane, c.column), (1, 67));
    }

    /// Packing takes the lower halves of adjacent columns.
    #[test]
    fn packed_registers_are_two_columns() {
        assert_eq!(cell(of(Shape::L32B32, true), 7, 3), Cell { lane: 7, column: 6 });
        assert_eq!(cell(of(Shape::L16B256, true), 1, 1), Cell { lane: 0, column: 6 });
    }
}
