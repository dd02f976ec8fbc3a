//! [`Pool`]: the rows of a paged cache, in the format that they are stored in.

mod backend;
mod format;
mod fp8;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, s};

pub(crate) use self::backend::BackendPool;
use self::backend::ReadFp8Backend;
pub use self::format::RowFormat;
pub(crate) use self::fp8::{Fp8Rows, Fp8Scales};
use super::new_pool::zeros;
use crate::MlaError;
use crate::check::Check;
use crate::limits::bytes_of;

/// Rows `[P, S, D]` of a paged cache, in the format that they are stored in; [`new_pool`](super::new_pool) makes dense ones. Clones
/// share memory.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::cache::{Pool, RowFormat};
/// use mla_ops::{WriteLatentArgs, write_latent};
///
/// let device = Device::flex();
/// // Rows of 512 channels in FP8 with 64 rotary ones in bf16: 656 bytes each.
/// let format = RowFormat::Fp8 { rope: 64 };
/// let cache = Pool::new([2, 4, 576], FloatDType::F32, format, &device)?;
/// assert_eq!((cache.dims(), cache.bytes()), ([2, 4, 576], 8 * 656));
/// // Rows are quantised where they are written.
/// let (slots, latent) = (index_tensor(vec![3], &device), Tensor::<2>::full([1, 576], 1.7, &device));
/// let cache = write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?;
/// assert_eq!(cache.dense().max().into_scalar::<f32>(), 1.75);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool(Rows);

/// The rows, as they are stored.
#[derive(Debug, Clone)]
enum Rows {
    /// `[P, S, D]`.
    Dense(Tensor<3>),
    /// i32, of the shape [`Fp8Rows::stored`].
    Fp8(Tensor<3, Int>, Fp8Rows),
}

/// Rows in memory, one after the other.
impl From<Tensor<3>> for Pool {
    fn from(rows: Tensor<3>) -> Self {
        Self(Rows::Dense(rows))
    }
}

impl Pool {
    /// A pool of zeros of this shape `[P, S, D]` and format.
    ///
    /// # Errors
    /// As [`new_pool`](super::new_pool); [`MlaError::Value`] for rows that the format does not know.
    pub fn new(shape: [usize; 3], dtype: FloatDType, format: RowFormat, device: &Device) -> Result<Self, MlaError> {
        const OP: &str = "Pool::new";
        let (check, dtype) = (Check::on(OP, device)?, DType::from(dtype));
        check.float_type("dtype", dtype)?;
        let (stored, stored_shape) = format.stored(OP, shape, dtype)?;
        check.allocation("shape", stored, stored_shape)?;
        let pool = Self::zeros(OP, shape, dtype, format, device)?;
        pool.check_written("shape")?;
        Ok(pool)
    }

    /// The same of a checked shape.
    pub(super) fn zeros(
        op: &'static str,
        shape: [usize; 3],
        dtype: DType,
        format: RowFormat,
        device: &Device,
    ) -> Result<Self, MlaError> {
        Ok(Self(match format.fp8(op, shape, dtype)? {
            None => Rows::Dense(zeros(shape, dtype, device)),
            Some(rows) => {
                let shape = rows.stored(shape);
                Rows::Fp8(
                    match shape.iter().product() {
                        0usize => Tensor::empty(shape, (device, DType::I32)),
                        len => Tensor::<1, Int>::zeros([len], (device, DType::I32)).reshape(shape),
                    },
                    rows,
                )
            }
        }))
    }

    /// `[P, S, D]`.
    pub fn dims(&self) -> [usize; 3] {
        match &self.0 {
            Rows::Dense(rows) => rows.dims(),
            Rows::Fp8(words, rows) => rows.dims(words.dims()),
        }
    }

    /// How the rows are stored.
    pub fn format(&self) -> RowFormat {
        match &self.0 {
            Rows::Dense(_) => RowFormat::Dense,
            Rows::Fp8(_, rows) => rows.format(),
        }
    }

