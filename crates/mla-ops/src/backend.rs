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
use burn::tensor::FloatDType;

#[cfg(all(feature = "fusion", feature = "_gpu"))]
use crate::fusion;
use crate::{Path, RouteExpertsOptions, SparseMlaOptions, Splits};

/// What [`MlaBackend::mla_plan`] needs beside the lengths.
#[derive(Debug, Clone)]
pub struct PlanSpec {
    /// Keys in a tile.
    pub tile: usize,
    /// Cubes that run at a time.
    pub cubes: usize,
    /// How the keys of a sequence are divided.
    pub splits: Splits,
    /// Longer lengths are cut to this.
    pub max_seq_len: usize,
    /// Rows of the item list.
    pub capacity: usize,
}

/// What [`MlaBackend::mla_decode`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct DecodeSpec {
    /// Leading channels of a cache row that are the value.
    pub value_width: usize,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Whether later query tokens see more keys than earlier ones.
    pub causal: bool,
    /// The implementation, one that the device has; otherwise the fastest.
    pub path: Option<Path>,
}

/// What [`MlaBackend::ragged_attention`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct RaggedSpec {
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// Whether a token sees only itself and those before it.
    pub causal: bool,
}

/// What [`MlaBackend::page_table`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct PageTableSpec {
    /// Tokens in a page.
    pub page_size: usize,
    /// Columns of the table.
    pub max_pages: usize,
}

/// What [`MlaBackend::kv_indices`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct KvIndicesSpec {
    /// Tokens in a page.
    pub page_size: usize,
    /// Length of the list.
    pub capacity: usize,
}

/// What [`MlaBackend::vertical_slash_index`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct VerticalSlashIndexSpec {
    /// The longest sequence of queries; longer lengths are cut to this.
    pub max_query_len: usize,
    /// Queries in a block row.
    pub block_size_m: usize,
    /// Keys in a key block.
    pub block_size_n: usize,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
}

impl VerticalSlashIndexSpec {
    /// Block rows.
    pub fn rows(&self) -> usize {
        self.max_query_len.div_ceil(self.block_size_m)
    }

    /// Key blocks that a band adds at most.
    pub fn blocks_per_band(&self) -> usize {
        self.block_size_m.div_ceil(self.block_size_n)
    }
}

/// What [`MlaBackend::vertical_slash_attention`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct VerticalSlashSpec {
    /// Rows of q, and of k and v, from one sequence to the next; none where the sequences are packed.
    pub strides: Option<[usize; 2]>,
    /// Queries in a block row.
    pub block_size_m: usize,
    /// Keys in a key block.
    pub block_size_n: usize,
    /// The factor of the scores.
    pub softmax_scale: f32,
    /// What scaled scores are bent to stay below; 0 for nothing.
    pub softcap: f32,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
}

/// What [`MlaBackend::lightning_index`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct LightningIndexSpec {
    /// How many keys are chosen.
    pub k: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// Whether keys are named by their slots in the pool; otherwise by their positions.
    pub slots: bool,
}

