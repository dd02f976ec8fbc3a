//! Decode with matrix instructions, for devices that have them with `ldmatrix` and asynchronous copies (NVIDIA from sm_80 on).
//!
//! The same items, tiles and outputs as the [plain](super::plain) kernel; both products of a tile go to the matrix units.
//! A cube has eight planes. They divide the scores of a tile among them by rows, keys and channels (sums over channels are
//! completed through shared memory), then the softmax by rows, then the output by channels: every plane accumulates all
//! rows of the tile for its channels of the value, in registers.
//!
//! Keys arrive in a ring of stages, copied asynchronously: while a tile is computed, the next ones are on their way. Weights
//! are rounded to the element type before they meet the values, as the matrix units ask for.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
#[cfg(feature = "offline")]
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::barrier::{Barrier, copy_async};
use cubecl::prelude::*;

use super::select::{Grid, MmaChoice};
use super::{DecodeArgs, LOWEST, key_slot, visible_end};
use crate::common::launch::or_dummy;
use crate::common::plane;

/// Planes of a cube.
pub(super) const PLANES: usize = 8;
/// Units of a plane. The matrix instructions are defined for this number.
pub(super) const LANES: usize = 32;
pub(super) const UNITS: usize = PLANES * LANES;

/// Units that copy a key together: they read 128 bytes at a time.
const KEY_UNITS: usize = 8;

/// Elements of a vector: a row of what `ldmatrix` loads.
const VECTOR: usize = 8;

/// The matrix instruction: 16 rows, 8 columns, 16 terms.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
pub(super) const K: usize = 16;

/// By how much scores may exceed what the weights are relative to, before the accumulators are scaled anew. Weights of up to
/// exp(8) = 2981 and their sums are well within the range of f16 and f32, and no less exact.
const SLACK: f32 = 8.0;

/// How a tile is divided among the planes of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MmaTile {
    /// Query rows.
    pub(super) rows: usize,
    /// Keys.
    keys: usize,
    /// Tiles of keys in shared memory.
    stages: usize,
    /// Planes that share the rows, the keys and the channels of the scores; the product is [`PLANES`].
    row_groups: usize,
    key_groups: usize,
    pub(super) slices: usize,
    /// Vectors of a key.
    pub(super) key_vectors: usize,
    /// Channels of a value, in steps of 16.
    value_steps: usize,
    /// Whether keys may be hidden.
    causal: bool,
}

impl MmaTile {
    pub(super) fn new(
        (rows, keys, stages, row_groups, key_groups): MmaChoice,
        widths: (usize, usize),
        causal: bool,
    ) -> Self {
        Self {
            rows,
            keys,
            stages,
            row_groups,
            key_groups,
            slices: PLANES / (row_groups * key_groups),
            key_vectors: widths.0 / VECTOR,
            value_steps: widths.1 / K,
            causal,
        }
    }

    /// Vectors from one query or key to the next in shared memory: one more than there are, so that the eight rows that
    /// `ldmatrix` loads at a time lie in different banks.
    fn stride(&self) -> usize {
        // An odd number of 16-byte rows.
        self.key_vectors | 1
    }

    /// Pairs of scores from one row to the next.
    fn score_stride(&self) -> usize {
        self.keys / 2 + 2
    }

    /// Pairs of weights from one row to the next.
    fn weight_stride(&self) -> usize {
        self.keys / 2 + 4
    }

    /// Steps of 16 value channels that a plane accumulates, at most.
    fn plane_steps(&self) -> usize {
        self.value_steps.div_ceil(PLANES)
    }

    pub(super) fn accumulators(&self) -> usize {
        self.rows / M * self.plane_steps() * 8
    }

    /// Units that share a row in the softmax.
    fn row_units(&self) -> usize {
        UNITS / self.rows
    }

