//! Rows of a paged cache in the formats that they are stored in, and how kernels read and write them. A format is a variant of
//! [`RowFormat`], of [`CacheArg`] and of `CacheRows`; which kernels take it, the tables of the operations say.
//!
//! FP8 rows are those of FlashMLA: E4M3 codes, scales, and rotary channels in bf16. Of DeepSeek-V3 (its README, "FP8 KV cache") 512
//! codes, an f32 scale for every 128 of them, and 64 rotary channels: 656 bytes. Of DeepSeek-V4 (its `tests/quant.py`) 448 codes and
//! 64 rotary channels, 576 bytes; behind the rows of a page lie their scales, a byte (E8M0) for every 64 codes and one that stands for
//! nothing. Scales are powers of two, so that in bf16 what a code stands for is exact.
//!
//! Rows of index keys are those of DeepGEMM's `fp8_paged_mqa_logits` and vLLM's `indexer_k_quant_and_cache`: codes alone, 128 of them,
//! and behind the rows of a page an f32 for each row, its scale: 132 bytes a key.

mod encode;
mod layout;
mod read;
mod write;

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

pub use self::layout::{Fp8Layout, Fp8Scales, RowFormat};
pub(crate) use self::layout::{row_at, scale_at};
pub use self::read::{ReadRowsArgs, launch_read_rows};
pub use self::write::{WriteFp8Args, launch_write_fp8};
use crate::common::launch::{or_dummy, share};
use crate::linear::packed::{decode_e4m3, decodes_pairs, e4m3};

/// Rows of a cache, one after the other.
pub enum CacheArg {
    /// E `[rows, D]`.
    Dense(BufferArg),
    /// u32 `[pages, words]`, pages of [`Fp8Layout::page_rows`].
    Fp8(BufferArg, Fp8Layout),
}

impl CacheArg {
    /// The format.
    pub fn format(&self) -> RowFormat {
        match self {
            Self::Dense(_) => RowFormat::Dense,
            Self::Fp8(_, layout) => RowFormat::Fp8(*layout),
        }
    }

    /// What is stored.
    pub(crate) fn buffer(&self) -> &BufferArg {
        match self {
            Self::Dense(buffer) | Self::Fp8(buffer, _) => buffer,
        }
    }

    /// The numbers of dense rows, for kernels whose table takes no others.
    #[cfg(feature = "cuda")]
    pub(crate) fn into_dense(self) -> BufferArg {
        match self {
            Self::Dense(rows) => rows,
            Self::Fp8(..) => unreachable!("the table takes dense rows only"),
        }
    }

    /// A second argument for the same rows.
    pub(crate) fn share(&self) -> Self {
        match self {
            Self::Dense(rows) => Self::Dense(share(rows)),
            Self::Fp8(words, layout) => Self::Fp8(share(words), *layout),
        }
    }

    /// For a kernel that reads rows of `width` channels in vectors of `vector`, of which there are `count`.
    pub(crate) fn rows<E: Float, V: Size>(
        self,
        client: &Client,
        [count, width, vector]: [usize; 3],
    ) -> CacheRowsArgs<E, V> {
        self.bind(decodes_pairs(client), |buffer| or_dummy(client, buffer, count), [width, vector])
    }

    fn bind<E: Float, V: Size>(
        self,
        pairs: bool,
        buffer: impl Fn(BufferArg) -> BufferArg,
        [width, vector]: [usize; 2],
    ) -> CacheRowsArgs<E, V> {
        match self {
            Self::Dense(rows) => CacheRowsArgs::Dense(DenseRowsLaunch::new(buffer(rows), width / vector)),
            Self::Fp8(words, layout) => CacheRowsArgs::Fp8(Fp8RowsLaunch::new(buffer(words), layout, pairs)),
        }
    }
}

/// Rows of a cache in a kernel. Launches make `CacheRowsArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum CacheRows<E: Float, V: Size> {
    Dense(DenseRows<E, V>),
    Fp8(Fp8Rows),
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct DenseRows<E: Float, V: Size> {
    pub(crate) elements: &'static [Vector<E, V>],
    #[cube(comptime)]
    pub(crate) vectors: usize,
}

#[derive(CubeType, CubeLaunch)]
pub(crate) struct Fp8Rows {
    words: &'static [u32],
    #[cube(comptime)]
    layout: Fp8Layout,
    /// Whether two codes are decoded at a time.
    #[cube(comptime)]
    pairs: bool,
}

#[cube]
impl<E: Float, V: Size> CacheRows<E, V> {
    /// Vector number `vector` of a row.
    pub(crate) fn load(&self, slot: usize, vector: usize) -> Vector<E, V> {
        #[comptime]
        match self {
            CacheRows::Dense(dense) => dense.elements[slot * dense.vectors + vector],
            CacheRows::Fp8(rows) => rows.load::<E, V>(slot, vector, true),
        }
    }

    /// The same of index keys, without their scale.
    pub(crate) fn load_unscaled(&self, slot: usize, vector: usize) -> Vector<E, V> {
        #[comptime]
        match self {
            CacheRows::Dense(dense) => dense.elements[slot * dense.vectors + vector],
            CacheRows::Fp8(rows) => rows.load::<E, V>(slot, vector, false),
        }
    }

