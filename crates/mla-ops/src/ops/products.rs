//! Which implementation computes products of rows and weights: the kernels for a small batch (GEMV), which read the weights once for
//! all rows, those for many rows on tensor cores, or Burn's product of matrices. [`LinearProblem`] decides it, for the operations
//! and for who asks.

pub mod measure;

use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "_gpu")]
use {
    burn::backend::{DispatchDevice, cubecl::dtype_to_elem_type},
    cubecl::client::Client,
    mla_kernels::linear::{LinearForm, LinearSizes, available, takes_many_rows},
};

use crate::device::has_kernels;
#[cfg(feature = "_gpu")]
use crate::path::Path;
#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;
use crate::{BlockFormat, Determinism, StackedWeight, Weight, WeightFormat};

/// Rows up to which the small-batch kernels are the fastest; Burn's product of matrices is for more, unless rows have to be
/// independent: its sums depend on how many rows there are.
const MAX_ROWS: usize = 64;
/// Outputs of a router at most.
const ROUTER_OUTPUTS: usize = 512;

/// Whether the device has kernels that are the fastest for so few rows, and there are any.
pub(crate) fn is_small_batch(rows: usize, device: &Device) -> bool {
    (1..=MAX_ROWS).contains(&rows) && has_kernels(device)
}

/// What decides which implementation of a product runs: see [`explain_path`](crate::explain_path).
///
/// Each operation has a constructor. Weights are dense and of the dtype of `x`, and rows may depend on one another, unless
/// [`Self::with_weight_format`], [`Self::with_weight_dtype`] and [`Self::with_determinism`] say otherwise.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use mla_ops::{Determinism, LinearProblem, explain_path};
///
/// // 4 rows of 512 channels, 1,024 outputs.
/// let problem = LinearProblem::dense([4, 512, 1024], DType::F32).with_determinism(Determinism::BatchInvariant);
/// println!("{}", explain_path(&problem, &Device::flex()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearProblem {
    /// Rows of x: tokens.
    rows: usize,
    inputs: usize,
    outputs: usize,
    /// Each output is of two products.
    gated: bool,
    matrices: Matrices,
    dtype: DType,
    weight_dtype: DType,
    weight_format: WeightFormat,
    determinism: Determinism,
}

/// Which matrices rows meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Matrices {
    /// All the same one.
    One,
    /// Each of so many heads its own, with channels that are carried over.
    Heads { heads: usize, carried: usize },
    /// Those of some of the experts.
    Experts { top_k: usize, experts: usize },
    /// So many products of two tensors, none of them a weight.
    Tensors { count: usize },
}

impl LinearProblem {
    /// [`linear`](crate::linear()), and each product of [`linear_each`](crate::linear_each()): `x [rows, inputs]`, weight
    /// `[outputs, inputs]`. `dtype` is that of x, f32, f16 or bf16; so in all of these.
    pub fn dense([rows, inputs, outputs]: [usize; 3], dtype: DType) -> Self {
        let (matrices, weight_format, determinism) = (Matrices::One, WeightFormat::Dense, Determinism::Fast);
        Self { rows, inputs, outputs, gated: false, matrices, dtype, weight_dtype: dtype, weight_format, determinism }
    }

    /// [`swiglu`](crate::swiglu()): `x [rows, inputs]`, weight `[2 * outputs, inputs]`.
    pub fn gated(sizes: [usize; 3], dtype: DType) -> Self {
        Self { gated: true, ..Self::dense(sizes, dtype) }
    }

    /// [`linear_by_head`](crate::linear_by_head()): `x [rows, heads, inputs + carried]`, weight `[heads, outputs, inputs]`, whose
    /// matrices lie one behind the other, or at a distance of a multiple of 16 bytes.
    pub fn by_head([rows, heads, inputs, outputs, carried]: [usize; 5], dtype: DType) -> Self {
        Self { matrices: Matrices::Heads { heads, carried }, ..Self::dense([rows, inputs, outputs], dtype) }
    }

