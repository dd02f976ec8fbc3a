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
//!
//! Codes of FP8 are copied as they are, 16 channels in 16 bytes, and become numbers when a unit takes them out of shared memory
//! (`keys.rs`); their scales are copied beside them. Codes are half as long, so that twice as many stages are as many bytes on their way.

mod keys;
mod queries;

use cubecl::cmma::MmaDefinition;
use cubecl::ir::AddressType;
use cubecl::prelude::*;

use self::keys::{Ring, copy_keys};
use self::queries::Queries;
use super::form::{Form as TopKForm, LOAD, Load};
use super::plain::rank;
use super::problem::{LightningIndexArgs, one_each, visible_keys};
use super::select;
use super::top_k::{self, choose_of_row};
use crate::cache_rows::Fp8Layout;
use crate::common::keys::SequencePages;
use crate::common::last_cube::{counters, is_last};
use crate::common::launch::{dummy, share};
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
/// Channels that four units load at once, and of codes.
pub(super) const CHUNK: usize = 4 * VECTOR;
pub(super) const CODE_CHUNK: usize = 2 * CHUNK;
/// Words of a piece, which a unit copies at once.
pub(super) const PIECE: usize = 4;
/// Stages of a plane for matrix instructions, where they fit. With the planes of two cubes, three of them on their way are 96
/// KiB for 128 channels: three times what an H200 can deliver to a multiprocessor within the time that a load takes.
const STAGES: usize = 4;
/// The same of codes.
const CODE_STAGES: usize = 2 * STAGES;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Groups of 8 heads.
    pub(super) head_steps: usize,
    /// Groups of 32 channels.
    pub(super) chunks: usize,
    /// Groups of 16 keys that a plane has in shared memory.
    pub(super) stages: usize,
    /// Where codes and scales are, if keys are not dense.
    pub(super) codes: Option<Fp8Layout>,
    /// How the last cube of a query token chooses among its keys, if it does.
    pub(super) chooses: Option<TopKForm>,
}

impl Form {
    /// With as many stages as there is room for; two are the fewest.
    pub(super) fn with_stages(self, shared_bytes: usize) -> Option<Self> {
        let most = if self.codes.is_some() { CODE_STAGES } else { STAGES };
        let forms = (2..=most).rev().map(|stages| Self { stages, ..self });
        forms.into_iter().find(|form| form.shared_bytes() <= shared_bytes)
    }

    /// Pieces of a key that a unit has in a stage.
    fn key_pieces(&self) -> usize {
        if self.codes.is_some() { self.chunks / 2 } else { self.chunks }
    }

    /// All of them: of two keys.
    fn pieces(&self) -> usize {
        2 * self.key_pieces()
    }

    fn has_scales(&self) -> bool {
        self.codes.is_some()
    }

    /// The parts of keys that have scales.
    fn layout(&self) -> Fp8Layout {
        self.codes.expect("keys with scales")
    }

    fn shared_bytes(&self) -> usize {
        let scales = if self.has_scales() { size_of::<f32>() } else { 0 };
        PLANES * self.stages * LANES * (self.pieces() * PIECE * size_of::<u32>() + scales)
    }
}

/// Scores the keys of `rows` query tokens, from `first_row` on, and says whether they are chosen, too.
pub(super) fn launch(
    client: &Client,
    args: &LightningIndexArgs,
    form: Form,
    address: AddressType,
    [first_row, rows]: [usize; 2],
) -> bool {
    let shares = select::mma_shares(client, &args.sizes, rows);
    let mut are_chosen = false;
    for chooses in top_k::behind_scores(client, args, [rows, LANES * PLANES]) {
        launch_form(client, args, Form { chooses, ..form }, address, [first_row, rows, shares]);
        are_chosen = chooses.is_some();
    }
    are_chosen
}

