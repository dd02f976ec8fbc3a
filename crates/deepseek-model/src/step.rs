//! What the steps of all models begin and end with: new tokens of some requests, and the rows of their last ones.

use std::collections::HashSet;
use std::ops::Range;

use burn::tensor::{Int, Tensor, kind::Basic, s};
pub(crate) use mla_ops::batch::index_tensor as ints;
use mla_ops::cache::{PagedCache, RequestId};

use crate::{ModelError, Result};

/// New tokens of one request, for which [`ModelCache::append`](crate::ModelCache::append) has made room.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// The request.
    pub request: RequestId,
    /// The tokens, at least one. They are the last of the request. Whole models read their ids; the modules of
    /// [`layers`](crate::layers) only count them.
    pub tokens: Vec<u32>,
    /// Their slots in a KV cache with a row for each token; empty for DeepSeek-V4.
    pub slots: Vec<i32>,
}

/// The last row of each chunk: `[N, hidden]` -> `[chunks, hidden]`.
pub(crate) fn last_rows(hidden: &Tensor<2>, chunks: &[Chunk]) -> Tensor<2> {
    let mut end = 0;
    let last = chunks.iter().map(|chunk| {
        end += chunk.tokens.len();
        hidden.clone().slice(s![end - 1..end, ..])
    });
    Tensor::cat(last.collect(), 0)
}

/// The columns of a table for rows of at most `len` numbers: a multiple of the widest load, whatever the rows are. Kernels that copy
/// tables are made for what divides their rows: so there is one of each.
pub(crate) fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// Elements of 4 bytes at whose multiples parts of a buffer begin: from there on kernels of every device may read.
pub(crate) const PART: usize = 128;

/// Fills up a part of a buffer: the next one begins behind it.
pub(crate) fn end_part(numbers: &mut Vec<i32>) {
    numbers.resize(numbers.len().next_multiple_of(PART), 0);
}

/// What lies in a buffer from a multiple of [`PART`] on, with no copy: a captured step would make it anew each time.
pub(crate) fn part<const D: usize, K: Basic>(buffer: &Tensor<1, K>, first: usize, shape: [usize; D]) -> Tensor<D, K> {
    // A slice is a copy where the buffer does not end at such a multiple; a window of all that there are is not.
    let windows = buffer.clone().unfold::<2, _>(0, shape.iter().product(), PART);
    let window = first / PART;
    windows.slice(s![window..window + 1, ..]).reshape(shape)
}

/// The parts of a buffer of whole numbers, one after the other.
pub(crate) struct Parts<'a> {
    numbers: &'a Tensor<1, Int>,
    next: usize,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(numbers: &'a Tensor<1, Int>) -> Self {
        Self { numbers, next: 0 }
    }

    /// The next one, which has an element.
    pub(crate) fn take<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D, Int> {
        let taken = part(self.numbers, self.next, shape);
        self.next += shape.iter().product::<usize>().next_multiple_of(PART);
        taken
    }
}

/// Whether the chunks are the last tokens of their requests, of which there is one at least, and none in two chunks.
pub(crate) fn check_chunks(chunks: &[Chunk], cache: &PagedCache) -> Result<()> {
    if chunks.is_empty() {
        return Err(ModelError::request("chunks", "none", "one at least"));
    }
    let mut seen = HashSet::new();
    for (i, Chunk { request, tokens, .. }) in chunks.iter().enumerate() {
        if !seen.insert(request) {
            let again = format!("{request} again in chunks[{i}]");
            return Err(ModelError::request("chunks", again, "one chunk of each request"));
        }
        let (new, len) = (tokens.len(), cache.len(*request)?);
        if new == 0 || new > len {
            let expected = match len {
                0 => "some that `PagedCache::append` has made room for: it has none".into(),
                _ => format!("1 to {len}, which were appended"),
            };
            return Err(ModelError::request("chunks", format!("{new} tokens of {request}"), expected));
        }
    }
    Ok(())
}

/// Positions of each chunk's tokens.
pub(crate) fn positions_of(chunks: &[Chunk], cache: &PagedCache) -> Result<Vec<Range<usize>>> {
    let range = |chunk: &Chunk| {
        let len = cache.len(chunk.request)?;
        Ok(len - chunk.tokens.len()..len)
    };
    chunks.iter().map(range).collect()
}
