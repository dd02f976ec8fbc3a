//! Sparse attention for Hopper (sm_90a): rows by asynchronous copies, products by wgmma. The README beside this file has the
//! schedule.

mod cube;
mod form;
mod fp8;
mod gather;
#[cfg(feature = "offline")]
mod offline;
mod output;
mod scores;
mod work;

use cubecl::prelude::*;

use self::cube::{Barriers, Cube, barrier_count};
pub(in crate::sparse_mla) use self::form::Stored;
use self::form::{Causal, Form, RING, Writes};
use self::fp8::{List, RowPages, RowPagesLaunch, Rows};
use self::gather::{Gather, VECTOR};
#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use self::output::Output;
use self::scores::{Exchange, Scores};
use self::work::{Ahead, Lists, PagedKeys, PagedKeysLaunch};
use super::merge::{self, MergeArgs};
use super::select::{pairs_pay, splits};
use super::{Pages, Partials, ScopeArgs, SparseMlaArgs, SparseMlaError, SparseMlaResults, SparsePlan};
use crate::cache_rows::RowFormat;
use crate::common::launch::{address_type, dummy, multiprocessors, or_dummy, share};
use crate::compiler::names_all_sizes;
use crate::ptx::{registers, shared_address, tma, warp};
use crate::tiles::form::{Form as TileForm, GROUP, KEYS, ROWS, STAGES, TILE_WIDTH, VALUE_WIDTH};
use crate::tiles::output::{COLUMNS, Results};

/// Registers of a unit, where there are FP8 rows: of the warpgroup of the scores, of those of the output, of that of the rows. Four have
/// 512 in all.
const SCORE_REGISTERS: u32 = 80;
const OUTPUT_REGISTERS: u32 = 160;
const ROW_REGISTERS: u32 = 104;

/// Launches the kernel, and the merge of its splits if there are some.
pub(super) fn launch(client: &Client, args: SparseMlaArgs, tile: TileForm) -> Result<(), SparseMlaError> {
    let (tokens, heads) = (args.sizes.tokens, args.sizes.heads);
    let head_tiles = heads.div_ceil(ROWS);
    let most_blocks = [Some(&args.first), args.second.as_ref()]
        .into_iter()
        .flatten()
        .map(|scope| scope.most.div_ceil(KEYS))
        .sum::<usize>();
    let multiprocessors = multiprocessors(client);
    let (sink, splits_of_tiles) = match &args.results {
        SparseMlaResults::Output { sink, .. } => (sink.is_some(), !args.batch_invariant),
        SparseMlaResults::Parts { .. } => (false, false),
    };
    let splits = if splits_of_tiles { splits(tokens * head_tiles, most_blocks, multiprocessors) } else { 1 };
    let lengths = |scope: Option<&ScopeArgs>| scope.is_some_and(|scope| scope.lengths.is_some());
    let causal = args.pages.as_ref().map(|pages| Causal(pages.causal));
    let stored = |rows| Stored::of(rows, tile.bf16).ok_or(SparseMlaError::NoKernel);
    let rows = stored(args.sizes.rows)?;
    let rows = [rows, args.sizes.second_rows.map_or(Ok(rows), stored)?];
    let may_pair = rows != [Stored::Dense; 2] && head_tiles.is_multiple_of(2);
    let pairs = |splits: usize| may_pair && pairs_pay(most_blocks.div_ceil(splits));
    let form = |writes, pair| Form {
        tile,
        second: args.second.is_some(),
        lengths: [lengths(Some(&args.first)), lengths(args.second.as_ref())],
        sink,
        rows,
        pair,
        pages: causal,
        writes,
    };
    if let Some(plan) = &args.plan {
        let query_len = args.pages.as_ref().map_or(1, |pages| pages.query_len);
        let cubes = ((query_len * head_tiles) as u32, plan.cubes as u32);
        let call = Call { items: 0, head_tiles: head_tiles as u32, splits: 1, cubes };
        if names_all_sizes() && args.pages.is_none() {
            // Who makes plans for few tokens makes none for many, whose tiles are not split.
            call.launch(client, &args, form(Writes::Whole, pairs(1)))?;
        }
        // How a plan divides the blocks is not known here.
        return call.launch(client, &args, form(Writes::Planned, may_pair));
    }
    let pair = pairs(splits);
    let items = (tokens * head_tiles).checked_mul(splits).ok_or(SparseMlaError::NoKernel)?;
    let (items, splits) = (u32::try_from(items), splits as u32);
    let items = items.map_err(|_| SparseMlaError::NoKernel)?;
    let most_cubes = if pair { multiprocessors.next_multiple_of(2) } else { multiprocessors };
    let cubes = (items.min(most_cubes as u32), 1);
    let call = Call { items, head_tiles: head_tiles as u32, splits, cubes };
    if names_all_sizes() && splits_of_tiles {
        // Another number of tokens has splits of more or fewer blocks, or none.
        for (writes, pair) in [(Writes::Whole, pairs(1)), (Writes::Split, false), (Writes::Split, pairs(1))] {
            call.launch(client, &args, form(writes, pair))?;
        }
    }
    let writes = match args.results {
        SparseMlaResults::Output { .. } if splits > 1 => Writes::Split,
        SparseMlaResults::Output { .. } => Writes::Whole,
        SparseMlaResults::Parts { .. } => Writes::Parts,
    };
    call.launch(client, &args, form(writes, pair))
}

