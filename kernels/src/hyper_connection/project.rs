//! What a mixer reads, for a few tokens: the streams after a block, and their products with the rows of the mixer.
//!
//! A cube has [`SLICE`] channels of all streams, of a tile of tokens. It mixes the block's output into them, and multiplies them with
//! those channels of all rows. So the products of a token come in parts, one of each slice, and the sum of squares beside them, which the
//! norm of the products needs; what reads them adds them up ([`sum_parts`]). Slices depend on nothing, and the parts have one order: a
//! token's bits do not depend on the others.

use cubecl::prelude::*;

use super::post::mixed_stream;
use super::select::{self, SLICE, Shape};
use super::{MixArgs, Sizes};
use crate::common::launch::{address_type, dummy};
use crate::experts_mlp::combine::{Place, TokenExperts};
use crate::residual_norm::{Summand, UNITS};

/// Units that share a row of the mixer.
const LANES: usize = 8;
/// Rows that the units of a cube have at a time.
const ROWS: usize = UNITS / LANES;
/// Loads of a unit that are under way together.
const AHEAD: usize = 8;

/// Arguments of [`launch_project`]; E is `sizes.elem`.
pub struct ProjectArgs {
    /// E `[tokens, n, width]`.
    pub streams: BufferArg,
    /// What is mixed into them before, if there is something.
    pub mix: Option<MixArgs>,
    /// f32 `[rows, n * width]`: the mixer.
    pub weight: BufferArg,
    /// f32 `[tokens, slices, rows + 1]` with the number of [`slices`](super::slices), written: the products of each slice of the
    /// channels, and behind them the sum of the squares of these channels.
    pub parts: BufferArg,
    /// Rows of the mixer: at most `(2 + n) n`.
    pub rows: usize,
    /// Sizes.
    pub sizes: Sizes,
}

/// Writes `parts`, and the mixed streams. Without elements nothing is launched.
pub fn launch_project(client: &Client, args: ProjectArgs) {
    let Sizes { tokens, width, elem, .. } = args.sizes;
    if tokens * width == 0 {
        return;
    }
    let Bound { streams, weight, outputs, indices, expert_weights, shared, post, comb, mixed, parts, experts, form } =
        args.bind(client);
    let Shape { vector, vectors } = select::choose(client.properties(), width, elem);
    let slices = select::slices(width);
    let address = address_type(client, &[&streams, &weight, &outputs, &parts]);
    project_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens.div_ceil(form.tokens) * slices, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address,
        vector,
        select::weight_vector(client.properties(), width, elem),
        streams,
        weight,
        outputs,
        indices,
        expert_weights,
        shared,
        post,
        comb,
        mixed,
        parts,
        tokens,
        vectors,
        slices,
        experts,
        form,
        elem,
    );
}

/// [`ProjectArgs`] as a kernel takes them. Of what there is not it has something that is not read.
pub(super) struct Bound {
    pub streams: BufferArg,
    pub weight: BufferArg,
    pub outputs: BufferArg,
    pub indices: BufferArg,
    pub expert_weights: BufferArg,
    pub shared: BufferArg,
    pub post: BufferArg,
    pub comb: BufferArg,
    pub mixed: BufferArg,
    pub parts: BufferArg,
    pub experts: usize,
    pub form: Form,
}

