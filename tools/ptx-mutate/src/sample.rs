//! Samples that a number chooses, the same everywhere.

/// FNV-1a of several texts.
pub fn fingerprint<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for text in texts {
        // The length keeps ("ab", "c") and ("a", "bc") apart.
        for byte in text.len().to_le_bytes().iter().chain(text) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    // FNV's low bits of similar texts are similar: mixed as in splitmix64.
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ hash >> 31
}

/// `count` of the items, chosen by `seed` and the items' names, in their order.
pub fn sample<T>(items: Vec<T>, count: usize, seed: u64, name: impl Fn(&T) -> String) -> Vec<T> {
    let rank = |item: &T| fingerprint([name(item).as_bytes(), &seed.to_le_bytes()[..]]);
    let mut ranks: Vec<u64> = items.iter().map(rank).collect();
    if ranks.len() <= count {
        return items;
    }
    let last = *ranks.select_nth_unstable(count).1;
    items.into_iter().filter(|item| rank(item) < last).collect()
}
