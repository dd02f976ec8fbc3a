//! Manifold-constrained hyper-connections (mHC): what a block reads of the residual streams, and how its output goes into them.
//!
//! Before the block a cube has a token. Its units add up the streams, and go over the sum once more for its norm: by then it is in
//! the cache. The products that say how are there, and the norm before them is a factor: of a few tokens they come with the sum of
//! squares (`project.rs`; `in_parts.rs` is for those on NVIDIA's GPUs), of many the units go over the streams once more for that. After the block a unit has a vector of channels,
//! in all streams (`post.rs`). Behind the last block the streams are added up, and that is all.

#[cfg(feature = "cuda")]
mod in_parts;
mod mixing;
#[cfg(feature = "cuda")]
mod one_launch;
mod post;
mod project;
mod select;
mod sinkhorn;

use cubecl::prelude::*;

use self::mixing::{Logits, sigmoid};
pub use self::post::{PostArgs, launch_post};
use self::project::sum_parts;
pub use self::project::{ProjectArgs, launch_project};
use self::select::Shape;
pub use self::select::slices;
use crate::common::launch::{address_type, dummy};
use crate::common::plane;
use crate::residual_norm::{Summand, UNITS, add_squares, norm, scale_of};

/// Sizes of [`PreArgs`], [`PostArgs`] and [`ProjectArgs`].
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Tokens.
    pub tokens: usize,
    /// Residual streams: `n`. A unit has n² numbers in its registers.
    pub streams: usize,
    /// Channels of a stream.
    pub width: usize,
    /// E: f32, f16 or bf16.
    pub elem: ElemType,
}

/// Arguments of [`launch_pre`].
pub struct PreArgs {
    /// E `[tokens, n, width]`.
    pub streams: BufferArg,
    /// The projections of all streams of a token, before any norm.
    pub products: Products,
    /// f32 `[3]`: factors of the parts for `pre`, `post` and `comb`. Without a block `[1]`.
    pub scale: BufferArg,
    /// f32 `[(2 + n) n]`: added to all parts. Without a block `[n]`.
    pub base: BufferArg,
    /// E `[tokens, width]`, written: what the block reads.
    pub input: BufferArg,
    /// The block, or none behind the last one.
    pub block: Option<BlockArgs>,
    /// Sizes.
    pub sizes: Sizes,
    /// Added to the mean squares in both norms.
    pub norm_eps: f32,
    /// Added to what must not be zero.
    pub eps: f32,
}

/// Projections of all streams of a token: `m = (2 + n) n` of them, without a block `n`.
pub enum Products {
    /// f32 `[tokens, m]`.
    Whole(BufferArg),
    /// f32 `[tokens, slices, m + 1]`, as [`launch_project`] writes them.
    InParts(BufferArg),
}

/// What a block computed, and how it goes into the streams: see [`PostArgs`].
pub struct MixArgs {
    /// E `[tokens, width]`.
    pub output: Summand,
    /// f32 `[tokens, n]`.
    pub post: BufferArg,
    /// f32 `[tokens, n, n]`.
    pub comb: BufferArg,
    /// E `[tokens, n, width]`, written.
    pub mixed: BufferArg,
}

/// What there is if a block reads the input.
pub struct BlockArgs {
    /// f32 `[width]`: of the norm before the block.
    pub norm_weight: BufferArg,
    /// f32 `[tokens, n]`, written: how much of the block's output goes into each stream.
    pub post: BufferArg,
    /// f32 `[tokens, n, n]`, written: what each stream (first index) gives to each stream.
    pub comb: BufferArg,
    /// Times that the columns of `comb` are normalised, at least 1.
    pub iterations: usize,
}

/// [`launch_project`], and then [`launch_pre`] with its streams and parts, in one launch where that is possible.
pub fn launch_project_and_pre(client: &Client, project: ProjectArgs, pre: PreArgs) {
    #[cfg(feature = "cuda")]
    if let Some(form) = one_launch::reader(client, &pre) {
        return one_launch::launch(client, project, pre, form);
    }
    launch_project(client, project);
    launch_pre(client, pre);
}

/// Writes `input`, and what the block will need. Without elements nothing is launched.
pub fn launch_pre(client: &Client, args: PreArgs) {
    let Sizes { tokens, streams, width, elem } = args.sizes;
    if tokens * width == 0 {
        return;
    }
    #[cfg(feature = "cuda")]
    if let Some(form) = in_parts::Form::of(client.properties(), &args) {
        return in_parts::launch(client, form, args);
    }
    let Shape { vector, vectors } = select::choose(client.properties(), width, elem);
    let plane = select::plane_of_matrix(client.properties(), streams);
    let (products, in_parts) = match args.products {
        Products::Whole(products) => (products, false),
        Products::InParts(parts) => (parts, true),
    };
    let form = Form { streams, before_block: args.block.is_some(), in_parts, plane };
    let BlockArgs { norm_weight, post, comb, iterations } = args.block.unwrap_or_else(|| BlockArgs {
        norm_weight: dummy(client),
        post: dummy(client),
        comb: dummy(client),
        iterations: 1,
    });
    pre_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.streams]),
        vector,
        args.streams,
        products,
        args.scale,
        args.base,
        norm_weight,
        args.input,
        post,
        comb,
        tokens,
        vectors,
        select::slices(width),
        args.norm_eps,
        args.eps,
        iterations,
        form,
        elem,
    );
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    streams: usize,
    before_block: bool,
    /// See [`Products`].
    in_parts: bool,
    /// See [`select::plane_of_matrix`].
    plane: usize,
}

