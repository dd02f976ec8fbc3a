//! What is multiplied with what: rows, matrices, and where the products go.

use cubecl::prelude::*;

use super::sizes::{Division, LinearForm, LinearSizes};
use super::weight::WeightArg;
use crate::common::launch::share;
use crate::route_experts::{self, RouteArgs};

/// Arguments of [`launch`](super::launch); X is `x_elem`, E is `elem`.
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
    pub(super) fn sizes(&self) -> LinearSizes {
        let &Self { inputs, outputs, form, x_elem, elem, batch_invariant, .. } = self;
        let (rows, matrices, division) = match &self.work {
            Work::Dense { rows, others } if others.is_empty() => (*rows, 1, Division::Dense),
            Work::Dense { rows, .. } => (*rows, 1, Division::Several),
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
    /// All of so many rows meet the one matrix, or several.
    Dense {
        /// Rows.
        rows: usize,
        /// Other matrices that they meet, as many as [`joined`](super::joined) says: those in blocks of codes first.
        others: Vec<OtherMatrix>,
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
        /// i32, as [`crate::experts_mlp::sort`] writes it for tiles of [`tile_tokens`](super::tile_tokens).
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
    pub(super) fn share(&self) -> Self {
        match self {
            &Work::Dense { rows, .. } => Work::Dense { rows, others: Vec::new() },
            &Work::Heads { rows, heads, carried, matrix_stride } => Work::Heads { rows, heads, carried, matrix_stride },
            &Work::Experts { ref order, ref tiles, pairs, experts, rows } => {
                Work::Experts { order: share(order), tiles: share(tiles), pairs, experts, rows }
            }
            Work::Token { .. } => unreachable!("a single token has not many rows"),
        }
    }

    /// A choice that is to be made, in a launch of its own, unless the projection's kernel `chooses`.
    pub(super) fn listed(self, client: &Client, chooses: impl Fn(&RouteArgs) -> bool) -> Self {
        match self {
            Work::Token { experts_of: ExpertsOf::Routed(route), pairs, experts, rows, shared } if !chooses(&route) => {
                let experts_of = ExpertsOf::Listed(share(&route.indices));
                route_experts::launch(client, *route);
                Work::Token { experts_of, pairs, experts, rows, shared }
            }
            Work::Token { experts_of: ExpertsOf::Routed(mut route), pairs, experts, rows, shared } => {
                if let Some(product) = route.product.take() {
                    super::launch(client, *product);
                }
                Work::Token { experts_of: ExpertsOf::Routed(route), pairs, experts, rows, shared }
            }
            work => work,
        }
    }
}

/// A matrix of the same inputs, where outputs are not gated.
pub struct OtherMatrix {
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
    /// Whether the row of a token is that of its number: `cache` is a scratch then, and `slots` are for who reads that.
    pub by_token: bool,
    /// Channels of a row of the cache.
    pub cache_width: usize,
    /// Pairs of neighbours that RoPE is applied to: all carried channels.
    pub pairs: usize,
    /// Rows of the cache.
    pub slot_count: usize,
    /// Added to the mean square in the norm.
    pub eps: f32,
}
