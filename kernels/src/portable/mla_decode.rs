//! Attention of a few query tokens over the paged latent cache, for any device: plain arithmetic, no matrix instructions.
//!
//! A cube works off the items that a plan gives it (see [`mla_plan`](super::mla_plan)) for one tile of query rows. A row is
//! one head of one query token; all rows of a sequence look at the same keys, so a tile of keys is loaded once into shared
//! memory and used by all rows of the tile, as keys and, its first channels, as values. The softmax is the online one, in
//! f32. An item gives its own normalised output and the logarithm of its sum; who wants the sequence's result merges them.
//!
//! # Shared memory
//! At most 32 KiB, whatever the device has: a tile of query rows and a tile of keys in the element type (rows are padded by
//! one vector against bank conflicts), and the scores of the tile in f32. D = 576 fits with 8 rows and 16 keys of two bytes
//! each (29.0 KiB), or with 4 rows and 8 keys of f32 (28.4 KiB). The tiles are halved until they fit; a single row and key
//! of more than 32 KiB are refused.

use cubecl::features::TypeUsage;
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;
use thiserror::Error;

use super::mla_plan::or_dummy;

/// Shared memory that a cube takes at most. What WebGPU drivers offer; on larger devices it lets several cubes run at a time.
const SHARED_BYTES: usize = 32 * 1024;

/// Units of a cube.
const UNITS: usize = 128;

/// Bytes of a key at most: beside it, a query row and the scores fit into the shared memory.
pub const MAX_KEY_BYTES: usize = 16_000;

/// Query rows and keys of a tile, at most. The product must not exceed the number of units.
const TILE_ROWS: usize = 8;
const TILE_KEYS: usize = 16;

/// Bytes of one load.
const LOAD_BYTES: usize = 16;

/// Where the maximum of a row starts. Finite, for a shader may not count on infinities.
const LOWEST: f32 = -1e30;

/// Buffers and sizes of [`launch`]. Buffers start at a multiple of 16 bytes.
pub struct DecodeArgs {
    /// `[batch, query_len, heads, key_width]` of `elem`.
    pub q: BufferArg,
    /// `[pages, page_size, key_width]` of `elem`; a row is a key, its first `value_width` channels are the value.
    pub kv_cache: BufferArg,
    /// Page ids i32 `[batch, max_pages]`. Entries past a sequence's end are not read.
    pub page_table: BufferArg,
    /// Keys of each sequence, i32 `[batch]`; says which keys are hidden if `causal`.
    pub seq_lens: BufferArg,
    /// Of the plan, i32 `[capacity, 4]`.
    pub items: BufferArg,
    /// Of the plan, i32 `[cubes + 1]`.
    pub cube_ptr: BufferArg,
    /// Output, f32 `[capacity, query_len * heads, value_width]`: of each item, normalised by its own sum; 0 where a row sees no
    /// key. What no item stands for is not written.
    pub partial_out: BufferArg,
    /// Output, f32 `[capacity, query_len * heads]`: the natural logarithm of the sum, -inf where a row sees no key.
    pub partial_lse: BufferArg,
    /// Number of sequences.
    pub batch: usize,
    /// Query tokens of each.
    pub query_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of a cache row.
    pub key_width: usize,
    /// Leading channels that are the value.
    pub value_width: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Tokens in a page, a power of two.
    pub page_size: usize,
    /// Columns of the page table.
    pub max_pages: usize,
    /// Cubes that the plan deals items out to.
    pub cubes: usize,
    /// Rows of `items`.
    pub capacity: usize,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Query token `i` sees the keys `j <= seq_len - query_len + i`; otherwise all.
    pub causal: bool,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// The sizes of [`DecodeArgs`], under the same names: what decides whether a device can decode.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DecodeSizes {
    pub batch: usize,
    pub query_len: usize,
    pub heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub pages: usize,
    pub page_size: usize,
    pub max_pages: usize,
    pub cubes: usize,
    pub capacity: usize,
    pub causal: bool,
    pub elem: ElemType,
}

