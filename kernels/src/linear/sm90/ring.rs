//! The stages of shared memory between the thread that loads blocks of channels and the warpgroups that multiply them.

use cubecl::prelude::*;

use super::packed::{Codes, PAIRS, Scales, decoded_words, finished};
use super::schedule::Place;
use super::{CHANNELS, CUBES, Form, GROUP, INTERLEAVED, Shares, WEIGHTS};
use crate::linear::parts::PARTS;
use crate::ptx::wgmma::descriptor;
use crate::ptx::{math, mbarrier, tma, warp, wgmma};

/// Where stages and their barriers are, and which one is next for this thread.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ring {
    weights_at: u32,
    tokens_at: u32,
    /// Barriers of stages that have been loaded.
    full: u32,
    /// Barriers of stages that no warp of both cubes needs any longer.
    empty: u32,
    stage: u32,
    /// How often the ring has been passed, modulo 2.
    phase: u32,
}

#[cube]
impl Ring {
    pub fn new(weights_at: u32, tokens_at: u32, barriers_at: u32, #[comptime] form: Form) -> Ring {
        let empty = barriers_at + comptime!(8 * form.stages());
        Ring { weights_at, tokens_at, full: barriers_at, empty, stage: 0u32, phase: 0u32 }
    }

    /// Initialises the barriers. One thread, before all synchronise.
    pub fn init(&self, #[comptime] form: Form) {
        #[unroll]
        for i in 0..comptime!(form.stages()) {
            mbarrier::init(self.full + i * 8, 1u32);
            mbarrier::init(self.empty + i * 8, comptime!(CUBES * 2 * GROUP / 32));
        }
        mbarrier::fence_init();
    }

    /// Loads the blocks of a tile: weights, and this cube's part of the tokens for both cubes. One thread.
    pub fn load(&mut self, x: u64, weight: u64, place: &Place, rank: u32, #[comptime] form: Form) {
        if comptime!(form.all_parts()) {
            let mut part = 0u32;
            while part < comptime!(PARTS as u32) {
                self.load_blocks(x, weight, place, part, rank, form);
                part = warp::next(part);
            }
        } else {
            self.load_blocks(x, weight, place, place.first_block, rank, form);
        }
    }

    /// Loads those from `first` on.
    fn load_blocks(&mut self, x: u64, weight: u64, place: &Place, first: u32, rank: u32, #[comptime] form: Form) {
        let mut block = first;
        while block < place.end_block {
            let bar = self.full + self.stage * 8;
            let channel = (block * comptime!(CHANNELS as u32)) as i32;
            // Of codes in bytes.
            let column = (block * comptime!(form.weight_columns())) as i32;
            mbarrier::wait(self.empty + self.stage * 8, self.phase ^ 1);
            let of_tokens = place.loaded(form) * comptime!(form.stage_blocks() * CHANNELS as u32 * 2);
            mbarrier::arrive_expect(bar, comptime!(form.weight_bytes()) + of_tokens);
            let tokens_at = self.tokens_at + self.stage * comptime!(form.token_bytes());
            let to = self.weights_at + self.stage * comptime!(form.weight_bytes());
            if comptime!(form.shares == Shares::Weights) {
                #[unroll]
                for i in 0..comptime!(form.stage_blocks()) {
                    let to = tokens_at + comptime!(i * form.block_token_bytes());
                    let channel = channel + comptime!((i * CHANNELS as u32) as i32);
                    tma::load_3d(to, x, bar, channel, place.first as i32, place.head as i32);
                }
                let half = rank * comptime!(form.loaded_weight_rows() as u32);
                let (to, row) = (to + half * comptime!(form.weight_row_bytes()), (place.output + half) as i32);
                tma::load_3d_multicast(to, weight, bar, column, row, place.expert as i32, 3u16);
            } else {
                let piece = comptime!(form.loaded_tokens() as u32);
                let mut token = rank * piece;
                if comptime!(form.is_trimmed()) {
                    // Every second piece of what there is.
                    while token < place.loaded(form) {
                        load_tokens(tokens_at, x, bar, channel, place, token);
                        token += comptime!(CUBES * form.loaded_tokens() as u32);
                    }
                } else {
                    #[unroll]
                    for i in 0..comptime!(form.stage_blocks()) {
                        let to = tokens_at + comptime!(i * form.block_token_bytes());
                        load_tokens(to, x, bar, channel + comptime!((i * CHANNELS as u32) as i32), place, token);
                    }
                }
                if comptime!(form.linear.gated) {
                    let eight = place.output / comptime!(INTERLEAVED as u32);
                    tma::load_5d(to, weight, bar, column, 0i32, 0i32, eight as i32, place.expert as i32);
                } else {
                    tma::load_3d(to, weight, bar, column, place.output as i32, place.expert as i32);
                }
            }
            self.advance(form);
            block = following(block, form);
        }
    }

