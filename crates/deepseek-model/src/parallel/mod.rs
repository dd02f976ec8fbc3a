//! Ranks: which part of a model one device has, and how the parts meet (Megatron-LM, arXiv 1909.08053, §3; where experts are too
//! narrow for that, a rank has whole ones, as in expert parallelism, GShard, arXiv 2006.16668).
//!
//! | part of a model | a rank has | ranks meet |
//! |---|---|---|
//! | embedding | all of it: a lookup reads a row of each token | |
//! | queries, keys and values of heads (`q_b_proj`, `kv_b_proj`, V4: `wq_b`, `attn_sink`, `wo_a`) | whole heads, V4: whole groups of them | |
//! | output projection, `down_proj` of dense layers and shared experts | columns | sum, once behind attention and once behind the feed-forward |
//! | gate and `up` projections of these | rows | |
//! | router | all of it: every rank chooses among all experts | |
//! | routed experts | hidden channels of each, or whole ones, see `ExpertCut` | the same sum |
//! | latent projections, KV cache, indexers, compressors, norms, hyper-connections | all of it, from hidden states that are the same bits on each | |
//! | head | tokens of the vocabulary | columns side by side |
//!
//! What a model does is the same for any number of ranks: the differences are in the sizes of its weights, in the numbers of whole
//! experts, and in what the [`Communicator`] does. That of a rank that is alone returns what it is given.

mod capture;
#[cfg(feature = "cuda")]
mod devices;
mod host;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use mla_ops::{Addend, LocalExperts};

pub(crate) use self::capture::Step;
pub use self::host::HostCommunicator;
use crate::config::Quantization;
use crate::{ModelError, Result};

/// How a tensor is divided among ranks; each has a part of one axis. Layers name the cut of every tensor that they ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Every rank has all of it.
    Whole,
    /// The first axis, in equal parts: the outputs of a projection (column-parallel in Megatron's words).
    Rows,
    /// The last axis, in equal parts: the inputs of a projection, whose results are summed over the ranks (row-parallel).
    Columns,
    /// The first axis, whose rows belong to so many heads; a rank has whole heads.
    Heads(usize),
    /// The experts that are stacked; a rank has whole ones.
    Experts,
    /// The tokens of the vocabulary; the last rank has fewer where they do not divide.
    Vocabulary,
}

/// How ranks divide the routed experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertCut {
    /// Each has as many hidden channels of every expert: it does its share of a token's experts, whichever these are.
    Channels,
    /// Each has whole experts, and those of other ranks are none in its routing: the few experts of a token rarely fall evenly.
    Whole,
}

impl ExpertCut {
    /// Hidden channels of a rank: whole vectors of 16 bytes.
    const CHANNELS: usize = 8;

    /// The better one of so many ranks for experts of this hidden width, stored in these blocks: channels, if all ranks have whole
    /// blocks of them.
    pub(crate) fn of(width: usize, quantization: Option<Quantization>, ranks: usize) -> Self {
        let each = width / ranks;
        let sides = quantization.map_or([1; 2], |quantization| quantization.block);
        let fits = |side: usize| each.is_multiple_of(side);
        let is_even = each * ranks == width && sides.into_iter().chain([Self::CHANNELS]).all(fits);
        if is_even && each > 0 { Self::Channels } else { Self::Whole }
    }

    /// Of gate and `up` projections.
    pub(crate) fn gate_up(self) -> Cut {
        if self == Self::Channels { Cut::Rows } else { Cut::Experts }
    }

    /// Of the projections back.
    pub(crate) fn down(self) -> Cut {
        if self == Self::Channels { Cut::Columns } else { Cut::Experts }
    }
}

/// What ranks say to one another. Every rank calls the same functions in the same order, as all take the same steps: the same
/// requests, in the same chunks, with caches of the same size.
///
/// A step that ends with an error has not reached all ranks alike: its requests can only be freed, on all of them. What
/// is wrong with the connection is [`ModelError::Communicator`].
pub trait Communicator: Debug + Send + Sync {
    /// The sum over all ranks of their `x`, `[N, width]` and of one dtype: the same bits on each, or the ranks will choose
    /// different experts and tokens. It may be a value that is not in memory yet, as what comes back may be.
    ///
    /// # Errors
    /// A rank that does not answer, as [`ModelError::Communicator`].
    fn all_reduce(&self, x: Addend) -> Result<Addend>;

