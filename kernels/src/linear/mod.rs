//! Projections of rows by one matrix, or by that of their expert or head.
//!
//! With few tokens a projection is as fast as its weights come from the memory: `plain.rs`, for all devices and dtypes, and
//! `mma`, with matrix instructions for f16 and bf16, read each weight once for a tile of tokens. With many tokens it is as fast
//! as the tensor cores: `sm90`, for Hopper, and `tiled`, with the same instructions as `mma`. [`LinearSizes`] decides which one runs
//! (`select.rs`).

mod activation;
#[cfg(feature = "cuda")]
mod choice;
mod forced;
mod grid;
#[cfg(feature = "cuda")]
mod latents;
#[cfg(feature = "cuda")]
pub(crate) mod mma;
pub mod normed;
#[cfg(feature = "cuda")]
mod parts;
mod plain;
mod select;
mod sizes;
#[cfg(feature = "cuda")]
mod sm90;
#[cfg(feature = "cuda")]
mod source;
#[cfg(feature = "cuda")]
mod tiled;
pub(crate) mod weight;

use cubecl::prelude::*;

pub use self::forced::{Forced, choices, choose};
use self::grid::Grid;
pub use self::select::{Choice, joins, joins_experts};
pub(crate) use self::select::{FEW_OUTPUTS, has_many_units};
pub use self::sizes::{Division, LinearSizes};
pub use self::weight::{WeightArg, WeightFormat};
use crate::common::launch::{address_type, share};
use crate::common::select::{Available, Path};
#[cfg(feature = "cuda")]
use crate::compiler::names_all_sizes;
use crate::merge_splits::{self, MergeSplitsArgs};
use crate::residual_norm::{self, AddRmsNormArgs, Summand};
use crate::route_experts::{self, RouteArgs};

/// Units of a cube of the plain kernel, mostly. They share a row of the weights, or each plane's worth of them has its own.
pub(crate) const UNITS: usize = 128;
/// Arguments of [`launch`]; X is `x_elem`, E is `elem`.
pub struct LinearArgs {
    /// X `[.., inputs]`: rows that [`Work`] numbers.
    pub x: BufferArg,
    /// E `[experts, outputs, inputs]`; with [`LinearForm::gated`] `[experts, 2 * outputs, inputs]`, gate rows first.
    pub weight: WeightArg,
    /// E `[.., outputs]`, written: rows that [`Work`] numbers.
    pub out: BufferArg,
    /// Which rows meet which matrix.
    pub work: Work,
    /// Channels of a row of x.
    pub inputs: usize,
    /// Channels of a row of the output.
    pub outputs: usize,
    /// Bound of the activations, if [`LinearForm::limited`].
    pub limit: f32,
    /// Gated, limited.
    pub form: LinearForm,
    /// E, or where E is f32, f16 or bf16.
    pub x_elem: ElemType,
    /// f32, f16 or bf16.
    pub elem: ElemType,
    /// Whether the bits of a row may not depend on how many rows there are.
    pub batch_invariant: bool,
}

impl LinearArgs {
    /// What the choice of the kernel depends on.
    fn sizes(&self) -> LinearSizes {
        let &Self { inputs, outputs, form, x_elem, elem, batch_invariant, .. } = self;
        let (rows, matrices, division) = match &self.work {
            Work::Dense { rows, second: None } => (*rows, 1, Division::Dense),
            Work::Dense { rows, second: Some(_) } => (*rows, 1, Division::Pair),
            Work::Heads { rows, heads, .. } => (rows * heads, *heads, Division::Heads),
            Work::Experts { pairs, experts, .. } => (*pairs, *experts, Division::Experts),
            Work::Token { pairs, .. } => (*pairs, *pairs, Division::Token),
        };
        let (carried, matrix_stride) = match &self.work {
            Work::Heads { carried, matrix_stride, .. } => (*carried, *matrix_stride),
            _ => (0, form.matrix(inputs, outputs)),
        };
        let (elems, format) = ([x_elem, elem], self.weight.format());
        let sizes = LinearSizes::dense([rows, inputs, outputs], form, elems, format);
        LinearSizes { matrices, division, carried, matrix_stride, batch_invariant, ..sizes }
    }
}