    pub(super) fn shared_bytes(&self) -> usize {
        let elems =
            (self.rows + self.stages * self.keys) * self.stride() * VECTOR + 2 * self.rows * self.weight_stride();
        let numbers = self.slices * self.rows * self.score_stride() * 2 + self.rows;
        // Some more for the barriers and for alignment.
        2 * elems + 4 * numbers + 256
    }
}

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, tile: MmaTile, grid: Grid) {
    let sizes = args.sizes;
    let slots = sizes.pages * sizes.page_size;
    // SAFETY: the buffers have the sizes that the arguments state, and slots are clamped to the cache. Items are taken as the
    // planner has made them.
    unsafe {
        decode_mma_kernel::launch_unchecked(
            client,
            grid.cubes,
            CubeDim::new_2d(LANES as u32, PLANES as u32),
            grid.address,
            VECTOR,
            2,
            args.q,
            or_dummy(client, args.kv_cache, slots),
            or_dummy(client, args.page_table, sizes.max_pages),
            args.seq_lens,
            args.items,
            args.cube_ptr,
            args.partial_out,
            args.partial_lse,
            sizes.query_len as u32,
            sizes.heads as u32,
            sizes.max_pages as u32,
            slots as u32,
            sizes.page_size.ilog2(),
            args.softmax_scale,
            f32::NEG_INFINITY.to_bits(),
            tile,
            sizes.elem,
        );
    }
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn decode_mma_kernel<E: Float, V: Size, P: Size>(
    q: &[Vector<E, V>],
    kv_cache: &[Vector<E, V>],
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
    cube_ptr: &[i32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    query_len: u32,
    heads: u32,
    max_pages: u32,
    slot_count: u32,
    page_shift: u32,
    softmax_scale: f32,
    // Of -inf, which not every compiler can write as a constant.
    empty_lse: u32,
    #[comptime] tile: MmaTile,
    #[define(E)] _elem: ElemType,
) {
    let unit = (UNIT_POS_Y * LANES as u32 + UNIT_POS_X) as usize;
    let rows = (query_len * heads) as usize;
    let first_row = CUBE_POS_X as usize * tile.rows;
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);

    let mut queries = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(tile.rows * tile.stride()), 128usize);
    let mut keys =
        Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(tile.stages * tile.keys * tile.stride()), 128usize);
    // [slices, rows, keys], in pairs of keys
    let mut scores = Shared::<[Vector<f32, P>]>::new_aligned_slice(
        comptime!(tile.slices * tile.rows * tile.score_stride()),
        16usize,
    );
    // [rows, keys], in pairs of keys
    let mut weights = Shared::<[Vector<E, P>]>::new_aligned_slice(comptime!(tile.rows * tile.weight_stride()), 16usize);
    // By how much each row's accumulators shrink.
    let mut factors = Shared::<[f32]>::new_slice(tile.rows);
    let mut arrived = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..tile.stages {
        arrived.push(Barrier::shared(comptime!(UNITS as u32).runtime(), unit == 0));
    }

    // The row that this unit computes weights of, together with its neighbours.
    let own_row = unit / comptime!(tile.row_units());
    let place = unit % comptime!(tile.row_units());
    let row = first_row + own_row;

    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    // Of this plane, [rows / 16, channels / 8].
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..comptime!(tile.rows / M * tile.plane_steps() * 2) {
        acc.push(Array::new(2usize));
    }

    // Tiles computed so far, of all items: says which stage is next, and how often it was filled.
    let mut turn = 0u32;
    let mut item = cube_ptr[CUBE_POS_Y as usize] as usize;
    let end_item = cube_ptr[CUBE_POS_Y as usize + 1] as usize;
    while item < end_item {
        let sequence = items[item * 4] as usize;
        let first_key = items[item * 4 + 1] as usize;
        let end_key = items[item * 4 + 2] as usize;
        let mut row_end = 0usize;
        if row < rows {
            row_end = visible_end(seq_lens, sequence, row, end_key, query_len, heads, tile.causal);
        }
        let last_row = min(first_row + comptime!(tile.rows - 1), rows - 1);
        let tile_end = visible_end(seq_lens, sequence, last_row, end_key, query_len, heads, tile.causal);
        let table_row = sequence * max_pages as usize;

        // Keys first: they are the longer way.
        #[unroll]
        for ahead in 0..comptime!(tile.stages - 1) {
            load_keys::<E, V>(
                kv_cache,
                page_table,
                &mut keys,
                &arrived,
                turn + ahead as u32,
                table_row,
                page_shift,
                slot_count,
                first_key + ahead * tile.keys,
                tile_end,
                tile,
            );
        }
        load_queries::<E, V>(q, &mut queries, sequence * rows, first_row, rows, unit, tile);
        #[unroll]
        for i in 0..comptime!(tile.rows / M * tile.plane_steps() * 2) {
            clear(&mut acc[i]);
        }
        let mut highest = f32::new(LOWEST);
        // Of the weights that this unit has computed.
        let mut sum = 0.0f32;

        let mut base = first_key;
        while base < tile_end {
            // All planes are done with the tile before, whose stage is filled anew.
            sync_cube();
            load_keys::<E, V>(
                kv_cache,
                page_table,
                &mut keys,
                &arrived,
                turn + comptime!(tile.stages as u32 - 1),
                table_row,
                page_shift,
                slot_count,
                base + comptime!((tile.stages - 1) * tile.keys),
                tile_end,
                tile,
            );
            let stage = turn % comptime!(tile.stages as u32);
            wait_for_stage(&arrived, stage, turn / comptime!(tile.stages as u32) % 2, tile);
            let stage_start = stage as usize * comptime!(tile.keys * tile.stride());
            score::<E, V, P>(&def, &queries, &keys, stage_start, &mut scores, tile);
            sync_cube();

            // The softmax of this unit's part of a row.
            let mut top = highest;
            let mut pairs = Array::<Vector<f32, P>>::new(comptime!(tile.keys / 2 / tile.row_units()));
            #[unroll]
            for i in 0..comptime!(tile.keys / 2 / tile.row_units()) {
                let pair = place + i * comptime!(tile.row_units());
                let mut total = scores[own_row * comptime!(tile.score_stride()) + pair];
                #[unroll]
                for slice in 1..tile.slices {
                    total += scores[(slice * tile.rows + own_row) * comptime!(tile.score_stride()) + pair];
                }
                total *= Vector::new(softmax_scale);
                pairs[i] = total;
                #[unroll]
                for half in 0..2usize {
                    if base + 2 * pair + half < row_end {
                        top = max(top, total.extract(half));
                    }
                }
            }
            top = row_max(top, tile);
            if top < highest + SLACK {
                top = highest;
            }
            let factor = (highest - top).exp();
            sum *= factor;
            highest = top;
            #[unroll]
            for i in 0..comptime!(tile.keys / 2 / tile.row_units()) {
                let pair = place + i * comptime!(tile.row_units());
                let mut weight = (pairs[i] - Vector::new(top)).exp();
                #[unroll]
                for half in 0..2usize {
                    if base + 2 * pair + half >= row_end {
                        weight.insert(half, 0.0f32);
                    }
                    sum += weight.extract(half);
                }
                weights[own_row * comptime!(tile.weight_stride()) + pair] = Vector::cast_from(weight);
            }
            if place == 0 {
                factors[own_row] = factor;
            }
            sync_cube();
            scale_rows::<E, NC>(&def, &mut acc, &factors, tile);
            accumulate::<E, V, P, NC>(&def, &weights, &keys, stage_start, &mut acc, tile);
            base += tile.keys;
            turn += 1;
        }
        // Tiles that were asked for past the end took their turns, too.
        turn += comptime!(tile.stages as u32 - 1);

        let total = row_sum(sum, tile);
        // The last tile's factors have been used by all.
        sync_cube();
        if place == 0 {
            let mut lse = f32::from_bits(empty_lse);
            let mut factor = 0.0f32;
            if row_end > first_key {
                lse = highest + total.ln();
                factor = 1.0f32 / total;
            }
            factors[own_row] = factor;
            if row < rows {
                partial_lse[item * rows + row] = lse;
            }
        }
        sync_cube();
        scale_rows::<E, NC>(&def, &mut acc, &factors, tile);
        write_out::<E, P, NC>(&def, &acc, partial_out, item * rows, first_row, rows, tile);
        item += 1;
    }
}

