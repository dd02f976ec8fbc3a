//! What stands between the projections of an attention with one key for all heads and the attention: norm, if there is one, and RoPE
//! of the queries, norm of the latents, RoPE of their rotary keys, and the write of both into the cache; RoPE of an indexer's queries.
//!
//! The first cubes have rows of latents, which take longer, the next ones heads of queries, and the last ones heads of the indexer. A decode
//! step's compressors, which depend on nothing of it, may have cubes before them ([`compress_kv`]).

mod select;

use std::mem;

use cubecl::prelude::*;

pub(crate) use self::select::Forms;
use self::select::{Rows, Shape};
use crate::common::launch::{RowGrid, address_type, dummy, is_row, or_dummy};
use crate::compress_kv::{self, Beside, CompressKvArgs, CompressKvError, Compressor, compress_own};
use crate::norm_rope::{Form, Head, Norm};

/// Arguments of [`launch`]; E is `elem`.
pub struct RopeWriteArgs {
    /// E `[tokens, heads, width]`.
    pub q: BufferArg,
    /// E `[tokens, cache_width]`: a latent, and behind it the rotary key.
    pub latent: BufferArg,
    /// f32 `[cache_width - 2 * pairs]`, or `[cache_width]` if `norm_whole_row`: the weight of the latent's norm.
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
    /// Whether the norm is that of the whole row, with the rotary key.
    pub norm_whole_row: bool,
    /// Added to the mean square in the norm of whole heads, if they have one: it has no weight.
    pub q_eps: Option<f32>,
    /// Queries of an indexer.
    pub index: Option<IndexHeads>,
    /// Compressors that take in the same tokens, and read nothing that is written here.
    pub compressors: Vec<CompressKvArgs>,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Heads that get RoPE alone.
pub struct IndexHeads {
    /// E `[tokens, heads, width]`.
    pub q: BufferArg,
    /// E `[tokens, heads, width]`, written.
    pub q_out: BufferArg,
    /// Heads of a token.
    pub heads: usize,
    /// Channels of a head, at least `2 * pairs`.
    pub width: usize,
}

/// Writes queries, latents and cache, and what compressors write: in the same launch, where they fit into it, or in others
/// ([`compress_kv::launch_each`]). A slot past the end of the cache is skipped like -1. Without tokens nothing is launched.
///
/// # Errors
/// What the device lacks for a compressor; nothing was launched.
pub fn launch(client: &Client, mut args: RopeWriteArgs) -> Result<(), CompressKvError> {
    let RopeWriteArgs { tokens, heads, width, cache_width, pairs, elem, .. } = args;
    let [index_heads, index_width] = args.index.as_ref().map_or([0; 2], |index| [index.heads, index.width]);
    let compressors = mem::take(&mut args.compressors);
    if tokens * (heads * width + index_heads * index_width + cache_width) == 0 {
        return compress_kv::launch_each(client, &compressors);
    }
    let beside = compress_kv::beside(client, &compressors, elem, [BUFFERS, RowGrid::UNITS])?;
    if beside.is_none() {
        compress_kv::launch_each(client, &compressors)?;
    }
    let (norm_whole_row, q_norm) = (args.norm_whole_row, if args.q_eps.is_some() { Norm::Plain } else { Norm::None });
    let index = args.index.is_some().then_some(index_width);
    let rows = Rows { widths: [width, cache_width], index, pairs, q_norm, norm_whole_row };
    let Shape { cube, vector, forms } =
        select::choose(client.properties(), &rows, elem, beside.as_ref().map_or(RowGrid::UNITS, Beside::units));
    let [q_len, index_len] = [heads * width, index_heads * index_width].map(|len| tokens * len);
    let weight_len = if norm_whole_row { cache_width } else { cache_width - 2 * pairs };
    let index_cubes = forms.index.map_or(0, |form| form.cubes(tokens * index_heads));
    let own_cubes = forms.latent.cubes(tokens) + forms.q.cubes(tokens * heads) + index_cubes;
    let cubes = own_cubes + beside.as_ref().map_or(0, Beside::cubes);
    let [index_q, index_q_out] = match args.index {
        Some(index) => [index.q, index.q_out].map(|q| or_dummy(client, q, index_len)),
        None => [(); 2].map(|()| dummy(client)),
    };
    let mut large = vec![&args.q, &index_q, &args.cache];
    large.extend(beside.iter().flat_map(Beside::buffers));
    let address = address_type(client, &large);
    let own = RowsToWriteLaunch::new(
        or_dummy(client, args.q, q_len),
        index_q,
        or_dummy(client, args.latent, cache_width),
        or_dummy(client, args.weight, weight_len),
        or_dummy(client, args.cos, pairs),
        or_dummy(client, args.sin, pairs),
        args.slots,
        or_dummy(client, args.q_out, q_len),
        index_q_out,
        or_dummy(client, args.latent_out, cache_width),
        or_dummy(client, args.cache, args.slot_count * cache_width),
        tokens,
        heads,
        width / vector,
        index_heads,
        index_width / vector,
        cache_width / vector,
        pairs,
        args.slot_count,
        args.eps,
        args.q_eps.unwrap_or(0.0),
        forms,
    );
    rope_write_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        cube,
        address,
        vector,
        beside.as_ref().map_or(1, Beside::vector_size),
        own,
        beside.as_ref().map_or_else(SequenceArg::new, |beside| beside.bind(client)),
        elem,
    );
    Ok(())
}

