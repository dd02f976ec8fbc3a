//! Matrices in shared memory as a descriptor gives them (PTX ISA 9.7.15.5.1, "Shared Memory Matrix Layout" and "Matrix
//! Descriptor").
//!
//! Memory is seen in chunks of 16 bytes, which no layout tears apart. Offsets are added to the start first; the swizzle
//! then permutes address bits. So a descriptor may start inside a swizzled tile.
use super::env::Env;
use super::product::Number;
use super::shared::address_in;
use crate::error::Fault;
use crate::ir::Elem;

/// How chunks are permuted in rows of this many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// Bytes of a row.
    fn row(self) -> u64 {
        match self {
            Self::None => 16,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

/// A matrix in shared memory. One of its dimensions is that of the sum over k, the other is M of A or N of B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    pub start: u64,
    /// The leading dimension's byte offset.
    pub leading: u64,
    /// The stride dimension's byte offset.
    pub stride: u64,
    /// Where the swizzle's pattern starts, in units of 128 bytes, modulo 1024.
    pub base: u64,
    pub swizzle: Swizzle,
    /// Neighbours in memory differ in M or N, not in k.
    pub transposed: bool,
}

/// 14 bits in units of 16 bytes.
fn bytes(descriptor: u64, first: u32) -> u64 {
    (descriptor >> first & 0x3fff) << 4
}

impl Tile {
    /// A descriptor of `wgmma`.
    pub fn of_wgmma(descriptor: u64, transposed: bool) -> Result<Self, Fault> {
        let reserved = 3 << 14 | 3 << 30 | 7 << 46 | 0x3ff << 52;
        if descriptor & reserved != 0 {
            let problem = format!("reserved bits {:#x} are set", descriptor & reserved);
            return Err(Fault::Descriptor { descriptor, problem });
        }
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let base = descriptor >> 49 & 7;
        if swizzle == Swizzle::None && base != 0 {
            let problem = format!("a base offset of {base} without a swizzle");
            return Err(Fault::Descriptor { descriptor, problem });
        }
        let (start, leading, stride) = (bytes(descriptor, 0), bytes(descriptor, 16), bytes(descriptor, 32));
        Ok(Self { start, leading, stride, base, swizzle, transposed })
    }

    /// Where a chunk lies: of the row or column `across` with the bytes of k from `along` on; of a transposed matrix,
    /// the bytes of M or N from `along` on with k being `across`.
    pub fn chunk(&self, across: u64, along: u64) -> u64 {
        let (row, eight) = (self.swizzle.row(), across / 8);
        let (chunks, inside) = (along / row, across % 8 * row + along % row);
        let offset = match (self.transposed, self.swizzle) {
            // Eight rows of 16 bytes are neighbours: a core matrix.
            (false, Swizzle::None) => eight * self.stride + chunks * self.leading,
            (true, Swizzle::None) => eight * self.leading + chunks * self.stride,
            // 32 bytes of k lie in one row: the leading offset is not used.
            (false, _) => eight * self.stride + chunks * row,
            (true, _) => eight * self.stride + chunks * self.leading,
        };
        self.swizzled((self.start + offset + inside) & 0x3_ffff)
    }

    /// The lowest of bits 4 to 6 change by the lowest of bits 7 to 9, counted from the pattern's start.
    fn swizzled(&self, address: u64) -> u64 {
        let line = (address >> 7).wrapping_sub(self.base);
        address ^ (line & (self.swizzle.row() / 16 - 1)) << 4
    }
}

impl Tile {
    /// The 16-byte parts of a matrix of this size: the M or N that they are of, or the first such, and addresses.
    pub fn chunks_of_rows(&self, elem: Elem, (across, along): (usize, usize)) -> impl Iterator<Item = (usize, u64)> {
        let (rows, length) = if self.transposed { (along, across) } else { (across, along) };
        let bytes = length * elem.bits() / 8;
        let first = move |row, byte| if self.transposed { byte * 8 / elem.bits() } else { row };
        let chunk = move |row, byte: usize| (first(row, byte), self.chunk(row as u64, byte as u64));
        (0..rows).flat_map(move |row| (0..bytes).step_by(16).map(move |byte| chunk(row, byte)))
    }

    /// Calls `f` with M or N, k and the value of each element of a matrix of this size.
    pub fn read<T: Number>(
        &self,
        env: &Env,
        rank: usize,
        elem: Elem,
        (across, along): (usize, usize),
        mut f: impl FnMut(usize, usize, T),
    ) -> Result<(), Fault> {
        let (bytes, transposed) = (elem.bits() / 8, self.transposed);
        let (rows, length) = if transposed { (along, across) } else { (across, along) };
        for row in 0..rows {
            for byte in (0..length * bytes).step_by(16) {
                let mut chunk = [0; 16];
                env.shared.peek(address_in(rank, self.chunk(row as u64, byte as u64)), &mut chunk)?;
                for (i, element) in chunk.chunks_exact(bytes).enumerate() {
                    let bits = element.iter().rev().fold(0, |bits, b| bits << 8 | u32::from(*b));
                    let (column, value) = (byte / bytes + i, T::decode(elem, bits));
                    if transposed { f(column, row, value) } else { f(row, column, value) }
                }
            }
        }
        Ok(())
    }
}
