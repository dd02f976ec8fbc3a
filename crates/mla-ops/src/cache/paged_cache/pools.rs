//! The pools of a cache, lent to those who write in them.

use burn::tensor::DType;

use super::{OP, PagedCache, wrong_value};
use crate::cache::{CacheError, Pool};
use crate::{MlaError, WriteLatentError};

/// The pools.
impl PagedCache {
    /// Pool number `index`, `[P, S, width]`, to read from: another handle of the same buffer.
    ///
    /// # Errors
    /// [`CacheError::PoolTaken`]; [`MlaError::Value`] for a pool that does not exist.
    pub fn pool(&self, index: usize) -> Result<Pool, CacheError> {
        self.check_index(index)?;
        let pool = self.pools[index].as_ref();
        pool.cloned().ok_or(CacheError::PoolTaken { pool: index })
    }

    /// Moves a pool out, so that the caller owns the only handle and can write in place. [`Self::put_pool`] gives it back.
    ///
    /// # Errors
    /// [`CacheError::PoolTaken`]; [`MlaError::Value`] for a pool that does not exist.
    pub fn take_pool(&mut self, index: usize) -> Result<Pool, CacheError> {
        self.check_index(index)?;
        let pool = self.pools[index].take();
        pool.ok_or(CacheError::PoolTaken { pool: index })
    }

    /// Gives back what [`Self::take_pool`] handed out.
    ///
    /// # Errors
    /// [`CacheError::PoolNotTaken`]; [`MlaError`] for a pool that does not exist, or one of another shape, dtype, format or
    /// device.
    pub fn put_pool(&mut self, index: usize, pool: Pool) -> Result<(), CacheError> {
        self.check_index(index)?;
        if self.pools[index].is_some() {
            return Err(CacheError::PoolNotTaken { pool: index });
        }
        self.check_pool(index, &pool)?;
        self.pools[index] = Some(pool);
        Ok(())
    }

    /// Writes into a pool: takes it, and gives it back, written or refused. What else `write` returns is the result:
    /// `Ok((write_latent(args)?, ()))`, or, with `written` from `rope_write(args)?`, `Ok((written.cache, written.q))`.
    ///
    /// ```
    /// # use burn::tensor::{Device, FloatDType, Tensor};
    /// # use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
    /// use mla_ops::batch::index_tensor;
    /// use mla_ops::{WriteLatentArgs, write_latent};
    ///
    /// # let device = Device::flex();
    /// # let config = CacheConfig {
    /// #     pools: vec![PoolConfig::per_token(12)],
    /// #     num_pages: 8,
    /// #     page_size: 4,
    /// #     max_requests: 2,
    /// #     max_tokens: 16,
    /// #     dtype: FloatDType::F32,
    /// # };
    /// let mut cache = PagedCache::new(config, &device)?;
    /// let request = cache.admit()?;
    /// let slots = index_tensor(cache.append(request, 1)?, &device);
    /// let latent = Tensor::<2>::ones([2, 12], &device); // a row too many
    /// let refused = cache.write_pool(0, |cache| {
    ///     Ok((write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?, ()))
    /// });
    /// assert!(refused.is_err() && cache.pool(0).is_ok());
    /// # Ok::<(), mla_ops::cache::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::PoolTaken`]; [`MlaError::Value`] for a pool that does not exist; what `write` returns; those of
    /// [`Self::put_pool`] for another tensor than the pool.
    pub fn write_pool<T>(
        &mut self,
        index: usize,
        write: impl FnOnce(Pool) -> Result<(Pool, T), Box<WriteLatentError>>,
    ) -> Result<T, CacheError> {
        match write(self.take_pool(index)?) {
            Ok((pool, rest)) => {
                self.put_pool(index, pool)?;
                Ok(rest)
            }
            Err(refused) => {
                self.put_pool(index, refused.cache)?;
                Err(refused.error.into())
            }
        }
    }

    fn check_index(&self, index: usize) -> Result<(), MlaError> {
        if index < self.pools.len() {
            return Ok(());
        }
        let expected = format!("below {}, the number of pools", self.pools.len());
        Err(wrong_value("pool", index, expected))
    }

    fn check_pool(&self, index: usize, pool: &Pool) -> Result<(), MlaError> {
        let (config, argument) = (&self.config, "pool");
        let shape = config.pool_shape(&config.pools[index]);
        if pool.dims() != shape {
            return Err(MlaError::Shape {
                op: OP,
                argument,
                actual: pool.dims().to_vec(),
                expected: format!("[num_pages, page_size / tokens_per_row, width] = {shape:?}"),
            });
        }
        let dtype = DType::from(config.dtype);
        if pool.dtype() != dtype {
            return Err(MlaError::DType { op: OP, argument, actual: pool.dtype(), expected: format!("{dtype:?}") });
        }
        let format = config.pools[index].format;
        if pool.format() != format {
            let (actual, expected) = (format!("a pool of {:?} rows", pool.format()), format!("{format:?} rows"));
            return Err(MlaError::Value { op: OP, argument, actual, expected });
        }
        if pool.device() != self.device {
            return Err(MlaError::Device {
                op: OP,
                argument,
                actual: format!("{:?}", pool.device()),
                expected: format!("{:?}", self.device),
                like: "cache",
            });
        }
        Ok(())
    }

    pub(super) fn check_all_pools_present(&self) -> Result<(), CacheError> {
        match self.pools.iter().position(Option::is_none) {
            Some(pool) => Err(CacheError::PoolTaken { pool }),
            None => Ok(()),
        }
    }
}
