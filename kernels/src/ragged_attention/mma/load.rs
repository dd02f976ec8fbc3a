//! Asynchronous copies of queries, keys and values into shared memory.
//!
//! A row there is panels of 64 channels, 128 bytes each. The vectors of a row of a panel are permuted by the number of the row: the same
//! vector of eight rows in turn lies in different banks, for `ldmatrix` and for the copies.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::form::{Form, KEYS, PANEL_VECTORS, ROWS, UNITS, VECTOR};
use super::tile::Tile;

/// Rows of which the units of a cube copy a panel at once.
const PASS: usize = UNITS / PANEL_VECTORS;

/// The sizes of a launch. Strides are in vectors.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Sizes {
    pub tokens: u32,
    pub keys: u32,
    pub sequences: u32,
    pub slots: u32,
    /// How many keys a row sees at most, the last ones.
    pub most_seen: i32,
    /// Query heads for each head of the keys.
    pub group_size: u32,
    /// From a token to the next, and from a head to the next.
    pub q_token: usize,
    pub q_head: usize,
    pub k_token: usize,
    pub k_head: usize,
    pub k_pe_token: usize,
    pub v_token: usize,
    pub v_head: usize,
}

/// Rows of a tensor: where the first one begins, with this unit's own vector, and how far the next one is.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    start: usize,
    stride: usize,
}

/// Where queries, keys and values of a tile come from.
#[derive(CubeType)]
pub(super) struct Source<'a, E: Float, V: Size> {
    q: &'a [Vector<E, V>],
    k: &'a [Vector<E, V>],
    /// The last panels of all heads' keys.
    k_pe: &'a [Vector<E, V>],
    v: &'a [Vector<E, V>],
    q_rows: Rows,
    k_rows: Rows,
    k_pe_rows: Rows,
    v_rows: Rows,
}

#[cube]
impl<'a, E: Float, V: Size> Source<'a, E, V> {
    pub fn new(
        q: &'a [Vector<E, V>],
        k: &'a [Vector<E, V>],
        k_pe: &'a [Vector<E, V>],
        v: &'a [Vector<E, V>],
        tile: &Tile,
        head: u32,
        sizes: &Sizes,
    ) -> Source<'a, E, V> {
        let own = UNIT_POS as usize % PANEL_VECTORS;
        let (query, key) = (tile.query as usize, tile.first_key as usize);
        let kv_head = (head / sizes.group_size) as usize;
        let q_rows = Rows { start: query * sizes.q_token + head as usize * sizes.q_head + own, stride: sizes.q_token };
        let k_rows = Rows { start: key * sizes.k_token + kv_head * sizes.k_head + own, stride: sizes.k_token };
        let k_pe_rows = Rows { start: key * sizes.k_pe_token + own, stride: sizes.k_pe_token };
        let v_rows = Rows { start: key * sizes.v_token + kv_head * sizes.v_head + own, stride: sizes.v_token };
        Source::<'a, E, V> { q, k, k_pe, v, q_rows, k_rows, k_pe_rows, v_rows }
    }

    /// Starts to copy the queries.
    pub fn start_queries(&self, memory: &mut Shared<[Vector<E, V>]>, tile: &Tile, #[comptime] form: Form) {
        copy_rows::<E, V>(self.q, &self.q_rows, memory, 0u32, tile.rows, comptime!(Room::of_queries(form)));
    }

    /// Starts to copy a block of keys.
    pub fn start_keys(&self, memory: &mut Shared<[Vector<E, V>]>, tile: &Tile, block: u32, #[comptime] form: Form) {
        let first = block * comptime!(KEYS as u32);
        copy_rows::<E, V>(self.k, &self.k_rows, memory, first, tile.keys, comptime!(Room::of_keys(form)));
        if comptime!(form.shared_panels > 0) {
            let room = comptime!(Room::of_shared_keys(form));
            copy_rows::<E, V>(self.k_pe, &self.k_pe_rows, memory, first, tile.keys, room);
        }
    }

    /// Starts to copy a block of values. Weights of keys past the end of the sequence are zero, but what is there may be NaN: they get
    /// zeros.
    pub fn start_values(&self, memory: &mut Shared<[Vector<E, V>]>, tile: &Tile, block: u32, #[comptime] form: Form) {
        let first = block * comptime!(KEYS as u32);
        copy_rows::<E, V>(self.v, &self.v_rows, memory, first, tile.keys, comptime!(Room::of_values(form)));
    }
}

/// Where rows lie in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Room {
    /// The first vector.
    start: usize,
    rows: usize,
    /// Panels of a row; of these, which ones are meant.
    row_panels: usize,
    first_panel: usize,
    panels: usize,
}

impl Room {
    fn new(start: usize, rows: usize, panels: usize) -> Self {
        Self { start, rows, row_panels: panels, first_panel: 0, panels }
    }

    /// All rows of all panels, behind which the next may begin.
    fn end(self) -> usize {
        self.start + self.rows * self.row_panels * PANEL_VECTORS
    }

    fn of_queries(form: Form) -> Self {
        Self::new(0, ROWS, form.key_panels)
    }

    fn of_keys(form: Form) -> Self {
        let all = Self::new(Self::of_queries(form).end(), KEYS, form.key_panels);
        Self { panels: form.key_panels - form.shared_panels, ..all }
    }

    fn of_shared_keys(form: Form) -> Self {
        let own = Self::of_keys(form);
        Self { first_panel: own.panels, panels: form.shared_panels, ..own }
    }

    fn of_values(form: Form) -> Self {
        Self::new(Self::of_keys(form).end(), KEYS, form.value_panels)
    }
}

/// Bytes to the first key and the first value.
pub(super) fn key_and_value_bytes(form: Form) -> (u32, u32) {
    let bytes = |room: Room| (room.start * VECTOR * 2) as u32;
    (bytes(Room::of_keys(form)), bytes(Room::of_values(form)))
}

/// Vectors of a tile of queries, a block of keys and one of values.
pub(super) fn vectors(form: Form) -> usize {
    Room::of_values(form).end()
}

/// Starts to copy rows from `first` on; zeros stand for those from `end` on, which are not read.
#[cube]
fn copy_rows<E: Float, V: Size>(
    from: &[Vector<E, V>],
    from_rows: &Rows,
    memory: &mut Shared<[Vector<E, V>]>,
    first: u32,
    end: u32,
    #[comptime] room: Room,
) {
    let (own_row, own) = (UNIT_POS as usize / PANEL_VECTORS, UNIT_POS as usize % PANEL_VECTORS);
    let row_vectors = comptime!(room.row_panels * PANEL_VECTORS);
    let to = own_row * row_vectors + comptime!(room.start + room.first_panel * PANEL_VECTORS) + (own ^ (own_row % 8));
    #[unroll]
    for pass in 0..comptime!(room.rows / PASS) {
        let row = first as usize + own_row + comptime!(pass * PASS);
        let to = to + comptime!(pass * PASS * row_vectors);
        if row < end as usize {
            let at = from_rows.start + row * from_rows.stride;
            #[unroll]
            for panel in 0..room.panels {
                let (at, to) = (at + comptime!(panel * PANEL_VECTORS), to + comptime!(panel * PANEL_VECTORS));
                copy_async(&from[at..at + 1], &mut memory[to..to + 1], comptime!(VECTOR as u32));
            }
        } else {
            #[unroll]
            for panel in 0..room.panels {
                memory[to + comptime!(panel * PANEL_VECTORS)] = Vector::new(E::from_int(0));
            }
        }
    }
}

const _: () = assert!(PASS.is_multiple_of(8), "a unit's rows are permuted alike");
