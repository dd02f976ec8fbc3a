//! Pairs of token and expert in the order of the experts, and tiles of them.

mod chunks;
mod places;
mod problem;
mod single;

use cubecl::prelude::*;

pub use self::problem::{SortArgs, TILE, max_tiles};

/// Pairs up to which one cube is faster than many.
const FEW: usize = 1024;

/// Writes `order` and `tiles`. Without pairs nothing is launched.
pub fn launch(client: &Client, args: SortArgs) {
    match args.pairs {
        0 => {}
        1..=FEW => single::launch(client, args),
        _ => chunks::launch(client, args),
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    [single::offline(), chunks::offline()].into_iter().flatten().collect()
}
