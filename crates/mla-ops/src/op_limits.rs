//! The launchers' own checks, asked with the sizes of a call before anything is launched.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Tensor};
use mla_kernels::DeviceError;
use mla_kernels::compress_kv::{self, CompressKvError, CompressKvSizes};
use mla_kernels::lightning_index::{self, LightningIndexError, LightningIndexSizes};
use mla_kernels::mla_decode::{self, DecodeError, DecodeSizes};
use mla_kernels::mla_plan::{self, PlanSizes};
use mla_kernels::ragged_attention::{self, RaggedAttentionError, RaggedAttentionSizes};

use crate::backend::PlanSpec;
use crate::check::Check;
use crate::{CompressKvArgs, CompressKvOptions, ExpertsMlpArgs, LightningIndexArgs, MlaDecodeProblem, MlaError, Path};

/// The device plans for this.
pub(crate) fn plan(check: &Check, batch: usize, spec: &PlanSpec) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let &PlanSpec { tile, cubes, splits, max_seq_len, capacity } = spec;
    let sizes = PlanSizes { batch, cubes, capacity, max_seq_len, tile, mode: splits.into() };
    mla_plan::check(&client, &sizes).map_err(|error| check.device_limit("seq_lens", error))?;
    check.allocation("splits", DType::I32, [capacity, 4])
}

/// The device decodes this, with a plan of these sizes.
pub(crate) fn decode(
    check: &Check,
    problem: &MlaDecodeProblem,
    [pages, max_pages]: [usize; 2],
    [cubes, capacity]: [usize; 2],
    causal: bool,
    path: Option<Path>,
) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let &MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype } = problem;
    let sizes = DecodeSizes {
        batch,
        query_len,
        heads,
        key_width,
        value_width,
        pages,
        page_size,
        max_pages,
        cubes,
        capacity,
        causal,
        elem: dtype_to_elem_type(dtype),
    };
    let kernel = path.and_then(Path::kernel).unwrap_or_else(|| sizes.kernel(&client));
    mla_decode::check_kernel(&client, &sizes, kernel).map_err(|error| {
        let argument = match &error {
            DecodeError::NoKernel(_) => "path",
            DecodeError::Element(_) => "q",
            DecodeError::Size { name: "tiles of query rows", .. } => "q",
            DecodeError::Size { name: "cubes", .. } => "plan",
            DecodeError::Address(len) if *len == capacity * query_len * heads * value_width => "splits",
            DecodeError::Address(len) if *len == batch * query_len * heads * key_width => "q",
            DecodeError::Address(len) if *len == batch * max_pages => "page_table",
            DecodeError::SharedMemory { .. } | DecodeError::Size { .. } | DecodeError::Address(_) => "kv_cache",
        };
        check.device_limit(argument, error)
    })?;
    // What the items give before they are merged, in f32.
    check.allocation("splits", DType::F32, [capacity, query_len, heads, value_width])
}

/// The device computes prefill attention of these sizes.
pub(crate) fn ragged(check: &Check, q: &Tensor<3>, value_width: usize, sequences: usize) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let [tokens, heads, key_width] = q.dims();
    let elem = dtype_to_elem_type(q.dtype());
    let sizes = RaggedAttentionSizes { tokens, heads, key_width, value_width, sequences, elem };
    ragged_attention::check(&client, &sizes).map_err(|error| {
        let argument = match &error {
            RaggedAttentionError::Offsets(_) if value_width > key_width => "v",
            RaggedAttentionError::Width { .. } if value_width == 0 => "v",
            _ => "q",
        };
        check.device_limit(argument, error)
    })
}

/// The device chooses `k` keys for each of these query tokens.
pub(crate) fn lightning_index(check: &Check, args: &LightningIndexArgs, k: usize) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([batch, query_len, heads, width], [pages, page_size, _]) = (args.q.dims(), args.keys.dims());
    let [_, max_pages] = args.page_table.dims();
    let elem = dtype_to_elem_type(args.q.dtype());
    let sizes = LightningIndexSizes { batch, query_len, heads, width, pages, page_size, max_pages, k, elem };
    lightning_index::check(&client, &sizes).map_err(|error| {
        let argument = match &error {
            LightningIndexError::Device(_) => "q",
            LightningIndexError::Scores { .. } => "page_table",
            LightningIndexError::Slots(_) => "keys",
            LightningIndexError::Offsets { name, .. } => *name,
        };
        check.device_limit(argument, error)
    })?;
    check.allocation("k", DType::I32, [batch, query_len, k])
}

/// The device pools these windows.
pub(crate) fn compress_kv(check: &Check, args: &CompressKvArgs, options: &CompressKvOptions) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([tokens, _], [blocks, ..], [window, _]) = (args.kv_gates.dims(), args.state.dims(), args.position_bias.dims());
    let ([batch, entries, pairs], [width]) = (args.cos.dims(), args.norm_weight.dims());
    let dtype = DType::from(options.dtype);
    let (overlap, elem) = (options.overlap, dtype_to_elem_type(dtype));
    // What there are too many of to count has no room, either.
    check.allocation("cos", dtype, [batch, entries, width])?;
    let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, elem };
    compress_kv::check(&client, &sizes).map_err(|error| {
        let argument = match &error {
            CompressKvError::Device(DeviceError::Elem(_)) => "dtype",
            CompressKvError::Device(_) => "norm_weight",
            CompressKvError::Offsets { name: "entries", .. } => "cos",
            CompressKvError::Offsets { name, .. } => *name,
        };
        check.device_limit(argument, error)
    })
}

/// The device computes these experts.
pub(crate) fn experts(check: &Check, args: &ExpertsMlpArgs) -> Result<(), MlaError> {
    if check.client().is_none() {
        return Ok(());
    }
    check.elements("x", &args.x)?;
    check.elements("gate_up", &args.gate_up)?;
    check.elements("down", &args.down)?;
    if let Some(shared) = &args.shared {
        check.elements("shared.gate_up", &shared.gate_up)?;
        check.elements("shared.down", &shared.down)?;
    }
    let ([tokens, hidden], [_, _, width]) = (args.x.dims(), args.down.dims());
    let (pairs, argument) = (tokens * args.routing.top_k(), args.routing.argument());
    if i32::try_from(pairs).is_err() {
        let reason = format!("{pairs} pairs of token and expert, and the most is {}", i32::MAX);
        return Err(check.device_limit(argument, reason));
    }
    check.allocation(argument, args.x.dtype(), [pairs, hidden.max(width)])
}
