//! Scores of an indexer with matrix instructions, for f16 and bf16.
//!
//! A plane keeps the index queries of a token in registers, all heads, and goes over the keys, 16 at a time. A product sums
//! over the channels in any order as long as both factors have the same: so a unit loads 16 bytes in a row of its keys, which
//! serve two steps of 16 channels, and no key goes through shared memory.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::launch::address_type;

/// Units of a plane. The matrix instructions are defined for this number.
const LANES: usize = 32;
/// Planes of a cube.
const PLANES: usize = 8;

/// The matrix instruction: 16 keys, 8 heads, 16 channels.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Channels that four units load at once.
const CHUNK: usize = 4 * VECTOR;
/// Vectors of queries that a unit may keep, each in four registers.
const MAX_VECTORS: usize = 32;
/// Cubes for each multiprocessor, to even out.
const WAVES: usize = 4;
/// Multiprocessors of a device that does not say: a small GPU.
const MULTIPROCESSORS: usize = 16;

/// Arguments of [`launch`].
pub struct IndexScoresArgs {
    /// `[tokens, heads, width]` of `elem`.
    pub q: BufferArg,
    /// `[slots, width]` of `elem`.
    pub keys: BufferArg,
    /// Page ids i32 `[tokens / query_len, max_pages]`.
    pub page_table: BufferArg,
    /// f32 `[tokens, heads]`.
    pub head_weights: BufferArg,
    /// i32 `[tokens]`: keys that a token sees.
    pub visible: BufferArg,
    /// f32 `[tokens, max_pages * page_size]`: written for the keys that a token sees.
    pub scores: BufferArg,
    /// Their sizes.
    pub sizes: IndexScoresSizes,
    /// The factor of the scores.
    pub scale: f32,
}

/// Sizes of [`IndexScoresArgs`].
#[derive(Debug, Clone, Copy)]
pub struct IndexScoresSizes {
    /// Query tokens of all sequences.
    pub tokens: usize,
    /// Query tokens of a sequence.
    pub query_len: usize,
    /// Heads of the indexer.
    pub heads: usize,
    /// Channels of an index key.
    pub width: usize,
    /// Rows of the cache.
    pub slots: usize,
    /// Tokens in a page, a power of two.
    pub page_size: usize,
    /// Columns of the page table.
    pub max_pages: usize,
    /// f16 or bf16.
    pub elem: ElemType,
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    /// Groups of 8 heads.
    head_steps: usize,
    /// Groups of 32 channels.
    chunks: usize,
}

impl Form {
    fn new(heads: usize, width: usize) -> Option<Self> {
        let form = Self { head_steps: heads.div_ceil(N), chunks: width / CHUNK };
        let fits = form.chunks > 0 && form.head_steps * form.chunks <= MAX_VECTORS;
        (width.is_multiple_of(CHUNK) && fits).then_some(form)
    }
}

/// Whether the device has what the kernel needs, for queries and keys of this size.
pub fn supports(client: &Client, heads: usize, width: usize, elem: ElemType) -> bool {
    let (features, float) = (client.features(), ElemType::Float(FloatKind::F32));
    let config = MmaConfig { a_type: elem, b_type: elem, cd_type: float, m: M as u32, n: N as u32, k: K as u32 };
    let hardware = &client.properties().hardware;
    features.matmul.mma.contains(&config)
        && features.plane.contains(Plane::Ops)
        && features.memory_reinterpret
        && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32)
        && Form::new(heads, width).is_some()
}

/// Launches the kernel, on a device that [`supports`] it. Without tokens or pages nothing is launched.
pub fn launch(client: &Client, args: IndexScoresArgs) {
    let sizes = args.sizes;
    let IndexScoresSizes { tokens, heads, width, page_size, max_pages, .. } = sizes;
    let Some(form) = Form::new(heads, width) else { return };
    if tokens == 0 || max_pages == 0 {
        return;
    }
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors;
    let multiprocessors = multiprocessors.map_or(MULTIPROCESSORS, |n| n as usize);
    let shares = (max_pages * page_size).div_ceil(M * PLANES).min((WAVES * multiprocessors).div_ceil(tokens));
    // SAFETY: the buffers have the sizes that the arguments state, and slots are clamped to the cache.
    unsafe {
        index_scores_kernel::launch_unchecked(
            client,
            cubecl::calculate_cube_count_elemwise(client, tokens * shares, CubeDim::new_single()),
            CubeDim::new_2d(LANES as u32, PLANES as u32),
            address_type(client, &[&args.q, &args.keys, &args.scores]),
            VECTOR,
            args.q,
            args.keys,
            args.page_table,
            args.head_weights,
            args.visible,
            args.scores,
            tokens,
            shares,
            sizes.query_len,
            heads,
            max_pages,
            sizes.slots,
            page_size.ilog2(),
            args.scale,
            form,
            sizes.elem,
        );
    }
}

