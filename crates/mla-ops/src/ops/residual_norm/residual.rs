//! [`Residual`]: the residual stream, with a summand that is not added yet.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

use super::backend::{BackendNormed, BackendProducts, BackendReader, ResidualNormBackend};
use crate::MlaError;
use crate::check::Check;
use crate::ops::experts_mlp::ExpertsSum;
use crate::ops::norm_rope::checks::check_norm;
use crate::ops::rms_norm;

/// The residual stream `[N, hidden]` of a model, f32, f16 or bf16, and at most one summand that waits for the norm behind it:
/// one launch has the sum and the norm, and that of experts their weighted sum, too.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, Residual, Weight, linear};
///
/// let device = Device::flex();
/// let (norm_weight, proj) = (Tensor::ones([8], &device), Weight::from(Tensor::<2>::ones([4, 8], &device)));
/// let mut residual = Residual::new(Tensor::ones([3, 8], &device));
/// residual.add(Tensor::<2>::ones([3, 8], &device))?; // not added yet
/// let mut normed = residual.norm(&norm_weight, 1e-6)?; // not computed yet
/// let y = linear(&mut normed, &proj, Determinism::Fast)?; // on a GPU, sum and norm may be in this launch
/// assert_eq!((y.dims(), residual.tensor().max().into_scalar::<f32>()), ([3, 4], 2.0));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Residual {
    stream: Tensor<2>,
    pending: Option<Summand>,
}

/// What a part of a layer adds to the residual stream, or to several: rows `[N, hidden]` in memory, or an [`ExpertsSum`].
#[derive(Debug, Clone)]
pub struct Addend(pub(crate) Summand);

#[derive(Debug, Clone)]
pub(crate) enum Summand {
    Rows(Tensor<2>),
    Experts(Box<ExpertsSum>),
}

/// What a residual stream waits to add.
pub(crate) enum Pending {
    Nothing,
    Rows,
    /// The experts of a single token that has shared experts.
    ExpertsOfToken,
    /// Other experts.
    Experts,
}

impl From<Tensor<2>> for Addend {
    fn from(rows: Tensor<2>) -> Self {
        Self(Summand::Rows(rows))
    }
}

impl Addend {
    pub(crate) fn dims(&self) -> [usize; 2] {
        self.0.dims()
    }

    /// A tensor of its dtype and device.
    pub(crate) fn like(&self) -> &Tensor<2> {
        match &self.0 {
            Summand::Rows(rows) => rows,
            Summand::Experts(sum) => sum.like(),
        }
    }

    /// The rows `[N, hidden]`.
    pub fn materialise(self) -> Tensor<2> {
        self.0.materialise()
    }
}

impl From<ExpertsSum> for Addend {
    fn from(sum: ExpertsSum) -> Self {
        Self(Summand::Experts(Box::new(sum)))
    }
}

impl Summand {
    fn dims(&self) -> [usize; 2] {
        match self {
            Self::Rows(rows) => rows.dims(),
            Self::Experts(sum) => sum.like().dims(),
        }
    }

    /// `[N, hidden]`.
    fn materialise(self) -> Tensor<2> {
        match self {
            Self::Rows(rows) => rows,
            Self::Experts(sum) => sum.materialise(),
        }
    }
}

impl Residual {
    /// A stream `[N, hidden]`, f32, f16 or bf16: the embeddings of tokens.
    pub fn new(stream: Tensor<2>) -> Self {
        Self { stream, pending: None }
    }

    /// `[N, hidden]`.
    pub fn dims(&self) -> [usize; 2] {
        self.stream.dims()
    }

    /// Adds rows of the stream's shape and dtype. Nothing is launched, unless another summand waits: that one is added first.
    ///
    /// # Errors
    /// Another shape, dtype or device.
    pub fn add(&mut self, addend: impl Into<Addend>) -> Result<(), MlaError> {
        let addend = addend.into();
        let check = Check::new("residual_add", "residual", &self.stream)?;
        check.float("residual", &self.stream)?;
        check.float_as("addend", addend.like(), self.stream.dtype(), "that of the residual stream")?;
        let [rows, width] = self.dims();
        let words = || format!("[N, hidden] = [{rows}, {width}]");
        check.dims("addend", addend.dims(), [Some(rows), Some(width)], words)?;
        if let Some(before) = self.pending.take() {
            self.stream = self.stream.clone() + before.materialise();
        }
        self.pending = Some(addend.0);
        Ok(())
    }

    /// The stream with all that was added, `[N, hidden]`. The norm behind it computes the sum again, so that its bits, and those
    /// of all that follows, are the same whether or not somebody looked.
    pub fn tensor(&mut self) -> Tensor<2> {
        match self.pending.take() {
            None => self.stream.clone(),
            Some(pending) => {
                let rows = pending.materialise();
                self.pending = Some(Summand::Rows(rows.clone()));
                self.stream.clone() + rows
            }
        }
    }

