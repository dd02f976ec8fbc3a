//! MLA decode for Hopper (sm_90a): tile loads by TMA, products by wgmma. The README beside this file has the schedule.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use crate::portable::launch::or_dummy;
use crate::portable::mla_decode::{DecodeArgs, DecodeError, DecodeKernel, DecodeSizes, visible_end};
use crate::ptx::wgmma::{Elem, Layout, Mma, Source, descriptor};
use crate::ptx::{barrier, fence, math, mbarrier, shared_address, tma, warp, wgmma};

/// Query rows of a tile: what a warpgroup multiplies at a time.
const ROWS: usize = 64;
/// Keys of a block, which arrives in two halves.
const KEYS: usize = 64;
const HALF_KEYS: usize = KEYS / 2;
/// Blocks of keys in shared memory.
const STAGES: u32 = 2;
/// Units of a warpgroup, and of the cube: scores, left half of the output, right half.
const GROUP: u32 = 128;
const UNITS: u32 = 3 * GROUP;

/// Channels of a value.
const VALUE_WIDTH: usize = 512;
/// Channels of a tile: 128 bytes, the width of the swizzle.
const TILE_WIDTH: usize = 64;
/// Bytes of 64 rows in one tile, of keys or queries.
const TILE_BYTES: u32 = 8192;

/// How queries and keys lie, seen as rows of terms.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
const VALUES: Layout = Layout::Across { terms: KEYS };
/// How weights lie.
const WEIGHTS: Layout = Layout::Cores { rows: ROWS };

/// By how much scores (in powers of two) may exceed what the weights are relative to, before the output is scaled anew.
const SLACK: f32 = 8.0;
const LOWEST: f32 = -1e30;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Tiles of 64 channels in a key.
    tiles: usize,
    /// Keys that one tile load brings: half a block, or a page if that is shorter.
    box_keys: usize,
    /// bf16, otherwise f16.
    bf16: bool,
    /// Whether keys may be hidden.
    causal: bool,
    /// Whether two cubes, with neighbouring tiles of query rows, load keys for each other.
    pair: bool,
}

impl Form {
    fn stage_bytes(self) -> u32 {
        self.tiles as u32 * TILE_BYTES
    }

    /// Cubes of a cluster.
    fn cluster(self) -> CubeDim {
        CubeDim::new_1d(if self.pair { 2 } else { 1 })
    }

    /// Warps that use a block's keys as values.
    fn value_warps(self) -> u32 {
        if self.pair { 16 } else { 8 }
    }

    fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Scores of a block.
    fn scores(self) -> Mma {
        let (steps, elem, b) = (4 * self.tiles, self.elem(), ROWS_OF_TERMS);
        Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1 }
    }

    /// Half of the output of a block: two groups, so that the first half of the keys is done with before the second.
    fn output(self) -> Mma {
        let (steps, elem, b) = (KEYS / 16, self.elem(), VALUES);
        Mma { n: VALUE_WIDTH / 2, steps, elem, a: Source::Shared(WEIGHTS), b, groups: 2 }
    }
}

/// What a device needs for this kernel, and the problem for the kernel.
pub(crate) fn form(client: &Client, sizes: &DecodeSizes) -> Option<Form> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    let bf16 = match sizes.elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let widths = sizes.value_width == VALUE_WIDTH && matches!(sizes.key_width, 512 | 576);
    let paged = sizes.page_size >= 16;
    (hopper && widths && paged).then_some(Form {
        tiles: sizes.key_width / TILE_WIDTH,
        box_keys: sizes.page_size.min(HALF_KEYS),
        bf16,
        causal: sizes.causal,
        pair: (sizes.query_len * sizes.heads).div_ceil(ROWS).is_multiple_of(2),
    })
}

/// The form, the grid and the width of offsets.
pub(crate) fn prepare(client: &Client, sizes: &DecodeSizes) -> Result<(Form, CubeCount, AddressType), DecodeError> {
    let form = form(client, sizes).ok_or(DecodeError::NoKernel(DecodeKernel::Sm90))?;
    Ok((form, sizes.cube_count(client, ROWS)?, sizes.address_type(client)?))
}

