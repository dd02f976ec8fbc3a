//! How heads, rows and channels are divided among cubes and their units.

/// Units of a cube, and entries of a list that it looks at together.
pub(super) const UNITS: usize = 128;
/// Heads of a cube: how often a row that was read is used.
pub(super) const HEADS: usize = 4;

/// Cubes of so many query tokens and heads.
pub(super) fn cubes(tokens: usize, heads: usize) -> usize {
    tokens * heads.div_ceil(HEADS)
}

/// Channels of a value that a unit has at most: every one that is so many units after its first.
pub(super) const fn columns(value_width: usize) -> usize {
    value_width.div_ceil(UNITS)
}