    /// The products of a tile, of the warpgroup's half of the weights. All units of a warpgroup.
    pub fn multiply<A: Size>(
        &mut self,
        scales: &Scales,
        codes: &Codes,
        place: &Place,
        group: u32,
        #[comptime] form: Form,
    ) -> Vector<f32, A> {
        if comptime!(form.all_parts()) {
            let mut total = Vector::<f32, A>::zeroed();
            let mut part = 0u32;
            while part < comptime!(PARTS as u32) {
                let sum = self.multiply_blocks::<A>(place, part, group, comptime!(form.tokens), form);
                total = add::<A>(total, sum);
                part = warp::next(part);
            }
            total
        } else if comptime!(form.is_trimmed()) {
            let mut acc = Vector::<f32, A>::zeroed();
            #[unroll]
            for i in 0..comptime!(form.widths().len()) {
                let width = comptime!(form.widths()[i]);
                if place.width(form) == comptime!(width as u32) {
                    if comptime!(form.format.is_dense()) {
                        acc = self.multiply_blocks::<A>(place, place.first_block, group, width, form);
                    } else {
                        acc = self.multiply_codes::<A>(scales, codes, place, group, width, form);
                    }
                }
            }
            acc
        } else if comptime!(form.format.is_dense()) {
            self.multiply_blocks::<A>(place, place.first_block, group, comptime!(form.tokens), form)
        } else if comptime!(form.stage_blocks() > 1) {
            self.multiply_stages::<A>(scales, codes, place, group, form)
        } else {
            self.multiply_codes::<A>(scales, codes, place, group, comptime!(form.tokens), form)
        }
    }

    /// Those of the blocks from `first` on, for so many tokens; the other accumulators stay zeros.
    fn multiply_blocks<A: Size>(
        &mut self,
        place: &Place,
        first: u32,
        group: u32,
        #[comptime] width: usize,
        #[comptime] form: Form,
    ) -> Vector<f32, A> {
        let mut acc = Vector::<f32, A>::zeroed();
        let mut block = first;
        while block < place.end_block {
            mbarrier::wait(self.full + self.stage * 8, self.phase);
            let weights = descriptor(self.rows_at(group, form), comptime!(WEIGHTS));
            let issued = wgmma::mma_ss::<A>(acc, weights, self.tokens(form), comptime!(form.products_of(width)));
            // The other warpgroup's products fill the tensor cores until this one has issued the next.
            acc = wgmma::wait::<A>(issued, 0u32);
            release(self.empty_at());
            self.advance(form);
            block = following(block, form);
        }
        acc
    }

