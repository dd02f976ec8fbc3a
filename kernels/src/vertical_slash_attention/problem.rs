//! Arguments, sizes and errors of vertical-slash attention, and the cubes of a launch.

use cubecl::prelude::*;
use thiserror::Error;

use crate::common::device::DeviceError;
use crate::common::select::Path;

/// Query rows of a cube.
pub(super) const ROWS: usize = 64;

/// How the sequences of a batch lie in a tensor of `tokens` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Sequence `b` begins at row `b * stride`, and `bounds[b]` is its length. `bounds` is `[B]`.
    Padded {
        /// The same for queries.
        query_stride: usize,
        /// The same for keys.
        key_stride: usize,
    },
    /// Sequence `b` is the rows `bounds[b] .. bounds[b + 1]`. `bounds` is `[B + 1]`.
    Packed,
}

/// Arguments of [`launch`](super::launch). B sequences, H query heads, G heads of keys; E is `elem`.
pub struct AttentionArgs {
    /// E `[query_tokens, H, key_width]`.
    pub q: BufferArg,
    /// E `[key_tokens, G, key_width]`.
    pub k: BufferArg,
    /// E `[key_tokens, G, value_width]`.
    pub v: BufferArg,
    /// i32: where the queries of each sequence are, as `layout` says. Taken as within the tensor.
    pub q_bounds: BufferArg,
    /// i32: where the keys of each sequence are.
    pub kv_bounds: BufferArg,
    /// i32 `[B, H, rows]`: key blocks of each block row; taken as within `0 ..= max_blocks`.
    pub block_count: BufferArg,
    /// i32 `[B, H, rows, max_blocks]`: the first key of each; keys that the sequence does not have are not seen.
    pub block_offset: BufferArg,
    /// i32 `[B, H, rows]`: single keys of each block row; taken as within `0 ..= max_columns`.
    pub column_count: BufferArg,
    /// i32 `[B, H, rows, max_columns]`: positions of single keys.
    pub column_index: BufferArg,
    /// E `[query_tokens, H, value_width]`, written: 0 for a query that sees no key.
    pub out: BufferArg,
    /// f32 `[query_tokens, H]`, written: the natural logarithm of the sum, -inf for a query that sees no key.
    pub lse: BufferArg,
    /// Sizes and element type.
    pub sizes: VerticalSlashSizes,
    /// Which of these keys a query sees, and what becomes of their products.
    pub options: VerticalSlashOptions,
}

/// Which keys of its block row a query sees, and what becomes of their products.
#[derive(Debug, Clone, Copy)]
pub struct VerticalSlashOptions {
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Scaled scores `s` become `softcap * tanh(s / softcap)`; 0 leaves them as they are.
    pub softcap: f32,
    /// Query `i` sees the keys up to position `i + kv_len - q_len`; otherwise all of its row's.
    pub causal: bool,
}

/// What decides how a device computes it.
#[derive(Debug, Clone, Copy)]
pub struct VerticalSlashSizes {
    /// How the sequences lie in q, k and v.
    pub layout: Layout,
    /// B.
    pub batch: usize,
    /// Rows of q.
    pub query_tokens: usize,
    /// Rows of k and v.
    pub key_tokens: usize,
    /// H, a multiple of G.
    pub heads: usize,
    /// G.
    pub kv_heads: usize,
    /// Channels of q and k, at least 1.
    pub key_width: usize,
    /// Channels of v, at least 1.
    pub value_width: usize,
    /// Block rows of a sequence. Queries past the last one see no key.
    pub rows: usize,
    /// Capacity of the block lists.
    pub max_blocks: usize,
    /// Capacity of the column lists.
    pub max_columns: usize,
    /// Queries in a block row, at least 1.
    pub block_size_m: usize,
    /// Keys in a key block, at least 1.
    pub block_size_n: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Why [`launch`](super::launch) did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VerticalSlashError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Keys or values without a channel.
    #[error("a key has {key_width} channels and a value {value_width}: both need at least 1")]
    Width {
        /// Channels of a key.
        key_width: usize,
        /// Channels of a value.
        value_width: usize,
    },
    /// Query heads that cannot be dealt out to the heads of the keys.
    #[error("{heads} query heads are no multiple of {kv_heads} heads of keys")]
    Heads {
        /// H.
        heads: usize,
        /// G.
        kv_heads: usize,
    },
    /// More cubes than the device launches at once.
    #[error(
        "{batch} sequences of {rows} block rows and {heads} heads need more cubes than the device launches at once"
    )]
    Cubes {
        /// B.
        batch: usize,
        /// Block rows of a sequence.
        rows: usize,
        /// H.
        heads: usize,
    },
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("a tensor of {0} elements needs 64-bit offsets, which the device does not have")]
    Offsets(usize),
    /// The device or the kernel does not take the problem.
    #[error("the device has no kernel {0:?} for this problem")]
    NoKernel(Path),
}

/// The width of offsets, and the cubes.
pub(super) struct Grid {
    pub address: AddressType,
    pub cubes: CubeCount,
}

impl VerticalSlashSizes {
    /// Whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.query_tokens == 0 || self.heads == 0
    }

    /// What every kernel needs.
    pub(super) fn check(&self) -> Result<(), VerticalSlashError> {
        let &Self { heads, kv_heads, key_width, value_width, .. } = self;
        if key_width == 0 || value_width == 0 {
            return Err(VerticalSlashError::Width { key_width, value_width });
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(VerticalSlashError::Heads { heads, kv_heads });
        }
        Ok(())
    }

    /// Cubes along x for each block row and part of it, along y for each head, along z for each sequence.
    pub(super) fn grid(&self, client: &Client) -> Result<Grid, VerticalSlashError> {
        let max = client.properties().hardware.max_cube_count;
        let &Self { batch, rows, heads, .. } = self;
        let x = rows.saturating_mul(self.block_size_m.div_ceil(ROWS));
        let tokens = self.query_tokens.max(self.key_tokens);
        if tokens > i32::MAX as usize || x > max.0 as usize || heads > max.1 as usize || batch > max.2 as usize {
            return Err(VerticalSlashError::Cubes { batch, rows, heads });
        }
        let address = self.address_type(client)?;
        Ok(Grid { address, cubes: CubeCount::Static(x as u32, heads as u32, batch as u32) })
    }

    /// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
    fn address_type(&self, client: &Client) -> Result<AddressType, VerticalSlashError> {
        let lists = self.batch * self.heads * self.rows;
        let queries = self.query_tokens * self.heads * self.key_width.max(self.value_width);
        let keys = self.key_tokens * self.kv_heads * self.key_width.max(self.value_width);
        let elements = queries.max(keys).max(lists.saturating_mul(self.max_blocks.max(self.max_columns).max(1)));
        let address = AddressType::from_len(elements);
        if !client.features().supports_address(address) {
            return Err(VerticalSlashError::Offsets(elements));
        }
        Ok(address)
    }
}
