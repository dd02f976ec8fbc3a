//! What a block reads of the streams of a token whose products come in parts, on NVIDIA's GPUs.
//!
//! The launch takes as long as what depends on one another. So a cube asks for all that it needs at once, and every warp adds up the parts
//! for itself, a number in each lane, behind the one barrier for all. The sum of the streams stays in registers until its norm is known. The
//! last warp has nothing but the matrix, for which nobody waits.

use cubecl::prelude::*;

use super::mixing::sigmoid;
use super::select::{self, Shape};
use super::{PreArgs, Products, Sizes, sinkhorn};
use crate::common::launch::address_type;
use crate::ptx::copy::load_global_4_or_zero;
use crate::ptx::{barrier, warp};
use crate::residual_norm::add_squares;

/// Lanes of a warp.
const LANES: usize = 32;
/// Most units that have channels, and most vectors of a stream that each has.
const WORKERS: usize = 256;
const ROUNDS: usize = 8;
/// Loads of a unit that are under way together.
const AHEAD: usize = 16;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    streams: usize,
    /// Vectors of a stream.
    vectors: usize,
    /// Units that have channels.
    workers: usize,
}

impl Form {
    /// For products in parts before a block, a number of a token in each lane.
    pub fn of(device: &DeviceProperties, args: &PreArgs) -> Option<Self> {
        let in_parts = args.block.is_some() && matches!(args.products, Products::InParts(_));
        let is_ptx = device.identity.fingerprint.starts_with("ptx");
        (in_parts && is_ptx).then(|| Self::of_sizes(device, &args.sizes)).flatten()
    }

    pub fn of_sizes(device: &DeviceProperties, &Sizes { streams, width, elem, .. }: &Sizes) -> Option<Self> {
        let Shape { vectors, .. } = select::choose(device, width, elem);
        let rounds = vectors.div_ceil(WORKERS);
        let workers = vectors.div_ceil(rounds).next_multiple_of(LANES);
        let form = Self { streams, vectors, workers };
        let has_plane = select::plane_of_matrix(device, streams) == LANES;
        (has_plane && form.count().next_power_of_two() == LANES && rounds <= ROUNDS).then_some(form)
    }

    /// The products of a token, and its sum of squares.
    fn count(self) -> usize {
        (2 + self.streams) * self.streams + 1
    }

    /// Warps that have channels, each a share of the parts.
    fn warps(self) -> usize {
        self.workers / LANES
    }

    fn rounds(self) -> usize {
        self.vectors.div_ceil(self.workers)
    }

    /// The units that have something to do.
    pub fn units(self) -> usize {
        self.workers + LANES
    }

    fn cube_dim(self) -> CubeDim {
        CubeDim::new_1d(self.units() as u32)
    }
}

/// Launches it; there are elements.
pub(super) fn launch(client: &Client, form: Form, args: PreArgs) {
    let PreArgs { streams, products, scale, base, input, block, sizes, norm_eps, eps } = args;
    let (Products::InParts(parts), Some(block)) = (products, block) else { return };
    let Sizes { tokens, width, elem, .. } = sizes;
    let Shape { vector, .. } = select::choose(client.properties(), width, elem);
    read_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens, CubeDim::new_single()),
        form.cube_dim(),
        address_type(client, &[&streams, &parts]),
        vector,
        select::weight_vector(client.properties(), width, elem),
        streams,
        parts,
        scale,
        base,
        block.norm_weight,
        input,
        block.post,
        block.comb,
        tokens,
        select::slices(width),
        norm_eps,
        eps,
        block.iterations,
        form,
        elem,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn read_kernel<E: Float, N: Size, W: Size>(
    streams: &[Vector<E, N>],
    parts: &[f32],
    scale: &[f32],
    base: &[f32],
    norm_weight: &[Vector<f32, W>],
    input: &mut [Vector<E, N>],
    post: &mut [f32],
    comb: &mut [f32],
    tokens: usize,
    slices: usize,
    norm_eps: f32,
    eps: f32,
    iterations: usize,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    if CUBE_POS < tokens {
        let sizes = Numbers { slices, norm_eps, eps, iterations };
        read_token(streams, parts, scale, base, norm_weight, input, post, comb, CUBE_POS, &sizes, form);
    }
}

