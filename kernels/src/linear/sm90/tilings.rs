//! How Hopper's kernel divides its work. Constants here were measured; the README says where.

use super::form::{self, CHANNELS, CUBES, Shares, Tiling, WEIGHT_ROWS, bits, cubes, pair_bytes, pairs_of_tiles, terms};
use super::partial::MOST_SPLITS;
use crate::linear::{Division, LinearSizes, WeightFormat, parts};

/// A tile of Hopper's kernel.
pub(in crate::linear) struct Tile {
    tokens: usize,
    /// How long it takes where experts or heads divide the rows. Small ones wait for the weights, from the L2 cache.
    divided: usize,
    /// How long it takes where it is trimmed to an expert's tokens, of a hundred of [`trimmed_time`]; nothing where no expert has it.
    trimmed: Option<usize>,
    /// Nanoseconds of one block of channels, where one matrix has all rows. Of 160 and 192 tokens it is what lies between
    /// the others: with it they are chosen where they were measured to be faster.
    block: f64,
    /// The same of codes, in one cube of a multiprocessor. Up to 64 tokens fitted to few rows, from 128 on what many took.
    codes: f64,
    /// How long a tile of FP8 and of FP4 takes where experts divide the rows, unless it is trimmed.
    experts: [usize; 2],
}
const TILES: [Tile; 7] = [
    Tile { tokens: 256, divided: 256, trimmed: Some(100), block: 646.0, codes: 700.0, experts: [0, 0] },
    Tile { tokens: 192, divided: 200, trimmed: Some(98), block: 490.0, codes: 610.0, experts: [0, 0] },
    Tile { tokens: 160, divided: 170, trimmed: None, block: 415.0, codes: 560.0, experts: [0, 0] },
    Tile { tokens: 128, divided: 144, trimmed: None, block: 340.0, codes: 415.0, experts: [300, 312] },
    Tile { tokens: 96, divided: 128, trimmed: None, block: 280.0, codes: 330.0, experts: [240, 274] },
    Tile { tokens: 64, divided: 111, trimmed: None, block: 213.0, codes: 260.0, experts: [195, 221] },
    Tile { tokens: 32, divided: 101, trimmed: None, block: 158.0, codes: 370.0, experts: [168, 182] },
];
/// Tokens of a tile that experts in FP8 and FP4 alone have.
const OF_EXPERTS: usize = 96;

impl Tile {
    /// Nanoseconds of a block of channels in this format.
    fn block_of(&self, format: WeightFormat) -> f64 {
        if format.is_dense() { self.block } else { self.codes }
    }

    /// How long it takes where experts or heads divide the rows, where all of a multiprocessor is its own.
    fn divided_of(&self, division: Division, format: WeightFormat) -> usize {
        match (division, format) {
            (_, WeightFormat::Dense) => self.divided,
            (Division::Experts, WeightFormat::Fp8) => self.experts[0],
            (Division::Experts, WeightFormat::Fp4) => self.experts[1],
            _ => self.codes as usize / cubes(format, self.tokens, false) as usize,
        }
    }
}

/// Tokens of a tile at most, where registers have more than its sums: those of all parts before.
const MOST_BESIDE_OTHERS: usize = 128;
/// How long a tile of an expert takes that is trimmed to its tokens: each tile, and a hundred of its tokens; of fewer than so many tokens it
/// waits for the weights. They are rounded up by so many, on average.
const TRIMMED: f64 = 80.0;
const TRIMMED_HUNDRED: f64 = 73.0;
const LEAST_WIDTH: f64 = 144.0;
const TRIM: f64 = 16.0;
/// Rows between which the number of tiles may change.
pub(in crate::linear) const LEAST: usize = TILES[TILES.len() - 1].tokens;
/// Tokens of a tile that has enough arithmetic for the cache, and how many smaller tiles the cache serves in the time of one.
const FULL: usize = 128;
const L2_TILES: usize = 40;
/// Rows up to which channels in parts were measured, and channels of a part at least.
const SPLIT_ROWS: usize = 2048;
const SPLIT_CHANNELS: usize = 256;

/// The tiling that takes the least time by a model of it, whose constants are fitted to all tilings of 681 products; its choices are
/// 1.2 % from the best ones, on average.
pub(in crate::linear) fn dense_tiling(sizes: &LinearSizes, clusters: usize, in_parts: bool) -> Option<Tiling> {
    // Bytes a nanosecond, from the L2 cache and from memory.
    const L2: f64 = 11_700.0;
    const MEMORY: f64 = 3850.0;
    // The part of the shorter one of products and loads that is not hidden under the other.
    const BESIDE: f64 = 0.11;
    // Nanoseconds from one tile of a pair of cubes to its next one.
    const BETWEEN: f64 = 440.0;
    // How much longer the last pairs that share weights take, where all of their rows but one are absent.
    const ABSENT: f64 = 0.56;
    // Nanoseconds of a launch that adds up parts, and bytes a nanosecond of these.
    const ADD_UP: f64 = 1300.0;
    const PARTS: f64 = 4050.0;
    let &LinearSizes { rows, inputs, outputs, form, format, .. } = sizes;
    let weight_rows = terms(sizes) * outputs;
    let blocks = inputs.div_ceil(CHANNELS);
    let time = |tile: &Tile, tiling: Tiling| {
        let tiles = pairs_of_tiles([rows.div_ceil(tiling.tokens), weight_rows], form, tiling.shares);
        let blocks_of_tile = blocks.div_ceil(tiling.splits);
        let clusters = clusters * cubes(format, tiling.tokens, false) as usize;
        let rounds = (tiles * tiling.splits).div_ceil(clusters);
        let pair_rows = CUBES as usize * tiling.tokens;
        let absent = if tiling.shares == Shares::Tokens { 0 } else { rows.next_multiple_of(pair_rows) - rows };
        let last_pairs = (weight_rows.div_ceil(WEIGHT_ROWS) * tiling.splits) as f64 * absent as f64 / pair_rows as f64;
        let blocks_of_pair = (rounds as f64 + last_pairs * ABSENT / clusters as f64) * blocks_of_tile as f64;
        let products = blocks_of_pair * tile.block_of(format) + rounds as f64 * BETWEEN;
        let loaded = (tiles * blocks * pair_bytes(tiling, format)) as f64 / L2;
        let loads = loaded.max((sizes.form.matrix(inputs, weight_rows) * bits(format) / 8) as f64 / MEMORY);
        let parts = (tiling.splits * rows * weight_rows * 2 * size_of::<f32>()) as f64;
        let adds = if tiling.splits > 1 { ADD_UP + parts / PARTS } else { 0.0 };
        products.max(loads) + BESIDE * products.min(loads) + adds
    };
    let tilings = all_tilings(sizes, in_parts).map(|(tile, tiling)| (time(tile, tiling), tiling));
    tilings.min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, tiling)| tiling)
}