    /// What was computed of an index key without its scale, with it.
    pub(crate) fn with_scale(&self, value: f32, slot: usize) -> f32 {
        #[comptime]
        match self {
            CacheRows::Dense(_) => value,
            CacheRows::Fp8(rows) => value * rows.scale(slot, 0usize),
        }
    }

    /// Starts to copy it to place `at` of shared memory; a vector of codes is there when this returns.
    pub(crate) fn copy(&self, slot: usize, vector: usize, to: &mut Shared<[Vector<E, V>]>, at: usize) {
        #[comptime]
        match self {
            CacheRows::Dense(dense) => {
                let (from, len) = (slot * dense.vectors + vector, V::value().comptime());
                copy_async(&dense.elements[from..from + 1], &mut to[at..at + 1], comptime!(len as u32));
            }
            CacheRows::Fp8(rows) => to[at] = rows.load::<E, V>(slot, vector, true),
        }
    }
}

#[cube]
impl Fp8Rows {
    fn load<E: Float, V: Size>(&self, slot: usize, vector: usize, #[comptime] scaled: bool) -> Vector<E, V> {
        let lanes = V::value().comptime();
        let layout = comptime!(self.layout);
        let row = row_at(slot, layout);
        let channel = vector * lanes;
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if channel < comptime!(layout.codes) {
            let mut scale = 1.0f32;
            if comptime!(scaled) {
                scale = self.scale(slot, channel / comptime!(layout.scaled()));
            }
            let word = row + channel / 4;
            if comptime!(lanes >= 4) {
                #[unroll]
                for i in 0..comptime!(lanes / 4) {
                    let codes = self.words[word + i];
                    decode_e4m3::<E, V>(&mut values, codes, scale, comptime!(4 * i), self.pairs);
                }
            } else {
                let codes = self.words[word] >> (u32::cast_from(channel % 4) * 8);
                #[unroll]
                for i in 0..lanes {
                    let value = e4m3(codes >> comptime!(8 * i as u32)) * scale;
                    values.insert(i, E::cast_from(value));
                }
            }
        } else {
            let first = channel - comptime!(layout.codes);
            let word = row + comptime!(layout.rope_at()) + first / 2;
            if comptime!(lanes >= 2) {
                #[unroll]
                for i in 0..comptime!(lanes / 2) {
                    let pair = self.words[word + i];
                    values.insert(comptime!(2 * i), E::cast_from(bf16_in(pair << 16)));
                    values.insert(comptime!(2 * i + 1), E::cast_from(bf16_in(pair)));
                }
            } else {
                let pair = self.words[word] << (u32::cast_from(1 - first % 2) * 16);
                values.insert(0usize, E::cast_from(bf16_in(pair)));
            }
        }
        values
    }
}

#[cube]
impl Fp8Rows {
    /// Scale number `scale` of a row.
    fn scale(&self, slot: usize, scale: usize) -> f32 {
        let layout = comptime!(self.layout);
        let word = self.words[scale_at(slot, scale, layout)];
        if comptime!(layout.is_f32()) {
            f32::reinterpret(word)
        } else {
            e8m0((word >> (u32::cast_from(scale % 4) * 8)) & 0xff)
        }
    }
}

/// The number of an E8M0 code, of which 255 is none.
#[cube]
fn e8m0(code: u32) -> f32 {
    f32::reinterpret(select(code == 255, f32::NAN.to_bits().runtime(), code << 23))
}

/// The bf16 in the upper half of a word.
#[cube]
fn bf16_in(word: u32) -> f32 {
    f32::reinterpret(word & 0xffff_0000)
}

/// FP8 rows, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline_rows<E: Float, V: Size>(format: RowFormat, sizes: [usize; 2]) -> CacheRowsArgs<E, V> {
    let rows = match format {
        RowFormat::Dense => CacheArg::Dense(crate::offline::buffer()),
        RowFormat::Fp8(layout) => CacheArg::Fp8(crate::offline::buffer(), layout),
    };
    rows.bind(true, |buffer| buffer, sizes)
}

/// Those of V3 and V4, and index keys.
#[cfg(feature = "offline")]
pub(crate) const OFFLINE_FP8: RowFormat =
    RowFormat::Fp8(Fp8Layout { codes: 512, rope: 64, scales: Fp8Scales::F32InRow });
#[cfg(feature = "offline")]
pub(crate) const OFFLINE_FP8_V4: RowFormat =
    RowFormat::Fp8(Fp8Layout { codes: 448, rope: 64, scales: Fp8Scales::E8m0BehindPage { page_rows: 64 } });
#[cfg(feature = "offline")]
pub(crate) const OFFLINE_FP8_KEYS: RowFormat =
    RowFormat::Fp8(Fp8Layout { codes: 128, rope: 0, scales: Fp8Scales::F32BehindPage { page_rows: 64 } });

/// Rows read and written.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    read::offline().into_iter().chain(write::offline()).collect()
}