/// Starts to copy a tile of keys into the stage of a turn. Zeros stand for keys from `end` on: what is there is not read.
#[cube]
fn load_keys<E: Float, V: Size>(
    kv_cache: &[Vector<E, V>],
    page_table: &[i32],
    keys: &mut Shared<[Vector<E, V>]>,
    arrived: &Sequence<Shared<Barrier>>,
    turn: u32,
    table_row: usize,
    page_shift: u32,
    slot_count: u32,
    base: usize,
    end: usize,
    #[comptime] tile: MmaTile,
) {
    let stage = turn % comptime!(tile.stages as u32);
    // Eight units copy a key, so that they read whole lines.
    let unit = UNIT_POS_Y as usize * LANES + UNIT_POS_X as usize;
    let lane = unit % KEY_UNITS;
    if base < end {
        #[unroll]
        for pass in 0..comptime!(tile.keys.div_ceil(UNITS / KEY_UNITS)) {
            let key = unit / KEY_UNITS + pass * comptime!(UNITS / KEY_UNITS);
            let to = (stage as usize * tile.keys + key) * comptime!(tile.stride()) + lane;
            if comptime!(tile.keys.is_multiple_of(UNITS / KEY_UNITS)) || key < tile.keys {
                if base + key < end {
                    let slot = key_slot(page_table, table_row, page_shift, slot_count, base + key);
                    let from = slot as usize * tile.key_vectors + lane;
                    #[unroll]
                    for i in 0..comptime!(tile.key_vectors.div_ceil(KEY_UNITS)) {
                        let (from, to) = (from + i * KEY_UNITS, to + i * KEY_UNITS);
                        if comptime!((i + 1) * KEY_UNITS <= tile.key_vectors) || lane + i * KEY_UNITS < tile.key_vectors
                        {
                            copy_async(&kv_cache[from..from + 1], &mut keys[to..to + 1], comptime!(VECTOR as u32));
                        }
                    }
                } else {
                    let mut vector = lane;
                    while vector < tile.key_vectors {
                        keys[to - lane + vector] = Vector::new(E::from_int(0));
                        vector += KEY_UNITS;
                    }
                }
            }
        }
    }
    #[unroll]
    for i in 0..tile.stages {
        if stage == comptime!(i as u32) {
            // Nobody waits for a turn past the end: its arrivals must not be under way when the cube ends.
            if base < end {
                arrived[i].commit_copy_async();
            }
            arrived[i].arrive();
        }
    }
}

