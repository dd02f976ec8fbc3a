//! [`lightning_index`]: the keys that each query token attends to, chosen by a few small heads.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod problem;
#[cfg(feature = "flex")]
mod reference;

pub use self::problem::LightningIndexProblem;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use self::backend::LightningIndexBackend;
use crate::MlaError;
use crate::cache::Pool;
use crate::check::{Check, read_i32};
use crate::dispatch::tensors;

const OP: &str = "lightning_index";

/// Bytes of keys that are dequantised for a call, at most.
const SCRATCH_BYTES: usize = 1 << 30;

/// Bytes that FP8 keys `[P, S, di]` are dequantised to, in numbers of so many bytes, for a call with many query tokens on Hopper; `None` for
/// more than are.
pub(crate) fn scratch_bytes(keys: [usize; 3], number: usize) -> Option<usize> {
    let bytes = keys.into_iter().fold(number, usize::saturating_mul);
    (bytes <= SCRATCH_BYTES).then_some(bytes)
}

/// Arguments of [`lightning_index`]: `Hi` index heads of width `di`.
#[derive(Debug, Clone)]
pub struct LightningIndexArgs {
    /// Index queries `[B, Sq, Hi, di]`, f32, f16 or bf16.
    pub q: Tensor<4>,
    /// Index keys `[P, S, di]` of the dtype of `q`, in pages: the pool of a cache of their own, dense or in FP8
    /// ([`RowFormat::Fp8IndexKeys`](crate::cache::RowFormat::Fp8IndexKeys)).
    /// On a GPU a pool that is not contiguous is copied in every call: make it with [`new_pool`](crate::cache::new_pool). Where Hopper
    /// scores many query tokens together, an FP8 pool is dequantised in every call, into a scratch of at most 1 GiB.
    pub keys: Pool,
    /// Page ids i32 `[B, maxP]`: key `j` of sequence `b` is row `j % S` of page `page_table[b, j / S]`. Entries past the
    /// last key that is seen may hold anything.
    pub page_table: Tensor<2, Int>,
    /// The weight of each head for each query token, `[B, Sq, Hi]` in f32 or the dtype of `q`, already scaled.
    pub head_weights: Tensor<3>,
    /// i32 `[B, Sq]`: query token `i` sees the keys `0 .. visible[b, i]`.
    pub visible: Tensor<2, Int>,
}

/// What [`lightning_index`] says of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexForm {
    /// Its position in the sequence.
    Positions,
    /// Its row in the pool, `page * S + offset`.
    Slots,
}

/// Options of [`lightning_index`].
#[derive(Debug, Clone)]
pub struct LightningIndexOptions {
    /// How many keys are chosen (2048 in DeepSeek-V3.2), at least 1.
    pub k: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// How the keys are named.
    pub form: IndexForm,
}

impl LightningIndexOptions {
    /// Keys by their positions.
    pub fn new(k: usize, scale: f32) -> Self {
        Self { k, scale, form: IndexForm::Positions }
    }
}

