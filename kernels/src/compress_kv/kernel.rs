//! The kernel: which entry a cube has, and where that goes.

use cubecl::prelude::*;

use super::pool::{Tokens, pool_into};
use super::select::Shape;
use super::{CompressKvArgs, EntryCache};
use crate::common::launch::{dummy, is_row, or_dummy, share};

/// A compressor, and the tokens that it takes in: see [`CompressKvArgs`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Compressor<G: Float, E: Float, N: Size> {
    kv_gates: &'static [Vector<G, N>],
    state: &'static mut [Vector<f32, N>],
    state_rows: &'static [i32],
    cu_seqlens: &'static [i32],
    starts: &'static [i32],
    position_bias: &'static [Vector<f32, N>],
    norm_weight: &'static [f32],
    cos: &'static [f32],
    sin: &'static [f32],
    entries: &'static mut [E],
    state_slots: &'static [i32],
    cache: &'static mut [E],
    cache_slots: &'static [i32],
    batch: usize,
    count: usize,
    window: usize,
    pairs: usize,
    slot_count: usize,
    cache_rows: usize,
    norm_eps: f32,
    #[cube(comptime)]
    shape: Shape,
}

/// As the kernel takes it.
pub(super) fn bind<G: Float, E: Float, N: Size>(
    client: &Client,
    args: &CompressKvArgs,
    shape: Shape,
) -> CompressorLaunch<G, E, N> {
    let sizes = &args.sizes;
    let buffer = |buffer: &BufferArg, len: usize| or_dummy(client, share(buffer), len);
    let (writes, none) = (args.writes.as_ref(), || dummy(client));
    let state_slots = writes.map_or_else(none, |writes| buffer(&writes.state_slots, sizes.tokens));
    let (cache, slots, cache_rows) = match writes.and_then(|writes| writes.cache.as_ref()) {
        Some(EntryCache { cache, slots, rows }) => (share(cache), share(slots), *rows),
        None => (none(), none(), 0),
    };
    CompressorLaunch::new(
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
    )
}

/// Compressors of these shapes, with nothing to launch.
#[cfg(feature = "offline")]
#[rustfmt::skip]
pub(crate) fn offline<G: Float, E: Float, N: Size>(shapes: &[Shape]) -> SequenceArg<Compressor<G, E, N>> {
    use crate::offline::buffer as any;
    let compressor = |&shape: &Shape| CompressorLaunch::new(
        any(), any(), any(), any(), any(), any(), any(), any(), any(), any(), any(), any(), any(),
        1, 1, 1, 1, 1, 1, 1e-6, shape,
    );
    shapes.iter().map(compressor).collect()
}

/// A cube for each entry of the compressors, one of which comes behind the other.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn compress_kernel<G: Float, E: Float, N: Size>(
    compressors: &mut Sequence<Compressor<G, E, N>>,
    #[define(G)] _gates_elem: ElemType,
    #[define(E)] _elem: ElemType,
) {
    let _ = compress_own(compressors, CUBE_POS);
}

/// The entry of cube number `cube` of those of compressors; how many these are. Called by all units of a cube, which may be another one.
#[cube]
pub(crate) fn compress_own<G: Float, E: Float, N: Size>(
    compressors: &mut Sequence<Compressor<G, E, N>>,
    cube: usize,
) -> usize {
    let mut before = 0usize.runtime();
    #[unroll]
    for i in 0..comptime!(compressors.len()) {
        let compressor = compressors.index_mut(i);
        let cubes = compressor.batch * compressor.count;
        if cube >= before && cube < before + cubes {
            compressor.compress(cube - before);
        }
        before += cubes;
    }
    before
}

#[cube]
impl<G: Float, E: Float, N: Size> Compressor<G, E, N> {
    /// Entry number `number` of `[B, n]`. Called by all units of a cube.
    fn compress(&mut self, number: usize) {
        let shape = comptime!(self.shape);
        let sequence = number / self.count;
        let start = usize::cast_from(self.starts[sequence]);
        let first_row = usize::cast_from(self.cu_seqlens[sequence]);
        let end_row = usize::cast_from(self.cu_seqlens[sequence + 1]);
        let end = start + end_row - first_row;
        let window = start / self.window + number % self.count;
        let mut entry = Shared::<[f32]>::new_slice(shape.width);
        let mut places = Places { number, cached: 0usize.runtime(), is_cached: false.runtime() };
        if comptime!(shape.caches) {
            places.find(self.cache_slots[number], self.cache_rows, shape.width);
        }
        if window < end / self.window {
            let block = usize::cast_from(self.state_rows[sequence]);
            let tokens = Tokens::new(start, first_row, window, self.window, block, shape.overlap);
            let squares = pool_into::<G, N>(&mut entry, self.kv_gates, self.state, self.position_bias, &tokens, shape);
            let scale = 1.0 / (squares / comptime!(shape.width as f32) + self.norm_eps).sqrt();
            self.write_entry(&places, &entry, scale);
        } else {
            let mut channel = UNIT_POS as usize;
            while channel < shape.width {
                self.put(&places, channel, E::from_int(0));
                channel += comptime!(shape.units());
            }
        }
        if comptime!(shape.writes) {
            self.write_state(first_row, end_row);
        }
    }

    /// The entry times `scale` and the weight of each channel, with RoPE applied to the last channels.
    fn write_entry(&mut self, places: &Places, entry: &Shared<[f32]>, scale: f32) {
        let shape = comptime!(self.shape);
        let straight = shape.width - 2 * self.pairs;
        let mut channel = UNIT_POS as usize;
        while channel < shape.width {
            let mut value = entry[channel] * scale * self.norm_weight[channel];
            if channel >= straight {
                let pair = (channel - straight) / 2;
                let first = straight + 2 * pair;
                let other = 2 * first + 1 - channel;
                let partner = entry[other] * scale * self.norm_weight[other];
                let angle = places.number * self.pairs + pair;
                let turned = select(channel == first, -partner, partner);
                value = value * self.cos[angle] + turned * self.sin[angle];
            }
            self.put(places, channel, E::cast_from(value));
            channel += comptime!(shape.units());
        }
    }

    fn put(&mut self, places: &Places, channel: usize, value: E) {
        let shape = comptime!(self.shape);
        self.entries[places.number * shape.width + channel] = value;
        if comptime!(shape.caches) && places.is_cached {
            self.cache[places.cached + channel] = value;
        }
    }

    /// Writes the new tokens of a sequence into its block of the state, of which this cube has read what it needs.
    fn write_state(&mut self, first_row: usize, end_row: usize) {
        let shape = comptime!(self.shape);
        let vectors = comptime!(2 * shape.channels());
        let mut row = first_row;
        while row < end_row {
            let slot = self.state_slots[row];
            if is_row(slot, self.slot_count) {
                let target = usize::cast_from(slot) * vectors;
                let mut column = UNIT_POS as usize;
                while column < vectors {
                    self.state[target + column] = Vector::cast_from(self.kv_gates[row * vectors + column]);
                    column += comptime!(shape.units());
                }
            }
            row += 1;
        }
    }
}

/// Where the entry of a cube goes.
#[derive(CubeType)]
struct Places {
    /// Among the entries.
    number: usize,
    /// In a cache, if it goes there, too.
    cached: usize,
    is_cached: bool,
}

#[cube]
impl Places {
    /// The row of a cache of so many.
    fn find(&mut self, slot: i32, rows: usize, #[comptime] width: usize) {
        if is_row(slot, rows) {
            self.is_cached = true;
            self.cached = usize::cast_from(slot) * width;
        }
    }
}
