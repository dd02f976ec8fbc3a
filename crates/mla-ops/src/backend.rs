//! Registration: the operations as a Burn backend extension.
//!
//! The public functions in `ops` validate and call the `Dispatch` implementation that the macro generates; it picks the
//! backend from the tensors. `CubeBackend` runs kernels (`cube.rs`), `Flex` the tensor reference (`flex.rs`). With the
//! feature `fusion` a generated implementation defers the calls of `CubeBackend`, for which the functions in `fusion.rs`
//! say what the outputs will be.

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use crate::RouteExpertsOptions;
#[cfg(all(feature = "fusion", feature = "_gpu"))]
use crate::fusion;

/// What [`MlaBackend::linear`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct LinearSpec {
    /// Whether this is [`swiglu`](crate::swiglu()).
    pub gated: bool,
    /// Bound of the activations.
    pub limit: Option<f32>,
}

/// What the choice of the best experts needs beside the tensors.
#[derive(Debug, Clone)]
pub struct RouteSpec {
    /// Whether there is a bias; otherwise that tensor is anything.
    pub biased: bool,
    /// Experts of a token.
    pub top_k: usize,
    /// The rest.
    pub options: RouteExpertsOptions,
}

/// The experts of tokens and their weights, or what they are chosen from.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendRouting<B: Backend> {
    /// Experts and weights.
    Chosen(IntTensor<B>, FloatTensor<B>),
    /// Logits, a bias, and the rest of what [`MlaBackend::choose_experts`] takes.
    Scored(FloatTensor<B>, FloatTensor<B>, RouteSpec),
}

impl<B: MlaBackend> BackendRouting<B> {
    /// Experts and weights.
    pub fn chosen(self) -> (IntTensor<B>, FloatTensor<B>) {
        match self {
            Self::Chosen(indices, weights) => (indices, weights),
            Self::Scored(logits, bias, route) => B::choose_experts(logits, bias, route),
        }
    }
}

/// What [`MlaBackend::experts_mlp`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct ExpertsSpec {
    /// Whether there are shared experts.
    pub shared: bool,
    /// Bound of the activations.
    pub limit: Option<f32>,
    /// Added to the mean square in the norm of the residual sum; none where there is no such sum.
    pub norm_eps: Option<f32>,
    /// Whether two projections of a single token's norm follow.
    pub pair: bool,
}

/// What [`MlaBackend::norm_rope`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct NormRopeSpec {
    /// Added to the mean square in the norm; none where there is no norm.
    pub norm_eps: Option<f32>,
    /// Whether the norm is that of all channels, not of those alone that do not turn.
    pub norm_turned: bool,
    /// Whether the norm has a weight; otherwise that tensor is anything.
    pub weighted: bool,
    /// Pairs of channels that turn; without them the tables are anything.
    pub pairs: usize,
    /// Whether heads turn back.
    pub inverse: bool,
}

/// The operations on backend primitives. Arguments are those of the public functions, validated.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub trait MlaBackend: Backend {
    /// [`linear`](crate::linear()) or [`swiglu`](crate::swiglu()).
    #[fusion(meta = fusion::linear)]
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: LinearSpec) -> FloatTensor<Self>;

    /// [`linear_pair`](crate::linear_pair()).
    #[fusion(meta = fusion::linear_pair)]
    fn linear_pair(
        x: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`linear_by_head`](crate::linear_by_head()).
    #[fusion(meta = fusion::linear_by_head)]
    fn linear_by_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`route_experts`](crate::route_experts()) of the best scores: experts and weights.
    #[fusion(meta = fusion::choose_experts)]
    fn choose_experts(
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        route: RouteSpec,
    ) -> (IntTensor<Self>, FloatTensor<Self>);

    /// [`route_experts`](crate::route_experts()) of given experts: these, and their weights.
    #[fusion(meta = fusion::weigh_experts)]
    fn weigh_experts(
        logits: FloatTensor<Self>,
        given: IntTensor<Self>,
        options: RouteExpertsOptions,
    ) -> (IntTensor<Self>, FloatTensor<Self>);

    /// [`experts_mlp_add_rms_norm`](crate::experts_mlp_add_rms_norm()) with what shared experts computed: the sum, and its norm.
    /// Without `spec.shared`, `shared` is anything. Without `spec.norm_eps`, `residual` and `norm_weight` are anything, and this
    /// is [`experts_mlp`](crate::experts_mlp()), twice.
    #[fusion(meta = fusion::experts_mlp)]
    #[allow(clippy::too_many_arguments)]
    fn experts_mlp(
        x: FloatTensor<Self>,
        indices: IntTensor<Self>,
        weights: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The same of a single token, with the weights of shared experts; and behind it the products of the norm with `first` and
    /// `second`, as [`MlaBackend::linear_pair`] computes them. Without `spec.pair`, both are anything, and so are the products.
    #[fusion(meta = fusion::experts_mlp_of_token)]
    #[allow(clippy::too_many_arguments)]
    fn experts_mlp_of_token(
        x: FloatTensor<Self>,
        #[extension_type] routing: BackendRouting<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared_gate_up: FloatTensor<Self>,
        shared_down: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`norm_rope`](crate::norm_rope()).
    #[fusion(meta = fusion::norm_rope)]
    fn norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        spec: NormRopeSpec,
    ) -> FloatTensor<Self>;

    /// [`add_rms_norm`](crate::add_rms_norm()): the sum, and its norm.
    #[fusion(meta = fusion::add_rms_norm)]
    fn add_rms_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`add_rms_norm_linear`](crate::add_rms_norm_linear()) of a few rows: the sum, its norm, the products.
    #[fusion(meta = fusion::add_rms_norm_linear)]
    fn add_rms_norm_linear(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`matmul`](crate::matmul) in f32.
    #[fusion(meta = fusion::matmul)]
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
}
