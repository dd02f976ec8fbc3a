//! From the bytes of mapped files to one tensor on a device.

use std::ops::Range;

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Float, FloatDType, Tensor, s};

use mla_ops::{check_written, largest_buffer, write_data};

use super::codes::{BlockWeight, window_of_scales};
use super::gather::{Gather, Span};
use super::stored::{Scale, Stored};
use super::{Checkpoint, Entry};
use crate::parallel::Part;

/// Bytes that a GPU is given at once: it holds them in pinned memory until they are copied, up to three times so many. An H200 takes the
/// same time for 8 to 32 MiB.
const AT_ONCE: usize = 16 << 20;

/// Matrices of one shape in the files, and which part of each is read.
pub(super) struct Matrices<'s, 'a> {
    pub(super) checkpoint: &'s Checkpoint,
    pub(super) stored: &'s [Stored<'a>],
    pub(super) each: &'s [usize],
    pub(super) part: &'s Part,
}

impl Matrices<'_, '_> {
    pub(super) fn columns(&self) -> usize {
        self.each.last().copied().unwrap_or(1).max(1)
    }

    /// Bytes that are taken of one.
    pub(super) fn share(&self, stored: &Stored<'_>) -> u64 {
        self.part.share(self.each, stored.len())
    }

    /// Of all.
    pub(super) fn bytes(&self) -> u64 {
        self.stored.iter().map(|stored| self.share(stored)).sum()
    }

    pub(super) fn is_whole(&self) -> bool {
        self.part.shape(self.each) == self.each
    }

    /// Plain numbers, as those of `dtype`.
    pub(super) fn plain(&self, stored: &Stored<'_>, dtype: FloatDType) -> Span {
        let (entry, size) = (stored.entry, stored.entry.dtype.bitsize() / 8);
        let [rows, columns] = self.part.window(self.each);
        let span = match self.is_whole() {
            true => self.checkpoint.span(entry, entry.end - entry.start, [0..1, 0..entry.end - entry.start]),
            false => {
                self.checkpoint.span(entry, self.columns() * size, [rows, columns.start * size..columns.end * size])
            }
        };
        span.converted(entry.dtype, dtype)
    }

    /// Codes, as they are stored.
    pub(super) fn codes(&self, stored: &Stored<'_>, scale: &Scale<'_>) -> Span {
        let ([rows, columns], per_byte) = (self.part.window(self.each), scale.format.per_byte());
        let bytes = columns.start / per_byte..columns.end / per_byte;
        self.checkpoint.span(stored.entry, self.columns() / per_byte, [rows, bytes])
    }

    /// Scales of a byte each, as they are stored.
    pub(super) fn scale_codes(&self, scale: &Scale<'_>) -> Span {
        let ([rows, columns], [high, wide]) = (self.part.window(self.each), scale.block);
        let across = self.columns().div_ceil(wide);
        let of_block = [rows.start / high..rows.end.div_ceil(high), columns.start / wide..columns.end.div_ceil(wide)];
        self.checkpoint.span(scale.entry, across, of_block)
    }

    /// Scales as numbers.
    pub(super) fn scales(&self, scale: &Scale<'_>) -> Vec<f32> {
        let scales = scale.numbers(self.checkpoint);
        window_of_scales(&scales, scale.block, self.columns(), &self.part.window(self.each))
    }