    /// The ranks' `x` side by side, `[N, columns]`. All have as many columns as the first, but for the last ones, which may have
    /// fewer.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>>;

    /// Whether all ranks say yes. None returns before all have called.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn agree(&self, yes: bool) -> Result<bool>;

    /// Says that this rank takes part no more, for this reason: the others get an error instead of waiting, as far as the
    /// connection permits.
    fn leave(&self, reason: &str);

    /// Whether sums and gathered values can be part of captured steps. They can where they are launches alone.
    fn can_be_captured(&self) -> bool {
        false
    }

    /// How values are exchanged, in words.
    fn describe(&self) -> String;
}

/// Nobody answers: a rank alone, which has all there is; or one whose sums and logits mean nothing, but have their shapes, and which
/// shows what one among others launches.
#[derive(Debug)]
struct Nobody {
    is_alone: bool,
}

impl Communicator for Nobody {
    fn all_reduce(&self, x: Addend) -> Result<Addend> {
        Ok(if self.is_alone { x } else { x.materialise().into() })
    }

    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>> {
        if self.is_alone {
            return Ok(x);
        }
        let copies = columns.div_ceil(x.dims()[1].max(1));
        Ok(Tensor::cat(vec![x; copies], 1).narrow(1, 0, columns))
    }

    fn agree(&self, yes: bool) -> Result<bool> {
        Ok(yes)
    }

    fn leave(&self, _reason: &str) {}

    fn can_be_captured(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        "nobody answers".into()
    }
}

/// A rank among others. Clones share the communicator.
#[derive(Debug, Clone)]
pub struct Parallel {
    rank: usize,
    size: usize,
    communicator: Arc<dyn Communicator>,
}

impl Parallel {
    /// A rank that is alone: every part is the whole, and what ranks say to one another costs nothing.
    pub fn single() -> Self {
        Self { rank: 0, size: 1, communicator: Arc::new(Nobody { is_alone: true }) }
    }

    /// Rank `rank` of `size`.
    ///
    /// # Errors
    /// [`ModelError::Request`] for a rank that is not below `size`.
    pub fn new(rank: usize, size: usize, communicator: Arc<dyn Communicator>) -> Result<Self> {
        if rank >= size {
            return Err(ModelError::request("rank", rank, format!("a rank below the number of ranks, {size}")));
        }
        Ok(Self { rank, size, communicator })
    }

    /// The ranks of one process, one on each device, in their order: one device is alone; different CUDA devices write small sums into
    /// one another's memory, and use NCCL for large ones; others, and a device that is named twice, exchange values by way of the
    /// host.
    ///
    /// # Errors
    /// [`ModelError::Request`] for no device; one of several that does not open; [`ModelError::Communicator`] of CUDA devices without
    /// access to one another's memory and without NCCL.
    pub fn group(devices: &[Device]) -> Result<Vec<Self>> {
        let size = devices.len();
        match size {
            0 => return Err(ModelError::request("devices", "empty", "at least one device")),
            1 => return Ok(vec![Self::single()]),
            _ => {}
        }
        devices.iter().try_for_each(mla_ops::check_opens)?;
        #[cfg(feature = "cuda")]
        if let Some(group) = devices::DeviceCommunicator::group(devices)? {
            let ranks = group.into_iter().enumerate();
            return ranks.map(|(rank, one)| Self::new(rank, size, Arc::new(one))).collect();
        }
        let ranks = HostCommunicator::group(size).into_iter().enumerate();
        ranks.map(|(rank, one)| Self::new(rank, size, Arc::new(one))).collect()
    }

    /// A rank that hears nothing of the others.
    pub(crate) fn pretended(rank: usize, size: usize) -> Self {
        match size {
            0 | 1 => Self::single(),
            _ => Self { rank, size, communicator: Arc::new(Nobody { is_alone: false }) },
        }
    }

    /// Which rank it is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The part of `count` heads, experts or channels that this rank has, in equal parts; the loader refuses tensors whose
    /// parts would not be equal.
    pub(crate) fn local(&self, count: usize) -> usize {
        count / self.size
    }

