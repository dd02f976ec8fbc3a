//! [`write_latent`]: new tokens into the paged cache, in place.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension};
use burn::tensor::{Int, Tensor};
use thiserror::Error;

use crate::MlaError;
use crate::cache::{BackendPool, CacheError, Pool};
use crate::check::{Check, check_slots};

const OP: &str = "write_latent";

/// Arguments of [`write_latent`].
#[derive(Debug, Clone)]
pub struct WriteLatentArgs {
    /// The cache `[P, S, D]`, row after row in memory ([`new_pool`](crate::cache::new_pool) and
    /// [`Pool::new`](crate::cache::Pool::new) make one); this must be its only handle.
    pub cache: Pool,
    /// i32 `[N]`: where each token goes, `page * S + offset`; -1 skips the token. No slot occurs twice.
    pub slots: Tensor<1, Int>,
    /// `[N, Dv]`, or `[N, D]` where there is no rotary part.
    pub latent: Tensor<2>,
    /// `[N, D - Dv]`: the rotary part, if any.
    pub rope: Option<Tensor<2>>,
}

/// A refused [`write_latent`], with the cache as it was.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct WriteLatentError {
    /// Why.
    pub error: MlaError,
    /// The cache, unchanged.
    pub cache: Pool,
}

impl From<Box<WriteLatentError>> for MlaError {
    fn from(refused: Box<WriteLatentError>) -> Self {
        refused.error
    }
}

impl From<Box<WriteLatentError>> for CacheError {
    fn from(refused: Box<WriteLatentError>) -> Self {
        refused.error.into()
    }
}

/// Writes a row per token into the cache and returns it: the same buffer, written in place, never a copy of the pool. Rows of a pool in FP8
/// are quantised on the way: for every 128 channels the scale is the smallest power of two, 2^-13 at least, by which no code overflows
/// ([`RowFormat`](crate::cache::RowFormat) has those of other rows).
///
/// Under Burn's fusing backend (feature `fusion`) a view of the cache that is still alive, and strides, show only when the
/// deferred call is carried out. The result is right then too, but made in a copy: views keep their values.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::cache::new_pool;
/// use mla_ops::{WriteLatentArgs, write_latent};
///
/// let device = Device::flex();
/// let cache = new_pool([2, 4, 6], FloatDType::F32, &device)?.into(); // [P, S, D]
/// // Of three tokens the first two are written, at the end of page 0 and the beginning of page 1.
/// let (slots, latent) = (index_tensor(vec![3, 4, -1], &device), Tensor::<2>::ones([3, 4], &device));
/// let rope = Some(Tensor::zeros([3, 2], &device));
/// let cache = write_latent(WriteLatentArgs { cache, slots, latent, rope })?;
/// assert_eq!(cache.dense().sum().into_scalar::<f32>(), 8.0);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices; a cache that is a strided view; [`MlaError::CacheShared`] if another handle of the
/// cache exists. The cache comes back in the error, unchanged. A slot out of range is on the device and cannot be seen;
/// [`WriteLatentArgs::validate_device_inputs`] looks.
pub fn write_latent(args: WriteLatentArgs) -> Result<Pool, Box<WriteLatentError>> {
    if let Err(error) = args.check_call(OP) {
        return Err(Box::new(WriteLatentError { error, cache: args.cache }));
    }
    let latent = args.latent.into_dispatch();
    let rows = match args.rope {
        Some(rope) => BackendRows::Parts(latent, rope.into_dispatch()),
        None => BackendRows::Whole(latent),
    };
    Ok(write_rows(args.cache, args.slots, rows))
}

/// Writes rows that have been checked.
pub(super) fn write_rows(cache: Pool, slots: Tensor<1, Int>, rows: BackendRows<Dispatch>) -> Pool {
    Pool::from_backend(Dispatch::write_latent(cache.into_backend(), slots.into_dispatch(), rows))
}

