//! The products of a warp: its rows of the weights and the tokens of a tile.

use cubecl::prelude::*;

use super::WARP;
use super::form::{BLOCK, COPIES, COPY_BYTES, Form, WEIGHT_ROWS};
use super::ring::{Items, Maps, Ring};
use crate::linear::packed::{E2M1_FACTOR, e2m1_halves, e8m0_of_word};
use crate::linear::{FP8_COLUMNS, WeightFormat};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, matrix, warp};

/// Where FP8's scales are, f32, and the rows of their blocks. Launches make `ScalesLaunch`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Scales {
    pub numbers: &'static [f32],
    pub rows_log2: u32,
    pub across: u32,
    pub matrix: u32,
}

/// A warp's rows of the weights: of so many of a matrix, of a gated output of each half, those from `output` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct WeightPlace {
    pub expert: u32,
    pub output: u32,
    pub outputs: u32,
}

/// Scales of FP8 for the two halves of a warp's rows: a unit has those of every 32nd block of 128 channels.
#[derive(CubeType)]
struct Held {
    first: Array<f32>,
    second: Array<f32>,
}

#[cube]
impl Held {
    fn load(scales: &Scales, place: &WeightPlace, #[comptime] form: Form) -> Held {
        let turns = comptime!(form.inputs.div_ceil(FP8_COLUMNS * WARP));
        let mut held = Held { first: Array::<f32>::new(turns), second: Array::<f32>::new(turns) };
        if comptime!(form.format == WeightFormat::Fp8) {
            let mut second = place.output + comptime!(WEIGHT_ROWS as u32 / 2);
            if comptime!(form.linear.gated) {
                second = place.outputs + place.output;
            }
            let matrix = place.expert as usize * scales.matrix as usize;
            let across = scales.across as usize;
            let first = matrix + (place.output >> scales.rows_log2) as usize * across;
            let second = matrix + (second >> scales.rows_log2) as usize * across;
            #[unroll]
            for turn in 0..turns {
                // Past the last block, that one again: its codes are zeros.
                let block = min((UNIT_POS % 32) as usize + comptime!(turn * WARP), across - 1);
                held.first[turn] = scales.numbers[first + block];
                held.second[turn] = scales.numbers[second + block];
            }
        }
        held
    }

    /// Those of block `number`.
    fn scales(&self, number: u32, #[comptime] form: Form) -> (f32, f32) {
        let turns = comptime!(form.inputs.div_ceil(FP8_COLUMNS * WARP));
        let (mut first, mut second) = (self.first[0], self.second[0]);
        #[unroll]
        for turn in 1..turns {
            let has = number / 32 == comptime!(turn as u32);
            first = select(has, self.first[turn], first);
            second = select(has, self.second[turn], second);
        }
        (warp::shuffle::<f32>(first, number % 32), warp::shuffle::<f32>(second, number % 32))
    }
}

/// Multiplies the rows of an item by those of x, and loads what comes after its pieces: sums of rows `t / 4` and `t / 4 + 8`, of tokens
/// `t % 4 * 2` and the next. All units of a warp.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply(
    ring: &mut Ring,
    maps: &Maps,
    tiles: &[i32],
    items: &Items,
    scales: &Scales,
    place: &WeightPlace,
    rows_at: u32,
    #[comptime] form: Form,
) -> Vector<f32, Const<4>> {
    let (row, quad) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let own_row = row * comptime!(COPY_BYTES as u32);
    // FP8 has a block of codes in 32 bytes, FP4 in 16.
    let is_fp4 = comptime!(form.format == WeightFormat::Fp4);
    let own_word = if comptime!(is_fp4) { quad * 4 } else { quad % 2 * 8 };
    let own_unit = if comptime!(is_fp4) { row * 16 } else { (row ^ (quad / 2)) * 16 };
    let mut x_at = rows_at + row * comptime!(form.row_bytes() as u32) + quad * 16;
    let held = Held::load(scales, place, form);
    let mut totals = Vector::<f32, Const<4>>::new(0.0f32);
    let mut piece = 0u32;
    while piece < comptime!(form.pieces() as u32) {
        ring.wait();
        // The instruction is for all units together, and branches may have parted them, as far as PTX says.
        sync_plane();
        let codes_at = ring.codes() + own_row + own_word;
        let mut powers = Sequence::<Vector<u32, Const<4>>>::new();
        if comptime!(is_fp4) {
            let scales_at = ring.scales(form) + row * comptime!(form.scale_row_bytes() as u32);
            powers.push(matrix::load_16(scales_at, 0u32));
            powers.push(matrix::load_16(scales_at, comptime!((WEIGHT_ROWS / 2 * form.scale_row_bytes()) as u32)));
        }
        #[unroll]
        for copy in 0..COPIES {
            let mut words = Sequence::<Codes>::new();
            #[unroll]
            for block in 0..comptime!(form.blocks()) {
                let unit = comptime!((block * BLOCK / form.codes()) as u32) ^ own_unit;
                words.push(Codes::load(codes_at + unit, copy, form));
            }
            if comptime!(copy == COPIES - 1) {
                // All units have read the stage.
                sync_plane();
                ring.load(maps, tiles, items, form);
                ring.advance(form);
                sync_plane();
            }
            let mut part = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for block in 0..comptime!(form.blocks()) {
                let numbers = matrix::load_16(x_at, comptime!(((copy * form.blocks() + block) * 2 * BLOCK) as u32));
                let sums = words[block].multiply(numbers, part, form);
                if comptime!(is_fp4) {
                    let place = comptime!(copy * form.blocks() + block);
                    let first = e8m0_of_word(powers[0].extract(comptime!(place / 4)), comptime!(place % 4));
                    let second = e8m0_of_word(powers[1].extract(comptime!(place / 4)), comptime!(place % 4));
                    totals = scaled(totals, sums, first, second);
                } else {
                    part = sums;
                }
            }
            if comptime!(!is_fp4) {
                let number = piece * comptime!(COPIES as u32) + comptime!(copy as u32);
                let (first, second) = held.scales(number, form);
                totals = scaled(totals, part, first, second);
            }
        }
        x_at += comptime!((COPIES * form.copy_channels() * 2) as u32);
        piece = warp::next(piece);
    }
    if comptime!(is_fp4) { totals * Vector::new(comptime!(E2M1_FACTOR as f32).runtime()) } else { totals }
}

