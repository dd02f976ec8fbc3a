//! A decode step: its arguments and sizes, what is wrong with them, and the grid of a launch.

use cubecl::features::TypeUsage;
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;
use thiserror::Error;

use crate::cache_rows::{CacheArg, RowFormat};
use crate::common::keys::{SequencePages, visible_end};
use crate::common::select::Path;

/// Where the maximum of a row starts. Finite, for a shader may not count on infinities.
pub(super) const LOWEST: f32 = -1e30;

/// Arguments of [`launch`](super::launch). Buffers start at a multiple of 16 bytes.
pub struct DecodeArgs {
    /// `[batch, query_len, heads, key_width]` of `elem`.
    pub q: BufferArg,
    /// Elements from one row of `q` to the next. Other than `key_width` only for kernels that
    /// [take strides](Path::takes_strides), and then a multiple of 16 bytes.
    pub q_stride: usize,
    /// `[pages, page_size, key_width]`; a row is a key, its first `value_width` channels are the value.
    pub kv_cache: CacheArg,
    /// The same for `kv_cache`; of FP8 rows `key_width`.
    pub kv_stride: usize,
    /// Page ids i32 `[batch, max_pages]`. Entries past a sequence's end are not read.
    pub page_table: BufferArg,
    /// Keys of each sequence, i32 `[batch]`; says which keys are hidden if `causal`.
    pub seq_lens: BufferArg,
    /// Of the plan, i32 `[capacity, 4]`.
    pub items: BufferArg,
    /// Of the plan, i32 `[cubes + 1]`.
    pub cube_ptr: BufferArg,
    /// Of the plan, i32 `[batch + 1]`.
    pub split_ptr: BufferArg,
    /// Scratch, f32 `[capacity, query_len * heads, value_width]`: of each item, normalised by its own sum.
    pub partial_out: BufferArg,
    /// Scratch, f32 `[capacity, query_len * heads]`: of each item, the natural logarithm of the sum.
    pub partial_lse: BufferArg,
    /// Output, `[batch, query_len, heads, value_width]` of `elem`; 0 where a row sees no key.
    pub out: BufferArg,
    /// Output, f32 `[batch, query_len, heads]`: the natural logarithm of the sum, -inf where a row sees no key.
    pub lse: BufferArg,
    /// Their sizes.
    pub sizes: DecodeSizes,
    /// The factor of the scores.
    pub softmax_scale: f32,
}

/// The sizes of a decode step, which decide whether a device can do it.
#[derive(Debug, Clone, Copy)]
pub struct DecodeSizes {
    /// Number of sequences.
    pub batch: usize,
    /// Query tokens of each.
    pub query_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of a cache row.
    pub key_width: usize,
    /// Leading channels that are the value.
    pub value_width: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Tokens in a page, a power of two.
    pub page_size: usize,
    /// Columns of the page table.
    pub max_pages: usize,
    /// Cubes that the plan deals items out to.
    pub cubes: usize,
    /// Rows of `items`.
    pub capacity: usize,
    /// Query token `i` sees the keys `j <= seq_len - query_len + i`; otherwise all.
    pub causal: bool,
    /// f32, f16 or bf16.
    pub elem: ElemType,
    /// How the rows of the cache are stored.
    pub rows: RowFormat,
}

/// Why the device cannot decode this.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// No such element type here.
    #[error("elements of type {0:?}, expected f32, f16 or bf16, and one that the device supports")]
    Element(ElemType),
    /// One query row and one key do not fit into shared memory.
    #[error("a key of {key_width} channels needs {needed} bytes of shared memory, expected at most {available}")]
    SharedMemory {
        /// Channels of a cache row.
        key_width: usize,
        /// Bytes for a tile of one row and one key.
        needed: usize,
        /// Bytes that may be used.
        available: usize,
    },
    /// A size that the kernel cannot work with.
    #[error("{name} is {actual}, expected {expected}")]
    Size {
        /// Which one.
        name: &'static str,
        /// What it is.
        actual: usize,
        /// What it should be.
        expected: String,
    },
    /// A certain kernel was asked for.
    #[error("the device has no {0:?} kernel for these sizes and elements")]
    NoKernel(Path),
    /// A buffer has more than 2^32 elements, and the device has no 64-bit addresses.
    #[error("a buffer of {0} elements, expected at most 2^32 - 1 on this device")]
    Address(usize),
}

impl DecodeSizes {
    /// One query token of one sequence of one token, for who asks only how the kernels divide the work.
    #[cfg(any(test, feature = "offline"))]
    pub(super) fn one_sequence(elem: ElemType, heads: usize, (key_width, value_width): (usize, usize)) -> Self {
        Self {
            batch: 1,
            query_len: 1,
            heads,
            key_width,
            value_width,
            pages: 1,
            page_size: 1,
            max_pages: 1,
            cubes: 1,
            capacity: 1,
            causal: false,
            elem,
            rows: RowFormat::Dense,
        }
    }

    /// Nothing to compute.
    pub(super) fn is_empty(&self) -> bool {
        [self.query_len, self.heads, self.batch, self.capacity, self.cubes].contains(&0)
    }

    pub(super) fn query_rows(&self) -> usize {
        self.query_len * self.heads
    }

