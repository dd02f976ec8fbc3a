//! Attention of a few query tokens over the paged latent cache.
//!
//! A cube works off the items that a plan gives it (see [`mla_plan`](crate::mla_plan)) for one tile of query rows. A row is
//! one head of one query token; all rows of a sequence look at the same keys, so a tile of keys is loaded once into shared
//! memory and used by all rows of the tile, as keys and, its first channels, as values. The softmax is the online one, in
//! f32. An item gives its own normalised output and the logarithm of its sum, and [`merge_splits`] merges those of a
//! sequence.
//!
//! Two kernels here do that: `plain.rs` with ordinary arithmetic, on every device, and `mma.rs` with matrix instructions. On
//! Hopper `sm90` does it, on Blackwell `sm100`. [`DecodeSizes::kernel`] says which one runs.

mod mma;
mod plain;
mod select;
#[cfg(feature = "cuda")]
mod sm100;
#[cfg(feature = "cuda")]
mod sm90;

use cubecl::features::TypeUsage;
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;
use thiserror::Error;

use self::select::Form;
pub use self::select::parallel_cubes;
use crate::common::launch::share;
use crate::common::select::{Available, Path};
use crate::linear::{self, LinearArgs};
use crate::merge_splits::{self, MergeSplitsArgs};
pub use plain::MAX_KEY_BYTES;

/// Where the maximum of a row starts. Finite, for a shader may not count on infinities.
const LOWEST: f32 = -1e30;

/// The implementations of this operation.
pub type DecodeKernel = Path;

/// Arguments of [`launch`]. Buffers start at a multiple of 16 bytes.
pub struct DecodeArgs {
    /// `[batch, query_len, heads, key_width]` of `elem`.
    pub q: BufferArg,
    /// Elements from one row of `q` to the next. Other than `key_width` only for kernels that
    /// [take strides](Path::takes_strides), and then a multiple of 16 bytes.
    pub q_stride: usize,
    /// `[pages, page_size, key_width]` of `elem`; a row is a key, its first `value_width` channels are the value.
    pub kv_cache: BufferArg,
    /// The same for `kv_cache`.
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

/// The implementations that a device has for these sizes, the fastest first.
pub fn available(client: &Client, sizes: &DecodeSizes) -> Vec<Available> {
    select::TABLE.available(client, sizes)
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &DecodeSizes) -> Result<(), DecodeError> {
    check_kernel(client, sizes, sizes.kernel(client))
}

/// The same for [`launch_kernel`].
///
/// # Errors
/// What [`launch_kernel`] would give.
pub fn check_kernel(client: &Client, sizes: &DecodeSizes, path: Path) -> Result<(), DecodeError> {
    if sizes.is_empty() {
        return Ok(());
    }
    sizes.check(client)?;
    select::prepare(client, sizes, path).map(|_| ())
}

/// Computes the items of a plan with the fastest kernel that the device has, and merges those of each sequence.
///
/// # Errors
/// The device lacks the element type, the memory or the addresses. Nothing is launched then.
pub fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let path = args.sizes.kernel(client);
    launch_kernel(client, args, path)
}

/// The same, with a certain implementation.
///
/// # Errors
/// As [`launch`], and where the device lacks what the kernel needs.
pub fn launch_kernel(client: &Client, args: DecodeArgs, path: Path) -> Result<(), DecodeError> {
    if let Some(merge) = launch_items(client, args, path)? {
        merge_splits::launch(client, merge);
    }
    Ok(())
}

/// The same, and behind it the projection of each head's `out`, which is its `x`: see [`linear::launch_merged`].
///
/// # Errors
/// As [`launch_kernel`].
pub fn launch_projected(
    client: &Client,
    args: DecodeArgs,
    path: Path,
    projection: LinearArgs,
) -> Result<(), DecodeError> {
    if let Some(merge) = launch_items(client, args, path)? {
        linear::launch_merged(client, merge, projection);
    }
    Ok(())
}

