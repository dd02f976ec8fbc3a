//! [`vertical_slash_index`]: the keys of each block of queries, from columns and diagonals.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod lists;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use self::backend::{BackendEntries, VerticalSlashIndexBackend};
use crate::MlaError;
use crate::check::{Check, read_i32};
use crate::dispatch::tensors;

const OP: &str = "vertical_slash_index";

/// The longest sequence, so that sums of two positions fit in an i32.
const MAX_TOKENS: usize = 1 << 29;
/// The largest block.
const MAX_BLOCK: usize = 1 << 16;

/// Arguments of [`vertical_slash_index`].
///
/// The entries of a head are a set: they may stand in any order and more than once. Negative ones are none, as are
/// those that name no key of the sequence.
#[derive(Debug, Clone)]
pub struct VerticalSlashIndexArgs {
    /// i32 `[B]`: queries of each sequence.
    pub q_lens: Tensor<1, Int>,
    /// i32 `[B]`: keys of each sequence, at most 2^29.
    pub kv_lens: Tensor<1, Int>,
    /// i32 `[B, H, Nv]`: columns, i.e. positions of keys that all queries attend to. `Nv` may be 0.
    pub vertical: Tensor<3, Int>,
    /// i32 `[B, H, Ns]`: diagonals. `Ns` may be 0.
    pub slash: Tensor<3, Int>,
    /// i32 `[H]`: how many of the entries of `vertical` each head uses, from the first on; all where absent.
    pub vertical_counts: Option<Tensor<1, Int>>,
    /// i32 `[H]`: the same of `slash`.
    pub slash_counts: Option<Tensor<1, Int>>,
}

/// Options of [`vertical_slash_index`].
#[derive(Debug, Clone)]
pub struct VerticalSlashIndexOptions {
    /// The greatest of `q_lens`, at most 2^29: decides how many block rows there are.
    pub max_query_len: usize,
    /// Queries in a block row (`M`), 1 to 65536.
    pub block_size_m: usize,
    /// Keys in a key block (`N`), 1 to 65536.
    pub block_size_n: usize,
    /// A query sees the keys up to its own position; otherwise all keys of its sequence.
    pub causal: bool,
}

impl VerticalSlashIndexOptions {
    /// Causal, in blocks of 64 queries and 64 keys, as MInference has them.
    pub fn new(max_query_len: usize) -> Self {
        Self { max_query_len, block_size_m: 64, block_size_n: 64, causal: true }
    }
}

/// What [`vertical_slash_index`] gives: for each block row of each head, key blocks and single columns. All i32,
/// `rows = ceil(max_query_len / M)`; row `r` is the queries `r * M .. (r + 1) * M` of its sequence.
///
/// The key sets of a row do not overlap: a key is in one key block, or is one of the columns, or is not attended to.
#[derive(Debug, Clone)]
pub struct VerticalSlashIndex {
    /// `[B, H, rows]`: key blocks of the row.
    pub block_count: Tensor<3, Int>,
    /// `[B, H, rows, Ns * ceil(M / N)]`: the position of each key block's first key, ascending; any position, not only
    /// multiples of `N`. A block is the keys `offset .. offset + N` as far as the sequence has them. -1 in the tail.
    pub block_offset: Tensor<4, Int>,
    /// `[B, H, rows]`: columns of the row.
    pub column_count: Tensor<3, Int>,
    /// `[B, H, rows, Nv]`: positions of single keys, ascending. -1 in the tail.
    pub column_index: Tensor<4, Int>,
    /// Queries in a block row (`M`).
    pub block_size_m: usize,
    /// Keys in a key block (`N`).
    pub block_size_n: usize,
}

