//! A tensor to write: where its numbers come from, how they are stored, and the writing of it.

use std::io::Write;
use std::ops::Range;

use burn::tensor::FloatDType;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;

use crate::WrongQuantization;
use crate::weights::codes::{BlockWeight, Format, e8m0_of, scale_for};
use crate::weights::numbers::convert;
use crate::weights::random::{self, Initial, seed_of};

/// Numbers that are in memory at once, about.
const AT_ONCE: usize = 1 << 20;

/// A tensor to write, with its scales if it is to be quantised.
pub(super) struct Item<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Values<'a>,
    pub(super) how: How,
}

/// Where numbers come from.
pub(super) enum Values<'a> {
    /// As they are stored.
    Stored {
        bytes: &'a [u8],
        dtype: Dtype,
    },
    /// Dequantised.
    Codes(BlockWeight<'a>),
    Random {
        seed: u64,
        initial: Initial,
    },
    /// A table of whole numbers.
    Table {
        below: usize,
    },
}

/// How numbers are written.
pub(super) enum How {
    Plain(Dtype),
    Codes { blocks: Blocks, scale: String, of: Dtype },
    Dequantized(Blocks, Dtype),
}

#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub(super) format: Format,
    pub(super) block: [usize; 2],
    pub(super) power_of_two: bool,
}

impl Values<'_> {
    /// Those of a model without weights; `name` is the tensor's.
    pub(super) fn random(seed: u64, name: &str, shape: &[usize]) -> Self {
        Self::Random { seed: seed_of(seed, name), initial: Initial::of(name, shape) }
    }
}

impl Item<'_> {
    fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1).max(1)
    }

    fn rows(&self) -> usize {
        self.shape.iter().product::<usize>() / self.columns()
    }

    /// The tensors in the file: names, dtypes, shapes and bytes.
    pub(super) fn stored(&self) -> Vec<(&str, Dtype, Vec<usize>, u64)> {
        let of = |name, dtype: Dtype, shape: Vec<usize>| {
            let bytes = shape.iter().map(|&size| size as u64).product::<u64>() * dtype.bitsize() as u64 / 8;
            (name, dtype, shape, bytes)
        };
        match &self.how {
            How::Plain(dtype) | How::Dequantized(_, dtype) => {
                vec![of(self.name.as_str(), *dtype, self.shape.clone())]
            }
            How::Codes { blocks, scale, of: scale_dtype } => {
                let (rows, columns) = (self.rows(), self.columns());
                let dtype = if blocks.format == Format::E4m3 { Dtype::F8_E4M3 } else { Dtype::I8 };
                let codes = of(self.name.as_str(), dtype, vec![rows, columns / blocks.format.per_byte()]);
                let scales = vec![rows.div_ceil(blocks.block[0]), columns.div_ceil(blocks.block[1])];
                vec![codes, of(scale.as_str(), *scale_dtype, scales)]
            }
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.stored().iter().map(|(.., bytes)| bytes).sum()
    }

    /// Rows that are written at a time: whole blocks.
    fn rows_at_once(&self) -> usize {
        let high = match &self.how {
            How::Plain(_) => 1,
            How::Codes { blocks, .. } | How::Dequantized(blocks, _) => blocks.block[0],
        };
        (AT_ONCE / self.columns() / high).max(1) * high
    }

    /// Bytes of memory that writing takes, about: the numbers, and what they become.
    pub(super) fn bytes_in_memory(&self) -> u128 {
        let at_once = match self.values {
            Values::Table { .. } => self.rows(),
            _ => self.rows_at_once().min(self.rows()),
        };
        (at_once as u128).saturating_mul(self.columns() as u128).saturating_mul(3 * size_of::<f32>() as u128)
    }

    /// Writes the tensor, some rows at a time, then its scales.
    pub(super) fn write(&self, out: &mut dyn Write) -> std::result::Result<(), WriteFault> {
        if let (Values::Stored { bytes, dtype }, How::Plain(to)) = (&self.values, &self.how)
            && dtype == to
        {
            return Ok(out.write_all(bytes)?);
        }
        if let Values::Table { below } = self.values {
            let table = random::table([self.rows(), self.columns()], below);
            return table.into_iter().try_for_each(|value| Ok(out.write_all(&i64::from(value).to_le_bytes())?));
        }
        let (rows, columns, step) = (self.rows(), self.columns(), self.rows_at_once());
        let mut numbers = Numbers::new(&self.values, columns);
        let mut all_scales = Vec::new();
        for first in (0..rows).step_by(step) {
            let at = first..(first + step).min(rows);
            let values = numbers.rows(at.clone());
            match &self.how {
                How::Plain(dtype) => out.write_all(&to_bytes(&values, *dtype))?,
                How::Codes { blocks, .. } => {
                    let (codes, scales) =
                        blocks.quantize(&values, columns).map_err(|place| self.fault(first, place))?;
                    out.write_all(&codes)?;
                    all_scales.extend(scales);
                }
                How::Dequantized(blocks, dtype) => {
                    let (codes, scales) =
                        blocks.quantize(&values, columns).map_err(|place| self.fault(first, place))?;
                    let Blocks { format, block, .. } = *blocks;
                    let weight = BlockWeight { format, bytes: codes.as_slice().into(), scales, block, columns };
                    out.write_all(&to_bytes(&weight.decode_on_host(0..at.len()), *dtype))?;
                }
            }
        }
        if let How::Codes { of, .. } = self.how {
            match of {
                Dtype::F8_E8M0 => out.write_all(&all_scales.into_iter().map(e8m0_of).collect::<Vec<_>>())?,
                _ => out.write_all(&to_bytes(&all_scales, of))?,
            }
        }
        Ok(())
    }

    fn fault(&self, first_row: usize, place: usize) -> WriteFault {
        let (row, column) = (first_row + place / self.columns(), place % self.columns());
        let actual = format!("holds a number at [{row}, {column}] that is not finite");
        let expected = "finite numbers, which can be quantised".into();
        WriteFault::Weight(WrongQuantization { name: self.name.clone(), actual, expected })
    }
}

