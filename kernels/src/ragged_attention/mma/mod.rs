//! Attention of prompts with the matrix instructions of a warp, for f16 and bf16 on NVIDIA GPUs from sm_80 on: a cube has a tile of
//! queries, asynchronous copies bring keys and values. The README beside this file has the schedule.

mod attend;
mod epilogue;
mod form;
mod load;
mod products;
mod tile;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use self::attend::{Attended, Attention};
use self::epilogue::Output;
pub(super) use self::form::form;
use self::form::{K, LANES, M, N, PANEL_BYTES, ROWS, UNITS, VECTOR};
use self::load::{Sizes, SizesLaunch, Source, key_and_value_bytes, vectors};
use self::products::Operands;
use self::tile::Tile;
use super::form::Form;
use super::problem::{
    HeadRows, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionOptions, RaggedAttentionSizes,
};
use super::softmax::{Scores, factors};
use super::tiles::{cube_count, slots};
use crate::common::launch::{dummy, or_dummy};
use crate::ptx::{shared_address, warp};

/// Launches the kernel for at least one token and head.
pub(super) fn launch(client: &Client, args: RaggedAttentionArgs, form: Form) -> Result<(), RaggedAttentionError> {
    let RaggedAttentionArgs { q, k, k_pe, v, cu_seqlens, cu_seqlens_k, out, lse, sizes, options } = args;
    let RaggedAttentionSizes { keys, elem, .. } = sizes;
    let form = form.with(&options);
    let (before_cap, scale) = factors(&options);
    // Of no use without shared channels, but a kernel has all its arguments.
    let k_pe = k_pe.unwrap_or_else(|| HeadRows::contiguous(dummy(client), 1, VECTOR));
    // SAFETY: the buffers have the sizes that the arguments state, rows past the end of a sequence are not read, and tiles without a
    // query are none.
    unsafe {
        ragged_mma_kernel::launch_unchecked(
            client,
            cube_count(client, &sizes, ROWS)?,
            CubeDim::new_1d(UNITS as u32),
            address_type(&sizes, [&q, &k, &k_pe, &v]),
            VECTOR,
            sizes.of_kernel(&options, [&q, &k, &k_pe, &v]),
            q.buffer,
            or_dummy(client, k.buffer, keys),
            or_dummy(client, k_pe.buffer, keys),
            or_dummy(client, v.buffer, keys),
            cu_seqlens,
            cu_seqlens_k,
            out,
            lse,
            before_cap,
            scale,
            f32::NEG_INFINITY.to_bits(),
            options.causal,
            form,
            elem,
        );
    }
    Ok(())
}

/// Offsets into all tensors fit, whatever their strides.
fn address_type(sizes: &RaggedAttentionSizes, inputs: [&HeadRows; 4]) -> AddressType {
    let &RaggedAttentionSizes { tokens, keys, heads, .. } = sizes;
    let reach = |rows: &HeadRows| tokens.max(keys) * rows.token_stride + heads * rows.head_stride;
    AddressType::from_len(inputs.into_iter().map(reach).fold(sizes.elements(), usize::max))
}

impl RaggedAttentionSizes {
    fn of_kernel(&self, options: &RaggedAttentionOptions, [q, k, k_pe, v]: [&HeadRows; 4]) -> SizesLaunch {
        let &Self { tokens, keys, sequences, heads, kv_heads, .. } = self;
        let slots = slots(tokens, sequences, ROWS);
        let [tokens, keys, sequences, slots, group_size] =
            [tokens, keys, sequences, slots, heads / kv_heads].map(|size| size as u32);
        let strides = |rows: &HeadRows| (rows.token_stride / VECTOR, rows.head_stride / VECTOR);
        let ((q_token, q_head), (k_token, k_head), (v_token, v_head)) = (strides(q), strides(k), strides(v));
        let (k_pe_token, _) = strides(k_pe);
        SizesLaunch::new(
            tokens,
            keys,
            sequences,
            slots,
            options.most_seen(),
            group_size,
            q_token,
            q_head,
            k_token,
            k_head,
            k_pe_token,
            v_token,
            v_head,
        )
    }
}