/// Which keys the queries attend to in the vertical-slash pattern, for
/// [`vertical_slash_attention`](crate::vertical_slash_attention).
///
/// From MInference (arXiv 2407.02490, appendix C.4.2). All queries of a block row attend to the same keys, except that
/// with `causal` a query sees no key past its own position `i + kv_len - q_len`. A block row is given
///
/// - the keys of its bands. Query `i` meets diagonal `s` at key `i + kv_len - q_len - s` with `causal`, and at key
///   `i + kv_len - s` without: diagonals are not negative, and from 1 to `q_len + kv_len - 1` they are then all that
///   the sequence has. The band of a diagonal is the `M` keys where the `M` queries of a whole row meet it, without
///   those before key 0. Bands are taken from the lowest to the highest: one that has keys which are in no block yet
///   adds `ceil(M / N)` blocks, one behind the other, the first of which begins at the lowest such key;
/// - the columns that are in none of these blocks.
///
/// Blocks and columns that begin past the last key which a query of the row sees are left out. Rows past a sequence's
/// last query have none. Attention to whole blocks means that queries attend to some more keys than the diagonals name;
/// [`VerticalSlashIndex`] says exactly to which.
///
/// For `M = N`, entries that are sorted (columns up, diagonals down) and distinct and, with `causal`, diagonal 0 among
/// them, the lists are those of MInference's and vLLM's `convert_vertical_slash_indexes`. These leave undefined what other
/// entries give, and what stands in the tails and in rows past the last query. Without diagonal 0 they may lose blocks
/// and columns, and a diagonal that ends right before the sequence may add a block; here neither happens.
///
/// # Example
/// 12 queries and as many keys, `M = N = 4`, causal, columns `[5, 0, 7]`, diagonals `[0, 6]`:
///
/// | row | queries | bands | `block_count` | `block_offset` | `column_count` | `column_index` |
/// |---|---|---|---|---|---|---|
/// | 0 | 0..4 | 0..4 | 1 | `[0, -1]` | 0 | `[-1, -1, -1]` |
/// | 1 | 4..8 | 0..2, 4..8 | 2 | `[0, 4]` | 0 | `[-1, -1, -1]` |
/// | 2 | 8..12 | 2..6, 8..12 | 2 | `[2, 8]` | 2 | `[0, 7, -1]` |
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{VerticalSlashIndexArgs, VerticalSlashIndexOptions, vertical_slash_index};
///
/// let device = Device::flex();
/// let lens = index_tensor(vec![12], &device);
/// let vertical = Tensor::<3, Int>::from_data([[[5, 0, 7]]], (&device, DType::I32));
/// let slash = Tensor::<3, Int>::from_data([[[0, 6]]], (&device, DType::I32));
/// let options = VerticalSlashIndexOptions { block_size_m: 4, block_size_n: 4, ..VerticalSlashIndexOptions::new(12) };
/// let index = vertical_slash_index(VerticalSlashIndexArgs::new(lens.clone(), lens, vertical, slash), &options)?;
/// assert_eq!(index.block_offset.into_data(), TensorData::from([[[[0, -1], [0, 4], [2, 8]]]]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, or sizes out of range: nothing is launched. Where values are not checked, lengths
/// and counts out of range are taken as the nearest that is in range.
pub fn vertical_slash_index(
    args: VerticalSlashIndexArgs,
    options: &VerticalSlashIndexOptions,
) -> Result<VerticalSlashIndex, MlaError> {
    let check = args.check(options)?;
    if check.sees_values() {
        args.validate_values(options)?;
    }
    let (block_count, block_offset, column_count, column_index) =
        tensors(<Dispatch as VerticalSlashIndexBackend>::vertical_slash_index(
            args.q_lens.into_dispatch(),
            args.kv_lens.into_dispatch(),
            entries(args.vertical, args.vertical_counts),
            entries(args.slash, args.slash_counts),
            options.clone(),
        ));
    let &VerticalSlashIndexOptions { block_size_m, block_size_n, .. } = options;
    Ok(VerticalSlashIndex { block_count, block_offset, column_count, column_index, block_size_m, block_size_n })
}

/// Entries `[B, H, _]`, and how many of them each head uses: all where nothing else is said.
fn entries(values: Tensor<3, Int>, counts: Option<Tensor<1, Int>>) -> BackendEntries<Dispatch> {
    let [_, heads, width] = values.dims();
    let counts = counts.unwrap_or_else(|| Tensor::full([heads], width as i32, (&values.device(), DType::I32)));
    BackendEntries { values: values.into_dispatch(), counts: counts.into_dispatch() }
}

impl VerticalSlashIndexOptions {
    /// Block rows.
    fn rows(&self) -> usize {
        self.max_query_len.div_ceil(self.block_size_m)
    }

    /// Key blocks that a band adds at most.
    fn blocks_per_band(&self) -> usize {
        self.block_size_m.div_ceil(self.block_size_n)
    }
}

