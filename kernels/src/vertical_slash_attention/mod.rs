//! Attention to the keys of a vertical-slash index.
//!
//! A cube attends a tile of the queries of a block row to the row's keys, a block of places of their list at a time: first those of
//! its key blocks, then its columns. Every row of `out` and `lse` is cleared first: queries that belong to no sequence, or to no
//! block row, stay so.

mod clear;
#[cfg(feature = "cuda")]
mod mma;
mod plain;
mod problem;
mod rows;
#[cfg(feature = "cuda")]
mod seen;
mod select;
#[cfg(feature = "cuda")]
mod sm90;

use cubecl::prelude::*;

pub use self::problem::{AttentionArgs, Layout, VerticalSlashError, VerticalSlashOptions, VerticalSlashSizes};
use self::select::Form;
use crate::common::select::{Available, Path};

/// The implementations that a device has for a problem, the fastest first.
pub fn available(client: &Client, sizes: &VerticalSlashSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Computes `out` and `lse` with one of the [`available`] implementations: attention of every query to the keys of its block row,
/// sums in f32.
///
/// # Errors
/// What the device lacks, or what the implementation does not take; nothing was launched.
pub fn launch(client: &Client, args: AttentionArgs, path: Path) -> Result<(), VerticalSlashError> {
    let sizes = args.sizes;
    if sizes.is_empty() {
        return Ok(());
    }
    let form = form(client, &sizes, path)?;
    let grid = sizes.grid(client)?;
    clear::launch(client, &args, grid.address);
    // Without keys there is no more to do, and some devices have no buffers without elements.
    if sizes.batch * sizes.rows * sizes.key_tokens == 0 {
        return Ok(());
    }
    match form {
        Form::Plain => plain::launch(client, args, grid),
        #[cfg(feature = "cuda")]
        Form::Mma(form) => mma::launch(client, args, grid, form),
        #[cfg(feature = "cuda")]
        Form::Sm90(form) => sm90::launch(client, args, grid, form)?,
    }
    Ok(())
}

fn form(client: &Client, sizes: &VerticalSlashSizes, path: Path) -> Result<Form, VerticalSlashError> {
    sizes.check()?;
    match select::TABLE.form(path, client, sizes) {
        Some(form) => Ok(form),
        // The one that says why not.
        None if path == Path::Plain => plain::check(client, sizes).map(|()| Form::Plain),
        None => Err(VerticalSlashError::NoKernel(path)),
    }
}

impl VerticalSlashSizes {
    /// The fastest implementation that a device has.
    pub fn path(&self, client: &Client) -> Path {
        select::TABLE.choose(client, self).map_or(Path::Plain, |(path, _)| path)
    }
}

/// All kernels, with the channels of DeepSeek-V3 and of other models.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline().into_iter().chain(clear::offline()).collect()
}