/// Why the device cannot decode this.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// No such element type here.
    #[error("elements of type {0:?}, expected f32, f16 or bf16, and one that the device supports")]
    Element(ElemType),
    /// One query row and one key do not fit into shared memory.
    #[error("a key of {key_width} channels needs {needed} bytes of shared memory, expected at most {available}")]
    SharedMemory {
        /// Channels of a cache row.
        key_width: usize,
        /// Bytes for a tile of one row and one key.
        needed: usize,
        /// Bytes that may be used.
        available: usize,
    },
    /// A size that the kernel cannot work with.
    #[error("{name} is {actual}, expected {expected}")]
    Size {
        /// Which one.
        name: &'static str,
        /// What it is.
        actual: usize,
        /// What it should be.
        expected: String,
    },
    /// A buffer has more than 2^32 elements, and the device has no 64-bit addresses.
    #[error("a buffer of {0} elements, expected at most 2^32 - 1 on this device")]
    Address(usize),
}

/// How a tile is divided among the units of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tile {
    /// Query rows, a power of two.
    rows: usize,
    /// Keys, a power of two.
    keys: usize,
    /// Elements of a vector.
    vector: usize,
    /// Vectors of a key.
    key_vectors: usize,
    /// Vectors of a value.
    value_vectors: usize,
    /// Rows whose scores with a key one unit computes.
    score_rows: usize,
    /// Units that share the channels of a score.
    slices: usize,
    /// Units side by side over the channels of a value; each has every that many-th vector.
    value_units: usize,
    /// Groups of rows that different units accumulate.
    row_groups: usize,
    /// Whether keys may be hidden.
    causal: bool,
}

impl Tile {
    /// The largest tile that fits into `available` bytes.
    fn choose(args: &DecodeSizes, max_vector: usize, available: usize) -> Result<Self, DecodeError> {
        let size = args.elem.size();
        let mut vector = (LOAD_BYTES / size).min(prev_power_of_two(max_vector));
        while !args.key_width.is_multiple_of(vector) || !args.value_width.is_multiple_of(vector) {
            vector /= 2;
        }
        let mut rows = (args.query_len * args.heads).next_power_of_two().min(TILE_ROWS);
        let mut keys = TILE_KEYS;
        loop {
            let tile = Self::new(args, vector, rows, keys);
            let needed = tile.shared_bytes(size);
            if needed <= available {
                return Ok(tile);
            }
            // Rows are worth more than keys: they say how often a loaded key is used.
            match (rows, keys) {
                (1, 1) => return Err(DecodeError::SharedMemory { key_width: args.key_width, needed, available }),
                _ if keys >= 2 * rows || rows == 1 => keys /= 2,
                _ => rows /= 2,
            }
        }
    }

    fn new(args: &DecodeSizes, vector: usize, rows: usize, keys: usize) -> Self {
        let score_rows = rows.min(2);
        let value_vectors = args.value_width / vector;
        let value_units = value_vectors.next_power_of_two().min(UNITS);
        Self {
            rows,
            keys,
            vector,
            key_vectors: args.key_width / vector,
            value_vectors,
            score_rows,
            slices: UNITS / (rows / score_rows * keys),
            value_units,
            row_groups: (UNITS / value_units).min(rows),
            causal: args.causal,
        }
    }

    /// Vectors from one row to the next in shared memory.
    fn stride(&self) -> usize {
        self.key_vectors + 1
    }

    fn shared_bytes(&self, elem_size: usize) -> usize {
        let tiles = (self.rows + self.keys) * self.stride() * self.vector * elem_size;
        let numbers = (self.slices + 1) * self.rows * self.keys + self.rows + self.keys;
        tiles + numbers * size_of::<f32>()
    }

    /// Rows that one unit accumulates.
    fn group_rows(&self) -> usize {
        self.rows / self.row_groups
    }

    /// Vectors of each row that one unit accumulates.
    fn unit_vectors(&self) -> usize {
        self.value_vectors.div_ceil(self.value_units)
    }
}

fn prev_power_of_two(n: usize) -> usize {
    1 << n.max(1).ilog2()
}

