//! MLA decode for Blackwell (sm_100a): tile loads by TMA, products by tcgen05. The README above this folder has the schedule.

mod single;

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use crate::portable::launch::or_dummy;
use crate::portable::mla_decode::{DecodeArgs, DecodeError, DecodeKernel, DecodeSizes};
use crate::sm90::mla_decode::output::COLUMNS;
use crate::sm90::mla_decode::{Form, HALF_KEYS, ROWS, form_of, tile_map};

/// What a device needs for this kernel, and the problem for the kernel. Later devices have other tensor cores.
pub(crate) fn form(client: &Client, sizes: &DecodeSizes) -> Option<Form> {
    let blackwell = client.properties().identity.fingerprint == "ptx_sm100";
    blackwell.then(|| form_of(sizes, HALF_KEYS)).flatten()
}

/// The form, the grid and the width of offsets.
pub(crate) fn prepare(client: &Client, sizes: &DecodeSizes) -> Result<(Form, CubeCount, AddressType), DecodeError> {
    let form = form(client, sizes).ok_or(DecodeError::NoKernel(DecodeKernel::Sm100))?;
    Ok((form, sizes.cube_count(client, ROWS)?, sizes.address_type(client)?))
}

/// Launches the kernel. Sizes have been checked.
pub(crate) fn launch(client: &Client, args: DecodeArgs) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let (form, cubes, address) = prepare(client, &sizes)?;
    let slots = sizes.pages * sizes.page_size;
    let kv_cache = or_dummy(client, args.kv_cache, slots);
    let kv_map = tile_map(kv_cache, [form.tiles, slots], args.kv_stride, [1, form.box_keys], sizes.elem)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], args.q_stride, [form.tiles, ROWS], sizes.elem)?;
    // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items are taken
    // as the planner has made them.
    unsafe {
        single::decode_sm100_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(single::UNITS),
            address,
            COLUMNS,
            kv_map,
            q_map,
            or_dummy(client, args.page_table, sizes.max_pages),
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
        );
    }
    Ok(())
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, buffer};
    let entry = |form: Form| {
        let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        let name = format!("mla_decode.sm100.{}.{}.{}", form.elem().name(), form.tiles * 64, form.box_keys);
        Entry::new(name, move |device, target| {
            let map = || tile_map(buffer(), [form.tiles, 64], 576, [1, 16], elem).expect("made of a handle");
            single::decode_sm100_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(single::UNITS),
                AddressType::U32,
                COLUMNS,
                map(),
                map(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                1,
                1,
                1.0,
                1,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm100a)
        .unchecked()
    };
    vec![
        entry(Form { tiles: 9, box_keys: 32, bf16: true, causal: true }),
        entry(Form { tiles: 8, box_keys: 16, bf16: false, causal: false }),
    ]
}
