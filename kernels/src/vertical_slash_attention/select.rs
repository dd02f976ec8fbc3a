//! Which kernel computes vertical-slash attention.

use super::plain;
use super::problem::VerticalSlashSizes;
#[cfg(feature = "cuda")]
use super::{mma, sm90};
use crate::common::select::{Path, Table, Variant};
#[cfg(feature = "cuda")]
use crate::tiles::prefill::form;

/// The implementations, the first choice first.
pub(super) const TABLE: Table<VerticalSlashSizes, Form> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; of the problem what `mma` needs",
        form: |client, sizes| sm90::form(client, sizes).map(Form::Sm90),
        #[cfg(feature = "offline")]
        offline: sm90::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Mma,
        needs: "matrix instructions with ldmatrix, asynchronous copies, and shared memory for tiles of queries, keys and values; \
                f16 or bf16, heads of 192 / 128, 128 / 128 or 64 / 64 channels",
        form: |client, sizes| mma::form(client, sizes).map(Form::Mma),
        #[cfg(feature = "offline")]
        offline: mma::offline,
    },
    Variant {
        path: Path::Plain,
        needs: "shared memory for a tile of queries and keys",
        form: |client, sizes| plain::check(client, sizes).ok().map(|()| Form::Plain),
        #[cfg(feature = "offline")]
        offline: plain::offline,
    },
]);

/// How a kernel divides the work.
pub(super) enum Form {
    Plain,
    #[cfg(feature = "cuda")]
    Mma(form::Form),
    #[cfg(feature = "cuda")]
    Sm90(form::Form),
}