/// Computes the outputs of all items of a plan.
///
/// # Errors
/// The device lacks the element type, the memory or the addresses. Nothing is launched then.
pub fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let sizes = args.sizes();
    if sizes.is_empty() {
        return Ok(());
    }
    let (tile, row_tiles, address) = sizes.prepare(client)?;
    let slots = args.pages * args.page_size;
    decode_kernel::launch(
        client,
        CubeCount::Static(row_tiles as u32, args.cubes as u32, 1),
        CubeDim::new_1d(UNITS as u32),
        address,
        tile.vector,
        args.q,
        or_dummy(client, args.kv_cache, slots),
        or_dummy(client, args.page_table, args.max_pages),
        args.seq_lens,
        args.items,
        args.cube_ptr,
        args.partial_out,
        args.partial_lse,
        args.query_len as u32,
        args.heads as u32,
        args.max_pages as u32,
        args.page_size.ilog2(),
        args.softmax_scale,
        f32::NEG_INFINITY.to_bits(),
        tile,
        args.elem,
    );
    Ok(())
}

impl DecodeArgs {
    fn sizes(&self) -> DecodeSizes {
        let &Self { batch, query_len, heads, key_width, value_width, pages, page_size, .. } = self;
        let &Self { max_pages, cubes, capacity, causal, elem, .. } = self;
        DecodeSizes {
            batch,
            query_len,
            heads,
            key_width,
            value_width,
            pages,
            page_size,
            max_pages,
            cubes,
            capacity,
            causal,
            elem,
        }
    }
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &DecodeSizes) -> Result<(), DecodeError> {
    if sizes.is_empty() { Ok(()) } else { sizes.prepare(client).map(|_| ()) }
}

impl DecodeSizes {
    /// Nothing to compute.
    fn is_empty(&self) -> bool {
        [self.query_len, self.heads, self.batch, self.capacity, self.cubes].contains(&0)
    }

    /// The tile, the number of tiles of query rows, and the width of offsets.
    fn prepare(&self, client: &Client) -> Result<(Tile, usize, AddressType), DecodeError> {
        self.check(client)?;
        let hardware = &client.properties().hardware;
        let available = hardware.max_shared_memory_size.min(SHARED_BYTES);
        let tile = Tile::choose(self, hardware.max_vector_size, available)?;
        let row_tiles = (self.query_len * self.heads).div_ceil(tile.rows);
        for (name, actual, limit) in [
            ("tiles of query rows", row_tiles, hardware.max_cube_count.0),
            ("cubes", self.cubes, hardware.max_cube_count.1),
        ] {
            if actual > limit as usize {
                return Err(DecodeError::Size { name, actual, expected: format!("at most {limit}") });
            }
        }
        Ok((tile, row_tiles, self.address_type(client)?))
    }