    /// The [`rms_norm`](crate::rms_norm) of the stream with all that was added, with a weight f32 `[hidden]`. Nothing is launched
    /// before somebody reads it.
    ///
    /// # Errors
    /// A weight of another shape, dtype or device, an epsilon that is negative or not finite, or a stream that is more than the
    /// device can do.
    pub fn norm(&mut self, weight: &Tensor<1>, eps: f32) -> Result<Normed<'_>, MlaError> {
        let check = Check::new("rms_norm", "residual", &self.stream)?;
        check.float("residual", &self.stream)?;
        let [_, width] = self.dims();
        check_norm(&check, "weight", weight, width, eps)?;
        check.elements("residual", &self.stream)?;
        Ok(Normed { weight: weight.clone(), eps, rows: None, residual: self })
    }

    fn pending(&self) -> Pending {
        match &self.pending {
            None => Pending::Nothing,
            Some(Summand::Rows(_)) => Pending::Rows,
            Some(Summand::Experts(sum)) if sum.is_of_token() => Pending::ExpertsOfToken,
            Some(Summand::Experts(_)) => Pending::Experts,
        }
    }
}

/// The norm `[N, hidden]` of a residual stream, which may not be in memory yet. What reads it first decides whether its own launch
/// computes it, and the residual sum before it; from then on it is in memory, and the sum is in the stream.
#[derive(Debug)]
#[must_use = "nothing is launched before it is read"]
pub struct Normed<'r> {
    residual: &'r mut Residual,
    weight: Tensor<1>,
    eps: f32,
    /// What was computed.
    rows: Option<Tensor<2>>,
}

impl Normed<'_> {
    /// `[N, hidden]`.
    pub fn dims(&self) -> [usize; 2] {
        self.residual.dims()
    }

    /// That of the stream.
    pub fn dtype(&self) -> DType {
        self.residual.stream.dtype()
    }

    /// That of the stream.
    pub fn device(&self) -> Device {
        self.residual.stream.device()
    }

    /// Of the shape, dtype and device of the norm.
    pub(crate) fn like(&self) -> &Tensor<2> {
        &self.residual.stream
    }

    /// The norm `[N, hidden]`, of the dtype of the stream; computed once.
    pub fn tensor(&mut self) -> Tensor<2> {
        if let Some(rows) = &self.rows {
            return rows.clone();
        }
        let stream = self.residual.stream.clone();
        let rows = match self.pending() {
            Pending::Nothing => rms_norm::in_memory(stream, self.weight.clone(), self.eps),
            _ if stream.shape().num_elements() == 0 => {
                self.residual.pending = None;
                stream
            }
            _ => {
                let (rows, _) = self.compute(BackendReader::None);
                rows
            }
        };
        self.rows.insert(rows).clone()
    }

    /// The row, where it is a single one, whose norm is not in memory and waits for no sum; with the weight of the norm.
    pub(crate) fn single_row(&self) -> Option<(Tensor<2>, Tensor<1>, f32)> {
        let [rows, width] = self.dims();
        let waits = self.rows.is_some() || self.residual.pending.is_some();
        (!waits && rows == 1 && width > 0).then(|| (self.residual.stream.clone(), self.weight.clone(), self.eps))
    }

    /// What has to be added before the norm can be computed; nothing where it was.
    pub(crate) fn pending(&self) -> Pending {
        match self.rows {
            Some(_) => Pending::Nothing,
            None => self.residual.pending(),
        }
    }

    /// Computes the norm, and what reads it, behind a pending sum.
    pub(crate) fn read_by(&mut self, reader: BackendReader<Dispatch>) -> BackendProducts<Dispatch> {
        let (rows, products) = self.compute(reader);
        self.rows = Some(rows);
        products
    }

    fn compute(&mut self, reader: BackendReader<Dispatch>) -> (Tensor<2>, BackendProducts<Dispatch>) {
        let (stream, weight) = (self.residual.stream.clone().into_dispatch(), self.weight.clone().into_dispatch());
        let pending = self.residual.pending.take().expect("the caller has seen it");
        let BackendNormed { sum, normed, products } = match pending {
            Summand::Rows(rows) => Dispatch::residual_norm(stream, rows.into_dispatch(), weight, reader, self.eps),
            Summand::Experts(sum) => sum.residual_norm(stream, (weight, self.eps), reader),
        };
        self.residual.stream = Tensor::from_dispatch(sum);
        (Tensor::from_dispatch(normed), products)
    }
}
