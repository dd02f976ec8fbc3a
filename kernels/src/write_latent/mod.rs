//! New tokens into the paged latent cache, in place.
//!
//! A row of the cache is one token's latent vector with its rotary key behind it. The rows of a batch of new tokens are
//! scattered to their slots (`page * page size + offset`); rows that no token goes to keep what they hold.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, address_type, grid_row, is_row};

/// Arguments of [`launch_write_latent`].
pub struct WriteLatentArgs {
    /// `[slot_count, latent_width + rope_width]`, written in place.
    pub cache: BufferArg,
    /// i32 `[tokens]`: the row of each token, -1 to skip the token. No row occurs twice.
    pub slots: BufferArg,
    /// `[tokens, latent_width]`.
    pub latent: BufferArg,
    /// `[tokens, rope_width]`.
    pub rope: BufferArg,
    /// Rows of the cache: pages times page size.
    pub slot_count: usize,
    /// New tokens.
    pub tokens: usize,
    /// Channels of the latent vector, at least 1.
    pub latent_width: usize,
    /// Channels of the rotary key, at least 1.
    pub rope_width: usize,
    /// Of cache, latent and rope.
    pub elem: ElemType,
}

/// Arguments of [`launch_write_rows`].
pub struct WriteRowsArgs {
    /// `[slot_count, width]`, written in place.
    pub cache: BufferArg,
    /// i32 `[tokens]`: the row of each token, -1 to skip the token. No row occurs twice.
    pub slots: BufferArg,
    /// `[tokens, width]`.
    pub rows: BufferArg,
    /// Rows of the cache: pages times page size.
    pub slot_count: usize,
    /// New tokens.
    pub tokens: usize,
    /// Channels of a row.
    pub width: usize,
    /// Of cache and rows.
    pub elem: ElemType,
}

/// Writes the latent vector and the rotary key of each token side by side into the token's row of the cache. A slot
/// past the end of the cache is skipped like -1. With no tokens nothing is launched.
pub fn launch_write_latent(client: &Client, args: WriteLatentArgs) {
    if args.tokens == 0 {
        return;
    }
    let grid = RowGrid::new(client, args.tokens, &[args.latent_width, args.rope_width], args.elem.size());
    write_latent_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.cache, &args.latent, &args.rope]),
        grid.vector_size,
        args.cache,
        args.slots,
        args.latent,
        args.rope,
        args.slot_count,
        args.tokens,
        args.latent_width / grid.vector_size,
        args.rope_width / grid.vector_size,
        args.elem,
    );
}

/// Writes whole rows, of caches whose rows have no parts. A slot past the end of the cache is skipped like -1. With no
/// tokens or a width of 0 nothing is launched.
pub fn launch_write_rows(client: &Client, args: WriteRowsArgs) {
    if args.tokens == 0 || args.width == 0 {
        return;
    }
    let grid = RowGrid::new(client, args.tokens, &[args.width], args.elem.size());
    write_rows_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.cache, &args.rows]),
        grid.vector_size,
        args.cache,
        args.slots,
        args.rows,
        args.slot_count,
        args.tokens,
        args.width / grid.vector_size,
        args.elem,
    );
}

/// One row of units per token; a unit copies every `CUBE_DIM_X`-th vector of it. Widths are in vectors.
///
/// No two units write the same element as long as no slot occurs twice, so that nothing is synchronised.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn write_latent_kernel<E: Float, N: Size>(
    cache: &mut [Vector<E, N>],
    slots: &[i32],
    latent: &[Vector<E, N>],
    rope: &[Vector<E, N>],
    slot_count: usize,
    tokens: usize,
    latent_width: usize,
    rope_width: usize,
    #[define(E)] _elem: ElemType,
) {
    let token = grid_row();
    if token < tokens {
        let slot = slots[token];
        if is_row(slot, slot_count) {
            let width = latent_width + rope_width;
            let target = usize::cast_from(slot) * width;
            let mut column = UNIT_POS_X as usize;
            while column < width {
                if column < latent_width {
                    cache[target + column] = latent[token * latent_width + column];
                } else {
                    cache[target + column] = rope[token * rope_width + column - latent_width];
                }
                column += CUBE_DIM_X as usize;
            }
        }
    }
}

/// As [`write_latent_kernel`], with rows in one part.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn write_rows_kernel<E: Float, N: Size>(
    cache: &mut [Vector<E, N>],
    slots: &[i32],
    rows: &[Vector<E, N>],
    slot_count: usize,
    tokens: usize,
    width: usize,
    #[define(E)] _elem: ElemType,
) {
    let token = grid_row();
    if token < tokens {
        let slot = slots[token];
        if is_row(slot, slot_count) {
            let target = usize::cast_from(slot) * width;
            let mut column = UNIT_POS_X as usize;
            while column < width {
                cache[target + column] = rows[token * width + column];
                column += CUBE_DIM_X as usize;
            }
        }
    }
}

/// Into V3's cache, with 32-bit and 64-bit addresses, and whole rows of 128 channels.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let parts = |name, elem: FloatKind, address| {
        let (dim, vector) = RowGrid::cube(&device, &[512, 64], ElemType::Float(elem).size());
        let elem_type = ElemType::Float(elem);
        Entry::of(elem, name, form!(write_latent_kernel, dim, [address, vector, _, _, _, _, 1, 1, 1, 1, elem_type]))
    };
    let rows = |elem: FloatKind| {
        let (dim, vector) = RowGrid::cube(&device, &[128], ElemType::Float(elem).size());
        let (address, elem_type) = (AddressType::U32, ElemType::Float(elem));
        Entry::of(elem, "write_rows", form!(write_rows_kernel, dim, [address, vector, _, _, _, 1, 1, 1, elem_type]))
    };
    let large = parts("write_latent.64_bits", FloatKind::BF16, AddressType::U64).on(|arch| arch == Arch::Sm90a);
    let forms = FLOATS.into_iter().flat_map(|elem| [parts("write_latent", elem, AddressType::U32), rows(elem)]);
    forms.chain([large]).collect()
}
