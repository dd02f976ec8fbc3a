//! Which lanes and columns of tensor memory matrices A and D occupy (PTX ISA, Data Path Layout Organization).
//!
//! In every layout a lane of D is computed from the same lane of A: where the columns of D are split over several
//! groups of lanes (B, E, G), A in tensor memory stands once in each group.

/// A layout of the table, without C, which is that of sparse matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataPath {
    /// M = 256 over two CTAs: 128 rows in each.
    A,
    /// M = 128 over two CTAs: 64 rows in each, the columns in two halves.
    B,
    /// M = 128.
    D,
    /// M = 64 of `.ws`: the columns in two halves.
    E,
    /// M = 64: sixteen of every 32 lanes.
    F,
    /// M = 32 of `.ws`: the columns in four quarters.
    G,
}

impl DataPath {
    /// The layout of M rows; `None` if the table has none.
    pub fn new(m: u32, group: u8, weight_stationary: bool) -> Option<Self> {
        Some(match (m, group, weight_stationary) {
            (256, 2, false) => Self::A,
            (128, 2, false) => Self::B,
            (128, 1, _) => Self::D,
            (64, 1, true) => Self::E,
            (64, 1, false) => Self::F,
            (32, 1, true) => Self::G,
            _ => return None,
        })
    }

    /// Rows of D, and of A, that one CTA holds.
    pub fn rows(self) -> u32 {
        match self {
            Self::A | Self::D => 128,
            Self::B | Self::E | Self::F => 64,
            Self::G => 32,
        }
    }

    /// Groups of lanes that the columns are split over.
    pub fn splits(self) -> u32 {
        match self {
            Self::A | Self::D | Self::F => 1,
            Self::B | Self::E => 2,
            Self::G => 4,
        }
    }

    /// The lane of a row of the CTA, in one of the splits.
    pub fn lane(self, row: u32, split: u32) -> u32 {
        match self {
            Self::F => row % 16 + 32 * (row / 16),
            _ => row + self.rows() * split,
        }
    }

    /// Whether D may start at this lane ("Tensor Memory Datapath Lane Alignment").
    pub fn may_start(self, lane: u32) -> bool {
        lane == 0 || self == Self::F && lane == 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The table's rows: M, `.cta_group`, `.ws`, the layout.
    #[rstest]
    #[case(32, 1, true, Some(DataPath::G))]
    #[case(64, 1, true, Some(DataPath::E))]
    #[case(64, 1, false, Some(DataPath::F))]
    #[case(128, 1, false, Some(DataPath::D))]
    #[case(128, 1, true, Some(DataPath::D))]
    #[case(128, 2, false, Some(DataPath::B))]
    #[case(256, 2, false, Some(DataPath::A))]
    #[case(32, 1, false, None)]
    #[case(256, 1, false, None)]
    #[case(64, 2, false, None)]
    fn the_table_has_these_layouts(
        #[case] m: u32,
        #[case] group: u8,
        #[case] weight_stationary: bool,
        #[case] layout: Option<DataPath>,
    ) {
        assert_eq!(DataPath::new(m, group, weight_stationary), layout);
    }

    /// Lanes of the first and the last row, by split.
    #[rstest]
    #[case(DataPath::A, &[(0, 127)])]
    #[case(DataPath::B, &[(0, 63), (64, 127)])]
    #[case(DataPath::D, &[(0, 127)])]
    #[case(DataPath::E, &[(0, 63), (64, 127)])]
    #[case(DataPath::F, &[(0, 111)])]
    #[case(DataPath::G, &[(0, 31), (32, 63), (64, 95), (96, 127)])]
    fn splits_take_groups_of_lanes(#[case] layout: DataPath, #[case] want: &[(u32, u32)]) {
        let ends = |s| (layout.lane(0, s), layout.lane(layout.rows() - 1, s));
        assert_eq!((0..layout.splits()).map(ends).collect::<Vec<_>>(), want);
    }

    /// Layout F: rows 16 to 31 in the second warp's lanes. Only it may start at lane 16.
    #[test]
    fn half_of_the_datapath() {
        assert_eq!([15, 16, 47, 48].map(|row| DataPath::F.lane(row, 0)), [15, 32, 79, 96]);
        assert!(DataPath::F.may_start(16) && !DataPath::F.may_start(32) && !DataPath::D.may_start(16));
    }
}