/// Cube `(s, h)` computes head `h` of a slot's tile. The last slots come first: their tiles see most keys.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn ragged_mma_kernel<E: Float, V: Size>(
    sizes: Sizes,
    q: &[Vector<E, V>],
    k: &[Vector<E, V>],
    k_pe: &[Vector<E, V>],
    values: &[Vector<E, V>],
    cu_seqlens: &[i32],
    cu_seqlens_k: &[i32],
    out: &mut [Vector<E, V>],
    lse: &mut [f32],
    before_cap: f32,
    scale: f32,
    empty_lse: u32,
    #[comptime] causal: bool,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut memory = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(vectors(form)), 128usize);
    // Of a cube past the last slot, the number wraps around: it has no tile either.
    let slot = sizes.slots - 1 - (CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X);
    let tile = Tile::find(cu_seqlens, cu_seqlens_k, slot, &sizes, causal);
    if tile.rows > 0 {
        let (head, warp) = (CUBE_POS_Y, warp::uniform(UNIT_POS / LANES as u32));
        let (memory_at, row) = (shared_address(&memory), warp * comptime!(M as u32));
        let queries_at = memory_at + row * comptime!(form.key_panels as u32 * PANEL_BYTES);
        let (keys_at, values_at) = comptime!(key_and_value_bytes(form));
        let operands = Operands::new(queries_at, memory_at + keys_at, memory_at + values_at, form);

        let def = MmaDefinition::<E, E, f32>::new(M, N, K);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let source = Source::new(q, k, k_pe, values, &tile, head, &sizes);
        let mut attended = Attended::<NC>::nothing(form);
        let scores = Scores { most_seen: sizes.most_seen, before_cap, scale };
        let attention = Attention { tile, operands, row, scores, form };
        attention.attend::<E, V, NC>(&def, &source, &mut memory, &mut attended);
        let output = Output { staging_at: queries_at, row, head, heads: CUBE_COUNT_Y, scale, empty_lse };
        output.write::<E, V, NC>(&mut attended.out, &attended.state, &tile, out, lse, form);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, form};
    let entry = |name: &str, kind: FloatKind, [key_panels, value_panels, shared_panels]: [usize; 3], causal| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let (negative, capped, windowed) = (name == "negative", name.ends_with("softcap"), name.starts_with("window"));
        let form = Form { key_panels, value_panels, shared_panels, bf16, negative, capped, windowed };
        let bits = if name == "64_bits" { AddressType::U64 } else { AddressType::U32 };
        let sizes = || SizesLaunch::new(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1);
        let cube = CubeDim::new_1d(UNITS as u32);
        #[rustfmt::skip]
        let kernel = form!(ragged_mma_kernel, cube, [
            bits, VECTOR, sizes(), _, _, _, _, _, _, _, _, 1.0, 1.0, 1, causal, form, elem
        ]);
        let entry = Entry::of(kind, &format!("ragged_attention.mma.{name}"), kernel).unchecked();
        // Hopper has a kernel of its own.
        entry.on(|arch| arch != Arch::Sm75 && arch != Arch::Sm90a)
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("192.128", bf16, [3, 2, 0], true),
        entry("192.128.shared", bf16, [3, 2, 1], true),
        entry("192.128.full", bf16, [3, 2, 0], false),
        entry("128.128", bf16, [2, 2, 0], true),
        entry("64.64", f16, [1, 1, 0], true),
        entry("negative", f16, [3, 2, 0], true),
        entry("window", bf16, [2, 2, 0], true),
        entry("window.softcap", bf16, [3, 2, 0], true),
        entry("64_bits", bf16, [3, 2, 1], true),
    ]
}