/// The grid of a launch.
struct Call {
    /// Splits of all tiles, where no plan has them.
    items: u32,
    head_tiles: u32,
    splits: u32,
    /// By a plan: tiles of a sequence or query token, and for each the cubes of the plan.
    cubes: (u32, u32),
}

impl Call {
    fn launch(&self, client: &Client, args: &SparseMlaArgs, form: Form) -> Result<(), SparseMlaError> {
        let sizes = &args.sizes;
        let result_rows = sizes.tokens * sizes.heads;
        let (partial_out, partial_lse, out, lse) = match &args.results {
            SparseMlaResults::Parts { acc, max, row_sum } => (share(acc), share(max), dummy(client), share(row_sum)),
            SparseMlaResults::Output { out, lse, .. } => {
                let (partial_out, partial_lse) = self.partials(client, args, form);
                (partial_out, partial_lse, share(out), share(lse))
            }
        };
        let second = args.second.as_ref().unwrap_or(&args.first);
        let buffer = |buffer: &BufferArg, len: usize| or_dummy(client, share(buffer), len);
        let lengths = |scope: &ScopeArgs| scope.lengths.as_ref().map_or_else(|| dummy(client), share);
        let sink = || match &args.results {
            SparseMlaResults::Output { sink: Some(sink), .. } => share(sink),
            _ => dummy(client),
        };
        let entries = |scope: &ScopeArgs| sizes.tokens * scope.most;
        let pages = match &args.pages {
            None => [1, 0, 0, 0],
            Some(Pages { query_len, page_size, .. }) => [
                *query_len as u32,
                (args.first.most / page_size) as u32,
                page_size.ilog2(),
                args.first.row_count as u32,
            ],
        };
        let of_plan = |buffer: fn(&SparsePlan) -> &BufferArg| {
            args.plan.as_ref().map_or_else(|| dummy(client), |it| share(buffer(it)))
        };
        // Rows are numbers or words.
        let rows = |scope: &ScopeArgs| if scope.rows.format() == RowFormat::Dense { scope.row_count } else { 0 };
        let words = |scope: &ScopeArgs| match (scope.rows.format(), scope.row_count) {
            (RowFormat::Dense, _) => dummy(client),
            // The first row is read where there is none.
            (RowFormat::Fp8(layout), 0) => scratch(client, layout.page_words()),
            (RowFormat::Fp8(_), _) => share(scope.rows.buffer()),
        };
        // SAFETY: the buffers have the sizes that the arguments state, and slots are those of rows.
        unsafe {
            sparse_sm90_kernel::launch_unchecked(
                client,
                CubeCount::Static(self.cubes.0, self.cubes.1, 1),
                CubeDim::new_1d(form.units()),
                address_type(client, &[args.first.rows.buffer(), second.rows.buffer(), &out, &partial_out]),
                COLUMNS,
                VECTOR,
                query_map(share(&args.q), form.tile, result_rows, sizes.elem)?,
                buffer(args.first.rows.buffer(), rows(&args.first)),
                words(&args.first),
                RowPagesLaunch::of(args.first.rows.format()),
                buffer(&args.first.slots, entries(&args.first)),
                lengths(&args.first),
                buffer(second.rows.buffer(), rows(second)),
                words(second),
                RowPagesLaunch::of(second.rows.format()),
                buffer(&second.slots, entries(second)),
                lengths(second),
                of_plan(|plan| &plan.items),
                of_plan(|plan| &plan.cube_ptr),
                of_plan(|plan| &plan.split_ptr),
                sink(),
                share(&partial_out),
                share(&partial_lse),
                share(&out),
                share(&lse),
                sizes.heads as u32,
                args.first.most as u32,
                second.most as u32,
                self.head_tiles,
                self.splits,
                self.items,
                PagedKeysLaunch::new(pages[0], pages[1], pages[2], pages[3]),
                args.softmax_scale * std::f32::consts::LOG2_E,
                f32::NEG_INFINITY.to_bits(),
                form,
                sizes.elem,
            );
        }
        let merged_here = args.plan.as_ref().is_none_or(|plan| plan.partials.is_none());
        if merged_here && matches!(form.writes, Writes::Split | Writes::Planned) {
            let split_ptr = args.plan.as_ref().map(|plan| share(&plan.split_ptr));
            let (outs, lses, has_sink) = (partial_out, partial_lse, form.sink);
            let (heads, splits, elem) = (sizes.heads, self.splits as usize, sizes.elem);
            let rows = result_rows;
            let args = MergeArgs { outs, lses, split_ptr, sink: sink(), has_sink, out, lse, rows, heads, splits, elem };
            merge::launch(client, args);
        }
        Ok(())
    }