#[cube]
fn wait_for_stage(arrived: &Sequence<Shared<Barrier>>, stage: u32, phase: u32, #[comptime] tile: MmaTile) {
    #[unroll]
    for i in 0..tile.stages {
        if stage == comptime!(i as u32) {
            arrived[i].wait_parity(phase);
        }
    }
}

/// The rows of a tile, zeros past the last one.
#[cube]
fn load_queries<E: Float, V: Size>(
    q: &[Vector<E, V>],
    queries: &mut Shared<[Vector<E, V>]>,
    sequence_row: usize,
    first_row: usize,
    rows: usize,
    unit: usize,
    #[comptime] tile: MmaTile,
) {
    let mut i = unit;
    while i < comptime!(tile.rows * tile.key_vectors) {
        let row = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let mut value = Vector::<E, V>::new(E::from_int(0));
        if first_row + row < rows {
            value = q[(sequence_row + first_row + row) * tile.key_vectors + vector];
        }
        queries[row * comptime!(tile.stride()) + vector] = value;
        i += UNITS;
    }
}

/// Scores of the whole tile, not yet scaled: of this plane's rows and keys, summed over its slice of the channels.
#[cube]
fn score<E: Float, V: Size, P: Size>(
    def: &MmaDefinition<E, E, f32>,
    queries: &Shared<[Vector<E, V>]>,
    keys: &Shared<[Vector<E, V>]>,
    stage_start: usize,
    scores: &mut Shared<[Vector<f32, P>]>,
    #[comptime] tile: MmaTile,
) {
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let row_steps = comptime!(tile.rows / tile.row_groups / M);
    let key_steps = comptime!(tile.keys / tile.key_groups / N);
    let first_row = plane % tile.row_groups * comptime!(tile.rows / tile.row_groups);
    let first_key = plane / tile.row_groups % tile.key_groups * comptime!(tile.keys / tile.key_groups);
    let slice = plane / comptime!(tile.row_groups * tile.key_groups);

    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for i in 0..comptime!(row_steps * key_steps) {
        acc.push(Array::new(2usize));
        clear(&mut acc[i]);
    }

    // Where this lane's rows of the matrices start that `ldmatrix` loads.
    let query_at = (first_row + lane % M) * comptime!(tile.stride()) + lane / M + 2 * slice;
    let query_rows = &queries[query_at..queries.len()];
    let key_at =
        stage_start + (first_key + lane / M * N + lane % N) * comptime!(tile.stride()) + lane / N % 2 + 2 * slice;
    let key_rows = &keys[key_at..keys.len()];
    // Unrolled: the loads of later steps hide behind the products of earlier ones.
    #[unroll]
    for i in 0..comptime!(tile.key_vectors / 2 / tile.slices) {
        let step = comptime!(2 * i * tile.slices);
        let mut a = Sequence::<Array<Vector<E, NA>>>::new();
        #[unroll]
        for r in 0..row_steps {
            let at = comptime!(step + r * M * tile.stride());
            a.push(def.load_matrix::<Vector<E, V>, NA>(&query_rows[at..at + 1], MatrixIdent::A, 4usize, false));
        }
        // Two columns of tiles at a time, and the last one alone if their number is odd.
        #[unroll]
        for pair in 0..comptime!(key_steps.div_ceil(2)) {
            let at = comptime!(step + pair * 2 * N * tile.stride());
            let width = comptime!(if 2 * pair + 1 < key_steps { 2 } else { 1 });
            let b = def.load_matrix::<Vector<E, V>, NA>(&key_rows[at..at + 1], MatrixIdent::B, 2 * width, false);
            #[unroll]
            for column in 0..width {
                let mut fragment = Array::<Vector<E, NA>>::new(2usize);
                fragment[0] = b[2 * column];
                fragment[1] = b[2 * column + 1];
                #[unroll]
                for r in 0..row_steps {
                    let tile_at = comptime!(r * key_steps + 2 * pair + column);
                    def.execute_inplace(&a[r], &fragment, &mut acc[tile_at]);
                }
            }
        }
    }

    #[unroll]
    for r in 0..row_steps {
        #[unroll]
        for half in 0..2usize {
            let (row, column) = def.position_of_nth(UNIT_POS_X, comptime!(2 * half as u32), MatrixIdent::Accumulator);
            let row = slice * tile.rows + first_row + r * M + row as usize;
            let pair = (first_key + column as usize) / 2;
            #[unroll]
            for c in 0..key_steps {
                let at = row * comptime!(tile.score_stride()) + pair + c * comptime!(N / 2);
                scores[at] = part::<NC, P>(&acc[comptime!(r * key_steps + c)], half);
            }
        }
    }
}