    /// Those of a tile with at least one block, whose weights are in blocks of codes: a block is decoded under the products of the one
    /// before, and the scales of the one after it are on their way.
    fn multiply_codes<A: Size>(
        &mut self,
        scales: &Scales,
        codes: &Codes,
        place: &Place,
        group: u32,
        #[comptime] width: usize,
        #[comptime] form: Form,
    ) -> Vector<f32, A> {
        let size!(D) = comptime!(decoded_words(form));
        let last = place.end_block - 1;
        let mut block = place.first_block;
        let mut acc = Vector::<f32, A>::zeroed();
        let factors = codes.factors(scales, block, form);
        let mut coming = codes.factors(scales, min(block + 1, last), form);
        let decoded = self.decode::<D>(codes, factors, group, form);
        let mut weights = finished::<D>(decoded, factors, 0usize, form);
        while block < last {
            let issued =
                wgmma::mma_rs::<A, Const<PAIRS>>(acc, weights, self.tokens(form), comptime!(form.products_of(width)));
            let empty = self.empty_at();
            self.advance(form);
            let after = codes.factors(scales, min(block + 2, last), form);
            let decoded = self.decode::<D>(codes, coming, group, form);
            acc = wgmma::wait::<A>(issued, 0u32);
            release(empty);
            weights = finished::<D>(decoded, coming, 0usize, form);
            coming = after;
            block = warp::next(block);
        }
        let issued =
            wgmma::mma_rs::<A, Const<PAIRS>>(acc, weights, self.tokens(form), comptime!(form.products_of(width)));
        acc = wgmma::wait::<A>(issued, 0u32);
        release(self.empty_at());
        self.advance(form);
        acc
    }

    /// The same where a stage has two blocks. Sums over the channels of one that share a scale take it.
    fn multiply_stages<A: Size>(
        &mut self,
        scales: &Scales,
        codes: &Codes,
        place: &Place,
        group: u32,
        #[comptime] form: Form,
    ) -> Vector<f32, A> {
        let size!(D) = comptime!(decoded_words(form));
        let last = place.end_block - 2;
        let mut block = place.first_block;
        let mut total = Vector::<f32, A>::zeroed();
        let mut factors = codes.factors(scales, block, form);
        let decoded = self.decode::<D>(codes, factors, group, form);
        let mut weights = finished::<D>(decoded, factors, 0usize, form);
        while block < last {
            let coming = codes.factors(scales, block + 2, form);
            let issued = self.multiply_both::<A>(total, weights, codes, factors, group, form);
            let empty = self.empty_at();
            self.advance(form);
            let decoded = self.decode::<D>(codes, coming, group, form);
            let acc = wgmma::wait::<A>(issued, 0u32);
            release(empty);
            weights = finished::<D>(decoded, coming, 0usize, form);
            total = if comptime!(form.scales_sums()) { add_scaled::<A>(total, acc, factors, form) } else { acc };
            factors = coming;
            block += 2;
        }
        let issued = self.multiply_both::<A>(total, weights, codes, factors, group, form);
        let acc = wgmma::wait::<A>(issued, 0u32);
        release(self.empty_at());
        self.advance(form);
        if comptime!(form.scales_sums()) { add_scaled::<A>(total, acc, factors, form) } else { acc }
    }

    /// Waits for this stage, and decodes its first block.
    fn decode<D: Size>(
        &self,
        codes: &Codes,
        factors: Vector<u32, Const<4>>,
        group: u32,
        #[comptime] form: Form,
    ) -> Vector<u32, D> {
        self.wait();
        codes.decode::<D>(self.rows_at(group, form), factors, 0usize, form)
    }

    /// The products with both blocks of a stage, of which the first one is decoded; those with the second one are under way.
    /// They are added to `total`, unless sums take a scale behind them.
    fn multiply_both<A: Size>(
        &self,
        total: Vector<f32, A>,
        weights: Vector<u32, Const<PAIRS>>,
        codes: &Codes,
        factors: Vector<u32, Const<4>>,
        group: u32,
        #[comptime] form: Form,
    ) -> Vector<f32, A> {
        let size!(D) = comptime!(decoded_words(form));
        let tokens_at = self.tokens_at + self.stage * comptime!(form.token_bytes());
        let second_at = tokens_at + comptime!(form.block_token_bytes());
        let layout = comptime!(form.products().b);
        let first = descriptor(tokens_at, layout);
        let issued = if comptime!(form.scales_sums()) {
            wgmma::mma_rs_zero::<A, Const<PAIRS>>(weights, first, comptime!(form.products()))
        } else {
            wgmma::mma_rs::<A, Const<PAIRS>>(total, weights, first, comptime!(form.products()))
        };
        let second = descriptor(second_at, layout);
        let decoded = codes.decode::<D>(self.rows_at(group, form), factors, 1usize, form);
        let acc = wgmma::wait::<A>(issued, 0u32);
        let weights = finished::<D>(decoded, factors, 1usize, form);
        wgmma::mma_rs::<A, Const<PAIRS>>(acc, weights, second, comptime!(form.products()))
    }

