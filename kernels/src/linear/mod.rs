//! Projections of rows by one matrix, or by that of their expert or head.
//!
//! With few tokens a projection is as fast as its weights come from the memory: `plain.rs`, for all devices and dtypes, and
//! `mma`, with matrix instructions for f16 and bf16, read each weight once for a tile of tokens; on Hopper `streamed` does so for
//! experts whose weights are in blocks of codes. With many tokens it is as fast as the tensor cores: `sm90`, for Hopper, and `tiled`,
//! with the same instructions as `mma`. [`LinearSizes`] decides which one runs (`select.rs`).

mod activation;
mod args;
mod behind;
#[cfg(feature = "cuda")]
mod choice;
pub mod dequantize;
mod forced;
mod grid;
#[cfg(feature = "cuda")]
mod latents;
#[cfg(feature = "cuda")]
pub(crate) mod mma;
pub mod normed;
pub(crate) mod packed;
#[cfg(feature = "cuda")]
mod parts;
mod plain;
#[cfg(feature = "cuda")]
mod powers;
mod select;
mod sizes;
#[cfg(feature = "cuda")]
mod sm90;
#[cfg(feature = "cuda")]
mod source;
#[cfg(feature = "cuda")]
mod streamed;
#[cfg(feature = "cuda")]
mod tiled;
pub(crate) mod weight;
mod weight_row;

use cubecl::prelude::*;

pub use self::args::{ExpertsOf, LatentRows, LinearArgs, OtherMatrix, PairRows, SharedMatrix, Work};
use self::behind::BehindArgs;
pub use self::forced::{Forced, choices, choose};
use self::grid::Grid;
pub use self::packed::{BlockLayout, FP4_COLUMNS, FP8_COLUMNS, PackedArg};
pub use self::select::{Choice, joined, joins_experts};
pub(crate) use self::select::{FEW_OUTPUTS, has_many_units};
pub use self::sizes::{Division, LinearForm, LinearSizes};
pub use self::weight::{WeightArg, WeightFormat};
#[cfg(feature = "cuda")]
use crate::common::launch::share;
use crate::common::launch::{address_type, address_type_of};
use crate::common::select::{Available, Path};
#[cfg(feature = "cuda")]
use crate::compiler::names_all_sizes;
use crate::merge_splits::{self, MergeSplitsArgs};
use crate::norm_rope::{self, NormRopeArgs};
use crate::residual_norm::{self, AddRmsNormArgs, Summand};
use crate::route_experts::RouteArgs;

/// Units of a cube of the plain kernel, mostly. They share a row of the weights, or each plane's worth of them has its own.
pub(crate) const UNITS: usize = 128;

/// Tokens of a tile of [`Work::Experts`], for which pairs have to be sorted.
pub fn tile_tokens(client: &Client, sizes: &LinearSizes) -> usize {
    choose(client, sizes).tokens
}