    /// Where the results of splits go, and their lse. Without splits nobody looks at them.
    fn partials(&self, client: &Client, args: &SparseMlaArgs, form: Form) -> (BufferArg, BufferArg) {
        let splits = match (form.writes, &args.plan) {
            (Writes::Planned, Some(SparsePlan { partials: Some(Partials { out, lse }), .. })) => {
                return (share(out), share(lse));
            }
            (Writes::Planned, Some(plan)) => plan.capacity,
            (Writes::Split, _) => args.sizes.tokens * self.splits as usize,
            _ => return (dummy(client), dummy(client)),
        };
        let rows = splits * args.sizes.heads;
        (scratch(client, rows * VALUE_WIDTH), scratch(client, rows))
    }
}

/// A buffer for so many numbers.
fn scratch(client: &Client, len: usize) -> BufferArg {
    // SAFETY: it has room for them.
    unsafe { BufferArg::from_raw_parts(client.empty(len * size_of::<f32>()), len) }
}

/// Rows of queries as `[tiles of 64 channels, rows, 64]`: one load brings all tiles of 64 rows.
fn query_map(q: BufferArg, tile: TileForm, rows: usize, elem: ElemType) -> Result<TensorMapArg<Tiled>, SparseMlaError> {
    let BufferArg::Handle { handle } = q else { return Err(SparseMlaError::NoKernel) };
    let (shape, strides) = ([tile.tiles, rows, TILE_WIDTH], [TILE_WIDTH, tile.tiles * TILE_WIDTH, 1]);
    // SAFETY: the query has as many rows of as many channels.
    Ok(unsafe {
        tma::tiled_map(handle.handle, &shape, &strides, &[tile.tiles, ROWS, TILE_WIDTH], elem, TensorMapSwizzle::B128)
    })
}