/// Launches the kernel. Sizes have been checked.
pub(crate) fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let (form, cubes, address) = prepare(client, &sizes)?;
    let slots = sizes.pages * sizes.page_size;
    let kv_map = tile_map(args.kv_cache, [form.tiles, slots], [1, form.box_keys], sizes.elem)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], [form.tiles, ROWS], sizes.elem)?;
    // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items are taken
    // as the planner has made them.
    unsafe {
        decode_sm90_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            2,
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

/// Rows of a matrix as `[tiles of 64 channels, rows, 64]`, so that one load brings tiles of rows.
fn tile_map(
    matrix: BufferArg,
    [tiles, rows]: [usize; 2],
    [tile_count, tile_rows]: [usize; 2],
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, DecodeError> {
    let BufferArg::Handle { handle } = matrix else { return Err(DecodeError::NoKernel(DecodeKernel::Sm90)) };
    let (shape, strides) = ([tiles, rows, TILE_WIDTH], [TILE_WIDTH, tiles * TILE_WIDTH, 1]);
    let tile = [tile_count, tile_rows, TILE_WIDTH];
    // SAFETY: the matrix has as many rows of as many channels.
    Ok(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &tile, elem, TensorMapSwizzle::B128) })
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = form.cluster(), create_dummy_kernel)]
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
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(4 * STAGES as usize + 4), 128usize);
    let keys_at = shared_address(&keys);
    let query_at = shared_address(&query);
    let weights_at = shared_address(&weights);
    // Of each half of each stage: loaded, and no longer needed.
    let full = shared_address(&barriers);
    let empty = full + comptime!(16 * STAGES);
    // Weights and factors of a block: there, and no longer needed.
    let weighed = empty + comptime!(16 * STAGES);
    let used = weighed + 8;
    let query_full = used + 8;
    let query_empty = query_full + 8;
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            mbarrier::init(full + i * 8, 1u32);
            mbarrier::init(empty + i * 8, comptime!(form.value_warps()));
        }
        mbarrier::init(weighed, GROUP);
        mbarrier::init(used, 8u32);
        mbarrier::init(query_full, 1u32);
        mbarrier::init(query_empty, GROUP);
        mbarrier::fence_init();
    }
    if comptime!(form.pair) {
        barrier::sync_cluster();
    } else {
        sync_cube();
    }

    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS % GROUP / 32);
    let lane = UNIT_POS % 32;
    let rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(ROWS as u32);
    // The first of the two rows of the tile that this unit has a part of, in scores and output alike.
    let own_row = warp * 16 + lane / 4;
    // The last row of the tile, or of both of a pair, which work off the same blocks.
    let pair = comptime!(u32::from(form.pair)).runtime();
    let last_row = min((CUBE_POS_X | pair) * comptime!(ROWS as u32) + comptime!(ROWS as u32 - 1), rows - 1);

    let mut item = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end_item = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    // Blocks, weights and queries of all items so far.
    let mut turn = 0u32;
    let mut round = 0u32;
    let mut queries = 0u32;
    if group == 0 {
        while item < end_item {
            let sequence = items[item as usize * 4] as usize;
            let first_key = items[item as usize * 4 + 1] as u32;
            let end_key = items[item as usize * 4 + 2] as usize;
            let row_a = min(tile_row + own_row, rows - 1);
            let row_b = min(tile_row + own_row + 8, rows - 1);
            let end_a = visible_end(seq_lens, sequence, row_a as usize, end_key, query_len, heads, form.causal) as u32;
            let end_b = visible_end(seq_lens, sequence, row_b as usize, end_key, query_len, heads, form.causal) as u32;
            let tile_end =
                visible_end(seq_lens, sequence, last_row as usize, end_key, query_len, heads, form.causal) as u32;
            let blocks = block_count(first_key, tile_end);
            let mut state =
                SoftmaxState { highest_a: f32::new(LOWEST), highest_b: f32::new(LOWEST), sum_a: 0.0f32, sum_b: 0.0f32 };
            mbarrier::wait(query_full, queries % 2);
            let mut base = first_key;
            let mut block = 0u32;
            while block < blocks {
                let stage = turn % STAGES;
                let phase = turn / STAGES % 2;
                mbarrier::wait(full + stage * 16, phase);
                mbarrier::wait(full + stage * 16 + 8, phase);
                let keys_of_stage = descriptor(keys_at + stage * comptime!(form.stage_bytes()), ROWS_OF_TERMS);
                let issued = wgmma::mma_ss_zero::<Const<32>>(
                    descriptor(query_at, ROWS_OF_TERMS),
                    keys_of_stage,
                    comptime!(form.scores()),
                );
                let s = wgmma::wait::<Const<32>>(issued, 0u32);
                let weighted = softmax(s, &mut state, base, end_a, end_b, scale, lane, form);
                mbarrier::wait(used, (round % 2) ^ 1);
                store_weights(&weighted, own_row, lane, &mut weights, &mut factors);
                if base + comptime!(KEYS as u32) > tile_end {
                    clear_keys(&mut keys, stage, tile_end - base, form);
                }
                fence::async_shared();
                mbarrier::arrive(weighed);
                base += comptime!(KEYS as u32);
                turn += 1;
                round += 1;
                block = warp::next(block);
            }
            mbarrier::arrive(query_empty);
            queries += 1;

            // The last factors: what normalises the output.
            let sum_a = quad_sum(state.sum_a);
            let sum_b = quad_sum(state.sum_b);
            mbarrier::wait(used, (round % 2) ^ 1);
            let corner = lane % 4;
            if corner == 0 {
                factors[own_row as usize] = inverse(sum_a);
                factors[own_row as usize + 8] = inverse(sum_b);
                let lse_a = log_sum(sum_a, state.highest_a, empty_lse);
                let lse_b = log_sum(sum_b, state.highest_b, empty_lse);
                if is_whole(split_ptr, sequence) {
                    write_lses(lse, sequence as u32 * rows, tile_row + own_row, rows, lse_a, lse_b);
                } else {
                    write_lses(partial_lse, item * rows, tile_row + own_row, rows, lse_a, lse_b);
                }
            }
            mbarrier::arrive(weighed);
            round += 1;
            item = warp::next(item);
        }
    } else {
        let half = group - 1;
        let producer = half == 0 && warp == 0;
        while item < end_item {
            let sequence = items[item as usize * 4] as usize;
            let first_key = items[item as usize * 4 + 1] as u32;
            let end_key = items[item as usize * 4 + 2] as usize;
            let tile_end =
                visible_end(seq_lens, sequence, last_row as usize, end_key, query_len, heads, form.causal) as u32;
            let blocks = block_count(first_key, tile_end);
            let mut loader = Loader {
                map: tma::tensor_map_address::<E, Tiled>(kv_map),
                keys_at,
                full,
                empty,
                first_key,
                tile_end,
                table_row: sequence as u32 * max_pages,
                page_shift,
                page: 0u32,
            };
            if producer {
                mbarrier::wait(query_empty, (queries % 2) ^ 1);
                if lane == 0 {
                    mbarrier::arrive_expect(query_full, form.stage_bytes());
                    let first_row = sequence as u32 * rows + tile_row;
                    tma::load_3d(
                        query_at,
                        tma::tensor_map_address::<E, Tiled>(q_map),
                        query_full,
                        0i32,
                        first_row as i32,
                        0i32,
                    );
                }
                let mut ahead = 0u32;
                while ahead < min(blocks, STAGES) {
                    loader.load_half(page_table, ahead, turn + ahead, 0u32, lane, form);
                    loader.load_half(page_table, ahead, turn + ahead, 1u32, lane, form);
                    ahead = warp::next(ahead);
                }
            }
            queries += 1;
            let mut acc = Vector::<f32, Const<128>>::zeroed();
            let mut block = 0u32;
            while block < blocks {
                let loads = producer && block + STAGES < blocks;
                mbarrier::wait(weighed, round % 2);
                let factor_a = factors[own_row as usize];
                let factor_b = factors[own_row as usize + 8];
                if plane_any(factor_a != 1.0f32 || factor_b != 1.0f32) {
                    acc = scale_rows(acc, factor_a, factor_b);
                }
                let stage = turn % STAGES;
                let value = keys_at + stage * comptime!(form.stage_bytes()) + half * comptime!(4 * TILE_BYTES);
                let issued = wgmma::mma_ss::<Const<128>>(
                    acc,
                    descriptor(weights_at, WEIGHTS),
                    descriptor(value, VALUES),
                    comptime!(form.output()),
                );
                // The first half of the keys is done with while the second is still at work.
                wgmma::wait_for_reads(1u32);
                free_half(empty, stage, 0u32, lane, form);
                if loads {
                    loader.load_half(page_table, block + STAGES, turn + STAGES, 0u32, lane, form);
                }
                acc = wgmma::wait::<Const<128>>(issued, 0u32);
                free_half(empty, stage, 1u32, lane, form);
                mbarrier::arrive_if(used, lane == 0);
                if loads {
                    loader.load_half(page_table, block + STAGES, turn + STAGES, 1u32, lane, form);
                }
                turn += 1;
                round += 1;
                block = warp::next(block);
            }
            mbarrier::wait(weighed, round % 2);
            let factor_a = factors[own_row as usize];
            let factor_b = factors[own_row as usize + 8];
            acc = scale_rows(acc, factor_a, factor_b);
            sync_plane();
            mbarrier::arrive_if(used, lane == 0);
            round += 1;
            let column = half * 128 + lane % 4;
            if is_whole(split_ptr, sequence) {
                write_rows::<E, P>(acc, out, sequence as u32 * rows, tile_row + own_row, rows, column);
            } else {
                write_rows::<f32, P>(acc, partial_out, item * rows, tile_row + own_row, rows, column);
            }
            item = warp::next(item);
        }
    }
    if comptime!(form.pair) {
        // The other cube may still write here and arrive here.
        barrier::sync_cluster();
    }
}