/// Sets an accumulator to zero.
#[cube]
fn clear<NC: Size>(acc: &mut Array<Vector<f32, NC>>) {
    #[unroll]
    for half in 0..2 {
        acc[half] = Vector::new(0.0f32);
    }
}

/// Multiplies one of the two rows of an accumulator.
#[cube]
fn scale<NC: Size>(acc: &mut Array<Vector<f32, NC>>, #[comptime] half: usize, factor: Vector<f32, NC>) {
    acc[half] *= factor;
}

/// One of the two rows of an accumulator.
#[cube]
fn part<NC: Size, P: Size>(acc: &Array<Vector<f32, NC>>, #[comptime] half: usize) -> Vector<f32, P> {
    Vector::cast_from(acc[half])
}

/// Multiplies the accumulators with a factor for each row.
#[cube]
fn scale_rows<E: Float, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    factors: &Shared<[f32]>,
    #[comptime] tile: MmaTile,
) {
    let columns = comptime!(2 * tile.plane_steps());
    let mut own = Array::<f32>::new(comptime!(tile.rows / N));
    let mut changed = false;
    #[unroll]
    for i in 0..comptime!(tile.rows / N) {
        let (row, _) = def.position_of_nth(UNIT_POS_X, comptime!((i % 2 * 2) as u32), MatrixIdent::Accumulator);
        let factor = factors[comptime!(i / 2 * M) + row as usize];
        own[i] = factor;
        changed = changed || factor != 1.0f32;
    }
    if plane::any(changed) {
        #[unroll]
        for i in 0..comptime!(tile.rows / N) {
            #[unroll]
            for c in 0..columns {
                scale(&mut acc[comptime!(i / 2 * columns + c)], comptime!(i % 2), Vector::new(own[i]));
            }
        }
    }
}

