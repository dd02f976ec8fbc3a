//! Ranks of the scores of one query token with matrix instructions, for f16 and bf16.
//!
//! A plane keeps the index queries of a token in registers, all heads, and goes over the keys, 16 at a time. A product sums
//! over the channels in any order as long as both factors have the same: so a unit takes 16 bytes in a row of its keys, which
//! serve two steps of 16 channels.
//!
//! There are registers for two planes on each of a multiprocessor's four parts, too few to hide the way to the memory. So each
//! plane has a ring of stages in shared memory, 16 keys in each, copied asynchronously: while one is computed, the others are
//! on their way. A unit reads the very pieces that it has copied. So nothing but its own copies stands between the two, planes
//! do not wait for each other, and pieces lie in the order of the units, in different banks.
//!
//! What a copy needs first, the slots of its keys, is looked up one step before.

mod queries;

use cubecl::cmma::MmaDefinition;
use cubecl::ir::AddressType;
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use self::queries::Queries;
use super::form::LOAD;
use super::plain::rank;
use super::problem::{LightningIndexArgs, one_each, visible_keys};
use crate::common::launch::share;
use crate::ptx::copy::{commit_copies, wait_for_copies};
use crate::ptx::warp;

/// Units of a plane. The matrix instructions are defined for this number.
pub(super) const LANES: usize = 32;
/// Planes of a cube: half of what a multiprocessor has registers for, so that one cube computes while another begins.
pub(super) const PLANES: usize = 4;
/// The matrix instruction: 16 keys, 8 heads, 16 channels.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
pub(super) const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Channels that four units load at once.
pub(super) const CHUNK: usize = 4 * VECTOR;
/// Stages of a plane for matrix instructions, where they fit. With the planes of two cubes, three of them on their way are 96
/// KiB for 128 channels: three times what an H200 can deliver to a multiprocessor within the time that a load takes.
pub(super) const STAGES: usize = 4;
/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Groups of 8 heads.
    pub(super) head_steps: usize,
    /// Groups of 32 channels.
    pub(super) chunks: usize,
    /// Groups of 16 keys that a plane has in shared memory.
    pub(super) stages: usize,
}

impl Form {
    /// Vectors that a unit has in a stage: of two keys.
    fn pieces(&self) -> usize {
        2 * self.chunks
    }

    pub(super) fn shared_bytes(&self) -> usize {
        PLANES * self.stages * self.pieces() * LANES * VECTOR * 2
    }
}

/// Scores the keys of `rows` query tokens, from `first_row` on; `shares` cubes share those of each.
pub(super) fn launch(
    client: &Client,
    args: &LightningIndexArgs,
    form: Form,
    address: AddressType,
    [first_row, rows, shares]: [usize; 3],
) {
    let sizes = &args.sizes;
    // SAFETY: the buffers have the sizes that the arguments state, and slots are clamped to the cache.
    unsafe {
        score_mma_kernel::launch_unchecked(
            client,
            one_each(client, rows * shares),
            CubeDim::new_2d(LANES as u32, PLANES as u32),
            address,
            VECTOR,
            share(&args.q),
            share(&args.keys),
            share(&args.page_table),
            share(&args.head_weights),
            share(&args.visible),
            share(&args.scores),
            ScoreSizesLaunch::new(
                first_row,
                rows,
                shares,
                sizes.query_len,
                sizes.max_pages,
                sizes.max_keys() as u32,
                sizes.score_stride(),
                sizes.slots() as u32,
                sizes.page_size.ilog2(),
                sizes.k as u32,
            ),
            args.scale,
            form,
            sizes.elem,
            args.weights_elem,
        );
    }
}

/// Cube `r * shares + s` takes every `shares`-th group of keys of query token `r`, from group `s` on; each of its planes has 16
/// keys of a group.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn score_mma_kernel<E: Float, W: Float, V: Size>(
    q: &[Vector<E, V>],
    keys: &[Vector<E, V>],
    page_table: &[i32],
    head_weights: &[W],
    visible: &[i32],
    scores: &mut [u32],
    sizes: ScoreSizes,
    scale: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
    #[define(W)] _weights_elem: ElemType,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    // [planes, stages, pieces, units]
    let mut ring =
        Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(PLANES * form.stages * form.pieces() * LANES), 128usize);
    // This unit's rows of a product, and its channels.
    let row = (UNIT_POS_X / 4) as usize;
    let quad = (UNIT_POS_X % 4) as usize;
    let token = sizes.first_row + CUBE_POS / sizes.shares;
    let mut count = 0usize.runtime();
    if CUBE_POS < sizes.rows * sizes.shares {
        count = visible_keys(visible, token, sizes.max_keys);
    }
    if count > sizes.k as usize {
        let table = Table {
            row: token / sizes.query_len * sizes.max_pages,
            page_shift: sizes.page_shift,
            slot_count: sizes.slot_count,
            last_key: count - 1,
        };
        // From one group of this cube to the next.
        let jump = sizes.shares * comptime!(PLANES * M);
        let mut first = (CUBE_POS % sizes.shares * PLANES + UNIT_POS_Y as usize) * M;
        // Keys before queries: they are the longer way.
        let mut pages = Sequence::<u32>::new();
        #[unroll]
        for ahead in 0..form.stages {
            pages.push(table.page(page_table, first + ahead * jump + row));
            pages.push(table.page(page_table, first + ahead * jump + row + M / 2));
        }
        #[unroll]
        for ahead in 0..comptime!(form.stages - 1) {
            if first + ahead * jump < count {
                let key = first + ahead * jump + row;
                let own = table.slot(pages[comptime!(2 * ahead)], key);
                let other = table.slot(pages[comptime!(2 * ahead + 1)], key + M / 2);
                copy_keys::<E, V>(keys, &mut ring, own, other, ahead as u32, form);
            }
            commit_copies();
        }
        // Of the next 16 keys that are copied.
        let mut own_page = pages[comptime!(2 * form.stages - 2)];
        let mut other_page = pages[comptime!(2 * form.stages - 1)];

        let queries = Queries::<E, V>::load::<W>(q, head_weights, token, form);
        // Groups of keys computed so far.
        let mut turn = 0u32;
        while first < count {
            // The stage that was computed last is filled anew.
            let ahead = first + comptime!(form.stages - 1) * jump;
            if ahead < count {
                let own = table.slot(own_page, ahead + row);
                let other = table.slot(other_page, ahead + row + M / 2);
                let turn = turn + comptime!(form.stages as u32 - 1);
                copy_keys::<E, V>(keys, &mut ring, own, other, turn, form);
            }
            // None where there are no keys: groups are counted.
            commit_copies();
            // Only the pages, for the next turn: to compute with them would be to wait for them.
            own_page = table.page(page_table, ahead + jump + row);
            other_page = table.page(page_table, ahead + jump + row + M / 2);
            wait_for_copies(comptime!(form.stages as u32 - 1));
            let sums = queries.weigh(&def, &ring, turn, form);
            let at = (token - sizes.first_row) * sizes.stride + first + row;
            let score = quad_sum(sums.own) * scale;
            let other_score = quad_sum(sums.other) * scale;
            // Whole loads of ranks, for the selection to read: what is past the last key is not looked at.
            let load = first + row / LOAD * LOAD;
            if quad == 0 && load < count {
                scores[at] = rank(score);
            }
            if quad == 1 && load + M / 2 < count {
                scores[at + M / 2] = rank(other_score);
            }
            // All lanes execute the products together.
            sync_plane();
            first += jump;
            turn += 1;
        }
    }
}