    /// Of the numbers that rows are read as: f32, f16 or bf16.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Rows::Dense(rows) => rows.dtype(),
            Rows::Fp8(_, rows) => rows.dtype,
        }
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        match &self.0 {
            Rows::Dense(rows) => rows.device(),
            Rows::Fp8(words, _) => words.device(),
        }
    }

    /// Its bytes on the device.
    pub fn bytes(&self) -> u64 {
        let bytes = match &self.0 {
            Rows::Dense(rows) => bytes_of(rows.dtype(), rows.dims()),
            Rows::Fp8(words, _) => bytes_of(DType::I32, words.dims()),
        };
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// All rows `[P, S, D]`, dequantised; of dense ones the tensor itself.
    pub fn dense(&self) -> Tensor<3> {
        match &self.0 {
            Rows::Dense(rows) => rows.clone(),
            Rows::Fp8(words, rows) => {
                let [pages, page_size, width] = self.dims();
                if pages * page_size == 0 {
                    return Tensor::empty(self.dims(), (&self.device(), rows.dtype));
                }
                let slots = Tensor::arange(0..(pages * page_size) as i64, (&words.device(), DType::I32));
                self.read(slots).reshape([pages, page_size, width])
            }
        }
    }

    /// The rows in these slots (i32 `[N]`, `page * S + offset`), dequantised: `[N, D]`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use mla_ops::batch::index_tensor;
    /// use mla_ops::cache::Pool;
    ///
    /// let device = Device::flex();
    /// let rows = Tensor::<2>::from_data([[0.0], [1.0], [2.0], [3.0]], &device);
    /// let pool = Pool::from(rows.reshape([2, 2, 1]));
    /// assert_eq!(pool.read(index_tensor(vec![3, 1], &device)).try_into_vec_as::<f32>().unwrap(), [3.0, 1.0]);
    /// ```
    pub fn read(&self, slots: Tensor<1, Int>) -> Tensor<2> {
        let ([pages, page_size, width], [count]) = (self.dims(), slots.dims());
        match &self.0 {
            Rows::Dense(rows) => rows.clone().reshape([pages * page_size, width]).select(0, slots),
            Rows::Fp8(_, rows) if count == 0 => Tensor::empty([0, width], (&self.device(), rows.dtype)),
            Rows::Fp8(words, rows) => {
                let rows = Dispatch::read_fp8_rows(words.clone().into_dispatch(), slots.into_dispatch(), *rows);
                Tensor::from_dispatch(rows)
            }
        }
    }

    /// The pool with a page copied over another. It must be the only handle, so that nothing but the page is written; reading with
    /// `select` makes a copy of the page alone, where a slice could be a view of the pool.
    pub(super) fn with_page_copied(self, from: Tensor<1, Int>, to: usize) -> Self {
        let to = s![to..to + 1, .., ..];
        Self(match self.0 {
            Rows::Dense(rows) => {
                let page = rows.clone().select(0, from);
                Rows::Dense(rows.slice_assign(to, page))
            }
            Rows::Fp8(words, rows) => {
                let page = words.clone().select(0, from);
                Rows::Fp8(words.slice_assign(to, page), rows)
            }
        })
    }

    pub(super) fn check_written(&self, argument: &'static str) -> Result<(), MlaError> {
        match &self.0 {
            Rows::Dense(rows) => crate::check_written(argument, rows),
            Rows::Fp8(words, _) => crate::check_written(argument, words),
        }
    }
}

/// As operations take it.
impl Pool {
    /// On the call's device, and of this dtype.
    pub(crate) fn check(&self, check: &Check, argument: &'static str, dtype: DType, why: &str) -> Result<(), MlaError> {
        match &self.0 {
            Rows::Dense(rows) => check.float_as(argument, rows, dtype, why),
            Rows::Fp8(words, rows) => {
                check.int(argument, words)?;
                check.same_dtype(argument, rows.dtype, dtype, why)
            }
        }
    }

    /// On the call's device, and of a dtype that operations know.
    pub(crate) fn check_stored(&self, check: &Check, argument: &'static str) -> Result<(), MlaError> {
        match &self.0 {
            Rows::Dense(rows) => check.float(argument, rows),
            Rows::Fp8(words, _) => check.int(argument, words),
        }
    }