    /// Both products of [`experts_mlp`](crate::experts_mlp()), that with the gate and `up`, and that with `down`: of `x [tokens,
    /// hidden]` and the `top_k` experts of each token, with weights `[experts, 2 * width, hidden]` and `[experts, hidden, width]`.
    ///
    /// Shared experts are those of a single token's own launches, or [`Self::gated`] and [`Self::dense`].
    pub fn experts([tokens, top_k, experts, hidden, width]: [usize; 5], dtype: DType) -> [Self; 2] {
        let matrices = Matrices::Experts { top_k, experts };
        [Self::gated([tokens, hidden, width], dtype), Self::dense([tokens, width, hidden], dtype)]
            .map(|product| Self { matrices, ..product })
    }

    /// [`matmul`](crate::matmul()): `lhs [.., rows, inputs]`, `rhs [.., inputs, outputs]`, where the leading dimensions make `count`
    /// products.
    pub fn matmul([count, rows, inputs, outputs]: [usize; 4], dtype: DType) -> Self {
        Self { matrices: Matrices::Tensors { count }, ..Self::dense([rows, inputs, outputs], dtype) }
    }

    /// With weights of another dtype than x: f32, those of a router.
    pub fn with_weight_dtype(self, weight_dtype: DType) -> Self {
        Self { weight_dtype, ..self }
    }

    /// With weights that are stored so.
    pub fn with_weight_format(self, weight_format: WeightFormat) -> Self {
        Self { weight_format, ..self }
    }

    /// With rows that may or may not depend on one another.
    pub fn with_determinism(self, determinism: Determinism) -> Self {
        Self { determinism, ..self }
    }

    /// Of [`linear`](crate::linear()).
    pub(crate) fn of_rows(x: &Tensor<2>, weight: &Weight, determinism: Determinism) -> Self {
        let ([rows, inputs], [outputs, _]) = (x.dims(), weight.dims());
        let dense = Self::dense([rows, inputs, outputs], x.dtype());
        dense.with_weight_dtype(weight.dtype()).with_weight_format(weight.format()).with_determinism(determinism)
    }

    /// Of [`swiglu`](crate::swiglu()).
    pub(crate) fn of_gated_rows(x: &Tensor<2>, gate_up: &Weight, determinism: Determinism) -> Self {
        let ([rows, inputs], [both, _]) = (x.dims(), gate_up.dims());
        let gated = Self::gated([rows, inputs, both / 2], x.dtype());
        gated.with_weight_format(gate_up.format()).with_determinism(determinism)
    }

    /// Of [`linear_by_head`](crate::linear_by_head()).
    pub(crate) fn of_heads(x: &Tensor<3>, weight: &StackedWeight, determinism: Determinism) -> Self {
        let ([rows, heads, width], [_, outputs, inputs]) = (x.dims(), weight.dims());
        let by_head = Self::by_head([rows, heads, inputs, outputs, width - inputs], x.dtype());
        by_head.with_weight_format(weight.format()).with_determinism(determinism)
    }