/// Numbers of a launch.
#[derive(CubeType)]
pub(super) struct Numbers {
    pub slices: usize,
    pub norm_eps: f32,
    pub eps: f32,
    pub iterations: usize,
}

/// What a cube does for a token, by its first units; others only wait with them.
#[cube]
pub(super) fn read_token<E: Float, N: Size, W: Size>(
    streams: &[Vector<E, N>],
    parts: &[f32],
    scale: &[f32],
    base: &[f32],
    norm_weight: &[Vector<f32, W>],
    input: &mut [Vector<E, N>],
    post: &mut [f32],
    comb: &mut [f32],
    token: usize,
    numbers: &Numbers,
    #[comptime] form: Form,
) {
    let n = comptime!(form.streams);
    let (own_warp, lane) = (warp::uniform(UNIT_POS / 32) as usize, UNIT_POS as usize % LANES);
    let own = Channels::<E, N>::load(streams, token, form);
    // Lanes past the numbers have the last one.
    let number = min(lane, comptime!(form.count() - 2));
    let part = min(number / n, 2usize.runtime());
    let (factor, shift) = (scale[part], base[number]);
    let total = sum_of_number(parts, token, numbers.slices, own_warp, lane, form);
    let width = comptime!((form.streams * form.vectors) as f32) * f32::cast_from(N::value());
    let squares = warp::shuffle::<f32>(total, comptime!(form.count() as u32 - 1).runtime());
    let logit = total * (1.0 / (squares / width + numbers.norm_eps).sqrt()) * factor + shift;
    if own_warp == form.warps() {
        let first = comptime!(2 * form.streams);
        let of_matrix = warp::shuffle::<f32>(logit, (first + lane % comptime!(form.streams * form.streams)) as u32);
        let writes = lane < comptime!(form.streams * form.streams);
        sinkhorn::by_plane(of_matrix, token, comb, writes, numbers.eps, numbers.iterations, n);
    } else if own_warp < form.warps() {
        let share = sigmoid(logit);
        if own_warp == 0 && lane >= n && lane < 2 * n {
            post[token * n + lane - n] = 2.0 * share;
        }
        own.write_norm::<W>(share + numbers.eps, norm_weight, input, token, numbers.norm_eps, form);
    }
}

/// A number of a token in each lane of each warp: the sum of its parts, of which each warp with channels adds up every so many.
#[cube]
fn sum_of_number(
    parts: &[f32],
    token: usize,
    slices: usize,
    own_warp: usize,
    lane: usize,
    #[comptime] form: Form,
) -> f32 {
    let (count, shares) = comptime!((form.count(), form.warps()));
    let at = min(lane, comptime!(count - 1));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(shares * LANES));
    if own_warp < shares {
        let mut sum = 0.0f32;
        let mut slice = own_warp;
        while slice < slices {
            // All loads before the first use: they take far longer than the rest, and ptxas would move CubeCL's own behind one another.
            let mut own = Sequence::<f32>::new();
            #[unroll]
            for i in 0..AHEAD {
                let other = slice + i * shares;
                let part = (token * slices + min(other, slices - 1)) * count + at;
                own.push(f32::reinterpret(load_global_4_or_zero(&parts[part..part + 1], 0u32, other < slices)));
            }
            #[unroll]
            for i in 0..AHEAD {
                sum += own[i];
            }
            slice += comptime!(AHEAD * shares);
        }
        sums[UNIT_POS as usize] = sum;
    }
    sync_cube();
    let mut total = 0.0f32;
    #[unroll]
    for share in 0..shares {
        total += sums[share * LANES + lane];
    }
    total
}

/// What a unit has of a token: in each round a vector of channels in all streams.
#[derive(CubeType)]
struct Channels<E: Float, N: Size> {
    streams: Sequence<Vector<E, N>>,
}

#[cube]
impl<E: Float, N: Size> Channels<E, N> {
    /// Past the last vector, that one.
    fn load(streams: &[Vector<E, N>], token: usize, #[comptime] form: Form) -> Channels<E, N> {
        let (n, vectors) = comptime!((form.streams, form.vectors));
        let mut own = Sequence::<Vector<E, N>>::new();
        #[unroll]
        for round in 0..comptime!(form.rounds()) {
            let column = column_of_round(round, form);
            #[unroll]
            for k in 0..n {
                own.push(streams[(token * n + k) * vectors + column]);
            }
        }
        Channels::<E, N> { streams: own }
    }

