//! Windows of tokens pooled into entries (DeepSeek-V4, compressed attention).
//!
//! A cube has an entry. Its units stand side by side along the channels, a vector each, and groups of them share the tokens
//! of the entry's windows: an online softmax for each channel, merged over the groups in shared memory. There the entry
//! stays for its norm and for its rotation.
//!
//! Where each sequence has one cube, as in a decode step, that one has read all that it needs of the state before the first barrier:
//! after that it writes the new tokens into the state, and its entry into a cache as well. That saves two launches.

mod pool;
mod select;

use cubecl::prelude::*;
use thiserror::Error;

use self::pool::{Tokens, pool_into};
use self::select::Shape;
use crate::common::device::{DeviceError, check_device};
use crate::common::launch::{address_type, dummy, io_vector_size, is_row, or_dummy, share};
use crate::compiler::names_all_sizes;

/// Arguments of [`launch`]; letters as in [`CompressKvSizes`], C is d, or 2 d with overlap, and L is m, or 2 m with overlap.
pub struct CompressKvArgs {
    /// G `[N, 2 C]`: keys and gates of the new tokens.
    pub kv_gates: BufferArg,
    /// f32 `[R, L, 2 C]`: those of tokens before them, of position `p` in row `p % L`. Written if there are `writes`.
    pub state: BufferArg,
    /// i32 `[B]`: the block of the state of each sequence, 0 to R - 1.
    pub state_rows: BufferArg,
    /// i32 `[B + 1]`, ascending from 0 to N: where the new tokens of each sequence begin.
    pub cu_seqlens: BufferArg,
    /// i32 `[B]`, at least 0: the position of the first new token of each sequence.
    pub starts: BufferArg,
    /// f32 `[m, C]`: added to the gates.
    pub position_bias: BufferArg,
    /// f32 `[d]`: the weight of the norm.
    pub norm_weight: BufferArg,
    /// f32 `[B, n, pairs]`.
    pub cos: BufferArg,
    /// f32 `[B, n, pairs]`.
    pub sin: BufferArg,
    /// E `[B, n, d]`, written: 0 where the new tokens do not fill the window.
    pub entries: BufferArg,
    /// What is written beside them; only where n is 1. Sequences have different blocks of the state then.
    pub writes: Option<Writes>,
    /// Sizes and the types G and E.
    pub sizes: CompressKvSizes,
    /// Added to the mean square.
    pub norm_eps: f32,
}

/// What else a launch writes.
pub struct Writes {
    /// i32 `[N]`: the row of the state, `block * L + position % L`, of each new token; -1 for none.
    pub state_slots: BufferArg,
    /// Where entries go.
    pub cache: Option<EntryCache>,
}

/// A cache of entries.
pub struct EntryCache {
    /// E `[rows, d]`, written.
    pub cache: BufferArg,
    /// i32 `[B]`: the row of each sequence's entry; -1 for none.
    pub slots: BufferArg,
    /// Its rows.
    pub rows: usize,
}

/// What decides whether a device can compute it.
#[derive(Debug, Clone, Copy)]
pub struct CompressKvSizes {
    /// N, new tokens.
    pub tokens: usize,
    /// B, sequences.
    pub batch: usize,
    /// n, entries of a sequence.
    pub entries: usize,
    /// R, blocks of the state.
    pub blocks: usize,
    /// m, tokens of a window, at least 1.
    pub window: usize,
    /// d, channels of an entry, at least 1.
    pub width: usize,
    /// Pairs of the last channels that RoPE applies to, at most d / 2.
    pub pairs: usize,
    /// Whether an entry pools the window before its own, too.
    pub overlap: bool,
    /// G, of new keys and gates: f32, f16 or bf16.
    pub gates_elem: ElemType,
    /// E, of the entries: f32, f16 or bf16.
    pub elem: ElemType,
}

/// Why [`launch`] did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompressKvError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("`{name}` has {len} elements, which needs 64-bit offsets, which the device does not have")]
    Offsets {
        /// The argument.
        name: &'static str,
        /// Its elements.
        len: usize,
    },
}

impl CompressKvSizes {
    /// Windows that an entry pools.
    fn windows(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }

    /// Rows of the state.
    fn state_rows(&self) -> usize {
        self.blocks * self.windows() * self.window
    }