    /// Of [`matmul`](crate::matmul()), whose sides have two dimensions or more.
    pub(crate) fn of_sides<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>, determinism: Determinism) -> Self {
        let (lhs_dims, rhs_dims) = (lhs.dims(), rhs.dims());
        let sizes = [lhs_dims[..D - 2].iter().product(), lhs_dims[D - 2], lhs_dims[D - 1], rhs_dims[D - 1]];
        Self::matmul(sizes, lhs.dtype()).with_determinism(determinism)
    }

    /// Whether a kernel computes it; otherwise it is Burn's product of matrices.
    pub(crate) fn has_kernel(&self, device: &Device) -> bool {
        self.has_small_batch_kernel(device) || self.has_many_rows_kernel(device)
    }

    /// Whether weights in blocks become a scratch of numbers, for the kernels that many rows of dense weights have. A decode step
    /// makes none.
    pub(crate) fn dequantises(&self, device: &Device) -> bool {
        let has_kernel = self.takes_small_batch_kernel() || self.has_many_rows_kernel(device);
        !self.weight_format.is_dense() && !self.is_empty() && !has_kernel && has_kernels(device)
    }

    /// Whether a small-batch kernel computes it, unless there is one for many rows.
    pub(crate) fn has_small_batch_kernel(&self, device: &Device) -> bool {
        #[cfg(feature = "_gpu")]
        if let Some(path) = measure::forced().filter(|_| self.can_be_forced()) {
            return matches!(path, Path::Portable | Path::PortableMma) && has_kernels(device);
        }
        self.takes_small_batch_kernel() && has_kernels(device)
    }

    /// Whether it is computed by a kernel that is made for more rows than a small batch has.
    pub(crate) fn has_many_rows_kernel(&self, device: &Device) -> bool {
        #[cfg(feature = "_gpu")]
        if let DispatchDevice::Cube(device) = device.as_dispatch() {
            return self.takes_many_rows_kernel(&device.client());
        }
        let _ = device;
        false
    }

    #[cfg(feature = "_gpu")]
    fn takes_many_rows_kernel(&self, client: &Client) -> bool {
        if measure::forced() == Some(Path::Matmul) && self.can_be_forced() {
            return false;
        }
        !matches!(self.matrices, Matrices::Tensors { .. }) && !self.is_empty() && takes_many_rows(client, &self.sizes())
    }

    /// Whether there is a choice.
    #[cfg(feature = "_gpu")]
    fn can_be_forced(&self) -> bool {
        let is_of_weights = matches!(self.matrices, Matrices::One | Matrices::Heads { .. });
        is_of_weights && !self.is_empty() && !self.determinism.is_batch_invariant()
    }

    /// Whether rows meet the matrices of their experts.
    #[cfg(feature = "_gpu")]
    fn is_of_experts(&self) -> bool {
        matches!(self.matrices, Matrices::Experts { .. })
    }

    fn takes_small_batch_kernel(&self) -> bool {
        let by_rows = match self.matrices {
            // Sorted by expert, and with one product for each, there are no sizes that Burn's products are for.
            Matrices::Experts { .. } => return true,
            Matrices::Tensors { .. } => false,
            Matrices::One | Matrices::Heads { .. } => self.rows <= MAX_ROWS || self.is_router(),
        };
        !self.is_empty() && (by_rows || self.determinism.is_batch_invariant())
    }

    /// Whether it is the product of rows and a router's weights, in f32: Burn's takes an order of magnitude longer than the kernel
    /// for a few rows.
    fn is_router(&self) -> bool {
        let is_f32 = self.weight_dtype == DType::F32 && self.dtype != DType::F32;
        self.matrices == Matrices::One && is_f32 && self.outputs <= ROUTER_OUTPUTS
    }

    fn is_empty(&self) -> bool {
        let matrices = match self.matrices {
            Matrices::One => 1,
            Matrices::Heads { heads: count, .. } | Matrices::Tensors { count } => count,
            Matrices::Experts { top_k, experts } => top_k.min(experts),
        };
        [self.rows, self.inputs, self.outputs, matrices].contains(&0)
    }
}

#[cfg(feature = "_gpu")]
impl LinearProblem {
    /// As the kernels' table takes them.
    fn sizes(&self) -> LinearSizes {
        let &Self { rows, inputs, outputs, gated, matrices, .. } = self;
        let elems = [self.dtype, self.weight_dtype].map(dtype_to_elem_type);
        let (form, format) = (LinearForm { gated, limited: false }, self.weight_format.into());
        let sizes = match matrices {
            Matrices::One => LinearSizes::dense([rows, inputs, outputs], form, elems, format),
            Matrices::Heads { heads, carried } => {
                LinearSizes::by_head([rows, heads, inputs, outputs, carried], elems, format)
            }
            Matrices::Tensors { count } => LinearSizes::by_head([rows, count, inputs, outputs, 0], elems, format),
            Matrices::Experts { top_k, .. } if rows == 1 => {
                LinearSizes::token([top_k, inputs, outputs], form, elems[1], format)
            }
            Matrices::Experts { top_k, experts } => {
                LinearSizes::experts([rows * top_k, experts, inputs, outputs], form, elems[1], format, false)
            }
        };
        LinearSizes { batch_invariant: self.determinism.is_batch_invariant(), ..sizes }
    }
}