    /// The check of a call whose first argument it is.
    pub(crate) fn check_first(&self, op: &'static str, argument: &'static str) -> Result<Check, MlaError> {
        match &self.0 {
            Rows::Dense(rows) => Check::new(op, argument, rows),
            Rows::Fp8(words, _) => Check::new(op, argument, words),
        }
        .and_then(|check| self.check_stored(&check, argument).map(|()| check))
    }

    /// Kernels reach all of it.
    pub(crate) fn check_elements(&self, check: &Check, argument: &'static str) -> Result<(), MlaError> {
        match &self.0 {
            Rows::Dense(rows) => check.elements(argument, rows),
            Rows::Fp8(words, _) => check.elements(argument, words),
        }
    }

    /// It is about to be written: row after row in memory, and no other handle.
    pub(crate) fn check_own(&self, check: &Check, argument: &'static str) -> Result<(), MlaError> {
        self.check_elements(check, argument)?;
        match &self.0 {
            Rows::Dense(rows) => {
                check.contiguous(argument, rows)?;
                check.only_handle(argument, rows)
            }
            Rows::Fp8(words, _) => check.only_handle(argument, words),
        }
    }

    /// Index keys, dense or in FP8.
    pub(crate) fn check_index_keys(&self, check: &Check, argument: &'static str) -> Result<(), MlaError> {
        let format = self.format();
        let expected = || "dense rows, or FP8 index keys".into();
        let known = matches!(format, RowFormat::Dense | RowFormat::Fp8IndexKeys);
        check.value(argument, known, format!("a pool of {format:?} rows"), expected)
    }

    /// The tensor, of an operation that knows dense rows only.
    pub(crate) fn dense_only(self, check: &Check, argument: &'static str) -> Result<Tensor<3>, MlaError> {
        let words = || "dense rows: this operation reads no others on this device".into();
        check.value(argument, self.format() == RowFormat::Dense, "a pool of FP8 rows", words)?;
        Ok(self.dense())
    }

    /// The same rows as pages of one.
    pub(crate) fn with_pages_of_one(self) -> Self {
        let [pages, page_size, width] = self.dims();
        Self(match self.0 {
            Rows::Dense(rows) => Rows::Dense(rows.reshape([pages * page_size, 1, width])),
            Rows::Fp8(words, rows) => {
                let rows = rows.with_pages_of_one();
                Rows::Fp8(words.reshape(rows.stored([pages * page_size, 1, width])), rows)
            }
        })
    }

    /// As a backend takes it.
    pub(crate) fn into_backend(self) -> BackendPool<Dispatch> {
        match self.0 {
            Rows::Dense(rows) => BackendPool::Dense(rows.into_dispatch()),
            Rows::Fp8(words, rows) => BackendPool::Fp8(words.into_dispatch(), rows),
        }
    }

    /// What a backend has given back.
    pub(crate) fn from_backend(pool: BackendPool<Dispatch>) -> Self {
        Self(match pool {
            BackendPool::Dense(rows) => Rows::Dense(Tensor::from_dispatch(rows)),
            BackendPool::Fp8(words, rows) => Rows::Fp8(Tensor::from_dispatch(words), rows),
        })
    }
}

#[cfg(feature = "flex")]
impl Pool {
    /// The tensor of dense rows; none of others.
    pub(crate) fn dense_rows(&self) -> Option<&Tensor<3>> {
        match &self.0 {
            Rows::Dense(rows) => Some(rows),
            Rows::Fp8(..) => None,
        }
    }

    /// The same rows, those in FP8 read as f32.
    pub(crate) fn in_f32(self) -> Self {
        Self(match self.0 {
            Rows::Dense(rows) => Rows::Dense(rows),
            Rows::Fp8(words, rows) => Rows::Fp8(words, Fp8Rows { dtype: DType::F32, ..rows }),
        })
    }

    /// The pool with its tensor or words written.
    pub(crate) fn map(
        self,
        dense: impl FnOnce(Tensor<3>) -> Tensor<3>,
        fp8: impl FnOnce(Tensor<3, Int>, Fp8Rows) -> Tensor<3, Int>,
    ) -> Self {
        Self(match self.0 {
            Rows::Dense(rows) => Rows::Dense(dense(rows)),
            Rows::Fp8(words, rows) => Rows::Fp8(fp8(words, rows), rows),
        })
    }
}