/// Adds the keys of a stage, times their weights, for this plane's channels.
#[cube]
fn accumulate<E: Float, V: Size, P: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    weights: &Shared<[Vector<E, P>]>,
    keys: &Shared<[Vector<E, V>]>,
    stage_start: usize,
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    #[comptime] tile: MmaTile,
) {
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let columns = comptime!(2 * tile.plane_steps());
    // A row of eight weights is four pairs.
    let weight_at = lane % M * comptime!(tile.weight_stride()) + lane / M * 4;
    let weight_rows = &weights[weight_at..weights.len()];
    let first_step = plane * comptime!(tile.plane_steps());
    let value_at = stage_start + lane % K * comptime!(tile.stride()) + lane / K + 2 * first_step;
    let value_rows = &keys[value_at..keys.len()];
    #[unroll]
    for step in 0..comptime!(tile.keys / K) {
        let mut a = Sequence::<Array<Vector<E, NA>>>::new();
        #[unroll]
        for r in 0..comptime!(tile.rows / M) {
            let at = comptime!(r * M * tile.weight_stride() + step * K / 2);
            a.push(def.load_matrix::<Vector<E, P>, NA>(&weight_rows[at..at + 1], MatrixIdent::A, 4usize, false));
        }
        #[unroll]
        for c in 0..comptime!(tile.plane_steps()) {
            if comptime!(tile.value_steps.is_multiple_of(PLANES)) || first_step + c < tile.value_steps {
                let at = comptime!(step * K * tile.stride() + 2 * c);
                let b = def.load_matrix::<Vector<E, V>, NA>(&value_rows[at..at + 1], MatrixIdent::B, 4usize, true);
                #[unroll]
                for column in 0..2usize {
                    let mut fragment = Array::<Vector<E, NA>>::new(2usize);
                    fragment[0] = b[2 * column];
                    fragment[1] = b[2 * column + 1];
                    #[unroll]
                    for r in 0..comptime!(tile.rows / M) {
                        let tile_at = comptime!(r * columns + 2 * c + column);
                        def.execute_inplace(&a[r], &fragment, &mut acc[tile_at]);
                    }
                }
            }
        }
    }
}