/// The sizes that the kernel works with.
#[derive(CubeType, CubeLaunch)]
struct ScoreSizes {
    /// The first query token that is scored, and how many are.
    first_row: usize,
    rows: usize,
    /// Cubes that share the keys of a query token.
    shares: usize,
    query_len: usize,
    max_pages: usize,
    max_keys: u32,
    /// Ranks from one query token to the next.
    stride: usize,
    slot_count: u32,
    /// The logarithm of the page size.
    page_shift: u32,
    k: u32,
}

/// Where a sequence's keys are.
#[derive(CubeType)]
struct Table {
    /// Where its page ids begin.
    row: usize,
    page_shift: u32,
    slot_count: u32,
    /// The last key that is seen.
    last_key: usize,
}

#[cube]
impl Table {
    /// The page that a key is in. Past the last key that is seen, that one again.
    fn page(&self, page_table: &[i32], key: usize) -> u32 {
        page_table[self.row + (min(key, self.last_key) as u32 >> self.page_shift) as usize] as u32
    }

    /// The slot of a key in its page; the last one if the page is not there.
    fn slot(&self, page: u32, key: usize) -> u32 {
        let offset = min(key, self.last_key) as u32 & ((1u32 << self.page_shift) - 1);
        min((page << self.page_shift) + offset, self.slot_count - 1)
    }
}

/// Starts to copy this unit's pieces of the 16 keys of a turn, two of which are this unit's.
#[cube]
fn copy_keys<E: Float, V: Size>(
    keys: &[Vector<E, V>],
    ring: &mut Shared<[Vector<E, V>]>,
    own_slot: u32,
    other_slot: u32,
    turn: u32,
    #[comptime] form: Form,
) {
    let vectors = comptime!(4 * form.chunks);
    let quad = (UNIT_POS_X % 4) as usize;
    let own = own_slot as usize * vectors + quad;
    let other = other_slot as usize * vectors + quad;
    let to = first_piece(turn, form);
    #[unroll]
    for chunk in 0..form.chunks {
        let (from, to) = (own + comptime!(4 * chunk), to + comptime!(2 * chunk * LANES));
        copy_async(&keys[from..from + 1], &mut ring[to..to + 1], comptime!(VECTOR as u32));
        let (from, to) = (other + comptime!(4 * chunk), to + LANES);
        copy_async(&keys[from..from + 1], &mut ring[to..to + 1], comptime!(VECTOR as u32));
    }
}

/// Where this unit's pieces for a turn begin in the ring.
#[cube]
fn first_piece(turn: u32, #[comptime] form: Form) -> usize {
    let stage = UNIT_POS_Y as usize * form.stages + (turn % comptime!(form.stages as u32)) as usize;
    stage * comptime!(form.pieces() * LANES) + UNIT_POS_X as usize
}

/// The sum over four units side by side.
#[cube]
fn quad_sum(value: f32) -> f32 {
    let pair = value + warp::shuffle_xor::<f32>(value, 1u32);
    pair + warp::shuffle_xor::<f32>(pair, 2u32)
}

/// With DeepSeek's 64 heads of 128 channels.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, form};
    let dim = CubeDim::new_2d(LANES as u32, PLANES as u32);
    let forms = [FloatKind::F16, FloatKind::BF16].into_iter().map(|kind| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let form = Form { head_steps: 8, chunks: 4, stages: STAGES };
        let form = form!(
            score_mma_kernel,
            dim,
            [
                bits,
                VECTOR,
                _,
                _,
                _,
                _,
                _,
                _,
                ScoreSizesLaunch::new(0, 1, 1, 1, 1, 64, 64, 64, 6, 1),
                1.0,
                form,
                elem,
                elem
            ]
        );
        Entry::of(kind, "lightning_index.score_mma", form).on(|arch| arch != Arch::Sm75).unchecked()
    });
    forms.collect()
}