impl Sizes for LinearProblem {
    fn words(&self) -> String {
        let &Self { rows, inputs, outputs, gated, matrices, dtype, weight_dtype, weight_format, determinism } = self;
        let weights = match weight_format {
            WeightFormat::Dense if weight_dtype == dtype => String::new(),
            WeightFormat::Dense => format!(" with weights in {weight_dtype:?}"),
            WeightFormat::Blocks(BlockFormat::Fp8) => " with weights in FP8".into(),
            WeightFormat::Blocks(BlockFormat::Fp4) => " with weights in FP4".into(),
        };
        let of = match matrices {
            Matrices::One => String::new(),
            Matrices::Heads { heads, .. } => format!(" of {heads} heads"),
            Matrices::Experts { top_k, experts } => format!(" for {top_k} of {experts} experts each"),
            Matrices::Tensors { count } => format!(" of {count} products"),
        };
        let gated = if gated { " gated" } else { "" };
        let invariant = if determinism.is_batch_invariant() { ", batch-invariant" } else { "" };
        format!("{dtype:?}{weights}, {rows} rows{of}, {inputs} channels to {outputs}{gated}{invariant}")
    }

    fn dtypes(&self) -> Vec<DType> {
        vec![self.dtype, self.weight_dtype]
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let &Self { rows, inputs, outputs, matrices, .. } = self;
        let (of_row, count, carried) = match matrices {
            Matrices::One => (1, 1, 0),
            Matrices::Heads { heads, carried } => (heads, heads, carried),
            Matrices::Experts { top_k, experts } => (top_k, experts, 0),
            Matrices::Tensors { count } => (count, count, 0),
        };
        // None of them is 0, for a product with it to be the others'.
        let shape = |lens: [usize; 4]| lens.map(|len| len.max(1)).to_vec();
        vec![
            shape([rows, of_row, inputs.saturating_add(carried), 1]),
            shape([rows, of_row, outputs.saturating_add(carried), 1]),
            shape([count, outputs, inputs, if self.gated { 2 } else { 1 }]),
        ]
    }

    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation> {
        let has_kernel = self.takes_small_batch_kernel() || self.takes_many_rows_kernel(client);
        let is_scratch = !self.weight_format.is_dense() && !self.is_empty() && !has_kernel;
        if is_scratch {
            // The kernels of the numbers that a launch before has dequantised.
            return self.with_weight_format(WeightFormat::Dense).on_gpu(client);
        }
        let burns = |needs| Implementation { path: Path::Matmul, needs };
        let (invariant, of_tensors) =
            (self.determinism.is_batch_invariant(), matches!(self.matrices, Matrices::Tensors { .. }));
        if matches!(self.matrices, Matrices::Experts { .. }) || invariant && !self.is_empty() {
            return Implementation::of_kernels(available(client, &self.sizes()));
        }
        if self.is_empty() || of_tensors {
            return vec![burns("nothing")];
        }
        let mut found = Implementation::of_kernels(available(client, &self.sizes()));
        // The kernel for many rows is the first, where it takes these.
        let faster = if self.takes_small_batch_kernel() {
            found.len()
        } else {
            usize::from(self.takes_many_rows_kernel(client))
        };
        found.insert(faster, burns("more than 64 rows to be faster than kernels for a small batch"));
        found
    }
}
