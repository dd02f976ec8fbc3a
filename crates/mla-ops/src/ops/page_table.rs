//! [`page_table`]: page ids of a batch from the request-to-token map.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension};
use burn::tensor::{DType, Int, Tensor, s};

use crate::MlaError;
use crate::check::{Check, read_i32};
use crate::dispatch::tensors;

const OP: &str = "page_table";

/// Which tokens of which requests a batch reads: arguments of [`page_table`] and [`kv_indices`](crate::kv_indices).
#[derive(Debug, Clone)]
pub struct PagedBatchArgs {
    /// i32 `[R, T]`: the slot (`page * S + offset`) of each token of each request; that of a page's first token is a multiple of
    /// `S`.
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

/// What [`page_table`] gives, all i32.
#[derive(Debug, Clone)]
pub struct PageTable {
    /// `[B, max_pages]`: entry `p` of sequence `b` is the page of its token `kv_start + p * S`, -1 from the sequence's end on.
    pub table: Tensor<2, Int>,
    /// `[B]`: 0, or 1 where the sequence has more than `max_pages` pages; then the table has the leading ones.
    pub overflow: Tensor<1, Int>,
}

/// Page ids of all sequences, at most `max_pages` of each.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{PagedBatchArgs, page_table};
///
/// let device = Device::flex();
/// // Pages of 2 tokens: request 0 has its tokens in the pages 3 and 1, request 1 in page 0.
/// let req_to_token = Tensor::<2, Int>::from_data([[6, 7, 2, 3], [0, 1, 0, 0]], (&device, DType::I32));
/// let (rows, lens) = (index_tensor(vec![1, 0], &device), index_tensor(vec![2, 3], &device));
/// let pages = page_table(PagedBatchArgs::new(req_to_token, rows, lens, 2), 2)?;
/// assert_eq!(pages.table.into_data(), TensorData::from([[0, -1], [3, 1]]));
/// assert_eq!(pages.overflow.into_data(), TensorData::from([0, 0]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, a page size that is no power of two, or a table that is too large: nothing is launched. A
/// `max_pages` that is too small shows in [`PageTable::overflow`], since the lengths are known on the device only. So are the
/// slots: one that is negative or no page's first has page -1, and [`PagedBatchArgs::validate_device_inputs`] names it.
pub fn page_table(args: PagedBatchArgs, max_pages: usize) -> Result<PageTable, MlaError> {
    let check = args.check(OP)?;
    let entries = max_pages.saturating_mul(args.req_rows.dims()[0].max(1));
    check.index_range("max_pages", entries)?;
    check.allocation("max_pages", DType::I32, [entries])?;
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    let (table, overflow) = tensors(<Dispatch as PageTableBackend>::page_table(args.into_backend(), max_pages));
    Ok(PageTable { table, overflow })
}

impl PagedBatchArgs {
    /// Sequences from their first token on: no `kv_start`.
    pub fn new(
        req_to_token: Tensor<2, Int>,
        req_rows: Tensor<1, Int>,
        seq_lens: Tensor<1, Int>,
        page_size: usize,
    ) -> Self {
        Self { req_to_token, req_rows, seq_lens, kv_start: None, page_size }
    }

    pub(super) fn check(&self, op: &'static str) -> Result<Check, MlaError> {
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

    /// What the backends take; a sequence without a start has 0.
    pub(super) fn into_backend(self) -> BackendPagedBatch<Dispatch> {
        let kv_start = self.kv_start.unwrap_or_else(|| self.seq_lens.zeros_like());
        BackendPagedBatch {
            req_to_token: self.req_to_token.into_dispatch(),
            req_rows: self.req_rows.into_dispatch(),
            seq_lens: self.seq_lens.into_dispatch(),
            kv_start: kv_start.into_dispatch(),
            page_size: self.page_size,
        }
    }

    /// Reads rows, starts, lengths and what they name of the map back and checks that these are slots of whole pages.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first row outside `0 .. R`, start that is negative or inside a page, length
    /// that passes the end of the map, or slot of a page's first token that is negative or no multiple of `S`. Before that,
    /// wrong shapes and dtypes as in [`page_table`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check(OP)?;
        self.validate_values(OP)
    }

    pub(super) fn validate_values(&self, op: &'static str) -> Result<(), MlaError> {
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
        self.validate_slots(op, &rows, &starts, &lens)
    }

    /// The first tokens of the pages in the batch have slots at which pages begin. Rows, starts and lengths are in order.
    fn validate_slots(&self, op: &'static str, rows: &[i32], starts: &[i32], lens: &[i32]) -> Result<(), MlaError> {
        let ([_, tokens], size) = (self.req_to_token.dims(), self.page_size);
        if rows.is_empty() || tokens == 0 {
            return Ok(());
        }
        let firsts = self.req_to_token.clone().slice(s![.., 0..tokens as i32;size as i32]);
        let pages = tokens.div_ceil(size);
        let slots = read_i32(op, "req_to_token", &firsts.select(0, self.req_rows.clone()))?;
        for (b, (&start, &len)) in starts.iter().zip(lens).enumerate() {
            let first = start as usize / size;
            for page in first..first + (len as usize).div_ceil(size) {
                let slot = slots[b * pages + page];
                if slot < 0 || !(slot as usize).is_multiple_of(size) {
                    return Err(MlaError::DeviceValue {
                        op,
                        argument: "req_to_token",
                        index: vec![rows[b] as usize, page * size],
                        actual: slot,
                        expected: format!("the first slot of a page: a multiple of {size}, and not negative"),
                    });
                }
            }
        }
        Ok(())
    }
}

/// [`PagedBatchArgs`], checked.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendPagedBatch<B: Backend> {
    /// i32 `[R, T]`.
    pub(super) req_to_token: IntTensor<B>,
    /// i32 `[B]`.
    pub(super) req_rows: IntTensor<B>,
    /// i32 `[B]`.
    pub(super) seq_lens: IntTensor<B>,
    /// i32 `[B]`.
    pub(super) kv_start: IntTensor<B>,
    /// `S`.
    pub(super) page_size: usize,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait PageTableBackend: Backend {
    /// [`page_table`]: table, overflow.
    #[fusion(meta = |batch, max_pages| {
        let sequences = batch.req_rows.shape[0];
        (crate::fusion::spec([sequences, *max_pages], DType::I32), crate::fusion::spec([sequences], DType::I32))
    })]
    fn page_table(
        #[extension_type] batch: BackendPagedBatch<Self>,
        max_pages: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "_gpu")]
