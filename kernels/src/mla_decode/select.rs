//! Which kernel computes a decode step, and how it divides the work. Constants here were measured; the README says where.

use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::mma::{self, MmaTile};
use super::plain::{self, Tile};
use super::{DecodeError, DecodeSizes};
use crate::common::launch::multiprocessors;
use crate::common::select::{Path, Table, Variant};
#[cfg(feature = "cuda")]
use crate::tiles::form::{self as tma, HALF_KEYS, ROWS};

/// The implementations, the fastest first.
pub(super) const TABLE: Table<DecodeSizes, Form> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm100,
        needs: "TMA and tcgen05 of a Blackwell of data centers; f16 or bf16, keys of 512 or 576 channels, values of 512, pages of \
                16 tokens or more",
        form: |client, sizes| sm100_form(client, sizes).map(Form::Sm100),
        #[cfg(feature = "offline")]
        offline: super::sm100::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; f16 or bf16, keys of 512 or 576 channels, values of 512, pages of 16 tokens or more",
        form: |client, sizes| sm90_form(client, sizes).map(Form::Sm90),
        #[cfg(feature = "offline")]
        offline: super::sm90::offline,
    },
    Variant {
        path: Path::Mma,
        needs: "matrix instructions with ldmatrix and asynchronous copies; f16 or bf16, widths of a multiple of 16",
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

/// How a kernel divides the work.
pub(super) enum Form {
    Plain(Tile),
    Mma(MmaTile),
    #[cfg(feature = "cuda")]
    Sm90(tma::Form),
    #[cfg(feature = "cuda")]
    Sm100(tma::Form),
}

/// The grid of a launch, and the width of its offsets.
pub(super) struct Grid {
    pub cubes: CubeCount,
    pub address: AddressType,
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
    };
    Ok((form, Grid { cubes, address: sizes.address_type(client)? }))
}

impl Path {
    /// Whether rows of `mla_decode`'s queries and keys may lie apart from each other.
    pub fn takes_strides(self) -> bool {
        self.is_specialised()
    }

    /// Made for one generation of GPUs: loads tiles by TMA, and writes sequences that are a single item to the result itself.
    pub(super) fn is_specialised(self) -> bool {
        matches!(self, Path::Sm90 | Path::Sm100)
    }
}

/// Cubes of a plan that fill the device, beside the tiles of so many query rows.
pub fn parallel_cubes(client: &Client, query_rows: usize) -> usize {
    let multiprocessors = multiprocessors(client);
    let (rows, cubes) = match client.features().matmul.mma.is_empty() {
        true => (PLAIN_ROWS, multiprocessors * PLAIN_CUBES),
        false => (MMA_ROWS, multiprocessors),
    };
    (cubes / query_rows.div_ceil(rows).max(1)).max(1)
}

/// Query rows and keys of a tile in plain arithmetic, at most. The product must not exceed the number of units.
const PLAIN_ROWS: usize = 8;
const PLAIN_KEYS: usize = 16;
/// Cubes in plain arithmetic that a multiprocessor runs at a time, about.
const PLAIN_CUBES: usize = 4;
/// Shared memory that such a cube takes at most. What WebGPU drivers offer; on larger devices it lets several cubes run at a
/// time.
const PLAIN_SHARED_BYTES: usize = 32 * 1024;
/// Bytes of one load.
const LOAD_BYTES: usize = 16;

const _: () = assert!(PLAIN_ROWS * PLAIN_KEYS <= plain::UNITS, "a unit for each weight");

/// The largest tile of the device that fits.
fn plain_tile(client: &Client, sizes: &DecodeSizes) -> Result<Tile, DecodeError> {
    let hardware = &client.properties().hardware;
    let available = hardware.max_shared_memory_size.min(PLAIN_SHARED_BYTES);
    plain_tile_within(available, sizes, hardware.max_vector_size)
}

/// The same on a device with enough shared memory.
#[cfg(any(test, feature = "offline"))]
pub(super) fn largest_plain_tile(sizes: &DecodeSizes, max_vector: usize) -> Result<Tile, DecodeError> {
    plain_tile_within(PLAIN_SHARED_BYTES, sizes, max_vector)
}

/// The largest tile that fits into `available` bytes.
fn plain_tile_within(available: usize, sizes: &DecodeSizes, max_vector: usize) -> Result<Tile, DecodeError> {
    let size = sizes.elem.size();
    let mut vector = (LOAD_BYTES / size).min(1 << max_vector.max(1).ilog2());
    while !sizes.key_width.is_multiple_of(vector) || !sizes.value_width.is_multiple_of(vector) {
        vector /= 2;
    }
    let mut rows = (sizes.query_len * sizes.heads).next_power_of_two().min(PLAIN_ROWS);
    let mut keys = PLAIN_KEYS;
    loop {
        let tile = Tile::new(sizes, vector, rows, keys);
        let needed = tile.shared_bytes(size);
        if needed <= available {
            return Ok(tile);
        }
        // Rows are worth more than keys: they say how often a loaded key is used.
        match (rows, keys) {
            (1, 1) => return Err(DecodeError::SharedMemory { key_width: sizes.key_width, needed, available }),
            _ if keys >= 2 * rows || rows == 1 => keys /= 2,
            _ => rows /= 2,
        }
    }
}

/// Rows, keys, stages, row groups and key groups of a tile for matrix instructions.
pub(super) type MmaChoice = (usize, usize, usize, usize, usize);