/// Computes the items of a plan. Returns the merge that is left to do; none, if there is nothing to compute.
fn launch_items(client: &Client, args: DecodeArgs, path: Path) -> Result<Option<MergeSplitsArgs>, DecodeError> {
    if args.sizes.is_empty() {
        return Ok(None);
    }
    let sizes = args.sizes;
    sizes.check(client)?;
    sizes.check_stride("q_stride", args.q_stride, path)?;
    sizes.check_stride("kv_stride", args.kv_stride, path)?;
    let merge = MergeSplitsArgs {
        outs: share(&args.partial_out),
        lses: share(&args.partial_lse),
        split_ptr: share(&args.split_ptr),
        out: share(&args.out),
        lse: share(&args.lse),
        batch: sizes.batch,
        items: sizes.capacity,
        rows: sizes.query_rows(),
        width: sizes.value_width,
        single_items_done: path.is_specialised(),
        elem: sizes.elem,
    };
    let (form, grid) = select::prepare(client, &sizes, path)?;
    match form {
        Form::Plain(tile) => plain::launch(client, args, tile, grid),
        Form::Mma(tile) => mma::launch(client, args, tile, grid),
        #[cfg(feature = "cuda")]
        Form::Sm90(form) => sm90::launch(client, args, form, grid)?,
        #[cfg(feature = "cuda")]
        Form::Sm100(form) => sm100::launch(client, args, form, grid)?,
    }
    Ok(Some(merge))
}

impl DecodeSizes {
    /// One query token of one sequence of one token, for who asks only how the kernels divide the work.
    #[cfg(any(test, feature = "offline"))]
    fn one_sequence(elem: ElemType, heads: usize, (key_width, value_width): (usize, usize)) -> Self {
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
        }
    }

    /// Nothing to compute.
    fn is_empty(&self) -> bool {
        [self.query_len, self.heads, self.batch, self.capacity, self.cubes].contains(&0)
    }

    fn query_rows(&self) -> usize {
        self.query_len * self.heads
    }

    /// The fastest implementation that there is.
    pub fn kernel(&self, client: &Client) -> Path {
        select::TABLE.choose(client, self).map_or(Path::Plain, |(path, _)| path)
    }

    fn check(&self, client: &Client) -> Result<(), DecodeError> {
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
    fn check_stride(&self, name: &'static str, actual: usize, path: Path) -> Result<(), DecodeError> {
        let aligned = (actual * self.elem.size()).is_multiple_of(16);
        if actual == self.key_width || path.takes_strides() && actual > self.key_width && aligned {
            return Ok(());
        }
        let expected = match path.takes_strides() {
            true => format!("{}, or more and a multiple of 16 bytes", self.key_width),
            false => format!("{}", self.key_width),
        };
        Err(DecodeError::Size { name, actual, expected })
    }

    /// Offsets in 32 bits, or in 64 where a buffer has too many elements.
    pub(crate) fn address_type(&self, client: &Client) -> Result<AddressType, DecodeError> {
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
    pub(crate) fn cube_count(&self, client: &Client, tile_rows: usize) -> Result<CubeCount, DecodeError> {
        let row_tiles = self.query_rows().div_ceil(tile_rows);
        let limits = client.properties().hardware.max_cube_count;
        for (name, actual, limit) in [("tiles of query rows", row_tiles, limits.0), ("cubes", self.cubes, limits.1)] {
            if actual > limit as usize {
                return Err(DecodeError::Size { name, actual, expected: format!("at most {limit}") });
            }
        }
        Ok(CubeCount::Static(row_tiles as u32, self.cubes as u32, 1))
    }
}

/// All kernels as DeepSeek's models use them.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    select::TABLE.offline()
}

/// One past the last key of an item that a query row sees.
#[cube]
pub(crate) fn visible_end(
    seq_lens: &[i32],
    sequence: usize,
    row: usize,
    end_key: usize,
    query_len: u32,
    heads: u32,
    #[comptime] causal: bool,
) -> usize {
    if comptime!(causal) {
        let token = (row as u32 / heads) as i32;
        let end = seq_lens[sequence] - query_len as i32 + token + 1;
        min(max(end, 0i32) as usize, end_key)
    } else {
        end_key
    }
}

/// The row of the cache that a token of a sequence is in; the last one if the page table names a page that is not there.
#[cube]
pub(super) fn key_slot(page_table: &[i32], table_row: usize, page_shift: u32, slot_count: u32, token: usize) -> u32 {
    let token = token as u32;
    let page = page_table[table_row + (token >> page_shift) as usize] as u32;
    min((page << page_shift) + (token & ((1u32 << page_shift) - 1)), slot_count - 1)
}
