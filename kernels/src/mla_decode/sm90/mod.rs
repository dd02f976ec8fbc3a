//! MLA decode for Hopper (sm_90a): tile loads by TMA, products by wgmma. The README beside this file has the schedule.

mod cube;
mod output;
mod scores;

use cubecl::prelude::*;

use self::cube::{BARRIERS, Barriers, Cube};
use self::output::Output;
use self::scores::Scores;
use crate::common::launch::or_dummy;
use crate::common::select::Path;
use crate::mla_decode::problem::{DecodeArgs, DecodeError, Grid};
use crate::mla_decode::tma::tile_map;
use crate::ptx::wgmma::{Layout, Mma, Source};
use crate::ptx::{shared_address, tma, warp};
use crate::tiles::form::{Form, GROUP, KEYS, ROWS, STAGES, VALUE_WIDTH};
use crate::tiles::loader::{Loader, PagedKeys, Plan, Stages, Tile};
use crate::tiles::output::{COLUMNS, Results};

/// Units of the cube: a warpgroup each for scores, left half of the output, right half.
const UNITS: u32 = 3 * GROUP;

/// How queries and keys lie, seen as rows of terms.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
const VALUES: Layout = Layout::Across { terms: KEYS };
/// How weights lie.
const WEIGHTS: Layout = Layout::Cores { rows: ROWS };

impl Form {
    /// Scores of a block.
    fn scores(self) -> Mma {
        let (steps, elem, b) = (4 * self.tiles, self.elem(), ROWS_OF_TERMS);
        Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1, per_step: 1 }
    }

    /// Half of the output of a block: two groups, so that the first half of the keys is done with before the second.
    fn output(self) -> Mma {
        let (steps, elem, b) = (KEYS / 16, self.elem(), VALUES);
        Mma { n: VALUE_WIDTH / 2, steps, elem, a: Source::Shared(WEIGHTS), b, groups: 2, per_step: 1 }
    }
}

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, form: Form, grid: Grid) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let slots = sizes.pages * sizes.page_size;
    let kv_cache = or_dummy(client, args.kv_cache.into_dense(), slots);
    let (path, kv_tile, q_tile) = (Path::Sm90, [1, form.box_keys], [form.tiles, ROWS]);
    let kv_map = tile_map(kv_cache, [form.tiles, slots], args.kv_stride, kv_tile, sizes.elem, path)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], args.q_stride, q_tile, sizes.elem, path)?;
    // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items are taken
    // as the planner has made them.
    unsafe {
        decode_sm90_kernel::launch_unchecked(
            client,
            grid.cubes,
            CubeDim::new_1d(UNITS),
            grid.address,
            COLUMNS,
            kv_map,
            q_map,
            or_dummy(client, args.page_table, sizes.max_pages),
            args.seq_lens,
            args.items,
            args.cube_ptr,
            args.split_ptr,
            args.partial_out,
            args.partial_lse,
            args.out,
            args.lse,
            sizes.query_len as u32,
            sizes.heads as u32,
            sizes.max_pages as u32,
            sizes.page_size.ilog2(),
            args.softmax_scale * std::f32::consts::LOG2_E,
            f32::NEG_INFINITY.to_bits(),
            form,
            sizes.elem,
        );
    }
    Ok(())
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn decode_sm90_kernel<E: Float, P: Size>(
    kv_map: &TensorMap<E, Tiled>,
    q_map: &TensorMap<E, Tiled>,
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
    cube_ptr: &[i32],
    split_ptr: &[i32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    out: &mut [Vector<E, P>],
    lse: &mut [f32],
    query_len: u32,
    heads: u32,
    max_pages: u32,
    page_shift: u32,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut keys = Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * form.stage_bytes() / 4) as usize), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(form.stage_bytes() as usize / 4), 1024usize);
    // [keys / 8][rows][8], what wgmma takes without swizzle
    let mut weights = Shared::<[u32]>::new_aligned_slice(comptime!(ROWS * KEYS / 2), 1024usize);
    let mut factors = Shared::<[f32]>::new_aligned_slice(ROWS, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(BARRIERS, 128usize);
    let keys_at = shared_address(&keys);
    let query_at = shared_address(&query);
    let weights_at = shared_address(&weights);
    let barriers = Barriers::new(shared_address(&barriers));
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        barriers.init();
    }
    sync_cube();

    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS % GROUP / 32);
    let lane = UNIT_POS % 32;
    let rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(ROWS as u32);
    let own_row = warp * 16 + lane / 4;
    let last_row = min(tile_row + comptime!(ROWS as u32 - 1), rows - 1);
    let tile = Tile { query_len, heads, last_row, causal: form.causal };
    let first = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    let cube = Cube { keys_at, query_at, weights_at, barriers, warp, lane, rows, tile_row, own_row, tile, first, end };
    let plan = Plan::new(items, split_ptr, seq_lens, page_table);
    let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, rows);
    if group == 0 {
        let mut scores = Scores::new(scale, empty_lse, form);
        scores.run::<E, P>(&cube, &plan, q_map, &mut keys, &mut weights, &mut factors, &mut results);
    } else {
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        let stages = Stages { keys_at, full: barriers.full, empty: barriers.empty };
        let loader = Loader::new(paged, stages, first, end, false);
        let mut output = Output::new(&cube, group - 1, loader, form);
        output.run::<E, P>(&cube, &plan, &factors, &mut results);
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::{AddressType, FloatKind};

    use crate::offline::{Arch, Entry, buffer};
    let entry = |form: Form| {
        let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        let name = format!(
            "mla_decode.sm90.{}.{}.{}",
            form.elem().name(),
            form.tiles * crate::tiles::form::TILE_WIDTH,
            form.box_keys
        );
        Entry::new(name, move |device, target| {
            let path = Path::Sm90;
            let map = || tile_map(buffer(), [form.tiles, 64], 576, [1, 16], elem, path).expect("made of a handle");
            decode_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                COLUMNS,
                map(),
                map(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                1,
                1,
                1.0,
                1,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    vec![
        entry(Form { tiles: 9, box_keys: 32, bf16: true, causal: true }),
        entry(Form { tiles: 8, box_keys: 16, bf16: false, causal: false }),
    ]
}