/// Such tiles in the order of preference. With more rows a loaded key is used more often; the number of keys and stages is what
/// fits beside them. The order was measured on an H200.
pub(super) const MMA_TILES: [MmaChoice; 9] = [
    (64, 48, 2, 2, 2),
    (64, 32, 2, 2, 2),
    (64, 16, 2, 4, 2),
    (32, 64, 2, 2, 2),
    (32, 32, 2, 2, 2),
    (32, 32, 2, 2, 4),
    (16, 64, 2, 1, 4),
    (16, 32, 2, 1, 4),
    (16, 64, 2, 1, 8),
];
/// Query rows of the largest of them.
const MMA_ROWS: usize = 64;
/// Numbers of a unit that the accumulators of the output may take.
const ACCUMULATORS: usize = 128;

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
    supported.then(choose).flatten()
}

/// The best tile for these sizes that fits into `available` bytes of shared memory.
pub(super) fn best_mma_tile(
    query_rows: usize,
    widths: (usize, usize),
    causal: bool,
    available: usize,
) -> Option<MmaTile> {
    let (key_width, value_width) = widths;
    if !key_width.is_multiple_of(mma::K) || !value_width.is_multiple_of(mma::K) {
        return None;
    }
    MMA_TILES
        .iter()
        .map(|&choice| MmaTile::new(choice, widths, causal))
        // More rows than there are would only be padding.
        .filter(|tile| tile.rows < 2 * query_rows.max(mma::M / 2 + 1))
        .filter(|tile| (tile.key_vectors / 2).is_multiple_of(tile.slices))
        .find(|tile| tile.shared_bytes() <= available && tile.accumulators() <= ACCUMULATORS)
}

#[cfg(feature = "cuda")]
fn sm90_form(client: &Client, sizes: &DecodeSizes) -> Option<tma::Form> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    hopper.then(|| tma::form_of(sizes, HALF_KEYS)).flatten()
}

/// Later devices have other tensor cores.
#[cfg(feature = "cuda")]
fn sm100_form(client: &Client, sizes: &DecodeSizes) -> Option<tma::Form> {
    let blackwell = client.properties().identity.fingerprint == "ptx_sm100";
    let most_keys = if is_pair(sizes) { ROWS } else { HALF_KEYS };
    blackwell.then(|| tma::form_of(sizes, most_keys)).flatten()
}

/// Whether a pair of Blackwell's cubes shares the keys, where one cube has not all query rows.
#[cfg(feature = "cuda")]
pub(super) fn is_pair(sizes: &DecodeSizes) -> bool {
    sizes.query_rows() > ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(elem: FloatKind, widths: (usize, usize), rows: usize) -> Result<Tile, DecodeError> {
        let sizes = DecodeSizes::one_sequence(ElemType::Float(elem), rows, widths);
        largest_plain_tile(&sizes, usize::MAX)
    }

    #[test]
    fn tiles_fill_the_shared_memory() {
        let half = tile(FloatKind::F16, (576, 512), 128).expect("fits");
        assert_eq!((half.rows, half.keys, half.vector), (8, 16, 8));
        let float = tile(FloatKind::F32, (576, 512), 128).expect("fits");
        assert_eq!((float.rows, float.keys, float.vector), (4, 8, 4));
        let odd = tile(FloatKind::F16, (7, 5), 3).expect("fits");
        assert_eq!((odd.rows, odd.keys, odd.vector), (4, 16, 1));
    }

    /// Whatever the sizes, all scores have a unit, and all rows of all value channels.
    #[test]
    fn the_units_cover_the_tile() {
        for elem in [FloatKind::F32, FloatKind::F16] {
            for widths in [(576, 512), (80, 64), (7, 5), (1, 1), (2048, 1023), (3000, 3000)] {
                for rows in [1, 2, 3, 8, 200] {
                    let tile = tile(elem, widths, rows).expect("fits");
                    assert!(tile.rows * tile.keys <= plain::UNITS);
                    assert_eq!(tile.rows / tile.score_rows * tile.keys * tile.slices, plain::UNITS);
                    assert_eq!(tile.row_groups * tile.group_rows(), tile.rows);
                    assert!(tile.row_groups * tile.value_units <= plain::UNITS);
                    assert!(tile.unit_vectors() * tile.value_units >= tile.value_vectors);
                }
            }
        }
    }

    #[test]
    fn a_key_that_does_not_fit_is_refused() {
        let error = tile(FloatKind::F32, (4096, 512), 16).expect_err("too wide");
        assert!(matches!(error, DecodeError::SharedMemory { available: PLAIN_SHARED_BYTES, .. }), "{error}");
    }

    /// All scores have a plane, all channels of all rows, and all weights a unit.
    #[test]
    fn the_planes_cover_the_tile() {
        for (rows, keys, stages, row_groups, key_groups) in MMA_TILES {
            assert_eq!(mma::PLANES % (row_groups * key_groups), 0);
            assert_eq!(rows % (row_groups * mma::M), 0, "{rows} rows");
            assert_eq!(keys % (key_groups * mma::N), 0, "{keys} keys");
            assert_eq!(keys % mma::K, 0);
            assert_eq!(keys / 2 % (mma::UNITS / rows), 0, "{keys} keys of {rows} rows");
            assert!(stages >= 2);
        }
    }
}
