//! Pairs of token and expert in the order of the experts, and tiles of them.

mod chunks;
mod places;
mod problem;
mod select;
mod single;

use cubecl::prelude::*;

#[cfg(feature = "cuda")]
pub(crate) use self::problem::{EVEN, pairs_of_tile};
pub use self::problem::{SortArgs, TILE, max_tiles};
use self::select::{Variant, choose};

/// Writes `order` and `tiles`. Without pairs nothing is launched.
pub fn launch(client: &Client, args: SortArgs) {
    match choose(args.pairs) {
        None => {}
        Some(Variant::Single) => single::launch(client, args),
        Some(Variant::Chunks) => chunks::launch(client, args),
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    [single::offline(), chunks::offline()].into_iter().flatten().collect()
}