/// The same; `shares` cubes share the keys of each query token.
fn launch_form(
    client: &Client,
    args: &LightningIndexArgs,
    form: Form,
    address: AddressType,
    [first_row, rows, shares]: [usize; 3],
) {
    let sizes = &args.sizes;
    let (cubes, counters) = match form.chooses {
        Some(_) => (CubeCount::Static((rows * shares) as u32, 1, 1), counters(client)),
        None => (one_each(client, rows * shares), dummy(client)),
    };
    // SAFETY: the buffers have the sizes that the arguments state, and slots are clamped to the cache.
    unsafe {
        score_mma_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_2d(LANES as u32, PLANES as u32),
            address,
            VECTOR,
            share(&args.q),
            share(args.keys.buffer()),
            share(&args.page_table),
            share(&args.head_weights),
            share(&args.visible),
            share(&args.scores),
            share(&args.indices),
            counters,
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
    keys: &[u32],
    page_table: &[i32],
    head_weights: &[W],
    visible: &[i32],
    ranks: &mut [Vector<u32, Load>],
    indices: &mut [i32],
    counters: &mut [u32],
    sizes: ScoreSizes,
    scale: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
    #[define(W)] _weights_elem: ElemType,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let mut ring = Ring::new(form);
    // This unit's rows of a product, and its channels.
    let row = (UNIT_POS_X / 4) as usize;
    let quad = (UNIT_POS_X % 4) as usize;
    let token = sizes.first_row + CUBE_POS / sizes.shares;
    let mut count = 0usize.runtime();
    if comptime!(form.chooses.is_some()).runtime() || CUBE_POS < sizes.rows * sizes.shares {
        count = visible_keys(visible, token, sizes.max_keys);
    }
    if count > sizes.k as usize {
        let scores = ranks.with_vector_size_mut::<Const<1>>();
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
                copy_keys(keys, &mut ring, own, other, ahead as u32, form);
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
                copy_keys(keys, &mut ring, own, other, turn, form);
            }
            // None where there are no keys: groups are counted.
            commit_copies();
            // Only the pages, for the next turn: to compute with them would be to wait for them.
            own_page = table.page(page_table, ahead + jump + row);
            other_page = table.page(page_table, ahead + jump + row + M / 2);
            wait_for_copies(comptime!(form.stages as u32 - 1));
            let sums = queries.weigh(&def, &ring, turn, form);
            let at = (token - sizes.first_row) * sizes.stride + first + row;
            // The scale of the key that this unit writes.
            let score = ring.with_scale(quad_sum(sums.own), turn, form) * scale;
            let other_score = ring.with_scale(quad_sum(sums.other), turn, form) * scale;
            // Whole loads of ranks, for the selection to read: what is past the last key is not looked at.
            let load = first + row / LOAD * LOAD;
            if quad == 0 && load < count {
                scores[at] = Vector::new(rank(score));
            }
            if quad == 1 && load + M / 2 < count {
                scores[at + M / 2] = Vector::new(rank(other_score));
            }
            // All lanes execute the products together.
            sync_plane();
            first += jump;
            turn += 1;
        }
    }
    if comptime!(form.chooses.is_some()) {
        // There are as many cubes as these, and none that would end before.
        sync_plane();
        let own_row = CUBE_POS / sizes.shares;
        if is_last(counters, own_row, sizes.shares) {
            let pages = SequencePages {
                table_row: token / sizes.query_len * sizes.max_pages,
                page_shift: sizes.page_shift,
                slot_count: sizes.slot_count,
            };
            let loads = own_row * sizes.stride / LOAD;
            let choice = comptime!(form.chooses.unwrap());
            choose_of_row(&*ranks, page_table, indices, token, count, loads, pages, sizes.k, choice);
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

    use crate::cache_rows::{OFFLINE_FP8_KEYS, RowFormat};
    use crate::lightning_index::form::Output;
    use crate::offline::{Arch, Entry, form};
    let dim = CubeDim::new_2d(LANES as u32, PLANES as u32);
    let chooses = TopKForm {
        units: LANES * PLANES,
        plane: LANES,
        loads: 4,
        again: false,
        candidates: false,
        output: Output::Slots,
    };
    let entry = |(kind, rows, chooses): (FloatKind, RowFormat, Option<TopKForm>)| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let (name, codes) = match rows {
            RowFormat::Dense if chooses.is_some() => ("lightning_index.score_mma.chooses", None),
            RowFormat::Dense => ("lightning_index.score_mma", None),
            RowFormat::Fp8(layout) => ("lightning_index.score_mma.fp8", Some(layout)),
        };
        let form = Form { head_steps: 8, chunks: 4, stages: 2, codes, chooses };
        let form = form.with_stages(usize::MAX).expect("room for all");
        let sizes = || ScoreSizesLaunch::new(0, 1, 1, 1, 1, 64, 64, 64, 6, 1);
        let form = form!(score_mma_kernel, dim, [bits, VECTOR, _, _, _, _, _, _, _, _, sizes(), 1.0, form, elem, elem]);
        Entry::of(kind, name, form).on(|arch| arch != Arch::Sm75).unchecked()
    };
    let forms = [(RowFormat::Dense, None), (OFFLINE_FP8_KEYS, None), (RowFormat::Dense, Some(chooses))];
    let kinds = [FloatKind::F16, FloatKind::BF16];
    forms.into_iter().flat_map(|(rows, chooses)| kinds.map(|kind| entry((kind, rows, chooses)))).collect()
}
