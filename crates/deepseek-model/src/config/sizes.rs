//! Bounds of sizes: what is computed from them does not overflow, and what is listed of them fits into any memory.

use super::Contradiction;

/// A size that a tensor may have, or an index: what 31 bits count.
pub(crate) const MOST: usize = i32::MAX as usize;
/// Channels of a head: a table has the rotations of a thousand positions at least.
pub(crate) const MOST_CHANNELS: usize = 1 << 16;
/// Layers.
pub(crate) const MOST_LAYERS: usize = 1 << 12;
/// Routed experts of all layers, each of which has tensors of its own.
pub(crate) const MOST_EXPERTS: usize = 1 << 18;
/// Bytes that a number takes at most, in a file or on a device.
const MOST_BYTES: u128 = 8;

/// A field, its value, and the largest that it may have.
pub(crate) type Bound = (&'static str, usize, usize);

/// The first size that is zero or too large.
pub(crate) fn out_of_range(sizes: &[Bound]) -> Option<Contradiction> {
    let &(field, size, most) = sizes.iter().find(|&&(_, size, most)| size == 0 || size > most)?;
    let expected = if size == 0 { "at least 1".to_string() } else { format!("at most {most}") };
    Some((field, size.to_string(), expected))
}

/// Experts that are too many for so many layers.
pub(crate) fn too_many_experts(layers: usize, experts: usize) -> Option<Contradiction> {
    let most = MOST_EXPERTS / layers.max(1);
    (experts > most).then(|| {
        let expected = format!("at most {most} for {layers} layers (tensors are listed one by one)");
        ("n_routed_experts", experts.to_string(), expected)
    })
}

/// Sizes that ask for more bytes than a program can address; the largest of them is named. `numbers` are those of all weights, or
/// of what a request has in the cache.
pub(crate) fn unaddressable(sizes: &[Bound], what: &str, numbers: u128) -> Option<Contradiction> {
    let bytes = numbers.saturating_mul(MOST_BYTES);
    if bytes <= isize::MAX as u128 {
        return None;
    }
    let &(field, size, _) = sizes.iter().max_by_key(|&&(_, size, _)| size)?;
    let expected = format!("less: {what} would take {bytes} bytes, and {} can be addressed", isize::MAX);
    Some((field, size.to_string(), expected))
}

/// The first size that is zero, too large, or asks for too much memory together with the others: for so many numbers of weights.
pub(crate) fn impossible_size(sizes: &[Bound], numbers: impl FnOnce() -> u128) -> Option<Contradiction> {
    out_of_range(sizes).or_else(|| unaddressable(sizes, "the weights", numbers()))
}

/// The product of some sizes.
pub(crate) fn product(sizes: &[usize]) -> u128 {
    sizes.iter().fold(1, |product: u128, &size| product.saturating_mul(size as u128))
}

/// The sum of such products.
pub(crate) fn sum(products: impl IntoIterator<Item = u128>) -> u128 {
    products.into_iter().fold(0, u128::saturating_add)
}

/// Whether a number is finite and above 0, also as the f32 that it is computed with.
pub(crate) fn is_positive(value: f64) -> bool {
    let value = value as f32;
    value.is_finite() && value > 0.0
}
