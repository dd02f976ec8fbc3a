//! What a block leaves: its output goes into the streams. A unit has a vector of channels of a token, in all streams.

use cubecl::prelude::*;

use super::Sizes;
use super::select::{self, Shape};
use crate::common::launch::address_type;
use crate::residual_norm::UNITS;

/// Arguments of [`launch_post`]; E is `sizes.elem`.
pub struct PostArgs {
    /// E `[tokens, n, width]`.
    pub streams: BufferArg,
    /// E `[tokens, width]`: what the block computed.
    pub output: BufferArg,
    /// f32 `[tokens, n]`.
    pub post: BufferArg,
    /// f32 `[tokens, n, n]`.
    pub comb: BufferArg,
    /// E `[tokens, n, width]`, written.
    pub mixed: BufferArg,
    /// Sizes.
    pub sizes: Sizes,
}

/// Writes `mixed`: the streams after the block. Without elements nothing is launched.
pub fn launch_post(client: &Client, args: PostArgs) {
    let Sizes { tokens, streams, width, elem } = args.sizes;
    if tokens * width == 0 {
        return;
    }
    let Shape { vector, vectors } = select::choose(client.properties(), width, elem);
    let cube = CubeDim::new_1d(UNITS as u32);
    post_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens * vectors, cube),
        cube,
        address_type(client, &[&args.streams]),
        vector,
        args.streams,
        args.output,
        args.post,
        args.comb,
        args.mixed,
        tokens,
        vectors,
        streams,
        elem,
    );
}

/// A unit per vector of channels of a token.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn post_kernel<E: Float, N: Size>(
    streams: &[Vector<E, N>],
    output: &[Vector<E, N>],
    post: &[f32],
    comb: &[f32],
    mixed: &mut [Vector<E, N>],
    tokens: usize,
    vectors: usize,
    #[comptime] n: usize,
    #[define(E)] _elem: ElemType,
) {
    let (token, column) = (ABSOLUTE_POS / vectors, ABSOLUTE_POS % vectors);
    if token < tokens {
        let added = Vector::<f32, N>::cast_from(output[ABSOLUTE_POS]);
        let first = token * n * vectors + column;
        let mut own = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for k in 0..n {
            own.push(Vector::cast_from(streams[first + k * vectors]));
        }
        #[unroll]
        for j in 0..n {
            mixed[first + j * vectors] = mixed_stream::<E, N>(&own, added, post, comb, token, j, n);
        }
    }
}

/// These channels of stream `j` of a token: of all `n` streams, and of what is added.
#[cube]
pub(super) fn mixed_stream<E: Float, N: Size>(
    streams: &Sequence<Vector<f32, N>>,
    added: Vector<f32, N>,
    post: &[f32],
    comb: &[f32],
    token: usize,
    j: usize,
    #[comptime] n: usize,
) -> Vector<E, N> {
    let mut sum = added * Vector::new(post[token * n + j]);
    #[unroll]
    for k in 0..n {
        sum += streams[k] * Vector::new(comb[(token * n + k) * n + j]);
    }
    Vector::cast_from(sum)
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entry = |kind| {
        let elem = ElemType::Float(kind);
        let Shape { vector, .. } = select::choose(&device, 4096, elem);
        let cube = CubeDim::new_1d(UNITS as u32);
        let form = form!(post_kernel, cube, [AddressType::U32, vector, _, _, _, _, _, 1, 1, 4, elem]);
        Entry::of(kind, "hyper_connection.post", form)
    };
    FLOATS.into_iter().map(entry).collect()
}