/// A warp is done with half of a block: told to the cube that loads it anew.
#[cube]
fn free_half(empty: u32, stage: u32, #[comptime] half: u32, lane: u32, #[comptime] form: Form) {
    let bar = empty + stage * 16 + half * 8;
    if comptime!(form.pair) {
        mbarrier::arrive_at_if(bar, half, lane == 0);
    } else {
        mbarrier::arrive_if(bar, lane == 0);
    }
}

#[cube]
fn block_count(first_key: u32, tile_end: u32) -> u32 {
    let mut blocks = 0u32;
    if tile_end > first_key {
        blocks = (tile_end - first_key + comptime!(KEYS as u32 - 1)) / comptime!(KEYS as u32);
    }
    blocks
}

/// Who loads the blocks of an item, and where they are.
#[derive(CubeType, Clone, Copy)]
struct Loader {
    map: u64,
    keys_at: u32,
    full: u32,
    empty: u32,
    first_key: u32,
    tile_end: u32,
    /// Where the sequence's pages start in the table.
    table_row: u32,
    page_shift: u32,
    /// Of 32 boxes of keys, one in each lane: the page.
    page: u32,
}

#[cube]
impl Loader {
    /// Starts to load half of a block; called by a whole plane, first for the first half.
    fn load_half(
        &mut self,
        page_table: &[i32],
        block: u32,
        turn: u32,
        #[comptime] half: u32,
        lane: u32,
        #[comptime] form: Form,
    ) {
        let first_box = block * comptime!((KEYS / form.box_keys) as u32);
        let own_box = first_box % 32;
        if comptime!(half == 0) && own_box == 0 {
            let key = self.first_key + (first_box + lane) * comptime!(form.box_keys as u32);
            if key < self.tile_end {
                self.page = page_table[(self.table_row + (key >> self.page_shift)) as usize] as u32;
            }
        }
        let stage = turn % STAGES;
        let full = self.full + stage * 16 + half * 8;
        let empty = self.empty + stage * 16 + half * 8;
        let loads = if comptime!(form.pair) { CUBE_POS_X % 2 == half } else { true.runtime() };
        if loads {
            if comptime!(form.pair) {
                mbarrier::wait_cluster(empty, (turn / STAGES % 2) ^ 1);
            } else {
                mbarrier::wait(empty, (turn / STAGES % 2) ^ 1);
            }
        }
        #[unroll]
        for part in 0..comptime!(HALF_KEYS / form.box_keys) {
            let at = comptime!(half * (HALF_KEYS / form.box_keys) as u32 + part as u32);
            let key = self.first_key + block * comptime!(KEYS as u32) + comptime!(at * form.box_keys as u32);
            let page = plane_shuffle(self.page, (first_box + at) % 32);
            let row = (page << self.page_shift) + (key & ((1u32 << self.page_shift) - 1));
            let to = self.keys_at + stage * comptime!(form.stage_bytes()) + comptime!(at * form.box_keys as u32 * 128);
            if lane == 0 && key < self.tile_end {
                // Each cube announces what comes to itself.
                mbarrier::expect(full, comptime!((form.tiles * form.box_keys * 128) as u32));
                if loads {
                    #[unroll]
                    for tile in 0..form.tiles {
                        let tile_to = to + comptime!(tile as u32 * TILE_BYTES);
                        if comptime!(form.pair) {
                            tma::load_3d_multicast(
                                tile_to,
                                self.map,
                                full,
                                0i32,
                                row as i32,
                                comptime!(tile as i32),
                                3u16,
                            );
                        } else {
                            tma::load_3d(tile_to, self.map, full, 0i32, row as i32, comptime!(tile as i32));
                        }
                    }
                }
            }
        }
        mbarrier::arrive_if(full, lane == 0);
        sync_plane();
    }
}

