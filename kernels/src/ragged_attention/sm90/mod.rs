//! Attention of prompts for Hopper (sm_90a): tile loads by TMA, products by wgmma, persistent cubes. The README beside this file has
//! the schedule.

mod attend;
mod form;
mod load;
mod plan;
mod work;

use cubecl::prelude::*;

use self::attend::Attention;
use self::form::Form;
pub(super) use self::form::form;
use self::form::{COMPUTE_REGISTERS, GROUP, GROUPS, LOAD_REGISTERS, PANEL, ROWS, STAGING_BYTES, UNITS, WARPS};
use self::load::{Maps, clear_values, load_all};
use self::work::{SLOT_WORDS, Schedule, Slot, cubes, heads_together};
use super::problem::{HeadRows, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionSizes};
use crate::common::launch::{dummy, multiprocessors, or_dummy};
use crate::common::select::Path;
use crate::ptx::{mbarrier, registers, shared_address, tma, warp};
use crate::tiles::prefill::softmax::{Scores, factors};
use crate::tiles::prefill::wgmma::epilogue::{Output, Rows, VECTOR};
use crate::tiles::prefill::wgmma::{Attended, panels_map};
use crate::tiles::ring::Ring;

/// Launches the kernel for at least one token and head.
pub(super) fn launch(client: &Client, args: RaggedAttentionArgs, form: Form) -> Result<(), RaggedAttentionError> {
    let RaggedAttentionArgs { q, k, k_pe, v, cu_seqlens, cu_seqlens_k, out, lse, sizes, options } = args;
    let RaggedAttentionSizes { tokens, keys, heads, kv_heads, key_width, value_width, shared_width, sequences, elem } =
        sizes;
    let form = options.form(form);
    let (before_cap, scale) = factors(options.softmax_scale, options.softcap);
    let plan = plan::launch(client, cu_seqlens, cu_seqlens_k, [tokens, keys, sequences], &options);
    let address = AddressType::from_len(sizes.elements());
    let head_bytes = keys * (key_width + value_width) * elem.size();
    let k_pe = match k_pe {
        Some(k_pe) => map(client, k_pe, [keys, 1, shared_width], elem)?,
        // Of no use, but a kernel has all its arguments.
        None => map(client, HeadRows::contiguous(dummy(client), 1, VECTOR), [0, 1, VECTOR], elem)?,
    };
    // SAFETY: the buffers have the sizes that the arguments state. Tile loads outside of the tensors give zeros, and rows past the
    // last one are not written. The plan has each tile once.
    unsafe {
        ragged_sm90_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes(multiprocessors(client), plan.most, heads) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address,
            VECTOR,
            map(client, q, [tokens, heads, key_width], elem)?,
            map(client, k, [keys, kv_heads, key_width - shared_width], elem)?,
            k_pe,
            map(client, v, [keys, kv_heads, value_width], elem)?,
            plan.tiles,
            plan.taken,
            out,
            lse,
            heads as u32,
            (heads / kv_heads) as u32,
            heads_together(heads, kv_heads, head_bytes) as u32,
            options.most_seen(),
            before_cap,
            scale,
            f32::NEG_INFINITY.to_bits(),
            form,
            elem,
        );
    }
    Ok(())
}

