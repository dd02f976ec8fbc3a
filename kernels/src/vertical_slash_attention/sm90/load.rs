//! The loading warpgroup: queries and whole tiles of keys by tile loads, other keys by asynchronous copies of 16 bytes.
//!
//! All four warps walk through the lists of both warpgroups in the same way. A tile that both lists name is loaded once.

use cubecl::prelude::*;

use super::form::{Form, GROUP, GROUPS, KEYS, LOADERS, PANEL_BYTES, WARP_KEYS, query_bytes, stage_bytes, stages};
use super::list::{Blocks, Others, PAST};
use super::stages::{END, GATHERED, Notes, OF_FIRST, OF_SECOND, Stages};
use super::work::{Index, Schedule, Work, rows};
use crate::ptx::copy::copy_or_zero;
use crate::ptx::{fence, mbarrier, tma, warp};
use crate::tiles::prefill::form::PANEL;
use crate::tiles::prefill::wgmma::epilogue::VECTOR;
use crate::vertical_slash_attention::rows::{Queries, Sizes};

/// Copies of a row of a panel.
const PANEL_VECTORS: u32 = (PANEL / VECTOR) as u32;
/// Rows of which a warp copies a panel at once.
const PASS: u32 = 32 / PANEL_VECTORS;

/// A position past the end of every sequence.
const NOWHERE: u32 = 1 << 31;
/// Of tiles since the last one of a warpgroup that has none: more than count.
const NEVER: u32 = 1 << 31;

/// Where queries, keys and values come from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sources<'a, E: Float, V: Size> {
    /// Maps of them.
    pub q: u64,
    pub k: u64,
    pub v: u64,
    /// Keys and values once more, for single rows.
    pub keys: &'a [Vector<E, V>],
    pub values: &'a [Vector<E, V>],
    pub kv_heads: u32,
    /// Query heads for each of them.
    pub group_size: u32,
}

#[cube]
impl<'a, E: Float, V: Size> Sources<'a, E, V> {
    /// With the maps of queries, keys and values.
    pub fn new(
        maps: (u64, u64, u64),
        keys: &'a [Vector<E, V>],
        values: &'a [Vector<E, V>],
        kv_heads: u32,
        group_size: u32,
    ) -> Sources<'a, E, V> {
        let (q, k, v) = maps;
        Sources::<'a, E, V> { q, k, v, keys, values, kv_heads, group_size }
    }
}

/// The room for the queries of a warpgroup, and the barriers that say that they have come, and that it needs them no longer.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct QueryRoom {
    pub at: u32,
    pub full: u32,
    pub empty: u32,
}

#[cube]
impl QueryRoom {
    /// That of a warpgroup among those of all, which have two barriers each.
    pub fn of_group(all_at: u32, barriers_at: u32, group: u32, #[comptime] form: Form) -> QueryRoom {
        let full = barriers_at + group * 16;
        QueryRoom { at: all_at + group * comptime!(query_bytes(form)), full, empty: full + 8 }
    }

    /// Initialises the barriers. One thread, before all synchronise.
    pub fn init(&self) {
        mbarrier::init(self.full, 1u32);
        mbarrier::init(self.empty, comptime!(GROUP / 32));
    }
}

