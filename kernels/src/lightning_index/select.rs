//! Which kernel scores the keys, and how many of them are cut into chunks, from which candidates are chosen.

#[cfg(feature = "cuda")]
use cubecl::features::{MmaConfig, Plane};
#[cfg(feature = "cuda")]
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::form::{LOAD, MAX_LOADS, MAX_UNITS};
#[cfg(feature = "cuda")]
use super::mma;
#[cfg(feature = "offline")]
use super::plain;
use super::problem::LightningIndexSizes;
#[cfg(feature = "cuda")]
use super::sm90;
use super::sums::BYTES_PER_UNIT;
#[cfg(feature = "cuda")]
use crate::cache_rows::RowFormat;
use crate::common::device::UNITS;
use crate::common::launch::multiprocessors;
use crate::common::select::{Path, Table, Variant};

/// The kernels that score, the fastest first.
pub(super) const TABLE: Table<LightningIndexSizes, Form> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; dense keys, f16 or bf16, 16, 32, 64 or 128 heads of 64 or 128 channels, pages of 8 tokens and \
                more, and of a sequence as many query tokens as have 512 heads together",
        form: |client, sizes| sm90::form(client, sizes).map(Form::Sm90),
        #[cfg(feature = "offline")]
        offline: sm90::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Mma,
        needs: "matrix instructions and asynchronous copies; f16 or bf16, a multiple of 8 heads and of 32 channels, up to 8192 in all; of \
                FP8 keys a multiple of 64 channels, in pages of 4 tokens and more",
        form: |client, sizes| mma_form(client, sizes).map(Form::Mma),
        #[cfg(feature = "offline")]
        offline: mma::offline,
    },
    Variant {
        path: Path::Plain,
        needs: "shared memory for a tile of keys",
        form: |_, _| Some(Form::Plain),
        #[cfg(feature = "offline")]
        offline: plain::offline,
    },
]);

/// How a kernel divides the work.
pub(super) enum Form {
    Plain,
    #[cfg(feature = "cuda")]
    Mma(mma::Form),
    #[cfg(feature = "cuda")]
    Sm90(sm90::Form),
}

/// Query tokens of a sequence, few and many: which kernel scores depends on no more of their number.
pub(super) const QUERY_LENS: [usize; 2] = [1, 512];

/// Vectors of queries that a unit may keep, each in four registers.
#[cfg(feature = "cuda")]
const MAX_VECTORS: usize = 32;
/// Cubes for each multiprocessor, to even out.
#[cfg(feature = "cuda")]
const WAVES: usize = 4;

/// None where the device lacks what the kernel needs, or the queries do not fit.
#[cfg(feature = "cuda")]
fn mma_form(client: &Client, sizes: &LightningIndexSizes) -> Option<mma::Form> {
    let (features, elem, float) = (client.features(), sizes.elem, ElemType::Float(FloatKind::F32));
    let [m, n, k] = [mma::M, mma::N, mma::K].map(|size| size as u32);
    let hardware = &client.properties().hardware;
    let supported = features.matmul.mma.contains(&MmaConfig { a_type: elem, b_type: elem, cd_type: float, m, n, k })
        && features.copy_async
        && features.plane.contains(Plane::Ops)
        && features.memory_reinterpret
        && (hardware.plane_size_min, hardware.plane_size_max) == (mma::LANES as u32, mma::LANES as u32);
    let (codes, chunk) = match sizes.rows {
        RowFormat::Dense => (None, mma::CHUNK),
        RowFormat::Fp8(layout) => (Some(layout), mma::CODE_CHUNK),
    };
    // The first codes of a page are where 16 bytes may be copied from.
    let copied = codes.is_none_or(|layout| layout.page_words().is_multiple_of(mma::PIECE));
    let whole = sizes.heads.is_multiple_of(mma::N) && sizes.width.is_multiple_of(chunk) && copied;
    let (head_steps, chunks) = (sizes.heads / mma::N, sizes.width / mma::CHUNK);
    if !(supported && whole && (1..=MAX_VECTORS).contains(&(head_steps * chunks))) {
        return None;
    }
    mma::Form { head_steps, chunks, stages: 2, codes, chooses: None }.with_stages(hardware.max_shared_memory_size)
}

/// Cubes that share the keys of a query token, of `rows` that are scored at a time.
#[cfg(feature = "cuda")]
pub(super) fn mma_shares(client: &Client, sizes: &LightningIndexSizes, rows: usize) -> usize {
    sizes.max_keys().div_ceil(mma::M * mma::PLANES).min((WAVES * multiprocessors(client) / rows).max(1))
}

/// How the keys are cut up on a device.
pub(super) fn plan(client: &Client, sizes: &LightningIndexSizes) -> Plan {
    let cubes = multiprocessors(client) / sizes.rows().max(1);
    Plan::of(sizes.max_keys(), sizes.k, max_units(client) * MAX_LOADS * LOAD, cubes)
}

