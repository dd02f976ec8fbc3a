//! Which keys of a block a row sees, in the registers of a warpgroup or a warp.

use cubecl::prelude::*;

use crate::tiles::prefill::softmax::{HIDDEN, Visible, VisibleExpand};

/// Up to which of the block's keys the two rows see, less the unit's first column: column `i` of a row is seen if it is less, and
/// not too far before.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seen {
    pub a: i32,
    pub b: i32,
    /// How many keys a row sees at most, where it sees only its last ones.
    pub most_seen: i32,
    #[cube(comptime)]
    pub mask: Mask,
}

/// Which of a block's keys may be hidden from a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mask {
    /// Those before its window.
    Start,
    /// Those past its last one.
    End,
    /// Both.
    Ends,
}

impl Mask {
    /// Of blocks that some row does not see to the end.
    pub(super) fn last(windowed: bool) -> Self {
        if windowed { Self::Ends } else { Self::End }
    }
}

#[cube]
impl Visible for Seen {
    fn visible(&self, score: f32, #[comptime] i: usize) -> f32 {
        let (row, column) = comptime!((i / 2 % 2, (i / 4 * 8 + i % 2) as i32));
        let end = if comptime!(row == 0) { self.a } else { self.b };
        let mut visible = score;
        if comptime!(matches!(self.mask, Mask::End | Mask::Ends)) {
            visible = select(column < end, visible, f32::new(HIDDEN));
        }
        if comptime!(matches!(self.mask, Mask::Start | Mask::Ends)) {
            visible = select(column < end - self.most_seen, f32::new(HIDDEN), visible);
        }
        visible
    }
}