/// A loading warp.
#[derive(CubeType)]
pub(super) struct Loader<'a, E: Float, V: Size> {
    sources: Sources<'a, E, V>,
    room: QueryRoom,
    stages: Stages,
    warp: u32,
    /// The head of the keys, and the token that is key 0 of the sequence.
    kv_head: u32,
    first_key: u32,
    /// Works so far.
    works: u32,
    /// Tiles since each warpgroup's last one.
    since_first: u32,
    since_second: u32,
    /// A bit for each stage to which single rows have been copied last.
    copied: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl<'a, E: Float, V: Size> Loader<'a, E, V> {
    pub fn new(
        sources: Sources<'a, E, V>,
        room: QueryRoom,
        stages: Stages,
        warp: u32,
        #[comptime] form: Form,
    ) -> Loader<'a, E, V> {
        Loader::<'a, E, V> {
            sources,
            room,
            stages,
            warp,
            kv_head: 0u32,
            first_key: 0u32,
            works: 0u32,
            since_first: 0u32,
            since_second: 0u32,
            copied: 0u32,
            form,
        }
    }

    /// Loads all work of the cube, as far ahead as there are stages.
    pub fn run(
        &mut self,
        schedule: &Schedule,
        index: &Index<'_>,
        sizes: &Sizes,
        notes: &mut Notes,
        #[comptime] aligned: bool,
        #[comptime] causal: bool,
    ) {
        let mut round = 0u32;
        while schedule.has_round(round) {
            let number = schedule.number(round);
            if number < schedule.count {
                let work = Work::new(schedule, number);
                let first = work.queries(index, sizes, 0u32);
                if first.first < first.end {
                    self.load(&work, &first, index, sizes, notes, aligned, causal);
                }
            }
            round += 1;
        }
    }

    /// The queries of a work, and its tiles.
    #[allow(clippy::too_many_arguments)]
    fn load(
        &mut self,
        work: &Work,
        first: &Queries,
        index: &Index<'_>,
        sizes: &Sizes,
        notes: &mut Notes,
        #[comptime] aligned: bool,
        #[comptime] causal: bool,
    ) {
        let second = work.queries(index, sizes, 1u32);
        let (list_a, list_b) = (work.list(first, index, sizes), work.list(&second, index, sizes));
        self.kv_head = work.head / self.sources.group_size;
        self.first_key = first.kv.first;
        let mut blocks_a = Blocks::new(list_a, sees(first, causal), aligned);
        let mut blocks_b = Blocks::new(list_b, sees(&second, causal), aligned);
        let mut others_a = Others::new(list_a, self.warp, aligned);
        let mut others_b = Others::new(list_b, self.warp, aligned);
        let past = i32::new(comptime!(PAST as i64));
        self.since_first = 0u32;
        self.since_second = select(list_b.places() > 0, 0u32, NEVER.runtime());
        self.load_queries(work, first, &second);
        blocks_a.begin();
        blocks_b.begin();
        // Lanes have looked up entries of their own.
        sync_plane();
        let (mut next_a, mut next_b) = (blocks_a.first(), blocks_b.first());
        while min(next_a, next_b) < past {
            let tile = min(next_a, next_b);
            let due = self.due();
            let (of_a, of_b) = (due == 0 && next_a == tile, due == 0 && next_b == tile);
            let mark = due + u32::cast_from(of_a) * OF_FIRST + u32::cast_from(of_b) * OF_SECOND;
            if due != 0 || tile >= 0 {
                self.load_block(select(due == 0, tile as u32, NOWHERE.runtime()), first.kv.len, mark, notes);
                self.count(mark);
            }
            blocks_a.advance_if(of_a);
            blocks_b.advance_if(of_b);
            sync_plane();
            next_a = blocks_a.first();
            next_b = blocks_b.first();
        }
        // Parts of a row have one list.
        let same = first.row == second.row && second.first < second.end;
        let of_a = select(same, comptime!(OF_FIRST | OF_SECOND), OF_FIRST.runtime());
        // In turn, for both warpgroups to have something to do.
        let mut turn_of_b = false;
        while others_a.has_more() || (others_b.has_more() && !same) {
            let mut mark = self.due();
            let mut position = u32::MAX.runtime();
            if mark == 0 {
                if others_a.has_more() && !(turn_of_b && others_b.has_more()) {
                    position = others_a.take();
                    mark = of_a;
                    turn_of_b = !same;
                } else {
                    position = others_b.take();
                    mark = OF_SECOND.runtime();
                    turn_of_b = false;
                }
            }
            self.gather(position, mark, notes);
            self.count(mark);
        }
        self.stages.open(notes, 0u32, END.runtime(), self.warp);
        if warp::elect() {
            self.stages.close();
        }
        self.stages.advance();
    }

    /// For whom a tile without keys is due: a warpgroup keeps the stage of its last tile until it has found the next one, and finds none
    /// behind those that the stages hold.
    fn due(&self) -> u32 {
        let most = comptime!(stages(self.form) - 2);
        u32::cast_from(self.since_first == most) * OF_FIRST + u32::cast_from(self.since_second == most) * OF_SECOND
    }

    /// Counts a tile.
    fn count(&mut self, mark: u32) {
        self.since_first = select(mark & OF_FIRST == 0, self.since_first + 1, 0u32);
        self.since_second = select(mark & OF_SECOND == 0, self.since_second + 1, 0u32);
    }

    /// Keys side by side: by tile loads, unless the sequence ends among them.
    fn load_block(&mut self, first: u32, keys: u32, mark: u32, notes: &mut Notes) {
        let position = first + self.warp * WARP_KEYS + UNIT_POS % WARP_KEYS;
        if first + comptime!(KEYS as u32) <= keys {
            self.load_whole(first, position, mark, notes);
        } else {
            self.gather(select(position < keys, position, u32::MAX.runtime()), mark, notes);
        }
    }

    fn load_whole(&mut self, first: u32, position: u32, mark: u32, notes: &mut Notes) {
        self.stages.open(notes, position, mark, self.warp);
        let stage = self.stages.stage();
        let copied = self.copied & (1u32 << stage);
        self.copied ^= copied;
        if warp::elect() {
            if self.warp == 0 {
                let bar = self.stages.full_at();
                let (head, row) = (self.kv_head as i32, (self.first_key + first) as i32);
                let (keys_at, values_at) = (self.stages.keys_at(stage), self.stages.values_at(stage));
                // The copies of all warps, which have been waited for.
                if copied != 0 {
                    fence::async_shared();
                }
                mbarrier::expect(bar, comptime!(stage_bytes(self.form)).runtime());
                load_panels(keys_at, self.sources.k, bar, head, row, comptime!(self.form.key_panels));
                load_panels(values_at, self.sources.v, bar, head, row, comptime!(self.form.value_panels));
            }
            self.stages.close();
        }
        self.stages.advance();
    }

    /// Keys anywhere: the warp's first lanes have their positions, the greatest number where there is none. Zeros stand for these.
    fn gather(&mut self, position: u32, mark: u32, notes: &mut Notes) {
        self.stages.open(notes, position, mark | GATHERED, self.warp);
        let stage = self.stages.stage();
        self.copied |= 1u32 << stage;
        let (keys_at, values_at) = (self.stages.keys_at(stage), self.stages.values_at(stage));
        let own = UNIT_POS % PANEL_VECTORS;
        #[unroll]
        for pass in 0..comptime!(WARP_KEYS / PASS) {
            let row = comptime!(pass * PASS) + UNIT_POS % 32 / PANEL_VECTORS;
            let position = warp::shuffle::<u32>(position, row);
            let is_key = position != u32::MAX;
            // No row behind the last one, where a sequence without keys would begin.
            let token = select(is_key, self.first_key + position, 0u32);
            let from = token as usize * self.sources.kv_heads as usize + self.kv_head as usize;
            // A panel's rows have 128 bytes, with the swizzle of 128 bytes.
            let to = (self.warp * WARP_KEYS + row) * comptime!(PANEL_VECTORS * 16) + (own ^ (row % 8)) * 16;
            let bytes = select(is_key, 16u32, 0u32);
            copy_row::<E, V>(self.sources.keys, from, keys_at + to, bytes, comptime!(self.form.key_panels));
            copy_row::<E, V>(self.sources.values, from, values_at + to, bytes, comptime!(self.form.value_panels));
        }
        self.stages.close_with_copies();
        self.stages.advance();
    }

    /// Loads the queries when the warpgroups have those of the work before in registers. The first warps have a warpgroup's each.
    fn load_queries(&mut self, work: &Work, first: &Queries, second: &Queries) {
        if self.warp < GROUPS {
            mbarrier::wait(self.room.empty, (self.works % 2) ^ 1);
            sync_plane();
            if warp::elect() {
                let row = first.all.first + select(self.warp == 0, first.first, second.first);
                let (map, bar, head) = (self.sources.q, self.room.full, work.head as i32);
                mbarrier::arrive_expect(bar, comptime!(query_bytes(self.form)).runtime());
                load_panels(self.room.at, map, bar, head, row as i32, comptime!(self.form.key_panels));
            }
        }
        self.works += 1;
    }
}