    /// Those of `count` experts that this rank has, for its routing; `None` where it has some of each, or all.
    pub(crate) fn local_experts(&self, count: usize, cut: ExpertCut) -> Option<LocalExperts> {
        let (part, _) = self.part(Cut::Experts, &[count]);
        (self.size > 1 && cut == ExpertCut::Whole)
            .then_some(LocalExperts { first: part.range.start, count: part.range.len() })
    }

    /// What this rank has of a tensor of this shape, and what is wrong where the parts are not equal.
    pub(crate) fn part(&self, cut: Cut, shape: &[usize]) -> (Part, Option<String>) {
        let (axis, count, what) = match cut {
            Cut::Whole => return (Part::whole(shape), None),
            Cut::Rows => (0, shape[0], "rows"),
            Cut::Columns => (shape.len() - 1, shape[shape.len() - 1], "columns"),
            Cut::Heads(heads) => (0, heads, "heads"),
            Cut::Experts => (0, shape[0], "experts"),
            Cut::Vocabulary => {
                let most = shape[0].div_ceil(self.size);
                let range = (self.rank * most).min(shape[0])..((self.rank + 1) * most).min(shape[0]);
                return (Part { axis: 0, range }, None);
            }
        };
        let each = self.local(count) * (shape[axis] / count.max(1));
        let uneven = each * self.size != shape[axis];
        let part = Part { axis, range: self.rank * each..(self.rank + 1) * each };
        (part, uneven.then(|| format!("has {count} {what} for {} ranks", self.size)))
    }

    /// The sum over all ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub(crate) fn all_reduce(&self, x: impl Into<Addend>) -> Result<Addend> {
        self.communicator.all_reduce(x.into())
    }

    /// The ranks' columns side by side, so many in all.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    pub(crate) fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>> {
        self.communicator.all_gather(x, columns)
    }

    /// Whether all ranks say yes; see [`Communicator::agree`].
    pub(crate) fn agree(&self, yes: bool) -> Result<bool> {
        self.communicator.agree(yes)
    }

    /// Takes part no more; see [`Communicator::leave`].
    pub(crate) fn leave(&self, reason: &str) {
        self.communicator.leave(reason);
    }

    /// How ranks exchange values, in words.
    pub fn describe(&self) -> String {
        self.communicator.describe()
    }

    /// Whether steps can be captured; see [`Communicator::can_be_captured`].
    pub(crate) fn can_be_captured(&self) -> bool {
        self.communicator.can_be_captured()
    }
}

/// The part of a tensor that a rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) axis: usize,
    /// Along that axis.
    pub(crate) range: Range<usize>,
}

impl Part {
    /// All of a tensor.
    pub(crate) fn whole(shape: &[usize]) -> Self {
        Self { axis: 0, range: 0..shape.first().copied().unwrap_or(1) }
    }

    /// Its shape, of a tensor of this shape.
    pub(crate) fn shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Some(size) = shape.get_mut(self.axis) {
            *size = self.range.len();
        }
        shape
    }

    /// Its share of the bytes of a tensor of this shape.
    pub(crate) fn share(&self, whole: &[usize], bytes: u64) -> u64 {
        let [own, all]: [u128; 2] =
            [&self.shape(whole)[..], whole].map(|shape| shape.iter().map(|&size| size as u128).product());
        (u128::from(bytes) * own).checked_div(all).unwrap_or_default() as u64
    }

    /// Its rows and columns in a tensor of this shape seen as a matrix, whose columns are the last axis.
    pub(crate) fn window(&self, whole: &[usize]) -> [Range<usize>; 2] {
        let columns = whole.last().copied().unwrap_or(1);
        let rows: usize = whole.iter().rev().skip(1).product();
        match self.axis {
            axis if axis + 1 == whole.len() && axis > 0 => [0..rows, self.range.clone()],
            // A vector is one row.
            _ if whole.len() < 2 => [0..1, self.range.clone()],
            _ => {
                let below: usize = whole[1..whole.len() - 1].iter().product();
                [self.range.start * below..self.range.end * below, 0..columns]
            }
        }
    }
}