impl WriteLatentArgs {
    /// Everything that a call must fulfil.
    pub(super) fn check_call(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = self.check_tensors(op)?;
        self.cache.check_own(&check, "cache")?;
        if check.sees_values() {
            self.validate_values(op)?;
        }
        Ok(check)
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check_tensors(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = self.cache.check_first(op, "cache")?;
        let [_, _, width] = self.cache.dims();
        check.int("slots", &self.slots)?;
        let [tokens] = self.slots.dims();
        let dtype = self.cache.dtype();
        check.float_as("latent", &self.latent, dtype, "the dtype of `cache`")?;
        let mut latent_width = width;
        if let Some(rope) = &self.rope {
            check.float_as("rope", rope, dtype, "the dtype of `cache`")?;
            let [_, rope_width] = rope.dims();
            check.value("rope", rope_width < width, format!("{rope_width} channels"), || {
                format!("fewer than the {width} of a cache row")
            })?;
            latent_width = width - rope_width;
            let words = || format!("[N, D - Dv] with N = {tokens}, the number of `slots`");
            check.dims("rope", rope.dims(), [Some(tokens), None], words)?;
        }
        let words =
            || format!("[{tokens}, {latent_width}]: a row per slot, that with `rope` fills a cache row of {width}");
        check.dims("latent", self.latent.dims(), [Some(tokens), Some(latent_width)], words)?;
        Ok(check)
    }

    /// Reads the slots back and checks that each is -1 or a slot of the cache, and that none occurs twice.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first that is not. Before that, wrong shapes and dtypes as in [`write_latent`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors(OP)?;
        self.validate_values(OP)
    }

    fn validate_values(&self, op: &'static str) -> Result<(), MlaError> {
        let [pages, page_size, _] = self.cache.dims();
        check_slots(op, "slots", &self.slots, pages * page_size)
    }
}

/// New rows of a cache.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendRows<B: Backend> {
    /// `[N, D]`.
    Whole(FloatTensor<B>),
    /// Latents `[N, Dv]` and rotary parts `[N, D - Dv]`.
    Parts(FloatTensor<B>, FloatTensor<B>),
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait WriteLatentBackend: Backend {
    /// [`write_latent`]: the cache's own buffer.
    #[fusion(meta = |cache, _slots, _rows| cache.same())]
    fn write_latent(
        #[extension_type] cache: BackendPool<Self>,
        slots: IntTensor<Self>,
        #[extension_type] rows: BackendRows<Self>,
    ) -> BackendPool<Self>;
}

#[cfg(feature = "_gpu")]
pub(super) mod cube {
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::cache_rows::{WriteFp8Args, launch_write_fp8};
    use mla_kernels::write_latent::{WriteLatentArgs, WriteRowsArgs, launch_write_latent, launch_write_rows};

    use super::{BackendRows, WriteLatentBackend};
    use crate::cache::{BackendPool, Fp8Rows};
    use crate::tensors::{buffers, contiguous, dims, elem, own};

    impl WriteLatentBackend for CubeBackend {
        fn write_latent(cache: BackendPool<Self>, slots: CubeTensor, rows: BackendRows<Self>) -> BackendPool<Self> {
            let (cache, slots) = (cache.map(|stored| own(contiguous(stored))), contiguous(slots));
            match (&cache, rows) {
                (BackendPool::Dense(cache), BackendRows::Whole(rows)) => write_rows(cache, slots, rows),
                (BackendPool::Dense(cache), BackendRows::Parts(latent, rope)) => {
                    write_parts(cache, slots, latent, rope);
                }
                (&BackendPool::Fp8(ref words, format), BackendRows::Whole(rows)) => {
                    write_fp8(words, format, slots, rows, None);
                }
                (&BackendPool::Fp8(ref words, format), BackendRows::Parts(latent, rope)) => {
                    write_fp8(words, format, slots, latent, Some(rope));
                }
            }
            cache
        }
    }

    fn write_rows(cache: &CubeTensor, slots: CubeTensor, rows: CubeTensor) {
        let rows = contiguous(rows);
        let ([pages, page_size, _], [tokens, width], elem) = (dims(cache), dims(&rows), elem(cache));
        let slot_count = pages * page_size;
        let args =
            buffers!(cache, slots, rows => WriteRowsArgs { cache, slots, rows, slot_count, tokens, width, elem });
        launch_write_rows(&cache.client, args);
    }

    fn write_parts(cache: &CubeTensor, slots: CubeTensor, latent: CubeTensor, rope: CubeTensor) {
        let ([tokens, latent_width], [_, rope_width]) = (dims(&latent), dims(&rope));
        if rope_width == 0 {
            return write_rows(cache, slots, latent);
        }
        if latent_width == 0 {
            return write_rows(cache, slots, rope);
        }
        let ([latent, rope], elem) = ([latent, rope].map(contiguous), elem(cache));
        let [pages, page_size, _] = dims(cache);
        let slot_count = pages * page_size;
        let args = buffers!(cache, slots, latent, rope => WriteLatentArgs {
            cache, slots, latent, rope, slot_count, tokens, latent_width, rope_width, elem,
        });
        launch_write_latent(&cache.client, args);
    }

