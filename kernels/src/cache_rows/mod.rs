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
mod read;
mod write;

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

pub use self::read::{ReadRowsArgs, launch_read_rows};
pub use self::write::{WriteFp8Args, launch_write_fp8};
use crate::common::launch::{or_dummy, share};
use crate::linear::packed::{decode_e4m3, decodes_pairs, e4m3};

/// How rows are stored: what the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowFormat {
    /// A number for each channel.
    #[default]
    Dense,
    /// FP8 E4M3 with scales, and rotary channels in bf16.
    Fp8(Fp8Layout),
}

/// The parts of an FP8 row: codes, scales, rotary channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8Layout {
    /// Channels that are codes, a multiple of 4 and not 0.
    pub codes: usize,
    /// Channels behind them that are bf16, a multiple of 2.
    pub rope: usize,
    /// The scales of the codes.
    pub scales: Fp8Scales,
}

/// What the scales of FP8 rows are, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// An f32 for every 128 codes, between those and the rotary channels of the row.
    F32InRow,
    /// A byte, E8M0, for every 64 codes. They lie behind the rows of each page, those of a row in a multiple of 8 bytes; a page is as
    /// long as a whole number of rows.
    E8m0BehindPage {
        /// Rows of a page, a power of two.
        page_rows: usize,
    },
    /// An f32 for all codes of a row, of which there are at most 512. They lie behind the rows of each page, and the next page behind
    /// them.
    F32BehindPage {
        /// Rows of a page, a power of two.
        page_rows: usize,
    },
}

impl Fp8Layout {
    /// Channels.
    pub fn width(self) -> usize {
        self.codes + self.rope
    }

    /// Codes that share a scale, at most: a power of two.
    pub fn scaled(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 128,
            Fp8Scales::E8m0BehindPage { .. } => 64,
            Fp8Scales::F32BehindPage { .. } => self.codes.next_power_of_two(),
        }
    }

    /// Rows that lie together with their scales.
    pub fn page_rows(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => 1,
            Fp8Scales::E8m0BehindPage { page_rows } | Fp8Scales::F32BehindPage { page_rows } => page_rows,
        }
    }

    /// Words of 4 bytes of a page of [`Self::page_rows`].
    pub fn page_words(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => self.row_words(),
            Fp8Scales::E8m0BehindPage { page_rows } => {
                (page_rows * (self.row_words() + self.scale_words())).next_multiple_of(self.row_words())
            }
            Fp8Scales::F32BehindPage { page_rows } => page_rows * (self.row_words() + self.scale_words()),
        }
    }

    /// Words from a row of a page to the next.
    pub(crate) fn row_words(self) -> usize {
        self.rope_at() + self.rope / 2
    }

    /// Words from the scales of a row to those of the next, where they lie behind the page.
    pub(crate) fn scale_words(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow | Fp8Scales::F32BehindPage { .. } => self.codes.div_ceil(self.scaled()),
            Fp8Scales::E8m0BehindPage { .. } => self.codes.div_ceil(self.scaled()).next_multiple_of(8) / 4,
        }
    }

    /// The first word of the rotary channels.
    fn rope_at(self) -> usize {
        match self.scales {
            Fp8Scales::F32InRow => self.codes / 4 + self.scale_words(),
            Fp8Scales::E8m0BehindPage { .. } | Fp8Scales::F32BehindPage { .. } => self.codes / 4,
        }
    }

    /// Whether rows are index keys: nothing but codes, all with one scale.
    pub(crate) fn is_index_key(self) -> bool {
        self.rope == 0 && matches!(self.scales, Fp8Scales::F32BehindPage { .. })
    }

    fn in_row(self) -> bool {
        self.scales == Fp8Scales::F32InRow
    }

    /// Whether scales are f32, otherwise bytes.
    fn is_f32(self) -> bool {
        !matches!(self.scales, Fp8Scales::E8m0BehindPage { .. })
    }

    /// Scales in a word.
    fn scales_per_word(self) -> usize {
        if self.is_f32() { 1 } else { 4 }
    }

    /// The least exponent of a scale, with its bias.
    fn least_scale(self) -> u32 {
        match self.scales {
            // 2^-13: that of FlashMLA's `tests/quant.py`, which has no quotient below 1e-4.
            Fp8Scales::F32InRow | Fp8Scales::E8m0BehindPage { .. } => 127 - 13,
            // 2^-22, the next power of two above 1e-4 / 448: the publisher's `act_quant` takes no largest number below 1e-4.
            Fp8Scales::F32BehindPage { .. } => 127 - 22,
        }
    }
}

/// The first word of a row.
#[cube]
pub(crate) fn row_at(slot: usize, #[comptime] layout: Fp8Layout) -> usize {
    let page_rows = comptime!(layout.page_rows());
    slot / page_rows * comptime!(layout.page_words()) + slot % page_rows * comptime!(layout.row_words())
}

/// The word of a row's scale number `scale`: all of it, or a byte.
#[cube]
pub(crate) fn scale_at(slot: usize, scale: usize, #[comptime] layout: Fp8Layout) -> usize {
    if comptime!(layout.in_row()) {
        row_at(slot, layout) + comptime!(layout.codes / 4) + scale
    } else {
        let page_rows = comptime!(layout.page_rows());
        let in_page = comptime!(page_rows * layout.row_words()) + slot % page_rows * comptime!(layout.scale_words());
        slot / page_rows * comptime!(layout.page_words()) + in_page + scale / comptime!(layout.scales_per_word())
    }
}

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

impl RowFormat {
    /// Whether rows of so many channels can be stored so.
    #[cfg(feature = "cuda")]
    pub(crate) fn fits(self, width: usize) -> bool {
        match self {
            Self::Dense => true,
            Self::Fp8(layout) => layout.width() == width,
        }
    }

    /// The widths that vectors must divide, so that each is of one part of a row and has one scale.
    pub(crate) fn parts(self, width: usize) -> [usize; 3] {
        match self {
            Self::Dense => [width; 3],
            Self::Fp8(layout) => [layout.codes, layout.rope, layout.scaled()],
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