    /// Waits until this stage has been loaded.
    fn wait(&self) {
        mbarrier::wait(self.full + self.stage * 8, self.phase);
    }

    /// The tokens of this stage.
    fn tokens(&self, #[comptime] form: Form) -> u64 {
        let tokens_at = self.tokens_at + self.stage * comptime!(form.token_bytes());
        descriptor(tokens_at, comptime!(form.products().b))
    }

    /// A warpgroup's rows of the weights of this stage.
    fn rows_at(&self, group: u32, #[comptime] form: Form) -> u32 {
        let half = group * comptime!(form.weight_bytes() / 2);
        self.weights_at + self.stage * comptime!(form.weight_bytes()) + half
    }

    /// The barrier at which this stage is given back.
    fn empty_at(&self) -> u32 {
        self.empty + self.stage * 8
    }

    fn advance(&mut self, #[comptime] form: Form) {
        let wraps = self.stage == comptime!(form.stages() - 1);
        self.stage = select(wraps, 0u32, self.stage + 1);
        self.phase ^= u32::cast_from(wraps);
    }
}

/// Loads tokens of a tile from this one on, for both cubes of the cluster.
#[cube]
fn load_tokens(tokens_at: u32, x: u64, bar: u32, channel: i32, place: &Place, token: u32) {
    let (to, row) = (tokens_at + token * comptime!(CHANNELS as u32 * 2), (place.first + token) as i32);
    tma::load_3d_multicast(to, x, bar, channel, row, place.head as i32, 3u16);
}

/// Gives a stage back, at its barriers in both cubes of the cluster: one lane for each.
#[cube]
fn release(empty: u32) {
    let lane = UNIT_POS % 32;
    mbarrier::arrive_at_after_reads_if(empty, lane % CUBES, lane < CUBES);
}

/// The block behind this one: in parts, of the same part.
#[cube]
fn following(block: u32, #[comptime] form: Form) -> u32 {
    if comptime!(form.in_parts) {
        warp::next(block) + comptime!(PARTS as u32 - 1)
    } else if comptime!(form.stage_blocks() == 1) {
        warp::next(block)
    } else {
        block + comptime!(form.stage_blocks())
    }
}

#[cube]
fn add<A: Size>(total: Vector<f32, A>, part: Vector<f32, A>) -> Vector<f32, A> {
    let count = A::value().comptime();
    let mut sums = Sequence::<f32>::new();
    #[unroll]
    for i in 0..count {
        sums.push(total.extract(i) + part.extract(i));
    }
    math::vector::<f32, A>(&sums)
}

/// Adds products with codes, which take their scale here: numbers of a unit are of two rows of the weights in turns of two.
#[cube]
fn add_scaled<A: Size>(
    total: Vector<f32, A>,
    acc: Vector<f32, A>,
    factors: Vector<u32, Const<4>>,
    #[comptime] form: Form,
) -> Vector<f32, A> {
    let count = A::value().comptime();
    let mut sums = Sequence::<f32>::new();
    #[unroll]
    for i in 0..count {
        let factor = f32::reinterpret(factors.extract(comptime!(i / 2 % 2)));
        if comptime!(i < form.tokens / 2) {
            sums.push(fma(acc.extract(i), factor, total.extract(i)));
        } else {
            sums.push(total.extract(i));
        }
    }
    math::vector::<f32, A>(&sums)
}
