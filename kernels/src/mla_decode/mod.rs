//! Attention of a few query tokens over the paged latent cache.
//!
//! A cube works off the items that a plan gives it (see [`mla_plan`](crate::mla_plan)) for one tile of query rows. A row is
//! one head of one query token; all rows of a sequence look at the same keys, so a tile of keys is loaded once into shared
//! memory and used by all rows of the tile, as keys and, its first channels, as values. The softmax is the online one, in
//! f32. An item gives its own normalised output and the logarithm of its sum, and [`merge_splits`] merges those of a
//! sequence.
//!
//! Two kernels here do that: `plain` with ordinary arithmetic, on every device, and `mma` with matrix instructions. On
//! Hopper `sm90` does it, on Blackwell `sm100`, and on both `fp8` for few heads over FP8 rows. [`DecodeSizes::kernel`] says which
//! one runs.

#[cfg(feature = "cuda")]
mod by_row;
#[cfg(feature = "cuda")]
mod fp8;
mod mma;
mod plain;
mod problem;
mod row;
mod select;
#[cfg(feature = "cuda")]
mod sm100;
#[cfg(feature = "cuda")]
mod sm90;
#[cfg(feature = "cuda")]
mod tma;

use cubecl::prelude::Client;

pub use self::plain::MAX_KEY_BYTES;
pub use self::problem::{DecodeArgs, DecodeError, DecodeSizes};
use self::select::Form;
pub use self::select::parallel_cubes;
use crate::common::launch::share;
use crate::common::select::{Available, Path};
use crate::linear::{self, LinearArgs};
use crate::merge_splits::{self, MergeSplitsArgs};
#[cfg(feature = "cuda")]
use crate::sparse_mla;

/// The implementations of this operation.
pub type DecodeKernel = Path;

/// The implementations that a device has for these sizes, the fastest first.
pub fn available(client: &Client, sizes: &DecodeSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &DecodeSizes) -> Result<(), DecodeError> {
    check_kernel(client, sizes, sizes.kernel(client))
}

/// The same for [`launch_kernel`].
///
/// # Errors
/// What [`launch_kernel`] would give.
pub fn check_kernel(client: &Client, sizes: &DecodeSizes, path: Path) -> Result<(), DecodeError> {
    if sizes.is_empty() {
        return Ok(());
    }
    sizes.check(client)?;
    select::prepare(client, sizes, path).map(|_| ())
}

/// Computes the items of a plan with the fastest kernel that the device has, and merges those of each sequence.
///
/// # Errors
/// The device lacks the element type, the memory or the addresses. Nothing is launched then.
pub fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let path = args.sizes.kernel(client);
    launch_kernel(client, args, path)
}

/// The same, with a certain implementation.
///
/// # Errors
/// As [`launch`], and where the device lacks what the kernel needs.
pub fn launch_kernel(client: &Client, args: DecodeArgs, path: Path) -> Result<(), DecodeError> {
    if let Some(merge) = launch_items(client, args, path)? {
        merge_splits::launch(client, merge);
    }
    Ok(())
}

/// The same, and behind it the projection of each head's `out`, which is its `x`: see [`linear::launch_merged`].
///
/// # Errors
/// As [`launch_kernel`].
pub fn launch_projected(
    client: &Client,
    args: DecodeArgs,
    path: Path,
    projection: LinearArgs,
) -> Result<(), DecodeError> {
    if let Some(merge) = launch_items(client, args, path)? {
        linear::launch_merged(client, merge, projection);
    }
    Ok(())
}

/// Computes the items of a plan. Gives what merges them; nothing where there are none.
fn launch_items(client: &Client, args: DecodeArgs, path: Path) -> Result<Option<MergeSplitsArgs>, DecodeError> {
    if args.sizes.is_empty() {
        return Ok(None);
    }
    let sizes = args.sizes;
    sizes.check(client)?;
    sizes.check_stride("q_stride", args.q_stride, path)?;
    sizes.check_stride("kv_stride", args.kv_stride, path)?;
    let merge = MergeSplitsArgs {
        outs: share(&args.partial_out),
        lses: share(&args.partial_lse),
        split_ptr: share(&args.split_ptr),
        out: share(&args.out),
        lse: share(&args.lse),
        batch: sizes.batch,
        items: sizes.capacity,
        rows: sizes.query_rows(),
        width: sizes.value_width,
        single_items_done: path.is_specialised(),
        elem: sizes.elem,
    };
    let (form, grid) = select::prepare(client, &sizes, path)?;
    match form {
        Form::Plain(tile) => plain::launch(client, args, tile, grid),
        Form::Mma(tile) => mma::launch(client, args, tile, grid),
        #[cfg(feature = "cuda")]
        Form::Sm90(form) => sm90::launch(client, args, form, grid)?,
        #[cfg(feature = "cuda")]
        Form::Sm100(form) => sm100::launch(client, args, form, grid)?,
        #[cfg(feature = "cuda")]
        Form::Fp8(form) => fp8::launch(client, &args, form, &grid),
        #[cfg(feature = "cuda")]
        Form::ByRow => sparse_mla::launch(client, args.by_row()).map_err(|_| DecodeError::NoKernel(path))?,
    }
    Ok(Some(merge))
}

impl DecodeSizes {
    /// The fastest implementation that there is.
    pub fn kernel(&self, client: &Client) -> Path {
        select::TABLE.choose(client, self).map_or(Path::Plain, |(path, _)| path)
    }
}

/// All kernels as DeepSeek's models use them.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline()
}