/// A cube per token, of `n` streams of `vectors` vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn pre_kernel<E: Float, N: Size>(
    streams: &[Vector<E, N>],
    products: &[f32],
    scale: &[f32],
    base: &[f32],
    norm_weight: &[f32],
    input: &mut [Vector<E, N>],
    post: &mut [f32],
    comb: &mut [f32],
    tokens: usize,
    vectors: usize,
    slices: usize,
    norm_eps: f32,
    eps: f32,
    iterations: usize,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let (n, before_block) = comptime!((form.streams, form.before_block));
    let (token, unit) = (CUBE_POS, UNIT_POS as usize);
    let count = comptime!(if before_block { (2 + n) * n } else { n });
    let mut numbers = Shared::<[f32]>::new_slice(comptime!(count + 1));
    let width = n * vectors * N::value().comptime();
    let factor = if comptime!(form.in_parts) {
        sum_parts(products, &mut numbers, min(token, tokens - 1), slices, comptime!(count + 1));
        1.0 / (numbers[count] / f32::cast_from(width) + norm_eps).sqrt()
    } else {
        let squares = read_whole(streams, products, &mut numbers, token, tokens, n * vectors, count);
        scale_of(squares, width, norm_eps)
    };
    let logits = Logits::new(token, factor, n);
    let mut pre = Shared::<[f32]>::new_slice(n);
    if token < tokens && unit < n {
        pre[unit] = sigmoid(logits.of(&numbers, scale, base, unit, 0usize)) + eps;
        if comptime!(before_block) {
            post[token * n + unit] = 2.0 * sigmoid(logits.of(&numbers, scale, base, n + unit, 1usize));
        }
    }
    sync_cube();
    // The matrix takes longer than all that is left, and depends on none of it: a plane has nothing else to do, where it can.
    let ptx = plane::is_ptx().comptime();
    let aside = comptime!(if before_block && ptx { form.plane } else { 0 });
    let mut first_column = unit;
    if comptime!(aside > 0) {
        first_column = unit - aside;
        if unit < aside {
            first_column = vectors;
            if token < tokens {
                sinkhorn::mix_by_plane(&logits, &numbers, scale, base, comb, eps, iterations);
            }
        }
    }
    let step = comptime!(UNITS - aside);
    let mut squares = 0.0f32;
    if token < tokens {
        squares = add_streams(streams, &pre, input, token, first_column, vectors, n, step);
    }
    if comptime!(before_block) {
        let factor_of_sum = scale_of(squares, vectors * N::value().comptime(), norm_eps);
        if token < tokens {
            let mut column = first_column;
            while column < vectors {
                let at = token * vectors + column;
                input[at] = norm(input[at], norm_weight, column, factor_of_sum);
                column += step;
            }
            if comptime!(aside == 0) {
                if comptime!(form.plane > 0) {
                    sinkhorn::mix_by_plane(&logits, &numbers, scale, base, comb, eps, iterations);
                } else if unit == 0 {
                    sinkhorn::by_unit(&logits, &numbers, scale, base, comb, eps, iterations);
                }
            }
        }
    }
}

/// Takes over the products of a token. Returns the squares of a unit's channels of its streams, which are so many vectors.
#[cube]
fn read_whole<E: Float, N: Size>(
    streams: &[Vector<E, N>],
    products: &[f32],
    numbers: &mut Shared<[f32]>,
    token: usize,
    tokens: usize,
    vectors: usize,
    #[comptime] count: usize,
) -> f32 {
    let unit = UNIT_POS as usize;
    let mut squares = 0.0f32;
    if token < tokens {
        let mut at = unit;
        while at < vectors {
            squares = add_squares(streams[token * vectors + at], squares);
            at += UNITS;
        }
        if unit < count {
            numbers[unit] = products[token * count + unit];
        }
    }
    squares
}

/// Adds up the streams of a token, every `step`-th vector from `first_column` on. Returns the sum of their squares.
#[cube]
fn add_streams<E: Float, N: Size>(
    streams: &[Vector<E, N>],
    pre: &Shared<[f32]>,
    input: &mut [Vector<E, N>],
    token: usize,
    first_column: usize,
    vectors: usize,
    #[comptime] n: usize,
    #[comptime] step: usize,
) -> f32 {
    let first = token * n * vectors;
    let mut squares = 0.0f32;
    let mut column = first_column;
    while column < vectors {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for k in 0..n {
            sum += Vector::cast_from(streams[first + k * vectors + column]) * Vector::new(pre[k]);
        }
        let rounded = Vector::cast_from(sum);
        input[token * vectors + column] = rounded;
        squares = add_squares::<E, N>(rounded, squares);
        column += step;
    }
    squares
}

/// Streams of DeepSeek-V4, and so many that one unit has the matrix.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entries = |kind| {
        let elem = ElemType::Float(kind);
        let Shape { vector, .. } = select::choose(&device, 4096, elem);
        let cube = CubeDim::new_1d(UNITS as u32);
        let pre = |streams, before_block, in_parts| {
            let form = Form { streams, before_block, in_parts, plane: select::plane_of_matrix(&device, streams) };
            #[rustfmt::skip]
            let form = form!(pre_kernel, cube,
                [AddressType::U32, vector, _, _, _, _, _, _, _, _, 1, 1, 1, 1.0, 1.0, 1, form, elem]);
            form
        };
        [
            Entry::of(kind, "hyper_connection.pre", pre(4, true, false)),
            Entry::of(kind, "hyper_connection.unit", pre(8, true, false)),
            Entry::of(kind, "hyper_connection.unit.parts", pre(8, true, true)),
            Entry::of(kind, "hyper_connection.head", pre(4, false, false)),
            Entry::of(kind, "hyper_connection.head.parts", pre(4, false, true)),
        ]
    };
    let all = FLOATS.into_iter().flat_map(entries).chain(post::offline()).chain(project::offline());
    all.chain(in_parts::offline()).chain(one_launch::offline()).collect()
}