/// All that there are.
pub(in crate::linear) fn all_tilings(
    sizes: &LinearSizes,
    in_parts: bool,
) -> impl Iterator<Item = (&'static Tile, Tiling)> + use<> {
    let &LinearSizes { rows, inputs, division, form, format, .. } = sizes;
    let dense = division == Division::Dense && !form.gated;
    let most = if dense && rows <= SPLIT_ROWS { (inputs / SPLIT_CHANNELS).clamp(1, MOST_SPLITS) } else { 1 };
    let tiles = TILES.iter().filter(move |tile| !in_parts || tile.tokens <= MOST_BESIDE_OTHERS);
    let tiles = tiles.filter(move |tile| match division {
        Division::Dense => tile.tokens != OF_EXPERTS,
        Division::Experts if tile.tokens == OF_EXPERTS => !format.is_dense(),
        Division::Experts => tile.tokens <= MOST_BESIDE_OTHERS || tile.trimmed.is_some(),
        _ => tile.tokens.is_power_of_two(),
    });
    tiles.flat_map(move |tile| {
        let tokens = tile.tokens;
        // Small tiles wait for the weights, and may share them.
        let shares = dense && tokens < 256 && rows > tokens;
        let shares = if shares { Shares::Weights } else { Shares::Tokens };
        // Parts are added up one by one: each has cubes of its own, or none has.
        let splits = (1..=most).filter(move |&splits| !in_parts || [1, parts::PARTS].contains(&splits));
        splits.map(move |splits| (tile, Tiling { tokens, splits, shares, in_parts }))
    })
}

/// The tiling of rows that experts or heads divide.
pub(in crate::linear) fn divided_tiling(sizes: &LinearSizes, clusters: usize, in_parts: bool) -> Option<Tiling> {
    let &LinearSizes { matrices, outputs, format, .. } = sizes;
    let pairs = outputs.div_ceil(CUBES as usize * form::outputs(sizes.form));
    let cost = |tile: &Tile| {
        let (tokens, time) = (tile.tokens, tile.divided_of(sizes.division, format));
        match (sizes.division, tile.trimmed) {
            (Division::Experts, Some(hundred)) => {
                trimmed_time(sizes, tokens) * (hundred * trimmed_of(format)) as f64 / 1e4
            }
            (Division::Experts, None) => tiles_of_expert(sizes, tokens) * time as f64,
            // How often all pairs of cubes have a tile, the last time perhaps not all. Small tiles that share weights wait for the
            // L2 cache.
            _ => {
                let tiles = matrices * sizes.rows_each().div_ceil(tokens) * pairs;
                let waits = tokens < FULL && sizes.rows_each() > tokens;
                (tiles.div_ceil(clusters) * time).max(if waits { tiles * time / L2_TILES } else { 0 }) as f64
            }
        }
    };
    let tilings = all_tilings(sizes, in_parts).map(|(tile, tiling)| (cost(tile), tiling));
    tilings.min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, tiling)| tiling)
}

/// Tiles that an expert has, where any number of rows from half of the average on to half more than it is as frequent.
fn tiles_of_expert(sizes: &LinearSizes, tokens: usize) -> f64 {
    let (each, tokens) = (sizes.rows as f64 / sizes.matrices as f64, tokens as f64);
    // The integral of the number of tiles.
    let up_to = |rows: f64| {
        let full = (rows / tokens).floor();
        tokens * full * (full + 1.0) / 2.0 + (rows - full * tokens) * (full + 1.0)
    };
    (up_to(1.5 * each) - up_to(0.5 * each)) / each
}

/// How much longer trimmed tiles take in a format, of a hundred; but those of codes in the unit of `Tile::experts`.
fn trimmed_of(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense => 100,
        WeightFormat::Fp8 => 230,
        WeightFormat::Fp4 => 205,
    }
}

/// How long tiles take that are trimmed to the tokens of an expert.
fn trimmed_time(sizes: &LinearSizes, tokens: usize) -> f64 {
    let each = sizes.rows as f64 / sizes.matrices as f64;
    let tiles = (each / tokens as f64 + 0.25).max(1.0);
    let multiplied = (each + TRIM * tiles).max(LEAST_WIDTH * tiles);
    TRIMMED * tiles + multiplied * TRIMMED_HUNDRED / 100.0
}