/// Why a tensor could not be written.
pub(super) enum WriteFault {
    Io(std::io::Error),
    Weight(WrongQuantization),
}

impl From<std::io::Error> for WriteFault {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Rows of a tensor as f32, one after the other.
struct Numbers<'a> {
    values: &'a Values<'a>,
    columns: usize,
    rng: Option<ChaCha8Rng>,
}

impl<'a> Numbers<'a> {
    fn new(values: &'a Values<'a>, columns: usize) -> Self {
        let rng = match values {
            Values::Random { seed, .. } => Some(ChaCha8Rng::seed_from_u64(*seed)),
            _ => None,
        };
        Self { values, columns, rng }
    }

    fn rows(&mut self, rows: Range<usize>) -> Vec<f32> {
        let count = rows.len() * self.columns;
        match (self.values, &mut self.rng) {
            (Values::Stored { bytes, dtype }, _) => {
                let width = self.columns * dtype.bitsize() / 8;
                let mut values = vec![0.0; count];
                let bytes = &bytes[rows.start * width..rows.end * width];
                convert(bytes, *dtype, bytemuck::cast_slice_mut(&mut values), FloatDType::F32);
                values
            }
            (Values::Codes(weight), _) => weight.decode_on_host(rows),
            (Values::Random { initial: Initial::Uniform { bound }, .. }, Some(rng)) => {
                (0..count).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound).collect()
            }
            (Values::Random { initial: Initial::Constant(value), .. }, _) => vec![*value; count],
            (Values::Random { .. } | Values::Table { .. }, _) => vec![0.0; count],
        }
    }
}

impl Blocks {
    /// Codes and scales of some rows that begin with a block; the place of a number that is not finite otherwise.
    fn quantize(self, values: &[f32], columns: usize) -> std::result::Result<(Vec<u8>, Vec<f32>), usize> {
        let Self { format, block: [high, wide], power_of_two } = self;
        let across = columns.div_ceil(wide);
        let mut largest = vec![0f32; values.len().div_ceil(columns * high) * across];
        for (place, value) in values.iter().enumerate() {
            if !value.is_finite() {
                return Err(place);
            }
            let block = &mut largest[place / columns / high * across + place % columns / wide];
            *block = block.max(value.abs());
        }
        let scales: Vec<f32> = largest.into_iter().map(|largest| scale_for(largest, format, power_of_two)).collect();
        let code = |(place, value): (usize, &f32)| {
            format.nearest(value / scales[place / columns / high * across + place % columns / wide])
        };
        let codes: Vec<u8> = values.iter().enumerate().map(code).collect();
        match format {
            Format::E4m3 => Ok((codes, scales)),
            Format::E2m1 => Ok((codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect(), scales)),
        }
    }
}

fn to_bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}