/// Maxima and sums of the two rows of a unit; the sums are of its own weights.
#[derive(CubeType, Clone, Copy)]
struct SoftmaxState {
    highest_a: f32,
    highest_b: f32,
    sum_a: f32,
    sum_b: f32,
}

/// Weights of a block, packed in pairs, and the factors that the output so far is to be multiplied with.
#[derive(CubeType, Clone, Copy)]
struct Weighted {
    weights: Vector<u32, Const<16>>,
    factor_a: f32,
    factor_b: f32,
}

#[cube]
fn softmax(
    s: Vector<f32, Const<32>>,
    state: &mut SoftmaxState,
    base: u32,
    end_a: u32,
    end_b: u32,
    scale: f32,
    lane: u32,
    #[comptime] form: Form,
) -> Weighted {
    let column = base + lane % 4 * 2;
    let mut masked = Sequence::<f32>::new();
    let mut top_a = f32::new(LOWEST);
    let mut top_b = f32::new(LOWEST);
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        #[unroll]
        for j in 0..2usize {
            let key = column + comptime!((8 * i + j) as u32);
            let a = select(key < end_a, s.extract(comptime!(4 * i + j)) * scale, f32::new(2.0 * LOWEST));
            masked.push(a);
            top_a = max(top_a, a);
        }
        #[unroll]
        for j in 0..2usize {
            let key = column + comptime!((8 * i + j) as u32);
            let b = select(key < end_b, s.extract(comptime!(4 * i + 2 + j)) * scale, f32::new(2.0 * LOWEST));
            masked.push(b);
            top_b = max(top_b, b);
        }
    }
    top_a = quad_max(top_a);
    top_b = quad_max(top_b);
    if top_a < state.highest_a + SLACK {
        top_a = state.highest_a;
    }
    if top_b < state.highest_b + SLACK {
        top_b = state.highest_b;
    }
    let factor_a = math::exp2(state.highest_a - top_a);
    let factor_b = math::exp2(state.highest_b - top_b);
    let mut sum_a = state.sum_a * factor_a;
    let mut sum_b = state.sum_b * factor_b;
    let mut packed = Sequence::<u32>::new();
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        let a0 = math::exp2(masked[comptime!(4 * i)] - top_a);
        let a1 = math::exp2(masked[comptime!(4 * i + 1)] - top_a);
        let b0 = math::exp2(masked[comptime!(4 * i + 2)] - top_b);
        let b1 = math::exp2(masked[comptime!(4 * i + 3)] - top_b);
        sum_a += a0 + a1;
        sum_b += b0 + b1;
        packed.push(math::pack(a0, a1, comptime!(form.elem())));
        packed.push(math::pack(b0, b1, comptime!(form.elem())));
    }
    state.highest_a = top_a;
    state.highest_b = top_b;
    state.sum_a = sum_a;
    state.sum_b = sum_b;
    Weighted { weights: math::vector::<u32, Const<16>>(&packed), factor_a, factor_b }
}

