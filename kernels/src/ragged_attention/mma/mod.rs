//! Attention of prompts with the matrix instructions of a warp, for f16 and bf16 on NVIDIA GPUs from sm_80 on: a cube has a tile of
//! queries, asynchronous copies bring keys and values. The README beside this file has the schedule.

mod attend;
mod tile;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use self::tile::tile_of;
use super::problem::{
    HeadRows, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionOptions, RaggedAttentionSizes,
};
use super::tiles::{cube_count, slots};
use crate::common::launch::{dummy, or_dummy};
use crate::ptx::shared_address;
use crate::tiles::prefill::mma::attend::{Attended, Attention};
use crate::tiles::prefill::mma::epilogue::Output;
use crate::tiles::prefill::mma::form::{Form, K, M, N, VECTOR};
use crate::tiles::prefill::mma::load::{Source, Strides, StridesLaunch, vectors};
use crate::tiles::prefill::softmax::{Scores, factors};

/// Query rows of a tile: eight warps.
const ROWS: usize = 128;

/// The sizes of a launch.
#[derive(CubeType, CubeLaunch)]
struct Sizes {
    tokens: u32,
    keys: u32,
    sequences: u32,
    slots: u32,
    /// How many keys a row sees at most, the last ones.
    most_seen: i32,
}

/// The form for a problem, where the device and the kernel take it.
pub(super) fn form(client: &Client, sizes: &RaggedAttentionSizes) -> Option<Form> {
    let form = sizes.form(ROWS)?;
    (form.fits(client, sizes.elem, 0) && cube_count(client, sizes, ROWS).is_ok()).then_some(form)
}

/// Launches the kernel for at least one token and head.
pub(super) fn launch(client: &Client, args: RaggedAttentionArgs, form: Form) -> Result<(), RaggedAttentionError> {
    let RaggedAttentionArgs { q, k, k_pe, v, cu_seqlens, cu_seqlens_k, out, lse, sizes, options } = args;
    let RaggedAttentionSizes { keys, elem, .. } = sizes;
    let form = options.form(form);
    let (before_cap, scale) = factors(options.softmax_scale, options.softcap);
    // Of no use without shared channels, but a kernel has all its arguments.
    let k_pe = k_pe.unwrap_or_else(|| HeadRows::contiguous(dummy(client), 1, VECTOR));
    // SAFETY: the buffers have the sizes that the arguments state, rows past the end of a sequence are not read, and tiles without a
    // query are none.
    unsafe {
        ragged_mma_kernel::launch_unchecked(
            client,
            cube_count(client, &sizes, ROWS)?,
            CubeDim::new_1d(form.units() as u32),
            address_type(&sizes, [&q, &k, &k_pe, &v]),
            VECTOR,
            sizes.of_kernel(&options),
            sizes.strides([&q, &k, &k_pe, &v]),
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
    fn of_kernel(&self, options: &RaggedAttentionOptions) -> SizesLaunch {
        let &Self { tokens, keys, sequences, .. } = self;
        let slots = slots(tokens, sequences, ROWS);
        let [tokens, keys, sequences, slots] = [tokens, keys, sequences, slots].map(|size| size as u32);
        SizesLaunch::new(tokens, keys, sequences, slots, options.most_seen())
    }

    fn strides(&self, [q, k, k_pe, v]: [&HeadRows; 4]) -> StridesLaunch {
        let strides = |rows: &HeadRows| (rows.token_stride / VECTOR, rows.head_stride / VECTOR);
        let ((q_token, q_head), (k_token, k_head), (v_token, v_head)) = (strides(q), strides(k), strides(v));
        let ((k_pe_token, _), group_size) = (strides(k_pe), (self.heads / self.kv_heads) as u32);
        StridesLaunch::new(group_size, q_token, q_head, k_token, k_head, k_pe_token, v_token, v_head)
    }
}

/// Cube `(s, h)` computes head `h` of a slot's tile. The last slots come first: their tiles see most keys.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn ragged_mma_kernel<E: Float, V: Size>(
    sizes: Sizes,
    strides: Strides,
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
    let (tile, blocks) = tile_of(cu_seqlens, cu_seqlens_k, slot, &sizes, causal);
    if tile.rows > 0 {
        let def = MmaDefinition::<E, E, f32>::new(M, N, K);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let attention = Attention::new(tile, shared_address(&memory), Scores { before_cap, scale, exact: true }, form);
        let source = Source::new(q, k, k_pe, values, &tile, CUBE_POS_Y, &strides);
        let mut attended = Attended::<NC>::nothing(form);
        blocks.attend::<E, V, NC>(&def, &attention, &source, &mut memory, &mut attended);
        let output = Output { head: CUBE_POS_Y, heads: CUBE_COUNT_Y, empty_lse };
        output.write::<E, V, NC>(&attention, &mut attended, out, lse);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, form};
    let entry = |name: &str, kind: FloatKind, panels: [usize; 3], causal| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let (negative, capped, windowed) = (name == "negative", name.ends_with("softcap"), name.starts_with("window"));
        let form = Form { negative, capped, windowed, ..Form::plain(ROWS, panels, bf16) };
        let bits = if name == "64_bits" { AddressType::U64 } else { AddressType::U32 };
        let (sizes, strides) = (|| SizesLaunch::new(1, 1, 1, 1, 1), || StridesLaunch::new(1, 1, 1, 1, 1, 1, 1, 1));
        let cube = CubeDim::new_1d(form.units() as u32);
        #[rustfmt::skip]
        let kernel = form!(ragged_mma_kernel, cube, [
            bits, VECTOR, sizes(), strides(), _, _, _, _, _, _, _, _, 1.0, 1.0, 1, causal, form, elem
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
