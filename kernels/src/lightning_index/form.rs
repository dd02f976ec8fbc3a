//! How a cube that chooses divides its keys.

use cubecl::prelude::Const;

/// Units of a cube at most.
pub(super) const MAX_UNITS: usize = 1024;
/// Ranks that a unit loads at once.
pub(super) type Load = Const<LOAD>;
pub(super) const LOAD: usize = 4;
/// Loads that a unit keeps in registers at most.
pub(super) const MAX_LOADS: usize = 8;
/// Units of a plane at most.
pub(super) const MAX_PLANE: usize = 32;

const _: () = assert!(LOAD == 4 && MAX_LOADS == 8, "a bit for each key of a unit, and four of them for a load");
const _: () = assert!(MAX_PLANE * LOAD < 1 << 8, "8 bits for the keys that a plane has in a load");
const _: () = assert!(MAX_UNITS * MAX_LOADS * LOAD < 1 << 16, "two sums of keys in 32 bits");

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Units of a cube.
    pub units: usize,
    /// Units of a plane; 1 where the device has no operations of planes.
    pub plane: usize,
    /// Loads of a unit.
    pub loads: usize,
    /// Whether a cube has more keys than its registers hold. It then reads them whenever it looks at them.
    pub again: bool,
    /// Whether the keys are candidates, whose positions are behind the ranks.
    pub candidates: bool,
    /// What becomes of the chosen keys.
    pub output: Output,
}

/// What is written of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Output {
    /// Its rank, and its position behind all ranks.
    Candidates,
    /// Its position.
    Positions,
    /// Its slot.
    Slots,
}

impl Form {
    /// Keys that the registers of a cube hold.
    pub fn capacity(&self) -> usize {
        self.units * self.loads * LOAD
    }

    /// Planes of a cube.
    pub fn planes(&self) -> usize {
        self.units / self.plane
    }
}