    /// Elements of `kv_gates`, `state` and `entries`.
    fn lens(&self) -> [(&'static str, usize); 3] {
        let row = 2 * self.windows() * self.width;
        [
            ("kv_gates", self.tokens * row),
            ("state", self.state_rows() * row),
            ("entries", self.batch * self.entries * self.width),
        ]
    }
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &CompressKvSizes) -> Result<(), CompressKvError> {
    prepare(client, sizes).map(|_| ())
}

/// All checks, and elements of a vector.
fn prepare(client: &Client, sizes: &CompressKvSizes) -> Result<usize, CompressKvError> {
    let vector_size = io_vector_size(client.properties(), &[sizes.width], size_of::<f32>());
    let shared_bytes = Shape::new(sizes, vector_size).shared_bytes();
    for elem in [sizes.elem, sizes.gates_elem] {
        check_device(client, elem, shared_bytes)?;
    }
    let reached = |len: usize| client.properties().supports_address(AddressType::from_len(len));
    match sizes.lens().into_iter().find(|(_, len)| !reached(*len)) {
        Some((name, len)) => Err(CompressKvError::Offsets { name, len }),
        None => Ok(vector_size),
    }
}

/// Writes `entries`, and `writes`; a slot past the end is skipped like -1. Without entries nothing is launched.
///
/// # Errors
/// What the device lacks; nothing was launched.
pub fn launch(client: &Client, args: CompressKvArgs) -> Result<(), CompressKvError> {
    let sizes = args.sizes;
    let cubes = sizes.batch * sizes.entries;
    if cubes == 0 {
        return Ok(());
    }
    let vector_size = prepare(client, &sizes)?;
    let caches = args.writes.as_ref().is_some_and(|writes| writes.cache.is_some());
    let shape = Shape { writes: args.writes.is_some(), caches, ..Shape::new(&sizes, vector_size) };
    if names_all_sizes() && !shape.writes {
        // A decode step's: keys and gates are of the dtype of the entries then.
        launch_form(client, &args, Shape { writes: true, caches: true, ..shape }, vector_size, sizes.elem);
    }
    launch_form(client, &args, shape, vector_size, sizes.gates_elem);
    Ok(())
}

fn launch_form(client: &Client, args: &CompressKvArgs, shape: Shape, vector_size: usize, gates_elem: ElemType) {
    let sizes = &args.sizes;
    let buffer = |buffer: &BufferArg, len: usize| or_dummy(client, share(buffer), len);
    let (writes, none) = (args.writes.as_ref(), || dummy(client));
    let state_slots = writes.map_or_else(none, |writes| buffer(&writes.state_slots, sizes.tokens));
    let [cache, slots] = match writes.and_then(|writes| writes.cache.as_ref()) {
        Some(EntryCache { cache, slots, .. }) => [cache, slots].map(share),
        None => [(); 2].map(|()| none()),
    };
    let cache_rows = writes.and_then(|writes| writes.cache.as_ref()).map_or(0, |cache| cache.rows);
    compress_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, sizes.batch * sizes.entries, CubeDim::new_single()),
        shape.cube_dim(),
        address_type(client, &[&args.kv_gates, &args.state, &args.entries, &cache]),
        vector_size,
        buffer(&args.kv_gates, sizes.tokens),
        buffer(&args.state, sizes.blocks),
        share(&args.state_rows),
        share(&args.cu_seqlens),
        share(&args.starts),
        share(&args.position_bias),
        share(&args.norm_weight),
        buffer(&args.cos, sizes.pairs),
        buffer(&args.sin, sizes.pairs),
        share(&args.entries),
        state_slots,
        cache,
        slots,
        sizes.batch,
        sizes.entries,
        sizes.window,
        sizes.pairs,
        sizes.state_rows(),
        cache_rows,
        args.norm_eps,
        shape,
        gates_elem,
        sizes.elem,
    );
}

/// Cube `i` has entry `i` of `[B, n]`.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn compress_kernel<G: Float, E: Float, N: Size>(
    kv_gates: &[Vector<G, N>],
    state: &mut [Vector<f32, N>],
    state_rows: &[i32],
    cu_seqlens: &[i32],
    starts: &[i32],
    position_bias: &[Vector<f32, N>],
    norm_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    entries: &mut [E],
    state_slots: &[i32],
    cache: &mut [E],
    cache_slots: &[i32],
    batch: usize,
    count: usize,
    window: usize,
    pairs: usize,
    slot_count: usize,
    cache_rows: usize,
    norm_eps: f32,
    #[comptime] shape: Shape,
    #[define(G)] _gates_elem: ElemType,
    #[define(E)] _elem: ElemType,
) {
    if CUBE_POS < batch * count {
        let sequence = CUBE_POS / count;
        let start = usize::cast_from(starts[sequence]);
        let first_row = usize::cast_from(cu_seqlens[sequence]);
        let end_row = usize::cast_from(cu_seqlens[sequence + 1]);
        let end = start + end_row - first_row;
        let number = start / window + CUBE_POS % count;
        let mut entry = Shared::<[f32]>::new_slice(shape.width);
        let mut places =
            Places { first: CUBE_POS * shape.width, cached: 0usize.runtime(), is_cached: false.runtime(), shape };
        if comptime!(shape.caches) {
            places.find(cache_slots[CUBE_POS], cache_rows);
        }
        if number < end / window {
            let block = usize::cast_from(state_rows[sequence]);
            let tokens = Tokens::new(start, first_row, number, window, block, shape.overlap);
            let squares = pool_into::<G, N>(&mut entry, kv_gates, state, position_bias, &tokens, shape);
            let scale = 1.0 / (squares / comptime!(shape.width as f32) + norm_eps).sqrt();
            write_entry::<E>(entries, cache, &places, &entry, norm_weight, cos, sin, pairs, scale, shape);
        } else {
            let mut channel = UNIT_POS as usize;
            while channel < shape.width {
                places.put::<E>(entries, cache, channel, E::from_int(0));
                channel += comptime!(shape.units());
            }
        }
        if comptime!(shape.writes) {
            write_state::<G, N>(kv_gates, state, state_slots, first_row, end_row, slot_count, shape);
        }
    }
}

