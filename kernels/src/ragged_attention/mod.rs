//! Prefill attention over packed sequences: a tile of queries at a time is attended to the keys of its sequence that it sees, with
//! an online softmax; scores are never in memory.

#[cfg(feature = "cuda")]
mod mma;
mod plain;
mod problem;
#[cfg(feature = "cuda")]
mod seen;
mod select;
#[cfg(feature = "cuda")]
mod sm90;
mod tiles;

use cubecl::prelude::*;

pub use self::problem::{
    HeadRows, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionOptions, RaggedAttentionSizes,
};
use self::select::Form;
use crate::common::select::{Available, Path};

/// The implementations that a device has for a problem, the fastest first; [`launch`] takes the first.
pub fn available(client: &Client, sizes: &RaggedAttentionSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &RaggedAttentionSizes) -> Result<(), RaggedAttentionError> {
    if sizes.is_empty() { Ok(()) } else { form(client, sizes, sizes.path(client)).map(|_| ()) }
}

/// Computes `out` and `lse` with one of the [`available`] implementations: attention of every token over its own sequence, sums in
/// f32.
///
/// # Errors
/// What the device lacks, or what the implementation does not take; nothing was launched.
pub fn launch(client: &Client, args: RaggedAttentionArgs, path: Path) -> Result<(), RaggedAttentionError> {
    if args.sizes.is_empty() {
        return Ok(());
    }
    match form(client, &args.sizes, path)? {
        Form::Plain(grid) => plain::launch(client, args, grid),
        #[cfg(feature = "cuda")]
        Form::Mma(form) => mma::launch(client, args, form),
        #[cfg(feature = "cuda")]
        Form::Sm90(form) => sm90::launch(client, args, form),
    }
}

fn form(client: &Client, sizes: &RaggedAttentionSizes, path: Path) -> Result<Form, RaggedAttentionError> {
    sizes.check()?;
    match select::TABLE.form(path, client, sizes) {
        Some(form) => Ok(form),
        // The one that says why not.
        None if path == Path::Plain => plain::prepare(client, sizes).map(Form::Plain),
        None => Err(RaggedAttentionError::NoKernel(path)),
    }
}

impl RaggedAttentionSizes {
    /// The fastest implementation that a device has.
    pub fn path(&self, client: &Client) -> Path {
        select::TABLE.choose(client, self).map_or(Path::Plain, |(path, _)| path)
    }
}

/// All kernels, with the channels of DeepSeek-V3 and of other models.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline()
}