/// How many positions the queries of a warpgroup see.
#[cube]
fn sees(queries: &Queries, #[comptime] causal: bool) -> u32 {
    let mut sees = u32::MAX.runtime();
    if comptime!(causal) {
        sees = max(queries.position() + rows(queries) as i32, 0i32) as u32;
    }
    sees
}

/// Loads the panels of 64 rows of a head. One lane.
#[cube]
fn load_panels(to: u32, map: u64, bar: u32, head: i32, row: i32, #[comptime] panels: usize) {
    #[unroll]
    for panel in 0..panels {
        let channel = comptime!((panel * PANEL) as i32).runtime();
        tma::load_3d(to + comptime!(panel as u32 * PANEL_BYTES), map, bar, channel, head, row);
    }
}

/// Starts to copy this unit's vector of each panel of a row.
#[cube]
fn copy_row<E: Float, V: Size>(rows: &[Vector<E, V>], row: usize, to: u32, bytes: u32, #[comptime] panels: usize) {
    let start = row * comptime!(panels * PANEL_VECTORS as usize) + (UNIT_POS % PANEL_VECTORS) as usize;
    #[unroll]
    for panel in 0..panels {
        let (from, place) = comptime!((panel as u32 * PANEL_VECTORS * 16, panel as u32 * PANEL_BYTES));
        copy_or_zero(&rows[start..start + 1], from, to, place, bytes);
    }
}

const _: () = assert!(WARP_KEYS.is_multiple_of(PASS) && LOADERS * WARP_KEYS == KEYS as u32, "all rows are copied");
