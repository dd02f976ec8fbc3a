//! Which kernel computes a decode step, and how it divides the work. Constants here were measured; the README says where.

use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use super::fp8::Form as Fp8Form;
use super::mma::{self, MmaTile, best_mma_tile};
#[cfg(feature = "offline")]
use super::plain;
use super::plain::{PLAIN_ROWS, Tile, plain_tile};
use super::problem::{DecodeError, DecodeSizes, Grid};
#[cfg(feature = "cuda")]
use super::tma::{form_of, is_pair};
#[cfg(feature = "cuda")]
use crate::cache_rows::RowFormat;
use crate::common::launch::multiprocessors;
use crate::common::select::{Path, Table, Variant};
#[cfg(feature = "cuda")]
use crate::sparse_mla;
#[cfg(feature = "cuda")]
use crate::tiles::form::{Form as TmaForm, HALF_KEYS, ROWS};

/// The implementations, the fastest first.
pub(super) const TABLE: Table<DecodeSizes, Form> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm100,
        needs: "TMA and tcgen05 of a Blackwell of data centers; f16 or bf16, dense rows of 512 or 576 channels, values of 512, \
                pages of 16 tokens or more; bf16 for FP8 rows, of 512 + 64 channels, on any pages",
        form: |client, sizes| match sizes.rows {
            RowFormat::Dense => sm100_form(client, sizes).map(Form::Sm100),
            RowFormat::Fp8(_) => {
                fp8_form(client, sizes, "ptx_sm100").map(Form::Fp8).or_else(|| by_row(client, sizes, Path::Sm100))
            }
        },
        #[cfg(feature = "offline")]
        offline: super::sm100::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; f16 or bf16, rows of 512 or 576 channels, values of 512, pages of 16 tokens or more; bf16 for \
                FP8 rows, of 512 + 64 channels, on any pages",
        form: |client, sizes| match sizes.rows {
            RowFormat::Dense => sm90_form(client, sizes).map(Form::Sm90),
            RowFormat::Fp8(_) => {
                fp8_form(client, sizes, "ptx_sm90").map(Form::Fp8).or_else(|| by_row(client, sizes, Path::Sm90))
            }
        },
        #[cfg(feature = "offline")]
        offline: || super::sm90::offline().into_iter().chain(super::fp8::offline()).collect(),
    },
    Variant {
        path: Path::Mma,
        needs: "matrix instructions with ldmatrix and asynchronous copies; f16 or bf16, widths of a multiple of 16; of FP8 rows \
                parts of a multiple of 8",
        form: |client, sizes| mma_tile(client, sizes).map(Form::Mma),
        #[cfg(feature = "offline")]
        offline: mma::offline,
    },
    Variant {
        path: Path::Plain,
        needs: "shared memory for a query row and a key",
        form: |client, sizes| plain_tile(client, sizes).ok().map(Form::Plain),
        #[cfg(feature = "offline")]
        offline: plain::offline,
    },
]);

/// By the kernel of sparse attention, where that path has one.
#[cfg(feature = "cuda")]
fn by_row(client: &Client, sizes: &DecodeSizes, path: Path) -> Option<Form> {
    sparse_mla::available(client, &sizes.by_row()).iter().any(|kernel| kernel.path == path).then_some(Form::ByRow)
}

/// How a kernel divides the work.
pub(super) enum Form {
    Plain(Tile),
    Mma(MmaTile),
    #[cfg(feature = "cuda")]
    Sm90(TmaForm),
    #[cfg(feature = "cuda")]
    Sm100(TmaForm),
    /// FP8 rows, few heads.
    #[cfg(feature = "cuda")]
    Fp8(Fp8Form),
    /// By the kernel of sparse attention, whose tiles have heads of one query token.
    #[cfg(feature = "cuda")]
    ByRow,
}

