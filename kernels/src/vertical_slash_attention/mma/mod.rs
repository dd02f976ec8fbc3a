//! Attention to the keys of a vertical-slash index with the matrix instructions of a warp, for f16 and bf16 on NVIDIA GPUs from sm_80
//! on. The README of the operation has the schedule.

mod keys;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use self::keys::{Keys, PLACES, Positions};
use super::problem::{AttentionArgs, Grid, Layout, ROWS, VerticalSlashSizes};
use super::rows::{KeyList, Queries, Sizes};
use super::seen::Sight;
use crate::ptx::shared_address;
use crate::tiles::prefill::mma::attend::{Attended, Attention};
use crate::tiles::prefill::mma::epilogue::Output;
use crate::tiles::prefill::mma::form::{Form, K, M, N, VECTOR};
use crate::tiles::prefill::mma::load::{Source, Strides, StridesLaunch, Tile, vectors};
use crate::tiles::prefill::softmax::{Scores, factors};

/// The form for a problem, where the device and the kernel take it.
pub(super) fn form(client: &Client, sizes: &VerticalSlashSizes) -> Option<Form> {
    let form = Form::of(ROWS, sizes.elem, [sizes.key_width, sizes.value_width, 0])?;
    let legal = sizes.check().is_ok() && sizes.grid(client).is_ok();
    (legal && form.fits(client, sizes.elem, PLACES * size_of::<u32>())).then_some(form)
}

/// Launches the kernel for at least one block row and key.
pub(super) fn launch(client: &Client, args: AttentionArgs, grid: Grid, form: Form) {
    let AttentionArgs { sizes, options, .. } = args;
    let softcap = (options.softcap != 0.0).then_some(options.softcap);
    let form = form.with_scores(options.softmax_scale, softcap);
    let (before_cap, scale) = factors(options.softmax_scale, softcap);
    // SAFETY: the buffers have the sizes that the arguments state. Rows of a tensor are those of a sequence, entries of a list those of
    // its capacity.
    unsafe {
        vertical_slash_mma_kernel::launch_unchecked(
            client,
            grid.cubes,
            CubeDim::new_1d(form.units() as u32),
            grid.address,
            VECTOR,
            sizes.of_kernel(),
            sizes.strides(),
            args.q,
            args.k,
            args.v,
            args.q_bounds,
            args.kv_bounds,
            args.block_count,
            args.block_offset,
            args.column_count,
            args.column_index,
            args.out,
            args.lse,
            before_cap,
            scale,
            f32::NEG_INFINITY.to_bits(),
            sizes.layout == Layout::Packed,
            options.causal,
            form,
            sizes.elem,
        );
    }
}

impl VerticalSlashSizes {
    /// Those of contiguous tensors.
    fn strides(&self) -> StridesLaunch {
        let (key, value) = (self.key_width / VECTOR, self.value_width / VECTOR);
        let group_size = (self.heads / self.kv_heads) as u32;
        StridesLaunch::new(group_size, self.heads * key, key, self.kv_heads * key, key, 0, self.kv_heads * value, value)
    }
}

/// Cube `(p, h, b)` computes head `h` of a part of sequence `b`'s block rows. The last ones come first: where queries see only what
/// precedes them, these have the most keys.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn vertical_slash_mma_kernel<E: Float, V: Size>(
    sizes: Sizes,
    strides: Strides,
    q: &[Vector<E, V>],
    k: &[Vector<E, V>],
    values: &[Vector<E, V>],
    q_bounds: &[i32],
    kv_bounds: &[i32],
    block_count: &[i32],
    block_offset: &[i32],
    column_count: &[i32],
    column_index: &[i32],
    out: &mut [Vector<E, V>],
    lse: &mut [f32],
    before_cap: f32,
    scale: f32,
    empty_lse: u32,
    #[comptime] packed: bool,
    #[comptime] causal: bool,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut memory = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(vectors(form)), 128usize);
    let mut positions = Positions::new();
    let queries = Queries::of_cube(q_bounds, kv_bounds, &sizes, packed, true);
    if queries.first < queries.end {
        let rows = min(queries.end - queries.first, comptime!(ROWS as u32));
        let tile =
            Tile { query: queries.all.first + queries.first, rows, first_key: queries.kv.first, keys: queries.kv.len };
        let def = MmaDefinition::<E, E, f32>::new(M, N, K);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        // No channels of a key are those of all heads.
        let source = Source::new(q, k, k, values, &tile, CUBE_POS_Y, &strides);
        let attention = Attention::new(tile, shared_address(&memory), Scores { before_cap, scale, exact: false }, form);
        let list = KeyList::of_cube(&queries, block_count, block_offset, column_count, column_index, &sizes);
        let keys = Keys::new(list, Sight::new(queries.position(), causal));
        let mut attended = Attended::<NC>::nothing(form);
        keys.attend::<E, V, NC>(&def, &attention, &source, &mut memory, &mut positions, &mut attended);
        let output = Output { head: CUBE_POS_Y, heads: CUBE_COUNT_Y, empty_lse };
        output.write::<E, V, NC>(&attention, &mut attended, out, lse);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use super::rows::offline_sizes;
    use crate::offline::{Arch, Entry, form};
    let entry = |name: &str, kind: FloatKind, panels: [usize; 3], packed, causal| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let form = Form { negative: name == "negative", capped: name == "softcap", ..Form::plain(ROWS, panels, bf16) };
        let bits = if name == "64_bits" { AddressType::U64 } else { AddressType::U32 };
        let (cube, strides) = (CubeDim::new_1d(form.units() as u32), || StridesLaunch::new(1, 1, 1, 1, 1, 1, 1, 1));
        #[rustfmt::skip]
        let kernel = form!(vertical_slash_mma_kernel, cube, [
            bits, VECTOR, offline_sizes(), strides(), _, _, _, _, _, _, _, _, _, _, _, 1.0, 1.0, 1, packed, causal, form, elem
        ]);
        let entry = Entry::of(kind, &format!("vertical_slash_attention.mma.{name}"), kernel).unchecked();
        entry.on(|arch| arch != Arch::Sm75)
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("192.128", bf16, [3, 2, 0], true, true),
        entry("128.128", bf16, [2, 2, 0], false, true),
        entry("128.128.full", f16, [2, 2, 0], true, false),
        entry("64.64", f16, [1, 1, 0], false, true),
        entry("negative", bf16, [2, 2, 0], false, true),
        entry("softcap", bf16, [2, 2, 0], true, true),
        entry("64_bits", bf16, [3, 2, 0], false, true),
    ]
}
