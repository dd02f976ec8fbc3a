//! How a cube's units share the channels and the tokens of an entry.

use super::CompressKvSizes;
use crate::common::device::UNITS;

/// Tokens that a unit loads at a time, at most.
const MAX_LOADS: usize = 8;

/// The units of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Units of a group, side by side along the channels.
    pub(super) columns: usize,
    /// Groups, which share the tokens.
    pub(super) groups: usize,
    /// Tokens that a unit loads at a time.
    pub(super) loads: usize,
    /// Channels of an entry, in vectors.
    pub(super) vectors: usize,
    /// Channels of an entry.
    pub(super) width: usize,
    pub(super) overlap: bool,
    /// Whether the cube of a sequence writes its new tokens into the state.
    pub(super) writes: bool,
    /// Whether entries go into a cache, too.
    pub(super) caches: bool,
}

impl Shape {
    /// Of a launch that writes entries alone.
    pub(super) fn new(sizes: &CompressKvSizes, vector_size: usize) -> Self {
        let (vectors, tokens) = (sizes.width / vector_size, sizes.windows() * sizes.window);
        let columns = vectors.next_power_of_two().min(UNITS);
        let groups = (UNITS / columns).min(tokens.next_power_of_two());
        let loads = tokens.div_ceil(groups).next_power_of_two().min(MAX_LOADS);
        let (width, overlap) = (sizes.width, sizes.overlap);
        Self { columns, groups, loads, vectors, width, overlap, writes: false, caches: false }
    }

    pub(crate) fn units(&self) -> usize {
        self.columns * self.groups
    }

    /// Keys of a token, in vectors.
    pub(super) fn channels(&self) -> usize {
        if self.overlap { 2 * self.vectors } else { self.vectors }
    }

    /// The softmax of each group, the entry, and a number of each unit.
    pub(super) fn shared_bytes(&self) -> usize {
        (3 * self.groups * self.width + self.width + self.units()) * size_of::<f32>()
    }
}