#[cube]
fn store_weights(
    weighted: &Weighted,
    own_row: u32,
    lane: u32,
    weights: &mut Shared<[u32]>,
    factors: &mut Shared<[f32]>,
) {
    #[unroll]
    for i in 0..comptime!(KEYS / 8) {
        // [keys / 8][rows][8 keys], four words each
        let at = (own_row * 4 + lane % 4) as usize + comptime!(i * ROWS * 4);
        weights[at] = weighted.weights.extract(comptime!(2 * i));
        weights[at + 32] = weighted.weights.extract(comptime!(2 * i + 1));
    }
    let corner = lane % 4;
    if corner == 0 {
        factors[own_row as usize] = weighted.factor_a;
        factors[own_row as usize + 8] = weighted.factor_b;
    }
}

/// Zeros for the keys of a block from `count` on: their weights are zero, but what is there may be NaN.
#[cube]
fn clear_keys(keys: &mut Shared<[u32]>, stage: u32, count: u32, #[comptime] form: Form) {
    let mut key = count;
    let at =
        stage * comptime!(form.stage_bytes() / 4) + UNIT_POS % GROUP / 32 * comptime!(TILE_BYTES / 4) + UNIT_POS % 32;
    while key < comptime!(KEYS as u32) {
        keys[(at + key * 32) as usize] = 0u32;
        keys[(at + key * 32 + comptime!(TILE_BYTES)) as usize] = 0u32;
        key += 1;
    }
}

