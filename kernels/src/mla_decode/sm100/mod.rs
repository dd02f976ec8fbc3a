//! MLA decode for Blackwell (sm_100a): tile loads by TMA, products by tcgen05. The README beside this file has the schedule.

mod chunks;
mod pair;
mod rows;
mod single;

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use self::pair::decode_sm100_pair_kernel;
use self::single::decode_sm100_kernel;
use crate::common::launch::or_dummy;
use crate::mla_decode::{DecodeArgs, DecodeError, DecodeKernel, DecodeSizes};
use crate::tiles::form::{Form, HALF_KEYS, ROWS, form_of, tile_map};
use crate::tiles::output::COLUMNS;

/// Whether a pair of cubes shares the keys, where one cube has not all query rows.
fn is_pair(sizes: &DecodeSizes) -> bool {
    sizes.query_len * sizes.heads > ROWS
}

/// What a device needs for these kernels, and the problem for the kernel. Later devices have other tensor cores.
pub(crate) fn form(client: &Client, sizes: &DecodeSizes) -> Option<Form> {
    let blackwell = client.properties().identity.fingerprint == "ptx_sm100";
    let most_keys = if is_pair(sizes) { ROWS } else { HALF_KEYS };
    blackwell.then(|| form_of(sizes, most_keys)).flatten()
}

/// The form, the grid and the width of offsets.
pub(crate) fn prepare(client: &Client, sizes: &DecodeSizes) -> Result<(Form, CubeCount, AddressType), DecodeError> {
    let form = form(client, sizes).ok_or(DecodeError::NoKernel(DecodeKernel::Sm100))?;
    let mut cubes = sizes.cube_count(client, if is_pair(sizes) { 2 * ROWS } else { ROWS })?;
    if let (true, CubeCount::Static(tiles, ..)) = (is_pair(sizes), &mut cubes) {
        *tiles *= 2;
    }
    Ok((form, cubes, sizes.address_type(client)?))
}

/// Launches the kernel. Sizes have been checked.
pub(crate) fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let (form, cubes, address) = prepare(client, &sizes)?;
    let slots = sizes.pages * sizes.page_size;
    let kv_cache = or_dummy(client, args.kv_cache, slots);
    let (kernel, kv_tile, q_tile) = (DecodeKernel::Sm100, [1, form.box_keys], [form.tiles, ROWS]);
    let kv_map = tile_map(kv_cache, [form.tiles, slots], args.kv_stride, kv_tile, sizes.elem, kernel)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], args.q_stride, q_tile, sizes.elem, kernel)?;
    let page_table = or_dummy(client, args.page_table, sizes.max_pages);
    macro_rules! launch {
        ($kernel:ident, $units:expr) => {
            // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items
            // are taken as the planner has made them.
            unsafe {
                $kernel::launch_unchecked(
                    client,
                    cubes,
                    CubeDim::new_1d($units),
                    address,
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
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, buffer, form};
    macro_rules! entry {
        ($kernel:ident, $units:expr, $name:literal, $form:expr) => {{
            let form: Form = $form;
            let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
            let name = format!("mla_decode.{}.{}.{}.{}", $name, form.elem().name(), form.tiles * 64, form.box_keys);
            let kernel = DecodeKernel::Sm100;
            let map =
                move || tile_map(buffer(), [form.tiles, 64], 576, [1, 16], elem, kernel).expect("made of a handle");
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
        entry!(decode_sm100_pair_kernel, pair::UNITS, "sm100_pair", Form { box_keys: 64, ..bf16 }),
        entry!(decode_sm100_pair_kernel, pair::UNITS, "sm100_pair", f16),
    ]
}