    /// Rows, of which the last channels may be apart, quantised into the words of a cache.
    pub(in crate::ops) fn write_fp8(
        words: &CubeTensor,
        format: Fp8Rows,
        slots: CubeTensor,
        first: CubeTensor,
        rest: Option<CubeTensor>,
    ) {
        let (first, rest) = (contiguous(first), rest.map(contiguous));
        let ([pages, page_size, _], [tokens, first_width]) = (format.dims(dims(words)), dims(&first));
        let (layout, slot_count, elem) = (format.layout(), pages * page_size, elem(&first));
        let rest = rest.filter(|_| first_width < format.width()).map(CubeTensor::into_buffer_arg);
        let args = buffers!(words, slots, first => WriteFp8Args {
            cache: words, layout, slots, first, rest, first_width, slot_count, tokens, elem,
        });
        launch_write_fp8(&words.client, args);
    }
}

#[cfg(feature = "flex")]
pub(super) mod reference {
    use burn::backend::{Flex, tensor::IntTensor};
    use burn::tensor::{Int, Tensor, kind::Basic, s};

    use super::{BackendRows, WriteLatentBackend};
    use crate::cache::{BackendPool, Fp8Rows, Fp8Scales, Pool};
    use crate::reference::{fp8_rows, host, tensor};

    impl WriteLatentBackend for Flex {
        fn write_latent(
            cache: BackendPool<Self>,
            slots: IntTensor<Self>,
            rows: BackendRows<Self>,
        ) -> BackendPool<Self> {
            let parts = match rows {
                BackendRows::Whole(rows) => vec![tensor(rows)],
                BackendRows::Parts(latent, rope) => vec![tensor(latent), tensor(rope)],
            };
            BackendPool::of(write_latent(cache.pool(), tensor(slots), &parts))
        }
    }

    /// The cache, written in place. `parts`, each `[N, _]`, stand side by side in a cache row.
    pub(in crate::ops) fn write_latent(cache: Pool, slots: Tensor<1, Int>, parts: &[Tensor<2>]) -> Pool {
        // In a shape to be, 0 stands for the length that was.
        if cache.dims().contains(&0) {
            return cache;
        }
        let dense = |cache| assign(cache, &slots, parts);
        cache.map(dense, |words, rows| {
            let (quantised, scales) = fp8_rows::quantise_rows(Tensor::cat(parts.to_vec(), 1), rows);
            match rows.scales {
                Fp8Scales::F32InRow => assign(words, &slots, &[quantised]),
                Fp8Scales::E8m0BehindPage { .. } | Fp8Scales::F32BehindPage { .. } => {
                    assign_apart(words, &slots, [quantised, scales], rows)
                }
            }
        })
    }

    /// The words of rows, and those of their scales, each where it belongs.
    fn assign_apart(
        cache: Tensor<3, Int>,
        slots: &Tensor<1, Int>,
        [words, scales]: [Tensor<2, Int>; 2],
        rows: Fp8Rows,
    ) -> Tensor<3, Int> {
        let shape = cache.dims();
        let mut cache = cache.flatten::<1>(0, 2);
        for (token, slot) in host(slots.clone()).into_iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            let (row, behind) = rows.words_of(slot);
            for (at, part) in [Some(row), behind].into_iter().zip([&words, &scales]) {
                let (Some(at), [_, len]) = (at, part.dims()) else { continue };
                let values = part.clone().narrow(0, token, 1).reshape([len]);
                cache = cache.slice_assign(s![at..at + len], values);
            }
        }
        cache.reshape(shape)
    }

    /// The handle of the rows is the only one, so that assigning to a slice copies nothing but the slice.
    fn assign<K: Basic>(cache: Tensor<3, K>, slots: &Tensor<1, Int>, parts: &[Tensor<2, K>]) -> Tensor<3, K> {
        let [pages, page_size, width] = cache.dims();
        let mut rows = cache.reshape([pages * page_size, width]);
        for run in runs(&host(slots.clone())) {
            let mut column = 0;
            for part in parts {
                let end = column + part.dims()[1];
                let values = part.clone().narrow(0, run.token, run.len);
                rows = rows.slice_assign([run.slot..run.slot + run.len, column..end], values);
                column = end;
            }
        }
        rows.reshape([pages, page_size, width])
    }

    /// Neighbouring tokens that go to neighbouring slots.
    struct Run {
        token: usize,
        slot: usize,
        len: usize,
    }

    /// The slots as runs, without the tokens to skip. New tokens of a sequence usually fill page after page.
    fn runs(slots: &[i32]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (token, &slot) in slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            match runs.last_mut() {
                Some(run) if run.token + run.len == token && run.slot + run.len == slot => run.len += 1,
                _ => runs.push(Run { token, slot, len: 1 }),
            }
        }
        runs
    }
}