    pub(super) fn check(&self, client: &Client) -> Result<(), DecodeError> {
        let known = matches!(self.elem, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16));
        let usage = client.features().type_usage(self.elem);
        if !known || !usage.contains(TypeUsage::Buffer) || !usage.contains(TypeUsage::Conversion) {
            return Err(DecodeError::Element(self.elem));
        }
        let size = |name, actual, good: bool, expected: &str| match good {
            true => Ok(()),
            false => Err(DecodeError::Size { name, actual, expected: expected.into() }),
        };
        size("page_size", self.page_size, self.page_size.is_power_of_two(), "a power of two")?;
        let width = format!("1 to {}, the key width", self.key_width);
        size("value_width", self.value_width, (1..=self.key_width).contains(&self.value_width), &width)?;
        let slots = self.pages.saturating_mul(self.page_size);
        size("tokens in the cache", slots, slots <= u32::MAX as usize, "at most 2^32 - 1")
    }

    /// A kernel can work with rows at this distance.
    pub(super) fn check_stride(&self, name: &'static str, actual: usize, path: Path) -> Result<(), DecodeError> {
        let aligned = (actual * self.elem.size()).is_multiple_of(16);
        let strided = path.takes_strides() && self.rows == RowFormat::Dense;
        if actual == self.key_width || strided && actual > self.key_width && aligned {
            return Ok(());
        }
        let expected = match strided {
            true => format!("{}, or more and a multiple of 16 bytes", self.key_width),
            false => format!("{}", self.key_width),
        };
        Err(DecodeError::Size { name, actual, expected })
    }

    /// Offsets in 32 bits, or in 64 where a buffer has too many elements.
    pub(super) fn address_type(&self, client: &Client) -> Result<AddressType, DecodeError> {
        let rows = self.query_rows();
        let lens = [
            self.batch * rows * self.key_width,
            self.pages * self.page_size * self.key_width,
            self.capacity * rows * self.value_width,
            self.batch * self.max_pages,
        ];
        let longest = lens.into_iter().max().unwrap_or(0);
        let address = AddressType::from_len(longest);
        match client.properties().supports_address(address) {
            true => Ok(address),
            false => Err(DecodeError::Address(longest)),
        }
    }

    /// A grid with one cube for each tile of `tile_rows` query rows and each cube of the plan.
    pub(super) fn cube_count(&self, client: &Client, tile_rows: usize) -> Result<CubeCount, DecodeError> {
        self.grid(client, self.query_rows().div_ceil(tile_rows))
    }

    /// A grid with one cube for each of so many tiles of query rows and each cube of the plan.
    pub(super) fn grid(&self, client: &Client, row_tiles: usize) -> Result<CubeCount, DecodeError> {
        let limits = client.properties().hardware.max_cube_count;
        for (name, actual, limit) in [("tiles of query rows", row_tiles, limits.0), ("cubes", self.cubes, limits.1)] {
            if actual > limit as usize {
                return Err(DecodeError::Size { name, actual, expected: format!("at most {limit}") });
            }
        }
        Ok(CubeCount::Static(row_tiles as u32, self.cubes as u32, 1))
    }
}

/// The grid of a launch, and the width of its offsets.
pub(super) struct Grid {
    pub cubes: CubeCount,
    pub address: AddressType,
}

impl Path {
    /// Whether rows of `mla_decode`'s queries and keys may lie apart from each other.
    pub fn takes_strides(self) -> bool {
        self.is_specialised()
    }

    /// Whether `mla_decode` writes the result of a sequence that is a single item without a partial one.
    pub fn writes_whole(self) -> bool {
        self.is_specialised()
    }

    /// Made for one generation of GPUs: loads tiles by TMA, and writes sequences that are a single item to the result itself.
    pub(super) fn is_specialised(self) -> bool {
        matches!(self, Path::Sm90 | Path::Sm100)
    }
}

/// The sizes that kernels work with.
#[derive(CubeType, CubeLaunch)]
pub(super) struct KernelSizes {
    pub query_len: u32,
    pub heads: u32,
    pub max_pages: u32,
    pub slot_count: u32,
    /// The logarithm of the page size.
    pub page_shift: u32,
}

impl DecodeSizes {
    pub(super) fn slots(&self) -> usize {
        self.pages * self.page_size
    }

    pub(super) fn of_kernel(&self) -> KernelSizesLaunch {
        let [query_len, heads, max_pages, slots] =
            [self.query_len, self.heads, self.max_pages, self.slots()].map(|size| size as u32);
        KernelSizesLaunch::new(query_len, heads, max_pages, slots, self.page_size.ilog2())
    }
}

#[cube]
impl KernelSizes {
    /// Query rows of a sequence.
    pub fn rows(&self) -> usize {
        (self.query_len * self.heads) as usize
    }

    /// The pages of a sequence.
    pub fn pages(&self, sequence: usize) -> SequencePages {
        let table_row = sequence * self.max_pages as usize;
        SequencePages { table_row, page_shift: self.page_shift, slot_count: self.slot_count }
    }

    /// One past the last key of an item that a query row sees.
    pub fn visible_end(
        &self,
        seq_lens: &[i32],
        sequence: usize,
        row: usize,
        end_key: usize,
        #[comptime] causal: bool,
    ) -> usize {
        visible_end(seq_lens, sequence, row, end_key, self.query_len, self.heads, causal)
    }
}