/// Writes the accumulators.
#[cube]
fn write_out<E: Float, P: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    acc: &Sequence<Array<Vector<f32, NC>>>,
    partial_out: &mut [Vector<f32, P>],
    item_row: usize,
    first_row: usize,
    rows: usize,
    #[comptime] tile: MmaTile,
) {
    let plane = UNIT_POS_Y as usize;
    let columns = comptime!(2 * tile.plane_steps());
    let row_pairs = comptime!(tile.value_steps * K / 2);
    #[unroll]
    for r in 0..comptime!(tile.rows / M) {
        #[unroll]
        for half in 0..2usize {
            let (row, column) = def.position_of_nth(UNIT_POS_X, comptime!(2 * half as u32), MatrixIdent::Accumulator);
            let row = first_row + r * M + row as usize;
            if row < rows {
                #[unroll]
                for c in 0..columns {
                    let tile_column = plane * columns + c;
                    if comptime!(tile.value_steps.is_multiple_of(PLANES))
                        || tile_column < comptime!(2 * tile.value_steps)
                    {
                        let at = (item_row + row) * row_pairs + tile_column * comptime!(N / 2) + column as usize / 2;
                        partial_out[at] = part::<NC, P>(&acc[comptime!(r * columns + c)], half);
                    }
                }
            }
        }
    }
}

/// The highest of what the units of a row have.
#[cube]
fn row_max(value: f32, #[comptime] tile: MmaTile) -> f32 {
    let mut highest = value;
    #[unroll]
    for i in 0..comptime!(tile.row_units().ilog2()) {
        highest = max(highest, plane::shuffle_xor::<f32>(highest, comptime!(1u32 << i)));
    }
    highest
}

/// The sum of what the units of a row have.
#[cube]
fn row_sum(value: f32, #[comptime] tile: MmaTile) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..comptime!(tile.row_units().ilog2()) {
        sum += plane::shuffle_xor::<f32>(sum, comptime!(1u32 << i));
    }
    sum
}

/// Every tile where it fits, for V3's rows.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use super::select::{MMA_TILES, best_mma_tile};
    use crate::offline::{Arch, Entry, form};
    let entry = |kind, bits, tile: MmaTile| {
        let MmaTile { rows, keys, key_groups, causal, .. } = tile;
        let mut name = format!("mla_decode.mma.{rows}x{keys}.{key_groups}");
        name += if causal { "" } else { ".full" };
        name += if bits == AddressType::U64 { ".64_bits" } else { "" };
        let (dim, elem) = (CubeDim::new_2d(LANES as u32, PLANES as u32), ElemType::Float(kind));
        #[rustfmt::skip]
        let form = form!(decode_mma_kernel, dim, [
            bits, VECTOR, 2, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1.0, 1, tile, elem
        ]);
        let fits = move |arch: Arch| arch >= Arch::Sm80 && tile.shared_bytes() <= arch.shared_memory();
        Entry::of(kind, &name, form).unchecked().on(fits)
    };
    let tiles = MMA_TILES.map(|choice| MmaTile::new(choice, (576, 512), true));
    let all = tiles.map(|tile| entry(FloatKind::BF16, AddressType::U32, tile));
    // Of a rank with 16 heads, and of all 128, on a Hopper.
    let usual = [16, 128].into_iter().flat_map(|heads| {
        let choose =
            |causal| best_mma_tile(heads, (576, 512), causal, Arch::Sm90a.shared_memory()).expect("V3 has a tile");
        [
            entry(FloatKind::F16, AddressType::U32, choose(true)),
            entry(FloatKind::BF16, AddressType::U32, choose(false)),
            entry(FloatKind::BF16, AddressType::U64, choose(true)),
        ]
        .map(|entry| entry.on(|arch| arch == Arch::Sm90a))
    });
    all.into_iter().chain(usual).collect()
}