    fn check(&self, client: &Client) -> Result<(), DecodeError> {
        let known = matches!(self.elem, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16));
        let usage = client.features().type_usage(self.elem);
        if !known || !usage.contains(TypeUsage::Buffer) || !usage.contains(TypeUsage::Conversion) {
            return Err(DecodeError::Element(self.elem));
        }
        let size = |name, actual, good: bool, expected: &str| match good {
            true => Ok(()),
            false => Err(DecodeError::Size { name, actual, expected: expected.into() }),
        };
        size("page_size", self.page_size, self.page_size.is_power_of_two(), "a power of two")?;
        let width = format!("1 to {}, the key width", self.key_width);
        size("value_width", self.value_width, (1..=self.key_width).contains(&self.value_width), &width)?;
        let slots = self.pages.saturating_mul(self.page_size);
        size("tokens in the cache", slots, slots <= u32::MAX as usize, "at most 2^32 - 1")
    }

    /// Offsets in 32 bits, or in 64 where a buffer has too many elements.
    fn address_type(&self, client: &Client) -> Result<AddressType, DecodeError> {
        let rows = self.query_len * self.heads;
        let lens = [
            self.batch * rows * self.key_width,
            self.pages * self.page_size * self.key_width,
            self.capacity * rows * self.value_width,
            self.batch * self.max_pages,
        ];
        let longest = lens.into_iter().max().unwrap_or(0);
        let address = AddressType::from_len(longest);
        match client.properties().supports_address(address) {
            true => Ok(address),
            false => Err(DecodeError::Address(longest)),
        }
    }
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch, address_type = "dynamic")]
fn decode_kernel<E: Float, V: Size>(
    q: &[Vector<E, V>],
    kv_cache: &[Vector<E, V>],
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
    cube_ptr: &[i32],
    partial_out: &mut [Vector<f32, V>],
    partial_lse: &mut [f32],
    query_len: u32,
    heads: u32,
    max_pages: u32,
    page_shift: u32,
    softmax_scale: f32,
    // Of -inf, which a shader cannot write as a constant.
    empty_lse: u32,
    #[comptime] tile: Tile,
    #[define(E)] _elem: ElemType,
) {
    let unit = UNIT_POS as usize;
    let rows = (query_len * heads) as usize;
    let first_row = CUBE_POS_X as usize * tile.rows;

    let mut queries = Shared::<[Vector<E, V>]>::new_slice(comptime!(tile.rows * tile.stride()));
    let mut keys = Shared::<[Vector<E, V>]>::new_slice(comptime!(tile.keys * tile.stride()));
    // The row of the cache that each key of the next tile is in.
    let mut slots = Shared::<[u32]>::new_slice(tile.keys);
    // [slices, rows, keys]
    let mut scores = Shared::<[f32]>::new_slice(comptime!(tile.slices * tile.rows * tile.keys));
    // [rows, keys]
    let mut weights = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.keys));
    // By how much each row's accumulators shrink.
    let mut factors = Shared::<[f32]>::new_slice(tile.rows);

    // The row and the key of the tile whose weight this unit computes.
    let has_weight = unit < comptime!(tile.rows * tile.keys);
    let weight_row = unit / tile.keys;
    let weight_key = unit % tile.keys;
    let row = first_row + weight_row;

    let mut acc = Array::<Vector<f32, V>>::new(comptime!(tile.group_rows() * tile.unit_vectors()));

    let mut item = cube_ptr[CUBE_POS_Y as usize] as usize;
    let end_item = cube_ptr[CUBE_POS_Y as usize + 1] as usize;
    while item < end_item {
        let sequence = items[item * 4] as usize;
        let first_key = items[item * 4 + 1] as usize;
        let end_key = items[item * 4 + 2] as usize;

        // Keys that this unit's row sees, and those that any row of the tile does.
        let mut row_end = 0usize;
        if row < rows {
            row_end = visible_end(seq_lens, sequence, row, end_key, query_len, heads, tile.causal);
        }
        let last_row = min(first_row + comptime!(tile.rows - 1), rows - 1);
        let tile_end = visible_end(seq_lens, sequence, last_row, end_key, query_len, heads, tile.causal);

        load_queries::<E, V>(q, &mut queries, sequence * rows, first_row, rows, tile);
        let table_row = sequence * max_pages as usize;
        find_slots(page_table, &mut slots, table_row, page_shift, first_key, tile_end, tile);
        #[unroll]
        for i in 0..comptime!(tile.group_rows() * tile.unit_vectors()) {
            acc[i] = Vector::new(0.0f32);
        }
        let mut highest = f32::new(LOWEST);
        // Of the weights that this unit has computed.
        let mut sum = 0.0f32;
        sync_cube();

        let mut base = first_key;
        while base < tile_end {
            load_keys::<E, V>(kv_cache, &mut keys, &slots, base, tile_end, tile);
            sync_cube();
            score::<E, V>(&queries, &keys, &mut scores, tile);
            find_slots(page_table, &mut slots, table_row, page_shift, base + tile.keys, tile_end, tile);
            sync_cube();
            if has_weight {
                let mut top = highest;
                for k in 0..tile.keys {
                    if base + k < row_end {
                        top = max(top, score_of(&scores, weight_row, k, tile) * softmax_scale);
                    }
                }
                let mut weight = 0.0f32;
                if base + weight_key < row_end {
                    weight = (score_of(&scores, weight_row, weight_key, tile) * softmax_scale - top).exp();
                }
                let factor = (highest - top).exp();
                sum = sum * factor + weight;
                highest = top;
                weights[unit] = weight;
                if weight_key == 0 {
                    factors[weight_row] = factor;
                }
            }
            sync_cube();
            accumulate::<E, V>(&keys, &weights, &factors, &mut acc, min(tile_end - base, tile.keys), tile);
            sync_cube();
            base += tile.keys;
        }

        if has_weight {
            weights[unit] = sum;
        }
        sync_cube();
        if has_weight && weight_key == 0 {
            let mut total = 0.0f32;
            for k in 0..tile.keys {
                total += weights[unit + k];
            }
            let mut lse = f32::from_bits(empty_lse);
            let mut factor = 0.0f32;
            if row_end > first_key {
                lse = highest + total.ln();
                factor = 1.0f32 / total;
            }
            factors[weight_row] = factor;
            if row < rows {
                partial_lse[item * rows + row] = lse;
            }
        }
        sync_cube();
        write_out::<V>(&acc, &factors, partial_out, item * rows, first_row, rows, tile);
        item += 1;
    }
}