impl ProjectArgs {
    pub(super) fn bind(self, client: &Client) -> Bound {
        let Self { streams, mix, weight, parts, rows, sizes: Sizes { tokens, streams: n, .. } } = self;
        let tokens = select::tile(client.properties(), tokens, n);
        let mut form = Form { streams: n, rows, tokens, mixes: mix.is_some(), ..Form::READ };
        let any = || dummy(client);
        let (mut indices, mut expert_weights, mut shared, mut experts) = (any(), any(), any(), 0);
        let (outputs, post, comb, mixed) = match mix {
            None => (any(), any(), any(), any()),
            Some(MixArgs { output, post, comb, mixed }) => {
                let rows = match output {
                    Summand::Rows(rows) => rows,
                    Summand::Experts(outputs) => {
                        (indices, expert_weights, experts) = (outputs.indices, outputs.weights, outputs.experts);
                        (shared, form.place) = outputs.shared.bind(client);
                        form.top_k = outputs.top_k;
                        outputs.rows
                    }
                };
                (rows, post, comb, mixed)
            }
        };
        Bound { streams, weight, outputs, indices, expert_weights, shared, post, comb, mixed, parts, experts, form }
    }
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub streams: usize,
    pub rows: usize,
    /// Tokens of a tile.
    pub tokens: usize,
    /// Whether there is something to mix in: of experts, if there are `top_k` of them.
    pub mixes: bool,
    pub top_k: usize,
    pub place: Place,
}

impl Form {
    /// Of streams that are in memory.
    pub const READ: Self = Self { streams: 1, rows: 1, tokens: 1, mixes: false, top_k: 0, place: Place::None };
}

