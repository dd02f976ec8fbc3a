//! What computes products: what the table chooses, or a choice in its place, for programs that measure whether the table is right.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cubecl::prelude::*;

use super::select::{self, Choice};
#[cfg(feature = "cuda")]
use super::sizes::Division;
use super::sizes::LinearSizes;
#[cfg(feature = "cuda")]
use super::{sm90, tiled};
use crate::common::select::Path;

/// Looked at by every launch.
static IS_FORCED: AtomicBool = AtomicBool::new(false);
static FORCED: Mutex<Option<Choice>> = Mutex::new(None);

/// As long as it lives, all products of the program that can be computed so are. There is one at a time.
#[derive(Debug)]
pub struct Forced(());

impl Forced {
    /// Begins.
    pub fn new(choice: Choice) -> Self {
        set(Some(choice));
        Self(())
    }
}

impl Drop for Forced {
    fn drop(&mut self) {
        set(None);
    }
}

fn set(choice: Option<Choice>) {
    *FORCED.lock().unwrap_or_else(PoisonError::into_inner) = choice;
    IS_FORCED.store(choice.is_some(), Ordering::Release);
}

/// The kernel for a problem, and how it divides the work.
pub fn choose(client: &Client, sizes: &LinearSizes) -> Choice {
    forced(client, sizes).unwrap_or_else(|| select::by_table(client, sizes))
}

/// What is to compute these, if that is forced and possible.
fn forced(client: &Client, sizes: &LinearSizes) -> Option<Choice> {
    if !IS_FORCED.load(Ordering::Acquire) || sizes.batch_invariant {
        return None;
    }
    let forced = (*FORCED.lock().unwrap_or_else(PoisonError::into_inner))?;
    choices(client, sizes).into_iter().find(|choice| *choice == forced)
}

/// All choices that there are for these sizes, and rows that may depend on one another.
pub fn choices(client: &Client, sizes: &LinearSizes) -> Vec<Choice> {
    let plain = select::TABLE.form(Path::Plain, client, sizes).into_iter();
    #[cfg(feature = "cuda")]
    let plain = plain.chain(on_tensor_cores(client, sizes));
    plain.collect()
}

/// All tilings, not only those of the table.
#[cfg(feature = "cuda")]
fn on_tensor_cores(client: &Client, sizes: &LinearSizes) -> Vec<Choice> {
    let mut all = Vec::from_iter(select::small_batch_choice(client, sizes));
    if tiled::supported(client, sizes) {
        all.extend(tiled::TOKENS.map(select::of_tiles));
    }
    if !matches!(sizes.division, Division::Several | Division::Token) && sm90::supported(client, sizes) {
        let tilings = sm90::all_tilings(sizes, false).filter(|(_, tiling)| tiling.splits.is_power_of_two());
        all.extend(tilings.map(|(_, tiling)| select::of_hopper(tiling)));
    }
    all
}
