//! MLA decode for Blackwell (sm_100a): tile loads by TMA, products by tcgen05. The README beside this file has the schedule.

mod pair;
mod single;

use cubecl::prelude::*;

use self::pair::decode_sm100_pair_kernel;
use self::single::decode_sm100_kernel;
use crate::common::launch::or_dummy;
use crate::common::select::Path;
use crate::mla_decode::problem::{DecodeArgs, DecodeError, Grid};
use crate::mla_decode::tma::{is_pair, tile_map};
use crate::tiles::form::{Form, ROWS};
use crate::tiles::output::COLUMNS;

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, form: Form, grid: Grid) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let slots = sizes.pages * sizes.page_size;
    let kv_cache = or_dummy(client, args.kv_cache.into_dense(), slots);
    // A pair's query comes tile by tile.
    let q_tiles = if is_pair(&sizes) { 1 } else { form.tiles };
    let (path, kv_tile, q_tile) = (Path::Sm100, [1, form.box_keys], [q_tiles, ROWS]);
    let kv_map = tile_map(kv_cache, [form.tiles, slots], args.kv_stride, kv_tile, sizes.elem, path)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], args.q_stride, q_tile, sizes.elem, path)?;
    let page_table = or_dummy(client, args.page_table, sizes.max_pages);
    macro_rules! launch {
        ($kernel:ident, $units:expr) => {
            // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items
            // are taken as the planner has made them.
            unsafe {
                $kernel::launch_unchecked(
                    client,
                    grid.cubes,
                    CubeDim::new_1d($units),
                    grid.address,
                    COLUMNS,
                    kv_map,
                    q_map,
                    page_table,
                    args.seq_lens,
                    args.items,
                    args.cube_ptr,
                    args.split_ptr,
                    args.partial_out,
                    args.partial_lse,
                    args.out,
                    args.lse,
                    sizes.query_len as u32,
                    sizes.heads as u32,
                    sizes.max_pages as u32,
                    sizes.page_size.ilog2(),
                    args.softmax_scale * std::f32::consts::LOG2_E,
                    f32::NEG_INFINITY.to_bits(),
                    form,
                    sizes.elem,
                )
            }
        };
    }
    match is_pair(&sizes) {
        true => launch!(decode_sm100_pair_kernel, pair::UNITS),
        false => launch!(decode_sm100_kernel, single::UNITS),
    }
    Ok(())
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::{AddressType, FloatKind};

    use crate::offline::{Arch, Entry, buffer, form};
    macro_rules! entry {
        ($kernel:ident, $units:expr, $name:literal, $form:expr) => {{
            let form: Form = $form;
            let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
            let name = format!("mla_decode.{}.{}.{}.{}", $name, form.elem().name(), form.tiles * 64, form.box_keys);
            let path = Path::Sm100;
            let map = move || tile_map(buffer(), [form.tiles, 64], 576, [1, 16], elem, path).expect("made of a handle");
            let (bits, dim) = (AddressType::U32, CubeDim::new_1d($units));
            let made = form!(
                $kernel,
                dim,
                [bits, COLUMNS, map(), map(), _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1.0, 1, form, elem]
            );
            Entry::new(name, made).on(|arch| arch == Arch::Sm100a).unchecked()
        }};
    }
    let bf16 = Form { tiles: 9, box_keys: 32, bf16: true, causal: true };
    let f16 = Form { tiles: 8, box_keys: 16, bf16: false, causal: false };
    vec![
        entry!(decode_sm100_kernel, single::UNITS, "sm100", bf16),
        entry!(decode_sm100_kernel, single::UNITS, "sm100", f16),
        entry!(decode_sm100_pair_kernel, pair::UNITS, "sm100_pair", bf16),
        entry!(decode_sm100_pair_kernel, pair::UNITS, "sm100_pair", f16),
    ]
}
