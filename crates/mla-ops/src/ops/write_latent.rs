//! [`write_latent`]: new tokens into the paged cache, in place.

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};
use thiserror::Error;

use crate::MlaError;
use crate::backend::MlaBackend;
use crate::check::{Check, check_slots};

const OP: &str = "write_latent";

/// Arguments of [`write_latent`].
#[derive(Debug, Clone)]
pub struct WriteLatentArgs {
    /// The cache `[P, S, D]`, row after row in memory ([`new_pool`](crate::cache::new_pool) makes one); this must be its
    /// only handle.
    pub cache: Tensor<3>,
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
    pub cache: Tensor<3>,
}

impl From<Box<WriteLatentError>> for MlaError {
    fn from(refused: Box<WriteLatentError>) -> Self {
        refused.error
    }
}

/// Writes a row per token into the cache and returns it: the same buffer, written in place, never a copy of the pool.
///
/// Under Burn's fusing backend (feature `fusion`) a view of the cache that is still alive, and strides, show only when the
/// deferred call is carried out. The result is right then too, but made in a copy: views keep their values.
///
/// # Errors
/// Wrong shapes, dtypes or devices; a cache that is a strided view; [`MlaError::CacheShared`] if another handle of the
/// cache exists. The cache comes back in the error, unchanged. A slot out of range is on the device and cannot be seen;
/// [`WriteLatentArgs::validate_device_inputs`] looks.
pub fn write_latent(args: WriteLatentArgs) -> Result<Tensor<3>, Box<WriteLatentError>> {
    if let Err(error) = args.check_call(OP) {
        return Err(Box::new(WriteLatentError { error, cache: args.cache }));
    }
    let (cache, slots, latent) = (args.cache.into_dispatch(), args.slots.into_dispatch(), args.latent.into_dispatch());
    Ok(Tensor::from_dispatch(match args.rope {
        Some(rope) => <Dispatch as MlaBackend>::write_latent(cache, slots, latent, rope.into_dispatch()),
        None => <Dispatch as MlaBackend>::write_rows(cache, slots, latent),
    }))
}

impl WriteLatentArgs {
    /// Everything that a call must fulfil.
    pub(super) fn check_call(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = self.check_tensors(op)?;
        check.elements("cache", &self.cache)?;
        check.contiguous("cache", &self.cache)?;
        check.only_handle("cache", &self.cache)?;
        if check.sees_values() {
            self.validate_values(op)?;
        }
        Ok(check)
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check_tensors(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = Check::new(op, "cache", &self.cache)?;
        check.float("cache", &self.cache)?;
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