/// The tokens of a cube, and its slice of the channels.
#[derive(CubeType)]
struct Tile {
    first: usize,
    count: usize,
    slice: usize,
    slices: usize,
    /// Vectors of the mixer in a stream's channels.
    width: usize,
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn project_kernel<E: Float, V: Size, N: Size>(
    streams: &[Vector<E, V>],
    weight: &[Vector<f32, N>],
    outputs: &[Vector<E, V>],
    indices: &[i32],
    expert_weights: &[f32],
    shared: &[Vector<E, V>],
    post: &[f32],
    comb: &[f32],
    mixed: &mut [Vector<E, V>],
    parts: &mut [f32],
    tokens: usize,
    vectors: usize,
    slices: usize,
    experts: usize,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    project_slice(
        streams,
        weight,
        outputs,
        indices,
        expert_weights,
        shared,
        post,
        comb,
        mixed,
        parts,
        tokens,
        vectors,
        slices,
        experts,
        form,
    );
}

/// What a cube does, by its first [`UNITS`] units; the others only wait with them.
#[cube]
pub(super) fn project_slice<E: Float, V: Size, N: Size>(
    streams: &[Vector<E, V>],
    weight: &[Vector<f32, N>],
    outputs: &[Vector<E, V>],
    indices: &[i32],
    expert_weights: &[f32],
    shared: &[Vector<E, V>],
    post: &[f32],
    comb: &[f32],
    mixed: &mut [Vector<E, V>],
    parts: &mut [f32],
    tokens: usize,
    vectors: usize,
    slices: usize,
    experts: usize,
    #[comptime] form: Form,
) {
    let (n, size) = comptime!((form.streams, form.tokens));
    let lanes = V::value().comptime();
    let weight_lanes = N::value().comptime();
    let first = CUBE_POS / slices * size;
    let mut count = 0usize.runtime();
    if first < tokens {
        count = min(size, tokens - first);
    }
    let width = vectors * comptime!(lanes / weight_lanes);
    let tile = Tile { first, count, slice: CUBE_POS % slices, slices, width };
    // They come from far away, and need nothing that the other loads bring.
    let weights = load(weight, &tile, 0usize, form);

    let mut values = Shared::<[Vector<f32, N>]>::new_slice(comptime!(size * n * SLICE / weight_lanes));
    let (of_token, of_stream) = comptime!((SLICE / lanes, SLICE / weight_lanes));
    let mut item = UNIT_POS as usize;
    while item < comptime!(size * of_token) {
        let (number, at) = (item / of_token, item % of_token);
        let (token, column) = (first + number, tile.slice * of_token + at);
        let to = number * comptime!(n * of_stream) + at * comptime!(lanes / weight_lanes);
        if number >= count {
            #[unroll]
            for k in 0..n {
                store::<V, N>(&mut values, Vector::<f32, V>::new(0.0f32), to + k * of_stream);
            }
        } else if column < vectors {
            let from = token * n * vectors + column;
            let mut own = Sequence::<Vector<f32, V>>::new();
            #[unroll]
            for k in 0..n {
                own.push(Vector::cast_from(streams[from + k * vectors]));
            }
            if comptime!(form.mixes) {
                let output = if comptime!(form.top_k == 0) {
                    outputs[token * vectors + column]
                } else {
                    let chosen = TokenExperts::read(indices, expert_weights, token, experts, form.top_k);
                    chosen.sum(outputs, shared, column, vectors, tokens * vectors, form.place)
                };
                let added = Vector::<f32, V>::cast_from(output);
                #[unroll]
                for j in 0..n {
                    let stream = mixed_stream::<E, V>(&own, added, post, comb, token, j, n);
                    mixed[from + j * vectors] = stream;
                    store::<V, N>(&mut values, Vector::<f32, V>::cast_from(stream), to + j * of_stream);
                }
            } else {
                #[unroll]
                for k in 0..n {
                    store::<V, N>(&mut values, own[k], to + k * of_stream);
                }
            }
        }
        item += UNITS;
    }
    sync_cube();

    let mut sums = Shared::<[f32]>::new_slice(comptime!(size * UNITS));
    write_products(&values, &weights, &mut sums, parts, &tile, 0usize, form);
    #[unroll]
    for round in 1..comptime!((form.rows + 1).div_ceil(ROWS)) {
        let weights = load(weight, &tile, round, form);
        sync_cube();
        write_products(&values, &weights, &mut sums, parts, &tile, round, form);
    }
}

/// Writes channels of a stream as vectors like those of the mixer.
#[cube]
fn store<V: Size, N: Size>(values: &mut Shared<[Vector<f32, N>]>, channels: Vector<f32, V>, at: usize) {
    let lanes = V::value().comptime();
    let weight_lanes = N::value().comptime();
    #[unroll]
    for piece in 0..comptime!(lanes / weight_lanes) {
        let mut vector = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for lane in 0..weight_lanes {
            vector.insert(lane, channels.extract(comptime!(piece * weight_lanes + lane)));
        }
        values[at + piece] = vector;
    }
}

/// What a unit has of its row of a round: of each stream, every so many vectors of the slice. Past the last row or channel, the last.
#[cube]
fn load<N: Size>(
    weight: &[Vector<f32, N>],
    tile: &Tile,
    round: usize,
    #[comptime] form: Form,
) -> Sequence<Vector<f32, N>> {
    let weight_lanes = N::value().comptime();
    let unit = UNIT_POS as usize;
    let row = min(round * ROWS + unit / LANES, comptime!(form.rows - 1));
    let first = tile.slice * comptime!(SLICE / weight_lanes) + unit % LANES;
    let mut weights = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..form.streams {
        #[unroll]
        for i in 0..comptime!(SLICE / weight_lanes / LANES) {
            let column = min(first + i * LANES, tile.width - 1);
            weights.push(weight[(row * form.streams + k) * tile.width + column]);
        }
    }
    weights
}

/// Writes the products of a round of rows. The row behind the last one is the token's own channels: their squares.
#[cube]
fn write_products<N: Size>(
    values: &Shared<[Vector<f32, N>]>,
    weights: &Sequence<Vector<f32, N>>,
    sums: &mut Shared<[f32]>,
    parts: &mut [f32],
    tile: &Tile,
    round: usize,
    #[comptime] form: Form,
) {
    let weight_lanes = N::value().comptime();
    let (vectors, each) = comptime!((SLICE / weight_lanes, SLICE / weight_lanes / LANES));
    let unit = UNIT_POS as usize;
    let (place, lane) = (unit / LANES, unit % LANES);
    let is_of_squares = round * ROWS + place == form.rows;
    let mut own = Array::<f32>::new(form.tokens);
    #[unroll]
    for t in 0..form.tokens {
        own[t] = 0.0f32;
    }
    #[unroll]
    for k in 0..form.streams {
        #[unroll]
        for i in 0..each {
            let at = lane + i * LANES;
            if tile.slice * vectors + at < tile.width {
                #[unroll]
                for t in 0..form.tokens {
                    let channels = values[(t * form.streams + k) * vectors + at];
                    let mut factors = weights[comptime!(k * each + i)];
                    if is_of_squares {
                        factors = channels;
                    }
                    #[unroll]
                    for l in 0..weight_lanes {
                        own[t] += channels.extract(l) * factors.extract(l);
                    }
                }
            }
        }
    }
    if unit < UNITS {
        #[unroll]
        for t in 0..form.tokens {
            sums[(t * LANES + lane) * ROWS + place] = own[t];
        }
    }
    sync_cube();
    let mut item = unit;
    while item < tile.count * ROWS {
        let (t, place) = (item / ROWS, item % ROWS);
        let row = round * ROWS + place;
        if row <= form.rows {
            let mut sum = 0.0f32;
            #[unroll]
            for l in 0..LANES {
                sum += sums[(t * LANES + l) * ROWS + place];
            }
            parts[((tile.first + t) * tile.slices + tile.slice) * comptime!(form.rows + 1) + row] = sum;
        }
        item += UNITS;
    }
}

/// Adds up the parts of a token's `count` numbers, in an order that does not depend on anything but how many there are. Called by all
/// units of a cube, which have waited for each other then.
#[cube]
pub(super) fn sum_parts(
    parts: &[f32],
    numbers: &mut Shared<[f32]>,
    token: usize,
    slices: usize,
    #[comptime] count: usize,
) {
    let across = comptime!(count.next_power_of_two());
    let shares = comptime!(UNITS / across);
    let unit = UNIT_POS as usize;
    let (share, at) = (unit / across, unit % across);
    let mut sum = 0.0f32;
    if at < count {
        let mut slice = share;
        while slice < slices {
            // All loads before the first use: they take far longer than the rest.
            let mut own = Sequence::<f32>::new();
            #[unroll]
            for i in 0..AHEAD {
                own.push(parts[(token * slices + min(slice + i * shares, slices - 1)) * count + at]);
            }
            #[unroll]
            for i in 0..AHEAD {
                if slice + i * shares < slices {
                    sum += own[i];
                }
            }
            slice += comptime!(AHEAD * shares);
        }
    }
    let mut sums = Shared::<[f32]>::new_slice(UNITS);
    sums[unit] = sum;
    sync_cube();
    if unit < count {
        let mut total = 0.0f32;
        #[unroll]
        for share in 0..shares {
            total += sums[share * across + unit];
        }
        numbers[unit] = total;
    }
    sync_cube();
}

/// DeepSeek-V4's streams and the most: in memory, behind an attention, behind experts, one token and several.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entry = |kind, (name, form): (&str, Form)| {
        let elem = ElemType::Float(kind);
        let Shape { vector, .. } = select::choose(&device, 4096, elem);
        let weight_vector = select::weight_vector(&device, 4096, elem);
        #[rustfmt::skip]
        let form = form!(project_kernel, CubeDim::new_1d(UNITS as u32),
            [AddressType::U32, vector, weight_vector, _, _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, form, elem]);
        Entry::of(kind, name, form)
    };
    let read = Form { streams: 4, rows: 24, ..Form::READ };
    let rows = Form { mixes: true, ..read };
    let experts = Form { top_k: 6, place: Place::Behind, ..rows };
    let forms = [
        ("hyper_connection.project", read),
        ("hyper_connection.project.rows", rows),
        ("hyper_connection.project.experts", experts),
        ("hyper_connection.project.head", Form { rows: 4, ..experts }),
        ("hyper_connection.project.tile", Form { tokens: select::TILE, place: Place::Apart, ..experts }),
        ("hyper_connection.project.most", Form { streams: 8, rows: 80, tokens: select::TILE, ..rows }),
    ];
    FLOATS.into_iter().flat_map(|kind| forms.map(|form| entry(kind, form))).collect()
}