/// The implementations that a device has for these sizes, the fastest first.
pub fn available(client: &Client, sizes: &LinearSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Whether rows are multiplied by a kernel that is made for many of them, and no other product of matrices may be faster; a small
/// batch always has a kernel. Tiles of dense rows were not timed against others.
pub fn takes_many_rows(client: &Client, sizes: &LinearSizes) -> bool {
    let choice = choose(client, sizes);
    choice.path == Path::Sm90 || choice.is_tiled() && sizes.division != Division::Dense
}

/// Writes `out`. Without rows, inputs or outputs nothing is launched.
pub fn launch(client: &Client, args: LinearArgs) {
    launch_with(client, Before::Nothing, With::Nothing, args);
}

/// The same for the heads of an attention whose splits are to be merged: `x` is their `out`. Bit for bit [`merge_splits`] and
/// [`launch`]; where a single token has few splits it is one launch, and `x` and the lse of several splits are not written.
pub fn launch_merged(client: &Client, merge: MergeSplitsArgs, args: LinearArgs) {
    launch_with(client, Before::Merge(merge), With::Nothing, args);
}

/// The same for the norm of a residual sum: `x` is its `normed`. Bit for bit [`residual_norm`] and [`launch`]; for a single row
/// it may be one launch.
pub fn launch_normed(client: &Client, norm: AddRmsNormArgs, args: LinearArgs) {
    launch_with(client, Before::Norm(norm), With::Nothing, args);
}

/// The same for rows that get a norm of their heads, or RoPE: `x` is their `out`. Bit for bit [`norm_rope`] and [`launch`]; for a single
/// token it may be one launch, and `x` is not written.
pub fn launch_norm_roped(client: &Client, norm_rope: NormRopeArgs, args: LinearArgs) {
    launch_with(client, Before::NormRope(norm_rope), With::Nothing, args);
}

/// The same, and then the norm of `out`, its `x`. Bit for bit [`launch`] and [`norm_rope`]; of a single token it may be one launch.
pub fn launch_then_norm(client: &Client, args: LinearArgs, norm: NormRopeArgs) {
    #[cfg(feature = "cuda")]
    if choose(client, &args.sizes()).path == Path::Mma && mma::takes_norm(client, &args, &norm) {
        return launch_with(client, Before::Nothing, With::Norm(Box::new(norm)), args);
    }
    launch(client, args);
    norm_rope::launch(client, norm);
}

/// The same with RoPE applied to the carried channels of the heads, and puts latents into a cache. The launch must be one that [`takes_rope`].
pub fn launch_with_rope(client: &Client, latents: LatentRows, args: LinearArgs) {
    launch_with(client, Before::Nothing, With::Latents(latents), args);
}

/// The same for the logits of a token, and the choice of its experts by them. The launch must be one that [`takes_route`].
pub(crate) fn launch_routed(client: &Client, route: RouteArgs, args: LinearArgs) {
    launch_with(client, Before::Nothing, With::Route(Box::new(route)), args);
}

/// Whether [`launch_routed`] takes this product: of a single token, with cubes that can count themselves.
pub(crate) fn takes_route(client: &Client, args: &LinearArgs) -> bool {
    let sizes = args.sizes();
    let is_ptx = cfg!(feature = "cuda") && client.properties().identity.fingerprint.starts_with("ptx");
    is_ptx && sizes.rows == 1 && choose(client, &sizes).path == Path::Plain
}

/// Whether [`launch_with_rope`] takes these.
pub fn takes_rope(client: &Client, latents: &LatentRows, args: &LinearArgs) -> bool {
    #[cfg(feature = "cuda")]
    if let Work::Heads { carried, .. } = args.work {
        let choice = choose(client, &args.sizes());
        return choice.path == Path::Mma && !choice.is_tiled() && mma::takes_latents(carried, latents);
    }
    let _ = (client, latents, args);
    false
}

/// What writes the rows of x, if they are not there.
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
pub(crate) enum Before {
    Nothing,
    Merge(MergeSplitsArgs),
    Norm(AddRmsNormArgs),
    NormRope(NormRopeArgs),
}

impl Before {
    fn launch(self, client: &Client) {
        match self {
            Self::Nothing => {}
            Self::Merge(merge) => merge_splits::launch(client, merge),
            Self::Norm(norm) => residual_norm::launch(client, norm),
            Self::NormRope(norm_rope) => norm_rope::launch(client, norm_rope),
        }
    }

    /// The largest buffer beside x.
    fn largest(&self) -> Option<&BufferArg> {
        match self {
            Self::Nothing => None,
            Self::Merge(merge) => Some(&merge.outs),
            Self::NormRope(norm_rope) => Some(&norm_rope.x),
            Self::Norm(AddRmsNormArgs { y: Summand::Rows(rows), .. }) => Some(rows),
            Self::Norm(AddRmsNormArgs { y: Summand::Experts(outputs), .. }) => Some(&outputs.rows),
        }
    }
}

/// What a launch does beside its products, or with them.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "which kernels elsewhere do none of"))]
pub(crate) enum With {
    Nothing,
    Latents(LatentRows),
    Norm(Box<NormRopeArgs>),
    Route(Box<RouteArgs>),
}

/// Behind a launch whose work the products' kernel does itself where that is faster, and with what it does beside them.
fn launch_with(client: &Client, before: Before, with: With, args: LinearArgs) {
    let (inputs, outputs, x_elem, elem) = (args.inputs, args.outputs, args.x_elem, args.elem);
    let sizes = args.sizes();
    let LinearSizes { rows, carried, matrix_stride, .. } = sizes;
    if rows * inputs * outputs == 0 {
        return before.launch(client);
    }
    let (x, weight, out, limit) = (args.x, args.weight, args.out, args.limit);
    let products = Products { x, weight, out, inputs, outputs, carried, matrix_stride, limit };
    let elements = products.weight.elements();
    let mut buffers = vec![&products.x, products.weight.largest(), &products.out];
    match &args.work {
        Work::Token { shared: Some(shared), .. } => buffers.push(shared.weight.largest()),
        Work::Dense { others, .. } => {
            buffers.extend(others.iter().flat_map(|other| [other.weight.largest(), &other.out]));
        }
        _ => {}
    }
    buffers.extend(before.largest());
    if let With::Latents(latents) = &with {
        buffers.push(&latents.cache);
    }
    let address = address_type(client, &buffers).max(address_type_of(client, elements));
    let choice = choose(client, &sizes);
    let first = (outputs, products.weight.format());
    let grid = |work: Work, chooses: &dyn Fn(&RouteArgs) -> bool| {
        Grid::new(client, work.listed(client, chooses), choice.tokens, first)
    };
    #[cfg(feature = "cuda")]
    if let Some(tiling) = choice.tiling {
        before.launch(client);
        let others = if names_all_sizes() { select::tilings(client, &sizes) } else { Vec::new() };
        for tiling in others {
            let (products, work) = (products.share(), args.work.share());
            sm90::launch(client, products, work, args.form, tiling, address, [x_elem, elem]);
        }
        return sm90::launch(client, products, args.work, args.form, tiling, address, [x_elem, elem]);
    }
    #[cfg(feature = "cuda")]
    if choice.is_tiled() {
        before.launch(client);
        let others = if names_all_sizes() { &tiled::TOKENS[..] } else { &[] };
        for &tokens in others {
            tiled::launch(client, products.share(), args.work.share(), args.form, tokens, address, elem);
        }
        return tiled::launch(client, products, args.work, args.form, choice.tokens, address, elem);
    }
    #[cfg(feature = "cuda")]
    if choice.path == Path::Mma
        && let Some(form) = streamed::takes(client, &products, &args.work, choice, &sizes)
    {
        before.launch(client);
        return streamed::launch(client, products, args.work, form, address, elem);
    }
    match choice.path {
        #[cfg(feature = "cuda")]
        Path::Mma => {
            let format = products.weight.format();
            let grid = grid(args.work, &|route| choice::chooses(route, format));
            let mut inside = Before::Nothing;
            if mma::takes(client, &products, &grid, &before) {
                inside = before;
            } else {
                before.launch(client);
            }
            mma::launch(client, products, grid, (inside, with), (choice, &sizes), address, elem);
        }
        _ => {
            before.launch(client);
            let behind = match with {
                #[cfg(feature = "cuda")]
                With::Route(route) => BehindArgs::route(client, *route),
                _ => BehindArgs::Nothing,
            };
            plain::launch(client, products, grid(args.work, &|_| false), args.form, address, [x_elem, elem], behind);
        }
    }
}

/// The matrices of a launch.
pub(crate) struct Products {
    pub x: BufferArg,
    pub weight: WeightArg,
    pub out: BufferArg,
    pub inputs: usize,
    pub outputs: usize,
    pub carried: usize,
    pub matrix_stride: usize,
    pub limit: f32,
}

#[cfg(feature = "cuda")]
impl Products {
    /// The same once more.
    fn share(&self) -> Self {
        let &Self { inputs, outputs, carried, matrix_stride, limit, .. } = self;
        let [x, out] = [&self.x, &self.out].map(share);
        Self { x, weight: self.weight.share(), out, inputs, outputs, carried, matrix_stride, limit }
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    [select::TABLE.offline(), normed::offline(), dequantize::offline()].into_iter().flatten().collect()
}