/// What an implementation is launched with. Sizes have been checked.
pub(super) fn prepare(client: &Client, sizes: &DecodeSizes, path: Path) -> Result<(Form, Grid), DecodeError> {
    let form = match TABLE.form(path, client, sizes) {
        Some(form) => form,
        // The one that says why not.
        None if path == Path::Plain => Form::Plain(plain_tile(client, sizes)?),
        None => return Err(DecodeError::NoKernel(path)),
    };
    let cubes = match &form {
        Form::Plain(tile) => sizes.cube_count(client, tile.rows)?,
        Form::Mma(tile) => sizes.cube_count(client, tile.rows)?,
        #[cfg(feature = "cuda")]
        Form::Sm100(_) if is_pair(sizes) => match sizes.cube_count(client, 2 * ROWS)? {
            CubeCount::Static(tiles, cubes, z) => CubeCount::Static(2 * tiles, cubes, z),
            cubes => cubes,
        },
        #[cfg(feature = "cuda")]
        Form::Sm90(_) | Form::Sm100(_) => sizes.cube_count(client, ROWS)?,
        #[cfg(feature = "cuda")]
        Form::Fp8(form) => sizes.cube_count(client, form.rows())?,
        #[cfg(feature = "cuda")]
        Form::ByRow => sizes.grid(client, sizes.query_len * sizes.heads.div_ceil(ROWS))?,
    };
    Ok((form, Grid { cubes, address: sizes.address_type(client)? }))
}

/// Cubes in plain arithmetic that a multiprocessor runs at a time, about.
const PLAIN_CUBES: usize = 4;
/// Query rows of the largest tile for matrix instructions.
const MMA_ROWS: usize = 64;

/// Cubes of a plan that fill the device, beside the tiles of so many query rows.
pub fn parallel_cubes(client: &Client, query_rows: usize) -> usize {
    let multiprocessors = multiprocessors(client);
    let (rows, cubes) = match client.features().matmul.mma.is_empty() {
        true => (PLAIN_ROWS, multiprocessors * PLAIN_CUBES),
        false => (MMA_ROWS, multiprocessors),
    };
    (cubes / query_rows.div_ceil(rows).max(1)).max(1)
}

/// The best tile for matrix instructions; none where the device lacks what the kernel needs.
fn mma_tile(client: &Client, sizes: &DecodeSizes) -> Option<MmaTile> {
    let (features, elem) = (client.features(), sizes.elem);
    let float = ElemType::Float(FloatKind::F32);
    let [m, n, k] = [mma::M, mma::N, mma::K].map(|size| size as u32);
    let hardware = &client.properties().hardware;
    let supported = features.matmul.mma.contains(&MmaConfig { a_type: elem, b_type: elem, cd_type: float, m, n, k })
        && features.matmul.ldmatrix.contains(&elem)
        && features.copy_async
        && features.plane.contains(Plane::Ops)
        && (hardware.plane_size_min, hardware.plane_size_max) == (mma::LANES as u32, mma::LANES as u32);
    let widths = (sizes.key_width, sizes.value_width);
    let choose = || best_mma_tile(sizes.query_rows(), widths, sizes.causal, hardware.max_shared_memory_size);
    let whole = sizes.rows.parts(sizes.key_width).iter().all(|part| part.is_multiple_of(mma::VECTOR));
    (supported && whole).then(choose).flatten()
}

#[cfg(feature = "cuda")]
fn sm90_form(client: &Client, sizes: &DecodeSizes) -> Option<TmaForm> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    hopper.then(|| form_of(sizes, HALF_KEYS)).flatten()
}

/// What takes few heads over FP8 rows needs nothing of one generation alone.
#[cfg(feature = "cuda")]
fn fp8_form(client: &Client, sizes: &DecodeSizes, generation: &str) -> Option<Fp8Form> {
    (client.properties().identity.fingerprint == generation).then(|| Fp8Form::of(sizes)).flatten()
}

/// Later devices have other tensor cores.
#[cfg(feature = "cuda")]
fn sm100_form(client: &Client, sizes: &DecodeSizes) -> Option<TmaForm> {
    let blackwell = client.properties().identity.fingerprint == "ptx_sm100";
    blackwell.then(|| form_of(sizes, HALF_KEYS)).flatten()
}