#[cube]
fn quad_max(value: f32) -> f32 {
    let pair = max(value, plane_shuffle_xor(value, 1u32));
    max(pair, plane_shuffle_xor(pair, 2u32))
}

#[cube]
fn quad_sum(value: f32) -> f32 {
    let pair = value + plane_shuffle_xor(value, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

#[cube]
fn inverse(sum: f32) -> f32 {
    let mut inverse = 0.0f32;
    if sum > 0.0f32 {
        inverse = 1.0f32 / sum;
    }
    inverse
}

#[cube]
fn log_sum(sum: f32, highest: f32, empty_lse: u32) -> f32 {
    let mut lse = f32::from_bits(empty_lse);
    if sum > 0.0f32 {
        lse = highest * f32::new(std::f32::consts::LN_2) + sum.ln();
    }
    lse
}

/// Multiplies both rows of a unit's part of the output.
#[cube]
fn scale_rows(acc: Vector<f32, Const<128>>, factor_a: f32, factor_b: f32) -> Vector<f32, Const<128>> {
    let mut scaled = Sequence::<f32>::new();
    #[unroll]
    for i in 0..32usize {
        scaled.push(acc.extract(comptime!(4 * i)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 1)) * factor_a);
        scaled.push(acc.extract(comptime!(4 * i + 2)) * factor_b);
        scaled.push(acc.extract(comptime!(4 * i + 3)) * factor_b);
    }
    math::vector::<f32, Const<128>>(&scaled)
}

/// Whether a sequence is a single item, whose result needs no merge.
#[cube]
fn is_whole(split_ptr: &[i32], sequence: usize) -> bool {
    split_ptr[sequence + 1] - split_ptr[sequence] == 1
}

/// Writes the lse of both rows of a unit; `row` is the first of them, and the sequence's or item's rows start at `start`.
#[cube]
fn write_lses(lse: &mut [f32], start: u32, row: u32, rows: u32, lse_a: f32, lse_b: f32) {
    if row < rows {
        lse[(start + row) as usize] = lse_a;
    }
    if row + 8 < rows {
        lse[(start + row + 8) as usize] = lse_b;
    }
}

/// Writes both rows of a unit's part of the output, from a column on. Columns are counted in pairs.
#[cube]
fn write_rows<T: Float, P: Size>(
    acc: Vector<f32, Const<128>>,
    out: &mut [Vector<T, P>],
    start: u32,
    row: u32,
    rows: u32,
    column: u32,
) {
    let at = (start + row) as usize * comptime!(VALUE_WIDTH / 2) + column as usize;
    if row < rows {
        write_row::<T, P>(acc, out, at, 0usize);
    }
    if row + 8 < rows {
        write_row::<T, P>(acc, out, at + comptime!(8 * VALUE_WIDTH / 2), 2usize);
    }
}

/// Writes one of the two rows.
#[cube]
fn write_row<T: Float, P: Size>(
    acc: Vector<f32, Const<128>>,
    out: &mut [Vector<T, P>],
    at: usize,
    #[comptime] first: usize,
) {
    #[unroll]
    for i in 0..32usize {
        let mut pair = Vector::<f32, P>::empty();
        pair.insert(0usize, acc.extract(comptime!(4 * i + first)));
        pair.insert(1usize, acc.extract(comptime!(4 * i + first + 1)));
        out[at + 4 * i] = Vector::cast_from(pair);
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, buffer};
    let entry = |form: Form| {
        let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        let cubes = if form.pair { "pair" } else { "one" };
        let name =
            format!("mla_decode.sm90.{}.{}.{}.{cubes}", form.elem().name(), form.tiles * TILE_WIDTH, form.box_keys);
        Entry::new(name, move |device, target| {
            let map = || tile_map(buffer(), [form.tiles, 64], [1, 16], elem).expect("made of a handle");
            decode_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                2,
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
        entry(Form { tiles: 9, box_keys: 32, bf16: true, causal: true, pair: true }),
        entry(Form { tiles: 9, box_keys: 32, bf16: true, causal: true, pair: false }),
        entry(Form { tiles: 8, box_keys: 16, bf16: false, causal: false, pair: true }),
        entry(Form { tiles: 8, box_keys: 16, bf16: false, causal: false, pair: false }),
    ]
}