/// The codes of a block that a unit has of its two rows: eight neighbours of each.
#[derive(CubeType, Clone, Copy)]
struct Codes {
    own: Vector<u32, Const<2>>,
    other: Vector<u32, Const<2>>,
}

#[cube]
impl Codes {
    fn load(at: u32, #[comptime] copy: usize, #[comptime] form: Form) -> Codes {
        let own_at = comptime!((copy * COPY_BYTES * WEIGHT_ROWS) as u32);
        let other_at = comptime!(own_at + (COPY_BYTES * WEIGHT_ROWS / 2) as u32);
        if comptime!(form.format == WeightFormat::Fp4) {
            let own = Vector::<u32, Const<2>>::new(matrix::load_4(at, own_at));
            Codes { own, other: Vector::<u32, Const<2>>::new(matrix::load_4(at, other_at)) }
        } else {
            Codes { own: matrix::load_8(at, own_at), other: matrix::load_8(at, other_at) }
        }
    }

    /// Adds the products with eight numbers of a token.
    fn multiply(
        &self,
        numbers: Vector<u32, Const<4>>,
        sums: Vector<f32, Const<4>>,
        #[comptime] form: Form,
    ) -> Vector<f32, Const<4>> {
        let mut sums = sums;
        #[unroll]
        for step in 0..2usize {
            let own = decoded(self.own, step, form);
            let other = decoded(self.other, step, form);
            let mut rows = Sequence::<u32>::new();
            rows.push(own.0);
            rows.push(other.0);
            rows.push(own.1);
            rows.push(other.1);
            let mut columns = Sequence::<u32>::new();
            columns.push(numbers.extract(comptime!(2 * step)));
            columns.push(numbers.extract(comptime!(2 * step + 1)));
            let rows = math::vector::<u32, Const<4>>(&rows);
            sums = matrix::multiply_add(sums, rows, math::vector::<u32, Const<2>>(&columns), Elem::F16);
        }
        sums
    }
}

/// The numbers of four of eight codes in f16, but for a factor, in the order in which rows of x are written.
#[cube]
fn decoded(codes: Vector<u32, Const<2>>, #[comptime] step: usize, #[comptime] form: Form) -> (u32, u32) {
    if comptime!(form.format == WeightFormat::Fp4) {
        let word = codes.extract(0usize);
        let first = e2m1_halves(word >> comptime!(8 * step as u32));
        (first, e2m1_halves(word >> comptime!(8 * step as u32 + 4)))
    } else {
        let word = codes.extract(step);
        (math::e4m3_pair(word, false), math::e4m3_pair(word, true))
    }
}

/// Adds sums with the scales of their rows.
#[cube]
fn scaled(
    totals: Vector<f32, Const<4>>,
    sums: Vector<f32, Const<4>>,
    first: f32,
    second: f32,
) -> Vector<f32, Const<4>> {
    let mut scales = Vector::<f32, Const<4>>::new(first);
    scales.insert(2usize, second);
    scales.insert(3usize, second);
    totals + sums * scales
}
