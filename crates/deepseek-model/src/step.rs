//! What the steps of all models begin and end with: new tokens of some requests, and the rows of their last ones.

use std::collections::HashSet;
use std::iter::repeat_n;
use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, kind::Basic, s};
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

/// Whole numbers on their way to a device: all by one copy, for each takes the host as long as a launch.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Vec<i32>);

/// The same on the device.
#[derive(Clone)]
pub(crate) struct Uploaded(Tensor<1, Int>);

impl Numbers {
    /// Takes some in; returns where they are.
    pub(crate) fn put(&mut self, numbers: impl IntoIterator<Item = i32>) -> Range<usize> {
        self.put_with(0, |all| all.extend(numbers))
    }

    /// Takes in what is put behind those so far, some `expected` numbers.
    pub(crate) fn put_with(&mut self, expected: usize, put: impl FnOnce(&mut Vec<i32>)) -> Range<usize> {
        let first = self.0.len();
        self.0.reserve(expected.next_multiple_of(PART));
        put(&mut self.0);
        let place = first..self.0.len();
        end_part(&mut self.0);
        place
    }

    /// Takes in lists, each filled up with -1 to as many numbers; returns where they are, and `[lists.len(), K]`.
    pub(crate) fn put_lists(&mut self, lists: &[Vec<i32>]) -> (Range<usize>, [usize; 2]) {
        let longest = padded(lists.iter().map(Vec::len).max().unwrap_or(0));
        let fill = |all: &mut Vec<i32>| {
            for list in lists {
                all.extend_from_slice(list);
                all.extend(repeat_n(-1, longest - list.len()));
            }
        };
        (self.put_with(lists.len() * longest, fill), [lists.len(), longest])
    }

    pub(crate) fn upload(self, device: &Device) -> Uploaded {
        Uploaded(ints(self.0, device))
    }
}

impl Uploaded {
    /// What is in a place, where it lies.
    pub(crate) fn take<const D: usize>(&self, place: Range<usize>, shape: [usize; D]) -> Tensor<D, Int> {
        match place.len() {
            // There are no windows of nothing.
            0 => Tensor::empty(shape, (&self.0.device(), DType::I32)),
            _ => part(&self.0, place.start, shape),
        }
    }

    /// The same in a row.
    pub(crate) fn row(&self, place: Range<usize>) -> Tensor<1, Int> {
        let len = place.len();
        self.take(place, [len])
    }
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