/// One past the last key of an item that a query row sees.
#[cube]
fn visible_end(
    seq_lens: &[i32],
    sequence: usize,
    row: usize,
    end_key: usize,
    query_len: u32,
    heads: u32,
    #[comptime] causal: bool,
) -> usize {
    if comptime!(causal) {
        let token = (row as u32 / heads) as i32;
        let end = seq_lens[sequence] - query_len as i32 + token + 1;
        min(max(end, 0i32) as usize, end_key)
    } else {
        end_key
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
    #[comptime] tile: Tile,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(tile.rows * tile.key_vectors) {
        let row = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let at = row * comptime!(tile.stride()) + vector;
        if first_row + row < rows {
            queries[at] = q[(sequence_row + first_row + row) * tile.key_vectors + vector];
        } else {
            queries[at] = Vector::new(E::from_int(0));
        }
        i += UNITS;
    }
}

/// Looks up where the keys `base ..` of a sequence are; those from `end` on are left alone.
#[cube]
fn find_slots(
    page_table: &[i32],
    slots: &mut Shared<[u32]>,
    table_row: usize,
    page_shift: u32,
    base: usize,
    end: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    if unit < tile.keys && base + unit < end {
        let token = (base + unit) as u32;
        let page = page_table[table_row + (token >> page_shift) as usize] as u32;
        slots[unit] = (page << page_shift) + (token & ((1u32 << page_shift) - 1));
    }
}

/// A tile of keys, zeros from `end` on: what is there is not read.
#[cube]
fn load_keys<E: Float, V: Size>(
    kv_cache: &[Vector<E, V>],
    keys: &mut Shared<[Vector<E, V>]>,
    slots: &Shared<[u32]>,
    base: usize,
    end: usize,
    #[comptime] tile: Tile,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(tile.keys * tile.key_vectors) {
        let key = i / tile.key_vectors;
        let vector = i % tile.key_vectors;
        let at = key * comptime!(tile.stride()) + vector;
        if base + key < end {
            keys[at] = kv_cache[slots[key] as usize * tile.key_vectors + vector];
        } else {
            keys[at] = Vector::new(E::from_int(0));
        }
        i += UNITS;
    }
}

/// Scores of the whole tile, not yet scaled. Each unit has one key, a few rows and a slice of the channels.
#[cube]
fn score<E: Float, V: Size>(
    queries: &Shared<[Vector<E, V>]>,
    keys: &Shared<[Vector<E, V>]>,
    scores: &mut Shared<[f32]>,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let key = unit % tile.keys;
    let first_row = unit / tile.keys % comptime!(tile.rows / tile.score_rows) * tile.score_rows;
    let slice = unit / comptime!(tile.keys * (tile.rows / tile.score_rows));
    let mut sums = Array::<Vector<f32, V>>::new(tile.score_rows);
    #[unroll]
    for r in 0..tile.score_rows {
        sums[r] = Vector::new(0.0f32);
    }
    let mut vector = slice;
    while vector < tile.key_vectors {
        let key_part = Vector::<f32, V>::cast_from(keys[key * comptime!(tile.stride()) + vector]);
        #[unroll]
        for r in 0..tile.score_rows {
            let query_part = queries[(first_row + r) * comptime!(tile.stride()) + vector];
            sums[r] += Vector::<f32, V>::cast_from(query_part) * key_part;
        }
        vector += tile.slices;
    }
    #[unroll]
    for r in 0..tile.score_rows {
        let lanes = sums[r];
        let mut total = lanes.extract(0usize);
        #[unroll]
        for i in 1..tile.vector {
            total += lanes.extract(i);
        }
        scores[(slice * tile.rows + first_row + r) * tile.keys + key] = total;
    }
}