/// Which rows meet which matrix.
pub enum Work {
    /// All of so many rows meet the one matrix, or two.
    Dense {
        /// Rows.
        rows: usize,
        /// Another matrix that they meet.
        second: Option<SecondMatrix>,
    },
    /// Each head of a token meets its own matrix: x `[rows, heads, inputs + carried]`, out `[rows, heads, outputs + carried]`.
    Heads {
        /// Tokens.
        rows: usize,
        /// Heads.
        heads: usize,
        /// Channels of a row of x that are copied behind its products.
        carried: usize,
        /// Elements from one matrix to the next.
        matrix_stride: usize,
    },
    /// Tiles of pairs of token and expert.
    Experts {
        /// i32 `[pairs]`, as [`crate::experts_mlp::sort`] writes it.
        order: BufferArg,
        /// i32, as [`crate::experts_mlp::sort`] writes it for tiles of [`tile_tokens`].
        tiles: BufferArg,
        /// Pairs.
        pairs: usize,
        /// Experts.
        experts: usize,
        /// Where the rows of pairs are.
        rows: PairRows,
    },
    /// The pairs of one token, each a tile of its own. Nothing is sorted: the order of the experts is that of the pairs.
    Token {
        /// The expert of each pair. Pairs of one that there is not are left out.
        experts_of: ExpertsOf,
        /// Pairs.
        pairs: usize,
        /// Experts.
        experts: usize,
        /// Where the rows of pairs are.
        rows: PairRows,
        /// A shared expert, whose row is behind those of the pairs.
        shared: Option<SharedMatrix>,
    },
}

/// Where the expert of each pair of a token is from.
pub enum ExpertsOf {
    /// i32 `[pairs]`.
    Listed(BufferArg),
    /// The choice of [`crate::route_experts`], which is written as well: in the launch of the projection where that can make it.
    Routed(Box<RouteArgs>),
}

impl Work {
    /// The same once more, of many rows.
    #[cfg(feature = "cuda")]
    fn share(&self) -> Self {
        match self {
            &Work::Dense { rows, .. } => Work::Dense { rows, second: None },
            &Work::Heads { rows, heads, carried, matrix_stride } => Work::Heads { rows, heads, carried, matrix_stride },
            &Work::Experts { ref order, ref tiles, pairs, experts, rows } => {
                Work::Experts { order: share(order), tiles: share(tiles), pairs, experts, rows }
            }
            Work::Token { .. } => unreachable!("a single token has not many rows"),
        }
    }

    /// A choice that is to be made, in a launch of its own, unless the projection's kernel `chooses`.
    fn listed(self, client: &Client, chooses: impl Fn(&RouteArgs) -> bool) -> Self {
        match self {
            Work::Token { experts_of: ExpertsOf::Routed(route), pairs, experts, rows, shared } if !chooses(&route) => {
                let experts_of = ExpertsOf::Listed(share(&route.indices));
                route_experts::launch(client, *route);
                Work::Token { experts_of, pairs, experts, rows, shared }
            }
            work => work,
        }
    }
}

/// A matrix of the same inputs, where outputs are not gated.
pub struct SecondMatrix {
    /// E `[outputs, inputs]`.
    pub weight: WeightArg,
    /// E `[rows, outputs]`, written.
    pub out: BufferArg,
    /// Its outputs.
    pub outputs: usize,
}

/// The matrix of an expert that the token has beside its own, with another number of hidden channels than theirs.
pub struct SharedMatrix {
    /// E, laid out like one of the others: `[outputs, inputs]`, or gated `[2 * outputs, inputs]`.
    pub weight: WeightArg,
    /// Its hidden channels: its outputs with [`PairRows::Gather`], its inputs with [`PairRows::Scatter`]. The other number is
    /// that of the other experts.
    pub width: usize,
}

/// Where the rows of pairs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PairRows {
    /// x has a row for each token, of so many pairs each; the output's rows have the order of the experts.
    Gather {
        /// Pairs of a token.
        top_k: usize,
    },
    /// x has the order of the experts; the output's rows that of the pairs.
    Scatter,
}

/// Latents, and a cache for them: see [`RopeWriteArgs`](crate::rope_write::RopeWriteArgs).
pub struct LatentRows {
    /// E `[tokens, cache_width]`.
    pub latent: BufferArg,
    /// f32 `[cache_width - 2 * pairs]`.
    pub weight: BufferArg,
    /// f32 `[tokens, pairs]`.
    pub cos: BufferArg,
    /// f32 `[tokens, pairs]`.
    pub sin: BufferArg,
    /// i32 `[tokens]`.
    pub slots: BufferArg,
    /// E `[slot_count, cache_width]`, written in place.
    pub cache: BufferArg,
    /// Channels of a row of the cache.
    pub cache_width: usize,
    /// Pairs of neighbours that turn: all carried channels.
    pub pairs: usize,
    /// Rows of the cache.
    pub slot_count: usize,
    /// Added to the mean square in the norm.
    pub eps: f32,
}