/// What [`MlaBackend::compress_kv`] needs beside the tensors.
#[derive(Debug, Clone)]
pub struct CompressKvSpec {
    /// Whether an entry pools the window before its own, too.
    pub overlap: bool,
    /// Added to the mean square in the norm of an entry.
    pub norm_eps: f32,
    /// Of the entries.
    pub dtype: FloatDType,
}

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
    /// [`mla_plan`](crate::mla_plan): items, cube_ptr, split_ptr.
    #[fusion(meta = fusion::mla_plan)]
    fn mla_plan(seq_lens: IntTensor<Self>, spec: PlanSpec) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`mla_decode`](crate::mla_decode): out, lse.
    #[fusion(meta = fusion::mla_decode)]
    #[allow(clippy::too_many_arguments)]
    fn mla_decode(
        q: FloatTensor<Self>,
        kv_cache: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        items: IntTensor<Self>,
        cube_ptr: IntTensor<Self>,
        split_ptr: IntTensor<Self>,
        spec: DecodeSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`mla_decode_project`](crate::mla_decode_project) of a single token.
    #[fusion(meta = fusion::mla_decode_project)]
    #[allow(clippy::too_many_arguments)]
    fn mla_decode_project(
        q: FloatTensor<Self>,
        kv_cache: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        items: IntTensor<Self>,
        cube_ptr: IntTensor<Self>,
        split_ptr: IntTensor<Self>,
        value_proj: FloatTensor<Self>,
        spec: DecodeSpec,
    ) -> FloatTensor<Self>;

    /// [`ragged_attention`](crate::ragged_attention): out, lse.
    #[fusion(meta = fusion::ragged_attention)]
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        spec: RaggedSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`page_table`](crate::page_table).
    #[fusion(meta = fusion::page_table)]
    fn page_table(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: PageTableSpec,
    ) -> IntTensor<Self>;

    /// [`kv_indices`](crate::kv_indices): indptr, indices, last_page_len, overflow.
    #[fusion(meta = fusion::kv_indices)]
    fn kv_indices(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: KvIndicesSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`vertical_slash_index`](crate::vertical_slash_index): block_count, block_offset, column_count, column_index.
    #[fusion(meta = fusion::vertical_slash_index)]
    fn vertical_slash_index(
        q_lens: IntTensor<Self>,
        kv_lens: IntTensor<Self>,
        vertical: IntTensor<Self>,
        slash: IntTensor<Self>,
        vertical_counts: IntTensor<Self>,
        slash_counts: IntTensor<Self>,
        spec: VerticalSlashIndexSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// [`vertical_slash_attention`](crate::vertical_slash_attention): out, lse. The bounds are lengths, or where sequences
    /// are packed, their ends.
    #[fusion(meta = fusion::vertical_slash_attention)]
    #[allow(clippy::too_many_arguments)]
    fn vertical_slash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        q_bounds: IntTensor<Self>,
        kv_bounds: IntTensor<Self>,
        block_count: IntTensor<Self>,
        block_offset: IntTensor<Self>,
        column_count: IntTensor<Self>,
        column_index: IntTensor<Self>,
        spec: VerticalSlashSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`lightning_index`](crate::lightning_index).
    #[fusion(meta = fusion::lightning_index)]
    fn lightning_index(
        q: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        head_weights: FloatTensor<Self>,
        visible: IntTensor<Self>,
        spec: LightningIndexSpec,
    ) -> IntTensor<Self>;

    /// [`compress_kv`](crate::compress_kv): the entries. The state is read; the public function writes it.
    #[fusion(meta = fusion::compress_kv)]
    #[allow(clippy::too_many_arguments)]
    fn compress_kv(
        kv_gates: FloatTensor<Self>,
        state: FloatTensor<Self>,
        state_rows: IntTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        starts: IntTensor<Self>,
        position_bias: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        spec: CompressKvSpec,
    ) -> FloatTensor<Self>;

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

    /// [`write_latent`](crate::write_latent) of latent and rotary part: the cache's own buffer.
    #[fusion(meta = fusion::write_latent)]
    fn write_latent(
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        latent: FloatTensor<Self>,
        rope: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// [`write_latent`](crate::write_latent) of whole rows: the cache's own buffer.
    #[fusion(meta = fusion::write_rows)]
    fn write_rows(cache: FloatTensor<Self>, slots: IntTensor<Self>, rows: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`rope_write`](crate::rope_write()): queries, latents, the cache's own buffer.
    #[fusion(meta = fusion::rope_write)]
    #[allow(clippy::too_many_arguments)]
    fn rope_write(
        q: FloatTensor<Self>,
        latent: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        norm_eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`rope_write_absorb`](crate::rope_write_absorb()) of a few tokens: absorbed queries, the cache's own buffer.
    #[fusion(meta = fusion::rope_write_absorb)]
    #[allow(clippy::too_many_arguments)]
    fn rope_write_absorb(
        q: FloatTensor<Self>,
        latent: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        weight: FloatTensor<Self>,
        norm_eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Lists of slots `[N, K]`, of each the first of `lengths` `[N]`, without their gaps: `[N, K]`, and how many there are,
    /// `[N]`. For [`sparse_mla`](crate::sparse_mla()).
    #[fusion(meta = fusion::compact_slots)]
    fn compact_slots(slots: IntTensor<Self>, lengths: IntTensor<Self>) -> (IntTensor<Self>, IntTensor<Self>);

    /// [`sparse_mla_parts`](crate::sparse_mla_parts()) of one scope: acc, max, row_sum.
    #[fusion(meta = fusion::sparse_parts)]
    fn sparse_parts(
        q: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        indices: IntTensor<Self>,
        lengths: IntTensor<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`merge_state`](crate::merge_state): out, lse.
    #[fusion(meta = fusion::merge_state)]
    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`merge_states`](crate::merge_states): out, lse.
    #[fusion(meta = fusion::merge_states)]
    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`Accumulator::merge`](crate::Accumulator::merge): out, lse of the accumulator.
    #[fusion(meta = fusion::merge_state_into)]
    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`matmul`](crate::matmul) in f32.
    #[fusion(meta = fusion::matmul)]
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
}
