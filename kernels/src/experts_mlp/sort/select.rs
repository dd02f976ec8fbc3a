//! One cube for few pairs, many for more, and how their units share the experts.

/// Units of a cube. Every runtime has this many.
pub(super) const UNITS: usize = 256;
/// Pairs of a cube, where there are many.
pub(super) const CHUNK: usize = 512;
/// Loaded pairs that a unit reads before it looks at them: it would wait for each otherwise.
pub(super) const AHEAD: usize = 8;
/// Pairs up to which one cube is faster than many.
pub(super) const FEW: usize = 1024;

/// Who sorts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// One cube (`single.rs`).
    Single,
    /// A cube for each chunk of the pairs (`chunks.rs`).
    Chunks,
}

/// For so many pairs; none without any.
pub(super) fn choose(pairs: usize) -> Option<Variant> {
    match pairs {
        0 => None,
        1..=FEW => Some(Variant::Single),
        _ => Some(Variant::Chunks),
    }
}

/// Experts of a unit: neighbours.
pub(super) fn run(experts: usize) -> usize {
    experts.div_ceil(UNITS)
}
