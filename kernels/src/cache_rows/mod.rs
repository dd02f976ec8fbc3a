//! Rows of a paged cache in the formats that they are stored in, and how kernels read and write them. A format is a variant of
//! [`RowFormat`], of [`CacheArg`] and of `CacheRows`; which kernels take it, the tables of the operations say.
//!
//! An FP8 row of 512 + 64 channels is that of FlashMLA (its README, "FP8 KV cache"): 512 bytes of E4M3 codes, an f32 scale for every
//! 128 of them, and 64 rotary channels in bf16: 656 bytes. Scales are powers of two, so that in bf16 what a code stands for is exact.

mod encode;
mod read;
mod write;

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

pub use self::read::{ReadRowsArgs, launch_read_rows};
pub use self::write::{WriteFp8Args, launch_write_fp8};
use crate::common::launch::or_dummy;
use crate::linear::packed::{decode_e4m3, decodes_pairs, e4m3};

/// Codes that share a scale.
pub const SCALED: usize = 128;

/// How rows are stored: what the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// A number for each channel.
    Dense,
    /// FP8 E4M3 with a scale for every 128 channels, and rotary channels in bf16.
    Fp8(Fp8Layout),
}

/// The parts of an FP8 row: codes, scales, rotary channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8Layout {
    /// Channels that are codes, a multiple of 4 and not 0.
    pub codes: usize,
    /// Channels behind them that are bf16, a multiple of 2.
    pub rope: usize,
}

impl Fp8Layout {
    /// Channels.
    pub fn width(self) -> usize {
        self.codes + self.rope
    }

    /// Words of 4 bytes.
    pub fn words(self) -> usize {
        self.rope_at() + self.rope / 2
    }

    /// The first word of the scales.
    fn scales_at(self) -> usize {
        self.codes / 4
    }

    /// The first word of the rotary channels.
    fn rope_at(self) -> usize {
        self.scales_at() + self.codes.div_ceil(SCALED)
    }
}

/// Rows of a cache, one after the other.
pub enum CacheArg {
    /// E `[rows, D]`.
    Dense(BufferArg),
    /// u32 `[rows, words]`.
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
    /// The widths that vectors must divide, so that each is of one part of a row and has one scale.
    pub(crate) fn parts(self, width: usize) -> [usize; 3] {
        match self {
            Self::Dense => [width; 3],
            Self::Fp8(layout) => [layout.codes, layout.rope, SCALED],
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
            CacheRows::Fp8(rows) => rows.load::<E, V>(slot, vector),
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
            CacheRows::Fp8(rows) => to[at] = rows.load::<E, V>(slot, vector),
        }
    }
}

#[cube]
impl Fp8Rows {
    fn load<E: Float, V: Size>(&self, slot: usize, vector: usize) -> Vector<E, V> {
        let lanes = V::value().comptime();
        let layout = comptime!(self.layout);
        let row = slot * comptime!(layout.words());
        let channel = vector * lanes;
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if channel < comptime!(layout.codes) {
            let scale = f32::reinterpret(self.words[row + comptime!(layout.scales_at()) + channel / SCALED]);
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

/// The bf16 in the upper half of a word.
#[cube]
fn bf16_in(word: u32) -> f32 {
    f32::reinterpret(word & 0xffff_0000)
}

/// V3's rows, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline_rows<E: Float, V: Size>(format: RowFormat, sizes: [usize; 2]) -> CacheRowsArgs<E, V> {
    let rows = match format {
        RowFormat::Dense => CacheArg::Dense(crate::offline::buffer()),
        RowFormat::Fp8(layout) => CacheArg::Fp8(crate::offline::buffer(), layout),
    };
    rows.bind(true, |buffer| buffer, sizes)
}

/// That of V3.
#[cfg(feature = "offline")]
pub(crate) const OFFLINE_FP8: RowFormat = RowFormat::Fp8(Fp8Layout { codes: 512, rope: 64 });

/// V3's rows, read and written.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    read::offline().into_iter().chain(write::offline()).collect()
}