/// Units of a cube that chooses, and the loads of each, for a chunk of keys. Few units with many keys each: they wait less for
/// one another.
pub(super) fn units_of(client: &Client, chunk: usize) -> (usize, usize) {
    let units = chunk.div_ceil(MAX_LOADS * LOAD).next_power_of_two().clamp(UNITS, max_units(client));
    (units, chunk.div_ceil(units * LOAD).next_power_of_two().min(MAX_LOADS))
}

/// Units of a cube at most on a device.
pub(super) fn max_units(client: &Client) -> usize {
    let hardware = &client.properties().hardware;
    let available = hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize;
    let available = available.min(hardware.max_shared_memory_size / BYTES_PER_UNIT);
    (1 << available.max(UNITS).ilog2()).min(MAX_UNITS)
}

/// Those of all chunks of `least` to `most` keys.
pub(super) fn units_of_fewer(client: &Client, least: usize, most: usize) -> Vec<(usize, usize)> {
    let ends = (0..usize::BITS).map(|power| 1 << power).take_while(|&keys| keys < most).chain([most]);
    let mut all: Vec<_> = ends.filter(|&keys| keys >= least).map(|keys| units_of(client, keys)).collect();
    all.dedup();
    all
}

/// Keys of a chunk at least: fewer make no cube faster.
pub(super) const MIN_CHUNK: usize = 4096;
/// A chunk has so many times `k` keys at least: fewer would leave too much for the next level, and candidates with their
/// positions have room where ranks were.
const REDUCTION: usize = 4;

/// How the keys of a query token are cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Keys of a chunk on all levels but the last, which has one chunk.
    pub chunk: usize,
    /// Keys of a query token at most, on each level: all; then the best `k` of each chunk of the level before.
    pub lens: Vec<usize>,
}

impl Plan {
    /// For at most `len` keys, of which a cube can hold `capacity`, where `cubes` cubes for a query token work at a time.
    ///
    /// What a cube can hold it takes: a second launch costs as much as it saves. More keys are cut up such that both levels
    /// have the same number of keys in a cube, as far as there are multiprocessors for the chunks.
    pub fn of(len: usize, k: usize, capacity: usize, cubes: usize) -> Self {
        let least = MIN_CHUNK.max(k.saturating_mul(REDUCTION));
        let mut lens = vec![len];
        if least > capacity {
            return Self { chunk: capacity, lens };
        }
        let even = len.saturating_mul(k).isqrt().max(len.div_ceil(cubes.max(1)));
        let chunk = even.clamp(least, capacity).next_multiple_of(LOAD);
        let mut left = len;
        while left > capacity {
            left = left / chunk * k + (left % chunk).min(k);
            lens.push(left);
        }
        Self { chunk, lens }
    }

    /// Numbers that the candidates of a query token take: ranks and positions.
    pub fn candidate_stride(&self) -> usize {
        self.lens.get(1).map_or(0, |len| 2 * len.next_multiple_of(LOAD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one cube holds is not cut up, nor what could not be made fewer.
    #[test]
    fn one_level() {
        for (len, k) in [(0, 1), (1, 1), (32768, 2048), (32769, 8193), (1 << 30, 1 << 20)] {
            assert_eq!(Plan::of(len, k, 32768, 132).lens, [len], "{k} of {len}");
        }
    }

    #[test]
    fn chunks_for_the_multiprocessors_that_are_free() {
        let plan = |cubes| Plan::of(131_072, 2048, 32768, cubes);
        assert_eq!(plan(132), Plan { chunk: 16384, lens: vec![131_072, 16384] });
        assert_eq!(plan(4), Plan { chunk: 32768, lens: vec![131_072, 8192] });
        assert_eq!(plan(0), Plan { chunk: 32768, lens: vec![131_072, 8192] });
    }

    /// Chunks are whole loads, every level leaves fewer, the last one fits into a cube, and candidates fit where ranks were.
    #[test]
    fn any_plan() {
        for len in (8193..3_000_000).step_by(77_777) {
            for k in [1, 2, 3, 40, 511, 2048] {
                for (capacity, cubes) in [(8192, 0), (8192, 16), (32768, 3), (32768, 132)] {
                    let plan = Plan::of(len, k, capacity, cubes);
                    assert!(plan.chunk <= capacity && plan.chunk.is_multiple_of(LOAD), "{plan:?}");
                    assert!(plan.lens.is_sorted_by(|before, after| before > after), "{plan:?}");
                    assert!(plan.lens.last().is_some_and(|&len| len <= capacity), "{plan:?}");
                    assert!(plan.candidate_stride() <= len, "{plan:?}");
                }
            }
        }
    }
}