/// A score, from its slices.
#[cube]
fn score_of(scores: &Shared<[f32]>, row: usize, key: usize, #[comptime] tile: Tile) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for slice in 0..tile.slices {
        total += scores[(slice * tile.rows + row) * tile.keys + key];
    }
    total
}

/// Shrinks the accumulators and adds the first `count` keys of the tile, times their weights.
#[cube]
fn accumulate<E: Float, V: Size>(
    keys: &Shared<[Vector<E, V>]>,
    weights: &Shared<[f32]>,
    factors: &Shared<[f32]>,
    acc: &mut Array<Vector<f32, V>>,
    count: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let column = unit % tile.value_units;
    let group = unit / tile.value_units;
    if group < tile.row_groups {
        let group_rows = comptime!(tile.group_rows());
        let first_row = group * group_rows;
        #[unroll]
        for r in 0..group_rows {
            let factor = Vector::<f32, V>::new(factors[first_row + r]);
            #[unroll]
            for c in 0..comptime!(tile.unit_vectors()) {
                acc[c * group_rows + r] *= factor;
            }
        }
        for key in 0..count {
            #[unroll]
            for c in 0..comptime!(tile.unit_vectors()) {
                let vector = column + c * tile.value_units;
                if vector < tile.value_vectors {
                    let value = Vector::<f32, V>::cast_from(keys[key * comptime!(tile.stride()) + vector]);
                    #[unroll]
                    for r in 0..group_rows {
                        let weight = Vector::<f32, V>::new(weights[(first_row + r) * tile.keys + key]);
                        acc[c * group_rows + r] += value * weight;
                    }
                }
            }
        }
    }
}

/// Writes the accumulators, times the factors.
#[cube]
fn write_out<V: Size>(
    acc: &Array<Vector<f32, V>>,
    factors: &Shared<[f32]>,
    partial_out: &mut [Vector<f32, V>],
    item_row: usize,
    tile_row: usize,
    rows: usize,
    #[comptime] tile: Tile,
) {
    let unit = UNIT_POS as usize;
    let column = unit % tile.value_units;
    let group = unit / tile.value_units;
    if group < tile.row_groups {
        let group_rows = comptime!(tile.group_rows());
        #[unroll]
        for r in 0..group_rows {
            let row = group * group_rows + r;
            if tile_row + row < rows {
                let factor = Vector::<f32, V>::new(factors[row]);
                #[unroll]
                for c in 0..comptime!(tile.unit_vectors()) {
                    let vector = column + c * tile.value_units;
                    if vector < tile.value_vectors {
                        let at = (item_row + tile_row + row) * tile.value_vectors + vector;
                        partial_out[at] = acc[c * group_rows + r] * factor;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(elem: FloatKind, (key_width, value_width): (usize, usize), rows: usize) -> Result<Tile, DecodeError> {
        let sizes = DecodeSizes {
            batch: 1,
            query_len: 1,
            heads: rows,
            key_width,
            value_width,
            pages: 1,
            page_size: 1,
            max_pages: 1,
            cubes: 1,
            capacity: 1,
            causal: false,
            elem: ElemType::Float(elem),
        };
        Tile::choose(&sizes, usize::MAX, SHARED_BYTES)
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
                    assert!(tile.rows * tile.keys <= UNITS);
                    assert_eq!(tile.rows / tile.score_rows * tile.keys * tile.slices, UNITS);
                    assert_eq!(tile.row_groups * tile.group_rows(), tile.rows);
                    assert!(tile.row_groups * tile.value_units <= UNITS);
                    assert!(tile.unit_vectors() * tile.value_units >= tile.value_vectors);
                }
            }
        }
    }

    #[test]
    fn a_key_that_does_not_fit_is_refused() {
        let error = tile(FloatKind::F32, (4096, 512), 16).expect_err("too wide");
        assert!(matches!(error, DecodeError::SharedMemory { available: SHARED_BYTES, .. }), "{error}");
    }
}
