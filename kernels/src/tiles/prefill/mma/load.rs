//! Asynchronous copies of queries, keys and values into shared memory.
//!
//! A row there is panels of 64 channels, 128 bytes each. The vectors of a row of a panel are permuted by the number of the row: the same
//! vector of eight rows in turn lies in different banks, for `ldmatrix` and for the copies.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::form::{Form, KEYS, PANEL_VECTORS, VECTOR};

/// Query rows of one sequence, and its keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    /// The first query token.
    pub query: u32,
    /// Query tokens; 0 where there is no tile.
    pub rows: u32,
    /// The first key token of the sequence.
    pub first_key: u32,
    /// Keys of the sequence.
    pub keys: u32,
}

/// Which keys of the sequence are in a block.
#[cube]
pub(crate) trait BlockRows {
    /// The position of the key in place `place + offset`; the number of keys or more where there is none.
    fn position(&self, place: usize, #[comptime] offset: usize) -> usize;
}

/// Keys side by side.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Consecutive {
    pub first: u32,
}

#[cube]
impl BlockRows for Consecutive {
    fn position(&self, place: usize, #[comptime] offset: usize) -> usize {
        self.first as usize + place + offset
    }
}

/// From a token to the next, and from a head to the next, in vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Strides {
    /// Query heads for each head of the keys.
    pub group_size: u32,
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
pub(crate) struct Source<'a, E: Float, V: Size> {
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
        strides: &Strides,
    ) -> Source<'a, E, V> {
        let own = UNIT_POS as usize % PANEL_VECTORS;
        let (query, key) = (tile.query as usize, tile.first_key as usize);
        let kv_head = (head / strides.group_size) as usize;
        let q_rows =
            Rows { start: query * strides.q_token + head as usize * strides.q_head + own, stride: strides.q_token };
        let k_rows = Rows { start: key * strides.k_token + kv_head * strides.k_head + own, stride: strides.k_token };
        let k_pe_rows = Rows { start: key * strides.k_pe_token + own, stride: strides.k_pe_token };
        let v_rows = Rows { start: key * strides.v_token + kv_head * strides.v_head + own, stride: strides.v_token };
        Source::<'a, E, V> { q, k, k_pe, v, q_rows, k_rows, k_pe_rows, v_rows }
    }

    /// Starts to copy the queries.
    pub fn start_queries(&self, memory: &mut Shared<[Vector<E, V>]>, tile: &Tile, #[comptime] form: Form) {
        let rows = Consecutive { first: 0u32.runtime() };
        copy_rows::<E, V, Consecutive>(
            self.q,
            &self.q_rows,
            memory,
            &rows,
            tile.rows,
            comptime!(Room::of_queries(form)),
        );
    }

    /// Starts to copy a block of keys.
    pub fn start_keys<R: BlockRows>(
        &self,
        memory: &mut Shared<[Vector<E, V>]>,
        tile: &Tile,
        block: &R,
        #[comptime] form: Form,
    ) {
        copy_rows::<E, V, R>(self.k, &self.k_rows, memory, block, tile.keys, comptime!(Room::of_keys(form)));
        if comptime!(form.shared_panels > 0) {
            let room = comptime!(Room::of_shared_keys(form));
            copy_rows::<E, V, R>(self.k_pe, &self.k_pe_rows, memory, block, tile.keys, room);
        }
    }

    /// Starts to copy a block of values. Where there is no key the weight is zero, but what is there may be NaN: such rows get zeros.
    pub fn start_values<R: BlockRows>(
        &self,
        memory: &mut Shared<[Vector<E, V>]>,
        tile: &Tile,
        block: &R,
        #[comptime] form: Form,
    ) {
        copy_rows::<E, V, R>(self.v, &self.v_rows, memory, block, tile.keys, comptime!(Room::of_values(form)));
    }
}

/// Where rows lie in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Room {
    /// The first vector.
    start: usize,
    rows: usize,
    /// Panels of a row; of these, which ones are meant.
    row_panels: usize,
    first_panel: usize,
    panels: usize,
    /// Rows of which the units of a cube copy a panel at once.
    pass: usize,
}

impl Room {
    fn new(start: usize, rows: usize, panels: usize, form: Form) -> Self {
        let pass = form.units() / PANEL_VECTORS;
        assert!(
            pass.is_multiple_of(8) && rows.is_multiple_of(pass),
            "a unit's rows are permuted alike, and all are copied"
        );
        Self { start, rows, row_panels: panels, first_panel: 0, panels, pass }
    }

    /// All rows of all panels, behind which the next may begin.
    fn end(self) -> usize {
        self.start + self.rows * self.row_panels * PANEL_VECTORS
    }

    fn of_queries(form: Form) -> Self {
        Self::new(0, form.rows, form.key_panels, form)
    }

    fn of_keys(form: Form) -> Self {
        let all = Self::new(Self::of_queries(form).end(), KEYS, form.key_panels, form);
        Self { panels: form.key_panels - form.shared_panels, ..all }
    }

    fn of_shared_keys(form: Form) -> Self {
        let own = Self::of_keys(form);
        Self { first_panel: own.panels, panels: form.shared_panels, ..own }
    }

    fn of_values(form: Form) -> Self {
        Self::new(Self::of_keys(form).end(), KEYS, form.value_panels, form)
    }
}

/// Bytes to the first key and the first value.
pub(crate) fn key_and_value_bytes(form: Form) -> (u32, u32) {
    let bytes = |room: Room| (room.start * VECTOR * 2) as u32;
    (bytes(Room::of_keys(form)), bytes(Room::of_values(form)))
}

/// Vectors of a tile of queries, a block of keys and one of values.
pub(crate) fn vectors(form: Form) -> usize {
    Room::of_values(form).end()
}

/// Starts to copy the rows of a block; zeros stand for those at `end` and behind it, which are not read.
#[cube]
fn copy_rows<E: Float, V: Size, R: BlockRows>(
    from: &[Vector<E, V>],
    from_rows: &Rows,
    memory: &mut Shared<[Vector<E, V>]>,
    block: &R,
    end: u32,
    #[comptime] room: Room,
) {
    let (own_row, own) = (UNIT_POS as usize / PANEL_VECTORS, UNIT_POS as usize % PANEL_VECTORS);
    let row_vectors = comptime!(room.row_panels * PANEL_VECTORS);
    let to = own_row * row_vectors + comptime!(room.start + room.first_panel * PANEL_VECTORS) + (own ^ (own_row % 8));
    #[unroll]
    for pass in 0..comptime!(room.rows / room.pass) {
        let row = block.position(own_row, comptime!(pass * room.pass));
        let to = to + comptime!(pass * room.pass * row_vectors);
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
