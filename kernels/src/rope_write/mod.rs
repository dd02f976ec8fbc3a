//! What stands between the projections of multi-head latent attention and the attention: RoPE of the queries, norm of the
//! latents, RoPE of their rotary keys, and the write of both into the paged cache.
//!
//! The first cubes have rows of latents, which take longer, the others heads of queries.

mod select;

use cubecl::prelude::*;

pub(crate) use self::select::Forms;
use self::select::Shape;
use crate::common::launch::{address_type, is_row, or_dummy};
use crate::norm_rope::Head;

/// Arguments of [`launch`]; E is `elem`.
pub struct RopeWriteArgs {
    /// E `[tokens, heads, width]`.
    pub q: BufferArg,
    /// E `[tokens, cache_width]`: a latent, and behind it the rotary key.
    pub latent: BufferArg,
    /// f32 `[cache_width - 2 * pairs]`: the weight of the latent's norm.
    pub weight: BufferArg,
    /// f32 `[tokens, pairs]`; without pairs anything.
    pub cos: BufferArg,
    /// f32 `[tokens, pairs]`; without pairs anything.
    pub sin: BufferArg,
    /// i32 `[tokens]`: the row of each token in the cache, -1 for none. No row occurs twice.
    pub slots: BufferArg,
    /// E `[tokens, heads, width]`, written: the query with RoPE applied.
    pub q_out: BufferArg,
    /// E `[tokens, cache_width]`, written: what goes into the cache.
    pub latent_out: BufferArg,
    /// E `[slot_count, cache_width]`, written in place.
    pub cache: BufferArg,
    /// Tokens.
    pub tokens: usize,
    /// Heads of a query.
    pub heads: usize,
    /// Channels of a head.
    pub width: usize,
    /// Channels of a row of the cache.
    pub cache_width: usize,
    /// Pairs of neighbours among the last channels that RoPE applies to, at most half of either width.
    pub pairs: usize,
    /// Rows of the cache.
    pub slot_count: usize,
    /// Added to the mean square in the norm.
    pub eps: f32,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes queries, latents and cache. A slot past the end of the cache is skipped like -1. Without tokens nothing is launched.
pub fn launch(client: &Client, args: RopeWriteArgs) {
    let RopeWriteArgs { tokens, heads, width, cache_width, pairs, elem, .. } = args;
    if tokens * (heads * width + cache_width) == 0 {
        return;
    }
    let Shape { cube, vector, forms } = select::choose(client.properties(), [width, cache_width], pairs, elem);
    let q_len = tokens * heads * width;
    rope_write_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(
            client,
            forms.latent.cubes(tokens) + forms.q.cubes(tokens * heads),
            CubeDim::new_single(),
        ),
        cube,
        address_type(client, &[&args.q, &args.cache]),
        vector,
        or_dummy(client, args.q, q_len),
        or_dummy(client, args.latent, cache_width),
        or_dummy(client, args.weight, cache_width - 2 * pairs),
        or_dummy(client, args.cos, pairs),
        or_dummy(client, args.sin, pairs),
        args.slots,
        or_dummy(client, args.q_out, q_len),
        or_dummy(client, args.latent_out, cache_width),
        or_dummy(client, args.cache, args.slot_count * cache_width),
        tokens,
        heads,
        width / vector,
        cache_width / vector,
        pairs,
        args.slot_count,
        args.eps,
        forms,
        elem,
    );
}

/// The units of a cube have one row or several. Widths are in vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn rope_write_kernel<E: Float, N: Size>(
    q: &[Vector<E, N>],
    latent: &[Vector<E, N>],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    slots: &[i32],
    q_out: &mut [Vector<E, N>],
    latent_out: &mut [Vector<E, N>],
    cache: &mut [Vector<E, N>],
    tokens: usize,
    heads: usize,
    width: usize,
    cache_width: usize,
    pairs: usize,
    slot_count: usize,
    eps: f32,
    #[comptime] forms: Forms,
    #[define(E)] _elem: ElemType,
) {
    let unit = UNIT_POS as usize;
    let latent_rows = comptime!(forms.latent.heads());
    let latent_cubes = tokens.div_ceil(latent_rows.runtime());
    if CUBE_POS < latent_cubes {
        let form = comptime!(forms.latent);
        let row = CUBE_POS * latent_rows + unit / form.columns;
        let mut column = unit % form.columns;
        let head = Head::new::<E, N>(latent, row, tokens, 1usize.runtime(), cache_width, pairs, eps, column, form);
        if row < tokens {
            let slot = slots[row];
            let is_written = is_row(slot, slot_count);
            while column < cache_width {
                let values = Vector::cast_from(head.values::<E, N>(latent, weight, cos, sin, column));
                latent_out[head.first + column] = values;
                if is_written {
                    cache[usize::cast_from(slot) * cache_width + column] = values;
                }
                column += form.columns;
            }
        }
    } else {
        let form = comptime!(forms.q);
        let row = (CUBE_POS - latent_cubes) * comptime!(form.heads()) + unit / form.columns;
        let mut column = unit % form.columns;
        let head = Head::new::<E, N>(q, row, tokens * heads, heads, width, pairs, eps, column, form);
        if row < tokens * heads {
            while column < width {
                q_out[head.first + column] = Vector::cast_from(head.values::<E, N>(q, weight, cos, sin, column));
                column += form.columns;
            }
        }
    }
}

/// DeepSeek-V2 and V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name, kind: FloatKind, bits| {
        let elem = ElemType::Float(kind);
        let Shape { cube, vector, forms } = select::choose(&device, [192, 576], 32, elem);
        let args = form!(
            rope_write_kernel,
            cube,
            [bits, vector, _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1.0, forms, elem]
        );
        Entry::of(kind, name, args)
    };
    let large = entry("rope_write.64_bits", FloatKind::BF16, AddressType::U64).on(|arch| arch == Arch::Sm90a);
    FLOATS.map(|kind| entry("rope_write", kind, AddressType::U32)).into_iter().chain([large]).collect()
}