pub(super) mod cube {
    use burn::tensor::DType;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::page_table::{PagedBatch, launch_page_table};

    use super::{BackendPagedBatch, PageTableBackend};
    use crate::tensors::{contiguous, dims, empty};

    impl PageTableBackend for CubeBackend {
        fn page_table(batch: BackendPagedBatch<Self>, max_pages: usize) -> (CubeTensor, CubeTensor) {
            let [sequences] = dims(&batch.req_rows);
            let table = empty(&batch.req_rows, [sequences, max_pages], DType::I32);
            let overflow = empty(&batch.req_rows, [sequences], DType::I32);
            // A kernel takes no buffer of nothing.
            let written = if max_pages == 0 { empty(&overflow, [1], DType::I32) } else { table.clone() };
            let (written, to_overflow) = (written.into_buffer_arg(), overflow.clone().into_buffer_arg());
            launch_page_table(&table.client, batch.into_buffers(), written, to_overflow, max_pages);
            (table, overflow)
        }
    }

    impl BackendPagedBatch<CubeBackend> {
        /// What the launchers take.
        pub(in crate::ops) fn into_buffers(self) -> PagedBatch {
            let ([requests, tokens], [batch]) = (dims(&self.req_to_token), dims(&self.req_rows));
            let buffer = |tensor: CubeTensor| contiguous(tensor).into_buffer_arg();
            PagedBatch {
                req_to_token: buffer(self.req_to_token),
                req_rows: buffer(self.req_rows),
                seq_lens: buffer(self.seq_lens),
                kv_start: buffer(self.kv_start),
                requests,
                tokens,
                batch,
                page_size: self.page_size,
            }
        }
    }
}

#[cfg(feature = "flex")]
mod reference {
    use burn::backend::{Flex, tensor::IntTensor};
    use burn::tensor::{DType, Int, Tensor};

    use super::{BackendPagedBatch, PageTableBackend};
    use crate::reference::{IntoFlex, device_i32, host, tensor};

    impl PageTableBackend for Flex {
        fn page_table(batch: BackendPagedBatch<Self>, max_pages: usize) -> (IntTensor<Self>, IntTensor<Self>) {
            let seq_lens: Tensor<1, Int> = tensor(batch.seq_lens.clone());
            let (shape, device) = (seq_lens.dims(), seq_lens.device());
            let room = i32::try_from(max_pages.saturating_mul(batch.page_size)).unwrap_or(i32::MAX);
            let overflow = host(seq_lens).into_iter().map(|len| i32::from(len > room)).collect();
            (page_table(batch, max_pages), device_i32::<1>(overflow, shape, &device)).into_flex()
        }
    }

    /// Page ids i32 `[B, max_pages]`, -1 from a sequence's end on, and for slots that are no page's first.
    fn page_table(batch: BackendPagedBatch<Flex>, max_pages: usize) -> Tensor<2, Int> {
        let BackendPagedBatch { req_to_token, req_rows, seq_lens, kv_start, page_size } = batch;
        let (req_to_token, req_rows): (Tensor<2, Int>, Tensor<1, Int>) = (tensor(req_to_token), tensor(req_rows));
        let (seq_lens, kv_start): (Tensor<1, Int>, Tensor<1, Int>) = (tensor(seq_lens), tensor(kv_start));
        let ([_, tokens], [batch], device) = (req_to_token.dims(), req_rows.dims(), req_to_token.device());
        let shape = [batch, max_pages];
        if batch == 0 || tokens == 0 || max_pages == 0 {
            return Tensor::full(shape, -1, (&device, DType::I32));
        }
        // No sequence is longer than the map, so that a later token counts as the one behind its end.
        let firsts = (0..max_pages).map(|page| (page * page_size).min(tokens) as i32).collect();
        let firsts = device_i32(firsts, [1, max_pages], &device).expand(shape);
        let past_end = firsts.clone().greater_equal(seq_lens.unsqueeze_dim::<2>(1).expand(shape));
        let columns = firsts + kv_start.unsqueeze_dim::<2>(1).expand(shape);
        // Columns past the end of the map belong to pages past the end of the sequence, which the mask replaces.
        let slots = req_to_token.select(0, req_rows).gather(1, columns.clamp_max(tokens as i32 - 1));
        let no_page =
            slots.clone().lower_elem(0).bool_or(slots.clone().remainder_scalar(page_size as i32).not_equal_elem(0));
        (slots / page_size as i32).mask_fill(past_end.bool_or(no_page), -1)
    }
}