/// What becomes of the products; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinearForm {
    /// The output is `silu(gate) * up` of two products.
    pub gated: bool,
    /// `up` is clamped both ways and the gate from above.
    pub limited: bool,
}

impl LinearForm {
    /// Elements of a matrix.
    fn matrix(self, inputs: usize, outputs: usize) -> usize {
        inputs * outputs * if self.gated { 2 } else { 1 }
    }
}

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
    launch_with(client, Before::Nothing, None, args);
}

/// The same for the heads of an attention whose splits are to be merged: `x` is their `out`. Bit for bit [`merge_splits`] and
/// [`launch`]; where a single token has few splits it is one launch, and `x` and the lse of several splits are not written.
pub fn launch_merged(client: &Client, merge: MergeSplitsArgs, args: LinearArgs) {
    launch_with(client, Before::Merge(merge), None, args);
}

/// The same for the norm of a residual sum: `x` is its `normed`. Bit for bit [`residual_norm`] and [`launch`]; for a single row
/// it may be one launch.
pub fn launch_normed(client: &Client, norm: AddRmsNormArgs, args: LinearArgs) {
    launch_with(client, Before::Norm(norm), None, args);
}

/// The same for heads whose carried channels turn, and puts latents into a cache. The launch must be one that [`turns`].
pub fn launch_turned(client: &Client, latents: LatentRows, args: LinearArgs) {
    launch_with(client, Before::Nothing, Some(latents), args);
}

/// Whether [`launch_turned`] takes these.
pub fn turns(client: &Client, latents: &LatentRows, args: &LinearArgs) -> bool {
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
}

impl Before {
    fn launch(self, client: &Client) {
        match self {
            Self::Nothing => {}
            Self::Merge(merge) => merge_splits::launch(client, merge),
            Self::Norm(norm) => residual_norm::launch(client, norm),
        }
    }

    /// The largest buffer beside x.
    fn largest(&self) -> Option<&BufferArg> {
        match self {
            Self::Nothing => None,
            Self::Merge(merge) => Some(&merge.outs),
            Self::Norm(AddRmsNormArgs { y: Summand::Rows(rows), .. }) => Some(rows),
            Self::Norm(AddRmsNormArgs { y: Summand::Experts(outputs), .. }) => Some(&outputs.rows),
        }
    }
}

/// Behind a launch whose work the products' kernel does itself where that is faster, and with what it does beside them.
fn launch_with(client: &Client, before: Before, latents: Option<LatentRows>, args: LinearArgs) {
    let (inputs, outputs, x_elem, elem) = (args.inputs, args.outputs, args.x_elem, args.elem);
    let sizes = args.sizes();
    let LinearSizes { rows, carried, matrix_stride, .. } = sizes;
    if rows * inputs * outputs == 0 {
        return before.launch(client);
    }
    let (x, weight, out, limit) = (args.x, args.weight, args.out, args.limit);
    let products = Products { x, weight, out, inputs, outputs, carried, matrix_stride, limit };
    let mut buffers = vec![&products.x, products.weight.largest(), &products.out];
    match &args.work {
        Work::Token { shared: Some(shared), .. } => buffers.push(shared.weight.largest()),
        Work::Dense { second: Some(second), .. } => buffers.extend([second.weight.largest(), &second.out]),
        _ => {}
    }
    buffers.extend(before.largest());
    buffers.extend(latents.as_ref().map(|latents| &latents.cache));
    let address = address_type(client, &buffers);
    let choice = choose(client, &sizes);
    let grid =
        |work: Work, chooses: fn(&RouteArgs) -> bool| Grid::new(client, work.listed(client, chooses), choice.tokens);
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
    match choice.path {
        #[cfg(feature = "cuda")]
        Path::Mma => {
            let grid = grid(args.work, choice::chooses);
            let mut inside = Before::Nothing;
            if mma::takes(client, &products, &grid, &before) {
                inside = before;
            } else {
                before.launch(client);
            }
            mma::launch(
                client,
                products,
                grid,
                (inside, latents),
                (args.form, choice.tokens, choice.in_parts),
                address,
                elem,
            );
        }
        _ => {
            let _ = latents;
            before.launch(client);
            plain::launch(client, products, grid(args.work, |_| false), args.form, address, [x_elem, elem]);
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
    [select::TABLE.offline(), normed::offline()].into_iter().flatten().collect()
}