/// Where the entry of a cube goes.
#[derive(CubeType)]
struct Places {
    first: usize,
    /// In a cache, if it goes there, too.
    cached: usize,
    is_cached: bool,
    #[cube(comptime)]
    shape: Shape,
}

#[cube]
impl Places {
    /// The row of a cache of so many.
    fn find(&mut self, slot: i32, rows: usize) {
        if is_row(slot, rows) {
            self.is_cached = true;
            self.cached = usize::cast_from(slot) * comptime!(self.shape.width);
        }
    }

    fn put<E: Float>(&self, entries: &mut [E], cache: &mut [E], channel: usize, value: E) {
        entries[self.first + channel] = value;
        if comptime!(self.shape.caches) && self.is_cached {
            cache[self.cached + channel] = value;
        }
    }
}

/// Writes the new tokens of a sequence into its block of the state, of which this cube has read what it needs.
#[cube]
fn write_state<G: Float, N: Size>(
    kv_gates: &[Vector<G, N>],
    state: &mut [Vector<f32, N>],
    state_slots: &[i32],
    first_row: usize,
    end_row: usize,
    slot_count: usize,
    #[comptime] shape: Shape,
) {
    let vectors = comptime!(2 * shape.channels());
    let mut row = first_row;
    while row < end_row {
        let slot = state_slots[row];
        if is_row(slot, slot_count) {
            let target = usize::cast_from(slot) * vectors;
            let mut column = UNIT_POS as usize;
            while column < vectors {
                state[target + column] = Vector::cast_from(kv_gates[row * vectors + column]);
                column += comptime!(shape.units());
            }
        }
        row += 1;
    }
}

/// The entry times `scale` and the weight of each channel, with RoPE applied to the last channels.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_entry<E: Float>(
    entries: &mut [E],
    cache: &mut [E],
    places: &Places,
    entry: &Shared<[f32]>,
    norm_weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    pairs: usize,
    scale: f32,
    #[comptime] shape: Shape,
) {
    let straight = shape.width - 2 * pairs;
    let mut channel = UNIT_POS as usize;
    while channel < shape.width {
        let mut value = entry[channel] * scale * norm_weight[channel];
        if channel >= straight {
            let pair = (channel - straight) / 2;
            let first = straight + 2 * pair;
            let other = 2 * first + 1 - channel;
            let partner = entry[other] * scale * norm_weight[other];
            let angle = CUBE_POS * pairs + pair;
            value = value * cos[angle] + cubecl::prelude::select(channel == first, -partner, partner) * sin[angle];
        }
        places.put::<E>(entries, cache, channel, E::cast_from(value));
        channel += comptime!(shape.units());
    }
}

/// V4's entries of 512 channels, of 4 tokens with overlap and of 128 without, and the index keys of 128 channels.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name, kind, bits, window, width, overlap, writes| {
        let (elem, pairs) = (ElemType::Float(kind), 32);
        let (tokens, batch, entries, blocks, gates_elem) = (1, 1, 1, 1, elem);
        let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, gates_elem, elem };
        let n = io_vector_size(&device, &[width], size_of::<f32>());
        let shape = Shape { writes, caches: writes, ..Shape::new(&sizes, n) };
        let dim = shape.cube_dim();
        #[rustfmt::skip]
        let form = form!(compress_kernel, dim,
            [bits, n, _, _, _, _, _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1e-6, shape, elem, elem]);
        Entry::of(kind, name, form)
    };
    let (narrow, wide) = (AddressType::U32, AddressType::U64);
    let overlap = FLOATS.map(|kind| entry("compress_kv.overlap", kind, narrow, 4, 512, true, false));
    let long = entry("compress_kv.long", FloatKind::F16, narrow, 128, 512, false, false);
    let index = entry("compress_kv.index", FloatKind::F16, narrow, 4, 128, true, false);
    let step = FLOATS.map(|kind| entry("compress_kv.step", kind, narrow, 4, 512, true, true));
    let long_step = entry("compress_kv.long_step", FloatKind::BF16, narrow, 128, 512, false, true);
    let large = entry("compress_kv.64_bits", FloatKind::BF16, wide, 4, 512, true, true).on(|arch| arch == Arch::Sm90a);
    overlap.into_iter().chain(step).chain([long, index, long_step, large]).collect()
}