/// The `k` best keys of each query token, i32 `[B, Sq, k]` (DeepSeek-V3.2-Exp §2.1, the lightning indexer).
///
/// Query token `i` of sequence `b` scores each key `j < visible[b, i]` with
/// `scale * sum_h head_weights[b, i, h] * relu(q[b, i, h] . key_j)`, in f32. The best are given in ascending order of
/// position; a token that sees fewer than `k` keys gets all of them, and -1 in the rest of its row. Of equal scores the
/// lower positions are chosen; +0 and -0 are equal, and NaN is lower than any number.
///
/// Keys in FP8 are what their codes and scale stand for: codes are multiplied as numbers, and the sum of a key by its scale.
///
/// The same inputs give the same keys, whatever the other sequences of the batch are; how sums are rounded may depend on how many
/// query tokens of a sequence there are. Rows of the pool that no token
/// sees, and entries of the page table past them, are never read into a score. [`explain_path`](crate::explain_path) says what
/// computes the scores of a [`LightningIndexProblem`].
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
/// use mla_ops::{LightningIndexArgs, LightningIndexOptions, lightning_index};
///
/// let device = Device::flex();
/// // A token with one index head sees 3 of 4 keys, which score 1, 5, 3 (and 9).
/// let args = LightningIndexArgs {
///     q: Tensor::ones([1, 1, 1, 1], &device),
///     keys: Tensor::from_data([[[3.0], [9.0]], [[1.0], [5.0]]], &device).into(), // pages of 2 keys
///     page_table: Tensor::from_data([[1, 0]], (&device, DType::I32)),
///     head_weights: Tensor::ones([1, 1, 1], &device),
///     visible: Tensor::<2, Int>::from_data([[3]], (&device, DType::I32)),
/// };
/// let options = LightningIndexOptions::new(2, 1.0);
/// assert_eq!(lightning_index(args, &options)?.into_data(), TensorData::from([[[1, 2]]]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, a `k` of 0, a scale that is not finite, or more than the device can do
/// ([`MlaError::DeviceLimit`]): nothing is launched. Numbers of keys and page ids that are out of range are on the device
/// and cannot be seen; [`LightningIndexArgs::validate_device_inputs`] looks.
pub fn lightning_index(args: LightningIndexArgs, options: &LightningIndexOptions) -> Result<Tensor<3, Int>, MlaError> {
    let check = args.check()?;
    args.check_options(&check, options)?;
    #[cfg(feature = "_gpu")]
    cube::check_limits(&check, &args, options.k)?;
    if check.sees_values() {
        args.validate_values()?;
    }
    Ok(tensors(<Dispatch as LightningIndexBackend>::lightning_index(
        args.q.into_dispatch(),
        args.keys.into_backend(),
        args.page_table.into_dispatch(),
        args.head_weights.into_dispatch(),
        args.visible.into_dispatch(),
        options.clone(),
    )))
}