    /// The numbers of one of them where they are codes with scales; `None` for plain ones.
    pub(super) fn blocks(&self, stored: &Stored<'_>) -> Option<BlockWeight<'_>> {
        let weight = stored.blocks(self.checkpoint, self.columns())?;
        Some(match self.is_whole() {
            true => weight,
            false => weight.window(self.part.window(self.each)),
        })
    }
}

impl Checkpoint {
    /// These rows of a tensor, and of each these bytes, where a row has `width`.
    fn span(&self, entry: &Entry, width: usize, [rows, bytes]: [Range<usize>; 2]) -> Span {
        let start = entry.start + rows.start * width + bytes.start;
        Span::new(&self.shards[entry.shard].bytes, start, [rows.len(), bytes.len()], width)
    }
}

/// A tensor as it fills up from its first element on. Flat, since GPUs pad the rows of matrices, and a padded matrix would be copied in
/// every step that uses it.
pub(super) struct Filling<K: Basic> {
    device: Device,
    dtype: DType,
    /// Elements that there will be, and those that there are.
    len: usize,
    written: usize,
    all: Option<Tensor<1, K>>,
    /// Then nothing is written, so that the tensor keeps its error.
    has_no_memory: bool,
    /// What follows, once there is enough of it for the device.
    waiting: Gather,
    at_once: usize,
}

impl<K: Basic> Filling<K> {
    /// For so many elements of `dtype`.
    pub(super) fn new(device: &Device, dtype: impl Into<DType>, len: usize) -> Self {
        let is_gpu = largest_buffer(device).is_some();
        let at_once = if is_gpu { AT_ONCE } else { usize::MAX };
        Self::in_parts(device, dtype.into(), len, at_once)
    }

    /// The same, in parts of so many bytes, whole elements.
    pub(super) fn in_parts(device: &Device, dtype: DType, len: usize, at_once: usize) -> Self {
        let (device, waiting) = (device.clone(), Gather::default());
        Self { device, dtype, len, written: 0, all: None, has_no_memory: false, waiting, at_once }
    }

    /// Takes in what the files have of the next elements.
    pub(super) fn read(&mut self, span: Span) {
        self.waiting.push(span);
        while self.waiting.len() >= self.at_once {
            let part = self.waiting.take(self.at_once);
            self.upload(part);
        }
    }

    /// Takes in the next elements.
    pub(super) fn put(&mut self, part: Tensor<1, K>) {
        self.upload_waiting();
        let ([len], first) = (part.dims(), self.written);
        self.written += len;
        if len == self.len {
            self.all = Some(part);
            return;
        }
        let whole = self.whole();
        // The tensor has no other handle, so that this writes in place.
        self.all = Some(whole.slice_assign(s![first..first + len], part));
    }

    /// What it has become; `None` where nothing was taken in.
    pub(super) fn finish(mut self) -> Option<Tensor<1, K>> {
        self.upload_waiting();
        self.all
    }

    fn upload_waiting(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.len() > 0 {
            self.upload(waiting);
        }
    }

    fn upload(&mut self, part: Gather) {
        let (len, first) = (part.len().div_ceil(self.dtype.size()), self.written);
        self.written += len;
        let data = match self.at_once {
            usize::MAX => part.data(len, self.dtype),
            _ => part.unread(len, self.dtype),
        };
        if len == self.len {
            self.all = Some(Tensor::from_data(data, (&self.device, self.dtype)));
            return;
        }
        let whole = self.whole();
        self.all = Some(match self.has_no_memory {
            true => whole,
            false => write_data(whole, first, data).expect("parts have the tensor's dtype and are no longer than it"),
        });
    }

    /// The tensor with what was written into it.
    fn whole(&mut self) -> Tensor<1, K> {
        self.all.take().unwrap_or_else(|| {
            let empty = Tensor::empty([self.len], (&self.device, self.dtype));
            self.has_no_memory = check_written("tensor", &empty).is_err();
            empty
        })
    }
}

impl Filling<Float> {
    /// Takes in one of the matrices: its blocks, or its plain numbers.
    pub(super) fn take(&mut self, matrices: &Matrices<'_, '_>, stored: &Stored<'_>, dtype: FloatDType) {
        let Some(weight) = matrices.blocks(stored) else { return self.read(matrices.plain(stored, dtype)) };
        for rows in weight.parts() {
            let len = rows.len() * weight.columns;
            self.put(weight.decode(rows, &self.device, dtype).reshape([len]));
        }
    }
}