    /// Writes the norm of the sum of the streams, of which lane `k` has the share of stream `k`. Called by the warps with channels.
    fn write_norm<W: Size>(
        &self,
        share: f32,
        norm_weight: &[Vector<f32, W>],
        input: &mut [Vector<E, N>],
        token: usize,
        eps: f32,
        #[comptime] form: Form,
    ) {
        let (n, vectors) = comptime!((form.streams, form.vectors));
        let lanes = N::value().comptime();
        let weight_lanes = W::value().comptime();
        let pieces = comptime!(lanes / weight_lanes);
        // Not with the streams, which are waited for first: these are needed behind the norm's barrier.
        let mut weights = Sequence::<Vector<f32, W>>::new();
        #[unroll]
        for round in 0..comptime!(form.rounds()) {
            #[unroll]
            for piece in 0..pieces {
                weights.push(norm_weight[column_of_round(round, form) * pieces + piece]);
            }
        }
        let mut shares = Sequence::<f32>::new();
        #[unroll]
        for k in 0..n {
            shares.push(warp::shuffle::<f32>(share, comptime!(k as u32).runtime()));
        }
        let mut sums = Sequence::<Vector<E, N>>::new();
        let mut squares = 0.0f32;
        #[unroll]
        for round in 0..comptime!(form.rounds()) {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for k in 0..n {
                sum += Vector::cast_from(self.streams[comptime!(round * n + k)]) * Vector::new(shares[k]);
            }
            let rounded = Vector::cast_from(sum);
            if UNIT_POS as usize + round * form.workers < vectors {
                squares = add_squares::<E, N>(rounded, squares);
            }
            sums.push(rounded);
        }
        let total = sum_of_workers(squares, form.warps());
        let width = comptime!(form.vectors as f32) * f32::cast_from(N::value());
        let factor = 1.0 / (total / width + eps).sqrt();
        #[unroll]
        for round in 0..comptime!(form.rounds()) {
            let column = UNIT_POS as usize + round * form.workers;
            if column < vectors {
                let mut values = Vector::<f32, N>::cast_from(sums[round]);
                #[unroll]
                for lane in 0..lanes {
                    let piece = comptime!(round * pieces + lane / weight_lanes);
                    let weight = weights[piece].extract(comptime!(lane % weight_lanes));
                    values.insert(lane, values.extract(lane) * factor * weight);
                }
                input[token * vectors + column] = Vector::cast_from(values);
            }
        }
    }
}

/// The vector of a stream that a unit has in a round; past the last one, that one.
#[cube]
fn column_of_round(round: usize, #[comptime] form: Form) -> usize {
    min(UNIT_POS as usize + round * form.workers, comptime!(form.vectors - 1))
}

/// The sum over the units that have channels, in so many warps, in an order that does not depend on anything. Called by these.
#[cube]
fn sum_of_workers(own: f32, #[comptime] warps: usize) -> f32 {
    let mut sum = own;
    #[unroll]
    for i in 0..comptime!(LANES.ilog2()) {
        sum += warp::shuffle_xor::<f32>(sum, comptime!(1u32 << i));
    }
    let mut sums = Shared::<[f32]>::new_slice(warps);
    if (UNIT_POS as usize).is_multiple_of(LANES) {
        sums[UNIT_POS as usize / LANES] = sum;
    }
    sync_plane();
    barrier::sync(1u32, comptime!((warps * LANES) as u32));
    let mut total = 0.0f32;
    #[unroll]
    for warp in 0..warps {
        total += sums[warp];
    }
    total
}

/// DeepSeek-V4's streams.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entry = |kind| {
        let elem = ElemType::Float(kind);
        let sizes = Sizes { tokens: 1, streams: 4, width: 4096, elem };
        let own = Form::of_sizes(&device, &sizes).expect("four streams");
        let Shape { vector, .. } = select::choose(&device, 4096, elem);
        let weight_vector = select::weight_vector(&device, 4096, elem);
        let cube = own.cube_dim();
        #[rustfmt::skip]
        let form = form!(read_kernel, cube,
            [AddressType::U32, vector, weight_vector, _, _, _, _, _, _, _, _, 1, 1, 1.0, 1.0, 1, own, elem]);
        Entry::of(kind, "hyper_connection.pre.parts", form)
    };
    FLOATS.into_iter().map(entry).collect()
}
