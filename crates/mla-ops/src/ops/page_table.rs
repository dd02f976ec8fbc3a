//! [`page_table`]: page ids of a batch from the request-to-token map.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::MlaError;
use crate::backend::{MlaBackend, PageTableSpec};
use crate::check::{Check, read_i32};

const OP: &str = "page_table";

/// Which tokens of which requests a batch reads: arguments of [`page_table`] and [`kv_indices`](crate::kv_indices).
#[derive(Debug, Clone)]
pub struct PagedBatchArgs {
    /// i32 `[R, T]`: the slot (`page * S + offset`) of each token of each request.
    pub req_to_token: Tensor<2, Int>,
    /// i32 `[B]`: the rows of `req_to_token` that are in the batch.
    pub req_rows: Tensor<1, Int>,
    /// i32 `[B]`: tokens of each, counted from `kv_start`.
    pub seq_lens: Tensor<1, Int>,
    /// i32 `[B]`: the first token of each, a multiple of the page size; 0 where absent.
    pub kv_start: Option<Tensor<1, Int>>,
    /// Tokens in a page (`S`), a power of two.
    pub page_size: usize,
}

/// Page ids i32 `[B, max_pages]`: entry `p` of sequence `b` is the page of its token `kv_start + p * S`, -1 from the
/// sequence's end on.
///
/// # Errors
/// Wrong shapes, dtypes or devices, or a page size that is no power of two: nothing is launched.
pub fn page_table(args: PagedBatchArgs, max_pages: usize) -> Result<Tensor<2, Int>, MlaError> {
    let check = args.check(OP)?;
    let entries = max_pages.saturating_mul(args.req_rows.dims()[0].max(1));
    check.index_range("max_pages", entries)?;
    check.allocation("max_pages", DType::I32, [entries])?;
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    let kv_start = args.kv_start_or_zero();
    let spec = PageTableSpec { page_size: args.page_size, max_pages };
    let table = <Dispatch as MlaBackend>::page_table(
        args.req_to_token.into_dispatch(),
        args.req_rows.into_dispatch(),
        args.seq_lens.into_dispatch(),
        kv_start.into_dispatch(),
        spec,
    );
    Ok(Tensor::from_dispatch(table))
}

impl PagedBatchArgs {
    pub(crate) fn check(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = Check::new(op, "req_to_token", &self.req_to_token)?;
        check.int("req_to_token", &self.req_to_token)?;
        check.int("req_rows", &self.req_rows)?;
        check.int("seq_lens", &self.seq_lens)?;
        let [batch] = self.req_rows.dims();
        let words = || format!("[B] with B = {batch}, the length of `req_rows`");
        check.dims("seq_lens", self.seq_lens.dims(), [Some(batch)], words)?;
        if let Some(kv_start) = &self.kv_start {
            check.int("kv_start", kv_start)?;
            check.dims("kv_start", kv_start.dims(), [Some(batch)], words)?;
        }
        check.page_size("page_size", self.page_size)?;
        Ok(check)
    }

    /// Where each sequence starts, i32 `[B]`.
    pub(crate) fn kv_start_or_zero(&self) -> Tensor<1, Int> {
        self.kv_start.clone().unwrap_or_else(|| self.seq_lens.zeros_like())
    }

    /// Reads rows, starts and lengths back and checks that they name tokens of the map.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first row outside `0 .. R`, start that is negative or inside a page, or length
    /// that passes the end of the map. Before that, wrong shapes and dtypes as in [`page_table`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check(OP)?;
        self.validate_values(OP)
    }

    pub(crate) fn validate_values(&self, op: &'static str) -> Result<(), MlaError> {
        let [requests, tokens] = self.req_to_token.dims();
        let rows = read_i32(op, "req_rows", &self.req_rows)?;
        let lens = read_i32(op, "seq_lens", &self.seq_lens)?;
        let starts = match &self.kv_start {
            Some(kv_start) => read_i32(op, "kv_start", kv_start)?,
            None => vec![0; rows.len()],
        };
        let error = |argument, b, actual, expected| {
            Err(MlaError::DeviceValue { op, argument, index: vec![b], actual, expected })
        };
        for (b, ((&row, &len), &start)) in rows.iter().zip(&lens).zip(&starts).enumerate() {
            if usize::try_from(row).map_or(true, |row| row >= requests) {
                return error("req_rows", b, row, format!("a row of `req_to_token`, from 0 and below {requests}"));
            }
            let page_size = self.page_size as i32;
            if start < 0 || start % page_size != 0 || start as usize > tokens {
                return error("kv_start", b, start, format!("a multiple of {page_size} from 0 to {tokens}"));
            }
            let most = tokens as i64 - i64::from(start);
            if len < 0 || i64::from(len) > most {
                return error("seq_lens", b, len, format!("0 to {most} (the row's tokens from `kv_start` on)"));
            }
        }
        Ok(())
    }
}
