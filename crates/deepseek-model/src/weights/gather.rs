//! Bytes that lie in mapped files and become one tensor. A GPU's server reads them itself, straight into the pinned memory that it copies
//! from, on all cores: fresh memory in between would cost more in page faults than all copies do.

use std::collections::VecDeque;
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::tensor::{DType, Element, FloatDType, TensorData, bf16, f16};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::Dtype;

use super::numbers::{convert, is_same};

/// Bytes that a thread reads at once: whole elements of any dtype.
const AT_ONCE: usize = 1 << 18;

/// Rows of bytes in a file, and what becomes of them. Bytes that stay as they are, are those of a little-endian machine.
#[derive(Debug, Clone)]
pub(super) struct Span {
    file: Arc<Mmap>,
    /// Where the first row begins.
    start: usize,
    rows: usize,
    /// Bytes of a row in the file.
    width: usize,
    /// Bytes between the beginnings of two rows.
    stride: usize,
    /// What numbers are converted from and to.
    convert: Option<(Dtype, FloatDType)>,
}

impl Span {
    /// `rows` times `width` bytes of `file` from `start` on, as they are.
    pub(super) fn new(file: &Arc<Mmap>, start: usize, [rows, width]: [usize; 2], stride: usize) -> Self {
        let [rows, width] = if width == stride { [1, rows * width] } else { [rows, width] };
        Self { file: file.clone(), start, rows, width, stride, convert: None }
    }

    /// The same, numbers of one dtype as those of another.
    pub(super) fn converted(self, from: Dtype, to: FloatDType) -> Self {
        Self { convert: Some((from, to)).filter(|_| !is_same(from, to)), ..self }
    }

    /// Bytes of the result.
    fn len(&self) -> usize {
        let [stored, wanted] = self.units();
        self.rows * (self.width / stored * wanted)
    }

    /// Bytes of an element in the file, and in the result.
    fn units(&self) -> [usize; 2] {
        self.convert.map_or([1, 1], |(from, to)| [from.bitsize() / 8, DType::from(to).size()])
    }

    /// Writes the result from byte `at` on, whole elements.
    fn read(&self, mut at: usize, mut out: &mut [u8]) {
        let [stored, wanted] = self.units();
        let width = self.width / stored * wanted;
        while !out.is_empty() {
            let (row, column) = (at / width, at % width);
            let len = out.len().min(width - column);
            let (now, rest) = mem::take(&mut out).split_at_mut(len);
            let first = self.start + row * self.stride + column / wanted * stored;
            let bytes = &self.file[first..first + len / wanted * stored];
            match self.convert {
                None => now.copy_from_slice(bytes),
                Some((from, to)) => convert(bytes, from, now, to),
            }
            at += len;
            out = rest;
        }
    }
}

/// Parts of files, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Gather {
    /// What is taken of the result of each.
    parts: VecDeque<(Span, Range<usize>)>,
    len: usize,
}

impl Gather {
    /// Adds all of a span.
    pub(super) fn push(&mut self, span: Span) {
        let all = 0..span.len();
        self.push_part(span, all);
    }

    fn push_part(&mut self, span: Span, part: Range<usize>) {
        self.len += part.len();
        self.parts.push_back((span, part));
    }

    /// Bytes of all of them.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Takes the first `len` bytes away, or all where there are fewer.
    pub(super) fn take(&mut self, len: usize) -> Self {
        let mut first = Self::default();
        while first.len < len
            && let Some((span, part)) = self.parts.pop_front()
        {
            let cut = part.end.min(part.start + len - first.len);
            if cut < part.end {
                self.parts.push_front((span.clone(), cut..part.end));
            }
            first.push_part(span, part.start..cut);
        }
        self.len -= first.len;
        first
    }

    /// A tensor of one axis, `len` elements of f32, f16, bf16 or i32, with zeros behind the last byte: read now.
    pub(super) fn data(&self, len: usize, dtype: DType) -> TensorData {
        fn filled<E: Element + Pod>(gather: &Gather, len: usize) -> TensorData {
            let mut values = vec![E::zeroed(); len];
            gather.fill(bytemuck::cast_slice_mut(&mut values));
            TensorData::new(values, [len])
        }
        match dtype {
            DType::F16 => filled::<f16>(self, len),
            DType::BF16 => filled::<bf16>(self, len),
            DType::I32 => filled::<i32>(self, len),
            _ => filled::<f32>(self, len),
        }
    }

    /// The same, read where a device takes it.
    pub(super) fn unread(self, len: usize, dtype: DType) -> TensorData {
        let bytes = len * dtype.size();
        let unread = Unread { gather: self, bytes, read: OnceLock::new() };
        // SAFETY: `Unread` has so many bytes, all of which it initialises wherever it gives them out.
        let data = unsafe { Bytes::from_controller(Box::new(unread), bytes) };
        TensorData::from_bytes(data, [len], dtype)
    }

    /// Reads into `out`, on all cores.
    fn fill(&self, out: &mut [u8]) {
        match out.len() > AT_ONCE {
            true => {
                let pieces = out.par_chunks_mut(AT_ONCE).enumerate();
                pieces.for_each(|(number, piece)| self.fill_from(number * AT_ONCE, piece));
            }
            false => self.fill_from(0, out),
        }
    }

    /// Reads into `out` from byte `at` on.
    fn fill_from(&self, mut at: usize, mut out: &mut [u8]) {
        let mut begin = 0;
        for (span, part) in &self.parts {
            let end = begin + part.len();
            if at < end && !out.is_empty() {
                let len = out.len().min(end - at);
                let (now, rest) = mem::take(&mut out).split_at_mut(len);
                span.read(part.start + at - begin, now);
                at += len;
                out = rest;
            }
            begin = end;
        }
        out.fill(0);
    }
}

/// Bytes of files that nobody has read yet. The server of a CUDA device has them copied into pinned memory; others, who want to see them,
/// have them read into memory of their own.
struct Unread {
    gather: Gather,
    bytes: usize,
    /// On one thread: what waits for it may be all there are.
    read: OnceLock<Vec<u8>>,
}

impl Unread {
    fn read(&self) -> &[u8] {
        self.read.get_or_init(|| {
            let mut bytes = vec![0; self.bytes];
            self.gather.fill_from(0, &mut bytes);
            bytes
        })
    }

    fn allowed(&self, policy: AccessPolicy) -> Result<(), AccessError> {
        let is_read = self.read.get().is_some();
        if is_read || policy.copy_allowed() { Ok(()) } else { Err(AccessError::WouldCopy) }
    }
}

impl AllocationController for Unread {
    fn alloc_align(&self) -> usize {
        align_of::<u8>()
    }

    /// Files are staged in pinned memory whatever their size, and let go of as soon as they are copied.
    fn property(&self) -> AllocationProperty {
        AllocationProperty::File
    }

    fn capacity(&self) -> usize {
        self.bytes
    }

    fn memory(&self, policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        self.allowed(policy)?;
        let bytes = self.read();
        // SAFETY: initialised bytes are bytes that may be initialised.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }

    unsafe fn memory_mut(&mut self, policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        self.allowed(policy)?;
        self.read();
        let bytes = self.read.get_mut().map_or(&mut [][..], |bytes| &mut bytes[..]);
        // SAFETY: the caller writes initialised bytes only.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) })
    }

    unsafe fn copy_into(&self, out: &mut [u8]) {
        match self.read.get() {
            Some(bytes) => out.copy_from_slice(&bytes[..out.len()]),
            None => self.gather.fill(out),
        }
    }
}