/// `[tokens, heads, channels]` in panels of 64 channels of 128 tokens of a head.
fn map(
    client: &Client,
    rows: HeadRows,
    [tokens, heads, width]: [usize; 3],
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, RaggedAttentionError> {
    let (shape, strides) = ([tokens, heads, width], [rows.token_stride, rows.head_stride]);
    // SAFETY: there are so many rows, so far apart.
    let map = unsafe { panels_map(or_dummy(client, rows.buffer, tokens), shape, strides, ROWS, elem) };
    map.ok_or(RaggedAttentionError::NoKernel(Path::Sm90))
}

/// A warpgroup loads, two compute the tiles that the cube takes, each 64 rows of a tile.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn ragged_sm90_kernel<E: Float, V: Size>(
    q_map: &TensorMap<E, Tiled>,
    k_map: &TensorMap<E, Tiled>,
    k_pe_map: &TensorMap<E, Tiled>,
    v_map: &TensorMap<E, Tiled>,
    tiles: &[i32],
    taken: &[Atomic<u32>],
    out: &mut [Vector<E, V>],
    lse: &mut [f32],
    heads: u32,
    group_size: u32,
    heads_together: u32,
    most_seen: i32,
    before_cap: f32,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let stages = comptime!(form.stages() as usize);
    let queries = Shared::<[u32]>::new_aligned_slice(comptime!(form.query_bytes() as usize / 4), 1024usize);
    let keys = Shared::<[u32]>::new_aligned_slice(comptime!(stages * form.key_bytes() as usize / 4), 1024usize);
    let mut values = Shared::<[u32]>::new_aligned_slice(comptime!(stages * form.value_bytes() as usize / 4), 1024usize);
    let staging = Shared::<[u32]>::new_aligned_slice(comptime!(STAGING_BYTES as usize / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(4 * stages + 3), 128usize);
    let mut words = Shared::<[u32]>::new_aligned_slice(SLOT_WORDS, 128usize);
    let barriers_at = shared_address(&barriers);
    let values_barriers = barriers_at + comptime!(16 * form.stages());
    let slot_barriers = values_barriers + comptime!(16 * form.stages());
    let cleared = slot_barriers + 16;
    let key_ring = Ring::new(shared_address(&keys), barriers_at, comptime!(form.key_bytes()), comptime!(form.stages()));
    let value_ring =
        Ring::new(shared_address(&values), values_barriers, comptime!(form.value_bytes()), comptime!(form.stages()));
    let mut slot = Slot::new(slot_barriers);
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(k_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(v_map));
        key_ring.init(WARPS);
        value_ring.init(WARPS);
        slot.init();
        mbarrier::init(cleared, 1u32);
        mbarrier::fence_init();
    }
    sync_cube();

    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS / 32);
    if group == GROUPS {
        registers::fewer(LOAD_REGISTERS);
        if warp == comptime!(GROUPS * GROUP / 32) {
            if warp::elect() {
                let maps = Maps {
                    q: tma::tensor_map_address::<E, Tiled>(q_map),
                    k: tma::tensor_map_address::<E, Tiled>(k_map),
                    k_pe: tma::tensor_map_address::<E, Tiled>(k_pe_map),
                    v: tma::tensor_map_address::<E, Tiled>(v_map),
                    group_size,
                };
                let schedule = Schedule::new(tiles, heads, heads_together);
                let queries_at = shared_address(&queries);
                load_all(&maps, &schedule, tiles, taken, queries_at, &mut words, slot, key_ring, value_ring, form);
            }
        } else if warp == comptime!(GROUPS * GROUP / 32 + 1) {
            clear_values(&mut values, &words, slot, value_ring, cleared, form);
        }
    } else {
        registers::more(COMPUTE_REGISTERS);
        let size!(A) = comptime!(form.value_panels * PANEL / 2);
        let queries_at = shared_address(&queries);
        let scores = Scores { before_cap, scale, exact: true };
        let rings = (key_ring, value_ring);
        let mut attention = Attention::new(rings, queries_at, cleared, scores, most_seen, group, form);
        let output = Output::new(shared_address(&staging), warp, heads, empty_lse, WARPS);
        let mut work = slot.read(&words);
        while work.is_some() {
            let mut attended = Attended::<A>::nothing();
            if work.tile.blocks > 0 {
                attention.attend::<A>(&work, &mut slot, &mut attended);
            } else {
                slot.release(UNIT_POS % 32);
            }
            let rows = Rows { query: work.tile.query, count: work.tile.rows, head: work.head };
            output.write::<E, V, A>(&attended, &rows, out, lse, scale, form);
            work = slot.read(&words);
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use self::form::KEYS;
    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, panels: [usize; 3], kind_of: fn(Form) -> Form| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let form = kind_of(Form::plain(ROWS, panels, bf16));
        let name = format!("ragged_attention.sm90.{}.{name}", form.elem().name());
        Entry::new(name, move |device, target| {
            let map = || {
                let BufferArg::Handle { handle } = buffer() else { unreachable!("made of a handle") };
                let (shape, strides) = ([KEYS, 1, PANEL], [PANEL, PANEL, 1]);
                // SAFETY: nothing is launched with it.
                unsafe { tma::tiled_map(handle.handle, &shape, &strides, &shape, elem, TensorMapSwizzle::B128) }
            };
            ragged_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                VECTOR,
                map(),
                map(),
                map(),
                map(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                1,
                1,
                1.0,
                1.0,
                1,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("192.128", bf16, [3, 2, 0], |form| form),
        entry("192.128.shared", bf16, [3, 2, 1], |form| form),
        entry("128.128", bf16, [2, 2, 0], |form| form),
        entry("64.64", f16, [1, 1, 0], |form| form),
        entry("negative", f16, [3, 2, 0], |form| Form { negative: true, ..form }),
        entry("window", bf16, [2, 2, 0], |form| Form { windowed: true, ..form }),
        entry("window.softcap", bf16, [3, 2, 0], |form| Form { windowed: true, capped: true, ..form }),
    ]
    .into_iter()
    .chain(plan::offline())
    .collect()
}