impl VerticalSlashIndexArgs {
    /// Each head uses all of its columns and diagonals.
    pub fn new(
        q_lens: Tensor<1, Int>,
        kv_lens: Tensor<1, Int>,
        vertical: Tensor<3, Int>,
        slash: Tensor<3, Int>,
    ) -> Self {
        Self { q_lens, kv_lens, vertical, slash, vertical_counts: None, slash_counts: None }
    }

    fn check(&self, options: &VerticalSlashIndexOptions) -> Result<Check, MlaError> {
        let check = Check::new(OP, "q_lens", &self.q_lens)?;
        check.int("q_lens", &self.q_lens)?;
        check.int("kv_lens", &self.kv_lens)?;
        check.int("vertical", &self.vertical)?;
        check.int("slash", &self.slash)?;
        let ([batch], [_, heads, verticals]) = (self.q_lens.dims(), self.vertical.dims());
        let words = || format!("[B] with B = {batch}, the length of `q_lens`");
        check.dims("kv_lens", self.kv_lens.dims(), [Some(batch)], words)?;
        let words = || format!("[B, H, Nv] with B = {batch}, the length of `q_lens`");
        check.dims("vertical", self.vertical.dims(), [Some(batch), None, None], words)?;
        let words = || format!("[B, H, Ns] with B = {batch}, H = {heads}, as in `vertical`");
        check.dims("slash", self.slash.dims(), [Some(batch), Some(heads), None], words)?;
        for (argument, counts) in [("vertical_counts", &self.vertical_counts), ("slash_counts", &self.slash_counts)] {
            if let Some(counts) = counts {
                check.int(argument, counts)?;
                let words = || format!("[H] with H = {heads}, as in `vertical`");
                check.dims(argument, counts.dims(), [Some(heads)], words)?;
            }
        }
        check_block_size(&check, "block_size_m", options.block_size_m)?;
        check_block_size(&check, "block_size_n", options.block_size_n)?;
        let len = options.max_query_len;
        check.value("max_query_len", len <= MAX_TOKENS, len, || format!("at most {MAX_TOKENS}"))?;
        let [_, _, slashes] = self.slash.dims();
        let lists = [batch, heads, len.div_ceil(options.block_size_m)];
        let entries = slashes.max(verticals).saturating_mul(options.block_size_m.div_ceil(options.block_size_n));
        let total = lists.into_iter().fold(entries, usize::saturating_mul);
        check.value("max_query_len", total <= isize::MAX as usize / 4, len, || {
            "a length whose index fits in memory".into()
        })?;
        Ok(check)
    }

    /// Reads lengths and counts back and checks that they are in range.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first length of queries outside `0 ..= max_query_len`, length of keys outside
    /// `0 ..= 2^29`, or count that is negative or greater than `Nv` or `Ns`. Before that, wrong shapes and dtypes as in
    /// [`vertical_slash_index`].
    pub fn validate_device_inputs(&self, options: &VerticalSlashIndexOptions) -> Result<(), MlaError> {
        self.check(options)?;
        self.validate_values(options)
    }

    fn validate_values(&self, options: &VerticalSlashIndexOptions) -> Result<(), MlaError> {
        let ([_, _, verticals], [_, _, slashes]) = (self.vertical.dims(), self.slash.dims());
        check_each(OP, "q_lens", &self.q_lens, options.max_query_len)?;
        check_each(OP, "kv_lens", &self.kv_lens, MAX_TOKENS)?;
        if let Some(counts) = &self.vertical_counts {
            check_each(OP, "vertical_counts", counts, verticals)?;
        }
        if let Some(counts) = &self.slash_counts {
            check_each(OP, "slash_counts", counts, slashes)?;
        }
        Ok(())
    }
}

/// A block size: 1 to 65536.
fn check_block_size(check: &Check, argument: &'static str, size: usize) -> Result<(), MlaError> {
    check.value(argument, (1..=MAX_BLOCK).contains(&size), size, || format!("1 to {MAX_BLOCK}"))
}

/// Reads the tensor back: every value is from 0 to `most`.
pub(super) fn check_each(
    op: &'static str,
    argument: &'static str,
    tensor: &Tensor<1, Int>,
    most: usize,
) -> Result<(), MlaError> {
    let values = read_i32(op, argument, tensor)?;
    match values.iter().position(|&value| usize::try_from(value).map_or(true, |value| value > most)) {
        None => Ok(()),
        Some(i) => {
            let expected = format!("0 to {most}");
            Err(MlaError::DeviceValue { op, argument, index: vec![i], actual: values[i], expected })
        }
    }
}