/// A cube computes every so-many-th split of all tiles, or what the plan gives it of one of each sequence's or query token's tiles.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = CubeDim::new_3d(form.cubes(), 1, 1)
)]
fn sparse_sm90_kernel<E: Float, P: Size, V: Size>(
    q_map: &TensorMap<E, Tiled>,
    rows_a: &[Vector<E, V>],
    words_a: &[u32],
    pages_a: RowPages,
    slots_a: &[i32],
    lengths_a: &[i32],
    rows_b: &[Vector<E, V>],
    words_b: &[u32],
    pages_b: RowPages,
    slots_b: &[i32],
    lengths_b: &[i32],
    plan_items: &[i32],
    cube_ptr: &[i32],
    split_ptr: &[i32],
    sink: &[f32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    out: &mut [Vector<E, P>],
    lse: &mut [f32],
    heads: u32,
    most_a: u32,
    most_b: u32,
    head_tiles: u32,
    splits: u32,
    items: u32,
    pages: PagedKeys,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let tile_bytes = comptime!(form.tile.stage_bytes() as usize);
    let keys = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES as usize * tile_bytes / 4), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(tile_bytes / 4), 1024usize);
    // [keys / 8][rows][8], what wgmma takes without swizzle
    let weights = Shared::<[u32]>::new_aligned_slice(comptime!(ROWS * KEYS / 2), 1024usize);
    let factors = Shared::<[f32]>::new_aligned_slice(ROWS, 128usize);
    let slots = Shared::<[i32]>::new_aligned_slice(comptime!(RING as usize * KEYS), 128usize);
    let kinds = Shared::<[u32]>::new_aligned_slice(comptime!(RING as usize), 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(barrier_count(form)), 128usize);
    let (keys_at, query_at, weights_at) = (shared_address(&keys), shared_address(&query), shared_address(&weights));
    let barriers = Barriers::new(shared_address(&barriers), form);
    let mut exchange = Exchange { weights, factors, slots, kinds };
    let lists = Lists::new(
        slots_a, lengths_a, slots_b, lengths_b, most_a, most_b, head_tiles, splits, pages, plan_items, split_ptr, form,
    );
    let (mut first, mut end, mut step) = (CUBE_POS as u32, items, CUBE_COUNT as u32);
    if comptime!(form.planned()) {
        first = warp::uniform(cube_ptr[CUBE_POS_Y as usize] as u32);
        end = warp::uniform(cube_ptr[CUBE_POS_Y as usize + 1] as u32);
        step = 1u32;
    }
    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS % GROUP / 32);
    let lane = UNIT_POS % 32;
    let own_row = warp * 16 + lane / 4;
    let cube = Cube { keys_at, query_at, weights_at, barriers, warp, lane, heads, own_row, first, end, step, form };
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        barriers.init(form);
    }
    let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, heads);
    if group == 0 {
        let place = UNIT_POS % comptime!(KEYS as u32);
        let mut ahead = Ahead::new(&lists, first, end, step, place, UNIT_POS < comptime!(KEYS as u32));
        if comptime!(form.fp8()) {
            registers::fewer(SCORE_REGISTERS);
        } else {
            #[unroll]
            for _ in 0..STAGES {
                ahead.publish(&lists, &mut exchange.slots, &mut exchange.kinds);
                ahead.advance(&lists);
            }
        }
        cube::sync(form);
        let mut scores = Scores::new(scale, empty_lse);
        scores.run::<E, P>(&cube, &lists, q_map, sink, &mut ahead, &mut exchange, &mut results);
    } else if comptime!(form.fp8()) && group == 3 {
        registers::fewer(ROW_REGISTERS);
        let list_a = List::<E, V>::new(rows_a, words_a, pages_a);
        let list_b = List::<E, V>::new(rows_b, words_b, pages_b);
        let rows = Rows::<E, V>::new(list_a, list_b, warp, lane, form);
        let mut ahead = rows.ahead(&cube, &lists);
        cube::sync(form);
        rows.run(&cube, &lists, &mut ahead, &mut exchange);
    } else {
        if comptime!(form.fp8()) {
            registers::more(OUTPUT_REGISTERS);
        }
        cube::sync(form);
        let gather = Gather::<E, V>::new(rows_a, rows_b, group - 1, warp, lane);
        let mut output = Output::new(group - 1);
        output.run::<E, P, V>(&cube, &lists, &gather, &exchange, &mut results);
    }
    if comptime!(form.pair) {
        // The other cube has its last rows from this one's memory.
        cube::sync(form);
    }
}