impl LightningIndexArgs {
    /// The keys of each sequence on their own, `[B, T, di]`, in place of a pool: pages of one row. Key `j` of sequence `b` has
    /// the slot `b * T + j`, its row in `[B * T, di]`. The others are as in the struct.
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
    /// use mla_ops::{IndexForm, LightningIndexArgs, LightningIndexOptions, lightning_index};
    ///
    /// let device = Device::flex();
    /// let keys = Tensor::<3>::from_data([[[3.0], [9.0], [5.0]]], &device); // [B, T, di]
    /// let (q, head_weights) = (Tensor::ones([1, 1, 1, 1], &device), Tensor::ones([1, 1, 1], &device));
    /// let visible = Tensor::<2, Int>::from_data([[3]], (&device, DType::I32));
    /// let args = LightningIndexArgs::dense(q, keys, head_weights, visible)?;
    /// let options = LightningIndexOptions { form: IndexForm::Slots, ..LightningIndexOptions::new(1, 1.0) };
    /// assert_eq!(lightning_index(args, &options)?.into_data(), TensorData::from([[[1]]]));
    /// # Ok::<(), mla_ops::MlaError>(())
    /// ```
    ///
    /// # Errors
    /// Keys that are on another device than `q`, or of another number of sequences, or more than i32 slots can name.
    pub fn dense(
        q: Tensor<4>,
        keys: Tensor<3>,
        head_weights: Tensor<3>,
        visible: Tensor<2, Int>,
    ) -> Result<Self, MlaError> {
        let check = Check::new(OP, "q", &q)?;
        check.float("keys", &keys)?;
        let ([batch, ..], [sequences, len, width]) = (q.dims(), keys.dims());
        let words = || format!("[B, T, di] with B = {batch}, as in `q`");
        check.dims("keys", [sequences, len, width], [Some(batch), None, None], words)?;
        let slots = batch.saturating_mul(len);
        check.index_range("keys", slots)?;
        let (device, float) = (q.device(), keys.dtype());
        // Burn reshapes no tensor without elements.
        let (keys, page_table) = if slots * width == 0 {
            let keys = Tensor::empty([slots, 1, width], (&device, float));
            (keys, Tensor::empty([batch, len], (&device, DType::I32)))
        } else {
            let page_table = Tensor::arange(0..slots as i64, (&device, DType::I32));
            (keys.reshape([slots, 1, width]), page_table.reshape([batch, len]))
        };
        Ok(Self { q, keys: keys.into(), page_table, head_weights, visible })
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check(&self) -> Result<Check, MlaError> {
        let check = Check::new(OP, "q", &self.q)?;
        check.float("q", &self.q)?;
        self.keys.check(&check, "keys", self.q.dtype(), "the dtype of `q`")?;
        self.keys.check_index_keys(&check, "keys")?;
        check.int("page_table", &self.page_table)?;
        if self.head_weights.dtype() == self.q.dtype() {
            check.float("head_weights", &self.head_weights)?;
        } else {
            check.float_as("head_weights", &self.head_weights, DType::F32, "always, or the dtype of `q`")?;
        }
        check.int("visible", &self.visible)?;
        let [batch, query_len, heads, width] = self.q.dims();
        let actual = format!("a query of {heads} heads of width {width}");
        check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
        let words = || format!("[P, S, di] with di = {width}, the width of `q`");
        check.dims("keys", self.keys.dims(), [None, None, Some(width)], words)?;
        check.page_size("keys page size (dimension 1)", self.keys.dims()[1])?;
        let words = || format!("[B, maxP] with B = {batch}");
        check.dims("page_table", self.page_table.dims(), [Some(batch), None], words)?;
        let words = || format!("[B, Sq, Hi] = [{batch}, {query_len}, {heads}], as in `q`");
        let rows = [Some(batch), Some(query_len), Some(heads)];
        check.dims("head_weights", self.head_weights.dims(), rows, words)?;
        let words = || format!("[B, Sq] = [{batch}, {query_len}], as in `q`");
        check.dims("visible", self.visible.dims(), [Some(batch), Some(query_len)], words)?;
        Ok(check)
    }

    fn check_options(&self, check: &Check, options: &LightningIndexOptions) -> Result<(), MlaError> {
        let ([batch, query_len, ..], [pages, page_size, _]) = (self.q.dims(), self.keys.dims());
        let &LightningIndexOptions { k, scale, form } = options;
        check.value("k", k > 0, k, || "at least 1".into())?;
        check.index_range("k", k)?;
        let entries = batch.saturating_mul(query_len).saturating_mul(k);
        check.value("k", entries <= isize::MAX as usize / 4, k, || "a number whose index fits in memory".into())?;
        check.value("scale", scale.is_finite(), scale, || "a finite number".into())?;
        match form {
            IndexForm::Positions => Ok(()),
            IndexForm::Slots => check.index_range("keys", pages.saturating_mul(page_size)),
        }
    }

    /// Reads numbers of keys and page table back and checks every entry that the call would use.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first number of keys outside `0 ..= maxP * S` or page id outside `0 .. P`.
    /// Before that, wrong shapes and dtypes as in [`lightning_index`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ([batch, query_len, ..], [pages, page_size, _]) = (self.q.dims(), self.keys.dims());
        let [_, max_pages] = self.page_table.dims();
        let visible = read_i32(OP, "visible", &self.visible)?;
        let table = read_i32(OP, "page_table", &self.page_table)?;
        let error = |argument, index, actual, expected| {
            Err(MlaError::DeviceValue { op: OP, argument, index, actual, expected })
        };
        let capacity = max_pages.saturating_mul(page_size);
        for b in 0..batch {
            let mut longest = 0;
            for (i, &keys) in visible[b * query_len..][..query_len].iter().enumerate() {
                match usize::try_from(keys) {
                    Ok(keys) if keys <= capacity => longest = longest.max(keys),
                    _ => {
                        let expected = format!("0 to {capacity} (the capacity of `page_table`)");
                        return error("visible", vec![b, i], keys, expected);
                    }
                }
            }
            for (p, &page) in table[b * max_pages..][..longest.div_ceil(page_size)].iter().enumerate() {
                if usize::try_from(page).map_or(true, |page| page >= pages) {
                    let expected = format!("a page of `keys`, 0 to {}", pages.saturating_sub(1));
                    return error("page_table", vec![b, p], page, expected);
                }
            }
        }
        Ok(())
    }
}