/// Cube `t * shares + s` takes every `shares`-th group of keys of token `t`, from group `s` on; each of its planes has 16 keys
/// of a group.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn index_scores_kernel<E: Float, V: Size>(
    q: &[Vector<E, V>],
    keys: &[Vector<E, V>],
    page_table: &[i32],
    head_weights: &[f32],
    visible: &[i32],
    scores: &mut [f32],
    tokens: usize,
    shares: usize,
    query_len: usize,
    heads: usize,
    max_pages: usize,
    slots: usize,
    page_shift: u32,
    scale: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let vectors = comptime!(4 * form.chunks);
    let row = (UNIT_POS_X / 4) as usize;
    let quad = (UNIT_POS_X % 4) as usize;
    let token = CUBE_POS / shares;
    if token < tokens {
        let end = min(usize::cast_from(max(visible[token], 0i32)), max_pages << page_shift as usize);
        let mut queries = Sequence::<Vector<E, V>>::new();
        let mut weights = Sequence::<f32>::new();
        #[unroll]
        for step in 0..form.head_steps {
            let head = comptime!(step * N) + row;
            let at = (token * heads + min(head, heads - 1)) * vectors + quad;
            #[unroll]
            for chunk in 0..form.chunks {
                queries.push(q[at + comptime!(4 * chunk)]);
            }
            // The two heads of this unit's part of a product. A head that is not there weighs nothing.
            #[unroll]
            for i in 0..2usize {
                let head = comptime!(step * N + i) + 2 * quad;
                let weight = head_weights[token * heads + min(head, heads - 1)];
                weights.push(select(head < heads, weight * scale, 0.0f32));
            }
        }
        let table = token / query_len * max_pages;
        let mut first = (CUBE_POS % shares * PLANES + UNIT_POS_Y as usize) * M;
        while first < end {
            let own = key_row(page_table, table, first + row, end, page_shift, slots) * vectors + quad;
            let other = key_row(page_table, table, first + row + M / 2, end, page_shift, slots) * vectors + quad;
            let mut key_vectors = Sequence::<Vector<E, V>>::new();
            #[unroll]
            for chunk in 0..form.chunks {
                key_vectors.push(keys[own + comptime!(4 * chunk)]);
                key_vectors.push(keys[other + comptime!(4 * chunk)]);
            }
            let mut score = 0.0f32;
            let mut other_score = 0.0f32;
            #[unroll]
            for step in 0..form.head_steps {
                let mut acc = Array::<Vector<f32, NC>>::new(2usize);
                acc[0] = Vector::new(0.0f32);
                acc[1] = Vector::new(0.0f32);
                #[unroll]
                for chunk in 0..form.chunks {
                    #[unroll]
                    for half in 0..2usize {
                        let a = key_vectors[comptime!(2 * chunk)];
                        let b = key_vectors[comptime!(2 * chunk + 1)];
                        let query = queries[comptime!(step * form.chunks + chunk)];
                        let mut keys = Array::<Vector<E, NA>>::new(4usize);
                        keys[0] = pair::<E, V, NA>(a, comptime!(2 * half));
                        keys[1] = pair::<E, V, NA>(b, comptime!(2 * half));
                        keys[2] = pair::<E, V, NA>(a, comptime!(2 * half + 1));
                        keys[3] = pair::<E, V, NA>(b, comptime!(2 * half + 1));
                        let mut query_pairs = Array::<Vector<E, NA>>::new(2usize);
                        query_pairs[0] = pair::<E, V, NA>(query, comptime!(2 * half));
                        query_pairs[1] = pair::<E, V, NA>(query, comptime!(2 * half + 1));
                        def.execute_inplace(&keys, &query_pairs, &mut acc);
                    }
                }
                #[unroll]
                for i in 0..2usize {
                    let weight = weights[comptime!(2 * step + i)];
                    score += weight * max(acc[0].extract(i), 0.0f32);
                    other_score += weight * max(acc[1].extract(i), 0.0f32);
                }
            }
            score = quad_sum(score);
            other_score = quad_sum(other_score);
            let at = token * (max_pages << page_shift as usize) + first + row;
            if quad == 0 && first + row < end {
                scores[at] = score;
            }
            if quad == 1 && first + row + M / 2 < end {
                scores[at + M / 2] = other_score;
            }
            first += shares * comptime!(PLANES * M);
        }
    }
}

/// The row of the cache with a key, or with the last one that is seen.
#[cube]
fn key_row(page_table: &[i32], table: usize, key: usize, end: usize, page_shift: u32, slots: usize) -> usize {
    let key = min(key, end - 1) as u32;
    let page = page_table[table + (key >> page_shift) as usize] as u32;
    min(((page << page_shift) + (key & ((1u32 << page_shift) - 1))) as usize, slots - 1)
}

/// Pair number `index` of the numbers in a vector, as an operand of the instruction.
#[cube]
fn pair<E: Float, V: Size, NA: Size>(vector: Vector<E, V>, #[comptime] index: usize) -> Vector<E, NA> {
    let words = Vector::<u32, Const<4>>::reinterpret(vector);
    Vector::<E, NA>::reinterpret(words.extract(index))
}

/// The sum over four units side by side.
#[cube]
fn quad_sum(value: f32) -> f32 {
    let pair = value + plane_shuffle_xor(value, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

/// As V3.2 uses it.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, form};
    let dim = CubeDim::new_2d(LANES as u32, PLANES as u32);
    let forms = [FloatKind::F16, FloatKind::BF16].into_iter().filter_map(|kind| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let form = Form::new(64, 128)?;
        let name = format!("index_scores.{}", if kind == FloatKind::BF16 { "bf16" } else { "f16" });
        let entry = Entry::new(
            name,
            form!(index_scores_kernel, dim, [bits, VECTOR, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 6, 1.0, form, elem]),
        );
        Some(entry.on(|arch| arch != Arch::Sm75).unchecked())
    });
    forms.collect()
}
