//! What the operations of a step ask of a cache, as tensors.

use burn::tensor::{DType, Int, Tensor};

use super::{OP, PagedCache, Request, RequestId, slot, wrong_value};
use crate::cache::CacheError;
use crate::check::Check;

/// What a step of the model needs: pages and lengths, or the inputs of the op `page_table`, one entry per request of the batch.
impl PagedCache {
    /// Pages, i32 `[B, max_pages]`, -1 behind the last of a request: what the op [`page_table`](crate::page_table) makes of
    /// [`Self::req_to_token`], from the host. [`Self::max_pages`] is enough for all; [`Self::page_table_of_first`] has the
    /// first pages of requests alone.
    ///
    /// No request, or no page for each (as fresh ones need), is an empty table.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`]; [`MlaError::Value`](crate::MlaError::Value) for a `max_pages` below the pages of a request, and
    /// this or [`MlaError::DeviceLimit`](crate::MlaError::DeviceLimit) for a table that is too large.
    pub fn page_table(&self, requests: &[RequestId], max_pages: usize) -> Result<Tensor<2, Int>, CacheError> {
        let most = self.max_pages(requests)?;
        if max_pages < most {
            return Err(
                wrong_value("max_pages", max_pages, format!("at least {most}, the most that a request has")).into()
            );
        }
        self.page_table_of_first(requests, max_pages)
    }

    /// [`Self::page_table`] of the first `max_pages` pages of each request, which may have more: where only its first tokens are
    /// read, as the keys before a chunk of a prompt are.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`]; [`MlaError::Value`](crate::MlaError::Value) or
    /// [`MlaError::DeviceLimit`](crate::MlaError::DeviceLimit) for a table that is too large.
    pub fn page_table_of_first(&self, requests: &[RequestId], max_pages: usize) -> Result<Tensor<2, Int>, CacheError> {
        let (check, shape) = (Check::on(OP, &self.device)?, [requests.len(), max_pages]);
        check.index_range("max_pages", requests.len().max(1).saturating_mul(max_pages))?;
        check.allocation("max_pages", DType::I32, shape)?;
        let mut table = Vec::with_capacity(requests.len() * max_pages);
        for &request in requests {
            let pages = self.request(request)?.pages.iter().map(|&page| page as i32);
            table.extend(pages.chain(std::iter::repeat(-1)).take(max_pages));
        }
        if table.is_empty() {
            return Ok(Tensor::empty(shape, (&self.device, DType::I32)));
        }
        Ok(self.upload(table).reshape(shape))
    }

    /// Lengths, i32 `[B]`.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn seq_lens(&self, requests: &[RequestId]) -> Result<Tensor<1, Int>, CacheError> {
        self.per_request(requests, |request| request.len as i32)
    }

    /// Rows of [`Self::req_to_token`], i32 `[B]`: the op's `req_rows`.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn rows(&self, requests: &[RequestId]) -> Result<Tensor<1, Int>, CacheError> {
        self.per_request(requests, |request| request.row as i32)
    }

    /// The map from (row, token position) to slot, i32 `[R, T]`; entries past a request's length hold anything. What is new since
    /// the last call is sent to the device now.
    ///
    /// ```
    /// # use burn::tensor::{Device, FloatDType};
    /// # use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
    /// use mla_ops::{PagedBatchArgs, page_table};
    ///
    /// # let config = CacheConfig {
    /// #     pools: vec![PoolConfig::per_token(12)],
    /// #     num_pages: 8,
    /// #     page_size: 4,
    /// #     max_requests: 2,
    /// #     max_tokens: 16,
    /// #     dtype: FloatDType::F32,
    /// # };
    /// let mut cache = PagedCache::new(config, &Device::flex())?;
    /// let request = cache.admit()?;
    /// cache.append(request, 5)?;
    /// // The page table, made on the device.
    /// let (rows, lens) = (cache.rows(&[request])?, cache.seq_lens(&[request])?);
    /// let pages = page_table(PagedBatchArgs::new(cache.req_to_token()?, rows, lens, 4), 2)?;
    /// assert_eq!(pages.table.into_data(), cache.page_table(&[request], 2)?.into_data());
    /// # Ok::<(), mla_ops::cache::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`RequestToToken::write`](crate::cache::RequestToToken::write), which a cache in order does not have.
    pub fn req_to_token(&mut self) -> Result<Tensor<2, Int>, CacheError> {
        let page_size = self.config.page_size;
        for Request { row, len, pages } in self.requests.values() {
            if let Some(first) = self.unwritten.remove(row) {
                let slots: Vec<i32> = (first..*len).map(|token| slot(pages, page_size, token)).collect();
                self.map.write(*row, first, &slots)?;
            }
        }
        Ok(self.map.tensor())
    }

    /// Pages of the request that has the most; 0 for an empty batch. The op's capacity.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn max_pages(&self, requests: &[RequestId]) -> Result<usize, CacheError> {
        let mut most = 0;
        for &request in requests {
            most = most.max(self.request(request)?.pages.len());
        }
        Ok(most)
    }

    fn per_request(
        &self,
        requests: &[RequestId],
        value: impl Fn(&Request) -> i32,
    ) -> Result<Tensor<1, Int>, CacheError> {
        let values = requests
            .iter()
            .map(|&request| Ok(value(self.request(request)?)))
            .collect::<Result<Vec<i32>, CacheError>>()?;
        Ok(self.upload(values))
    }
}