/// Buffers of [`RowsToWrite`].
const BUFFERS: usize = 11;

/// What a launch reads and writes beside compressors: see [`RopeWriteArgs`]. Widths are in vectors.
#[derive(CubeType, CubeLaunch)]
struct RowsToWrite<E: Float, N: Size> {
    q: &'static [Vector<E, N>],
    index_q: &'static [Vector<E, N>],
    latent: &'static [Vector<E, N>],
    weight: &'static [f32],
    cos: &'static [f32],
    sin: &'static [f32],
    slots: &'static [i32],
    q_out: &'static mut [Vector<E, N>],
    index_q_out: &'static mut [Vector<E, N>],
    latent_out: &'static mut [Vector<E, N>],
    cache: &'static mut [Vector<E, N>],
    tokens: usize,
    heads: usize,
    width: usize,
    index_heads: usize,
    index_width: usize,
    cache_width: usize,
    pairs: usize,
    slot_count: usize,
    eps: f32,
    q_eps: f32,
    #[cube(comptime)]
    forms: Forms,
}

/// The first cubes are those of compressors, which take longest. The units of another one have one row or several.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn rope_write_kernel<E: Float, N: Size, M: Size>(
    rows: &mut RowsToWrite<E, N>,
    compressors: &mut Sequence<Compressor<E, E, M>>,
    #[define(E)] _elem: ElemType,
) {
    let count = compressors.len();
    if comptime!(count == 0) {
        rows.write(CUBE_POS);
    } else {
        let before = compress_own(compressors, CUBE_POS);
        if CUBE_POS >= before {
            rows.write(CUBE_POS - before);
        }
    }
}

#[cube]
impl<E: Float, N: Size> RowsToWrite<E, N> {
    /// Writes what cube number `cube` has. Called by all units of it.
    fn write(&mut self, cube: usize) {
        let forms = comptime!(self.forms);
        let unit = UNIT_POS as usize;
        let latent_rows = comptime!(forms.latent.heads());
        let latent_cubes = self.tokens.div_ceil(latent_rows.runtime());
        if cube < latent_cubes {
            let form = comptime!(forms.latent);
            let row = cube * latent_rows + unit / form.columns;
            let mut column = unit % form.columns;
            let (width, one) = (self.cache_width, 1usize.runtime());
            let head = Head::new::<E, N>(self.latent, row, self.tokens, one, width, self.pairs, self.eps, column, form);
            if row < self.tokens {
                let slot = self.slots[row];
                let is_written = is_row(slot, self.slot_count);
                while column < width {
                    let values =
                        Vector::cast_from(head.values::<E, N>(self.latent, self.weight, self.cos, self.sin, column));
                    self.latent_out[head.first + column] = values;
                    if is_written {
                        self.cache[usize::cast_from(slot) * width + column] = values;
                    }
                    column += form.columns;
                }
            }
        } else {
            let (cube, form) = (cube - latent_cubes, comptime!(forms.q));
            let (tokens, pairs, eps) = (self.tokens, self.pairs, self.q_eps);
            let (heads, width) = (self.heads, self.width);
            let (weight, cos, sin) = (self.weight, self.cos, self.sin);
            if comptime!(forms.index.is_some()) {
                let q_cubes = (tokens * heads).div_ceil(comptime!(form.heads()).runtime());
                if cube < q_cubes {
                    write_heads::<E, N>(
                        self.q, self.q_out, weight, cos, sin, tokens, heads, width, pairs, eps, cube, form,
                    );
                } else {
                    let (cube, form) = (cube - q_cubes, comptime!(forms.index.unwrap_or(forms.q)));
                    let (heads, width) = (self.index_heads, self.index_width);
                    write_heads::<E, N>(
                        self.index_q,
                        self.index_q_out,
                        weight,
                        cos,
                        sin,
                        tokens,
                        heads,
                        width,
                        pairs,
                        0.0f32,
                        cube,
                        form,
                    );
                }
            } else {
                write_heads::<E, N>(self.q, self.q_out, weight, cos, sin, tokens, heads, width, pairs, eps, cube, form);
            }
        }
    }
}

/// Writes the heads of cube number `cube` of those that have heads. Called by all units of it; a norm has no weight.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_heads<E: Float, N: Size>(
    q: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    tokens: usize,
    heads: usize,
    width: usize,
    pairs: usize,
    eps: f32,
    cube: usize,
    #[comptime] form: Form,
) {
    let unit = UNIT_POS as usize;
    let row = cube * comptime!(form.heads()) + unit / form.columns;
    let mut column = unit % form.columns;
    let head = Head::new::<E, N>(q, row, tokens * heads, heads, width, pairs, eps, column, form);
    if row < tokens * heads {
        while column < width {
            out[head.first + column] = Vector::cast_from(head.values::<E, N>(q, weight, cos, sin, column));
            column += form.columns;
        }
    }
}

/// DeepSeek-V2 and V3; V4, with an indexer.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name: &'static str, kind: FloatKind, rows: Rows, bits| {
        let elem = ElemType::Float(kind);
        let shapes = if name.ends_with("compressors") { compress_kv::shapes_of_v4(&device) } else { Vec::new() };
        let units = shapes.first().map_or(RowGrid::UNITS, |shape| shape.units());
        let Shape { cube, vector, forms } = select::choose(&device, &rows, elem, units);
        #[rustfmt::skip]
        let args = form!(rope_write_kernel, cube,
            [bits, vector, 4, offline_rows(forms), compress_kv::offline_beside(&shapes), elem]);
        Entry::of(kind, name, args)
    };
    let v3 = Rows { widths: [192, 576], index: None, pairs: 32, q_norm: Norm::None, norm_whole_row: false };
    let v4 = Rows { widths: [512; 2], index: Some(128), pairs: 32, q_norm: Norm::Plain, norm_whole_row: true };
    let large = entry("rope_write.64_bits", FloatKind::BF16, v3, AddressType::U64).on(|arch| arch == Arch::Sm90a);
    let forms = [("rope_write", v3), ("rope_write.index", v4), ("rope_write.compressors", v4)];
    let each = |kind| forms.map(|(name, rows)| entry(name, kind, rows, AddressType::U32));
    FLOATS.into_iter().flat_map(each).chain([large]).collect()
}

#[cfg(feature = "offline")]
#[rustfmt::skip]
fn offline_rows<E: Float, N: Size>(forms: Forms) -> RowsToWriteLaunch<E, N> {
    use crate::offline::buffer as any;
    RowsToWriteLaunch::new(
        any(), any(), any(), any(), any(), any(), any(), any(), any(), any(), any(),
        1, 1, 1, 1, 1, 1, 1, 1, 1.0, 1.0, forms,
    )
}
