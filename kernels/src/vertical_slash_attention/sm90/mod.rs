//! Attention to the keys of a vertical-slash index for Hopper (sm_90a): tile loads by TMA, single rows by asynchronous copies, products
//! by wgmma, persistent cubes. The README of the operation has the schedule.

mod attend;
mod form;
mod list;
mod load;
mod stages;
mod work;

use cubecl::prelude::*;

use self::attend::Attention;
pub(super) use self::form::form;
use self::form::{
    COMPUTE_REGISTERS, Form, GROUP, GROUPS, KEYS, LOAD_REGISTERS, LOADERS, STAGING_BYTES, UNITS, moves_registers,
    query_bytes, query_words, stage_bytes, stages, works,
};
use self::load::{Loader, QueryRoom, Sources};
use self::stages::{Notes, Stages};
use self::work::{Index, Schedule, Work, rows};
use super::problem::{AttentionArgs, Grid, Layout, VerticalSlashError, VerticalSlashSizes};
use super::rows::Sizes;
use super::seen::Sight;
use crate::common::launch::{multiprocessors, share};
use crate::common::select::Path;
use crate::ptx::{mbarrier, registers, shared_address, tma, warp};
use crate::tiles::prefill::form::PANEL;
use crate::tiles::prefill::softmax::{Scores, factors};
use crate::tiles::prefill::wgmma::epilogue::{Output, Rows, VECTOR};
use crate::tiles::prefill::wgmma::{Attended, GROUP_ROWS, panels_map};

/// Launches the kernel for at least one block row and key.
pub(super) fn launch(client: &Client, args: AttentionArgs, grid: Grid, form: Form) -> Result<(), VerticalSlashError> {
    let AttentionArgs { sizes, options, .. } = args;
    let VerticalSlashSizes { query_tokens, key_tokens, heads, kv_heads, key_width, value_width, elem, .. } = sizes;
    let softcap = (options.softcap != 0.0).then_some(options.softcap);
    let form = form.with_scores(options.softmax_scale, softcap);
    let (before_cap, scale) = factors(options.softmax_scale, softcap);
    let works = works(&sizes).ok_or(VerticalSlashError::NoKernel(Path::Sm90))?;
    // SAFETY: the buffers have the sizes that the arguments state. Rows of a tensor are those of a sequence, entries of a list those of
    // its capacity. Tile loads outside of the tensors give zeros.
    unsafe {
        vertical_slash_sm90_kernel::launch_unchecked(
            client,
            CubeCount::Static(works.min(multiprocessors(client) as u32), 1, 1),
            CubeDim::new_1d(UNITS),
            grid.address,
            VECTOR,
            map(args.q, [query_tokens, heads, key_width], elem)?,
            map(share(&args.k), [key_tokens, kv_heads, key_width], elem)?,
            map(share(&args.v), [key_tokens, kv_heads, value_width], elem)?,
            sizes.of_kernel(),
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
            sizes.batch as u32,
            heads as u32,
            kv_heads as u32,
            before_cap,
            scale,
            f32::NEG_INFINITY.to_bits(),
            sizes.layout == Layout::Packed,
            sizes.block_size_n.is_multiple_of(KEYS),
            options.causal,
            form,
            elem,
        );
    }
    Ok(())
}

/// `[tokens, heads, channels]` in panels of 64 channels of 64 tokens of a head.
fn map(buffer: BufferArg, shape: [usize; 3], elem: ElemType) -> Result<TensorMapArg<Tiled>, VerticalSlashError> {
    let [_, heads, width] = shape;
    // SAFETY: the buffers have such rows.
    let map = unsafe { panels_map(buffer, shape, [heads * width, width], GROUP_ROWS, elem) };
    map.ok_or(VerticalSlashError::NoKernel(Path::Sm90))
}

/// A warpgroup loads, two compute the parts of block rows that are the cube's.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn vertical_slash_sm90_kernel<E: Float, V: Size>(
    q_map: &TensorMap<E, Tiled>,
    k_map: &TensorMap<E, Tiled>,
    v_map: &TensorMap<E, Tiled>,
    sizes: Sizes,
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
    sequences: u32,
    heads: u32,
    kv_heads: u32,
    before_cap: f32,
    scale: f32,
    empty_lse: u32,
    #[comptime] packed: bool,
    #[comptime] aligned: bool,
    #[comptime] causal: bool,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let count = comptime!(stages(form) as usize);
    let queries = Shared::<[u32]>::new_aligned_slice(comptime!((GROUPS * query_bytes(form)) as usize / 4), 1024usize);
    let tiles = Shared::<[u32]>::new_aligned_slice(comptime!(count * stage_bytes(form) as usize / 4), 1024usize);
    let staging = Shared::<[u32]>::new_aligned_slice(comptime!(STAGING_BYTES as usize / 4), 1024usize);
    let positions = Shared::<[u32]>::new_aligned_slice(comptime!(count * KEYS), 128usize);
    let marks = Shared::<[u32]>::new_aligned_slice(count, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 * count + 2 * GROUPS as usize), 128usize);
    let mut notes = Notes { positions, marks };
    let barriers_at = shared_address(&barriers);
    let ring = Stages::new(shared_address(&tiles), barriers_at, form);
    let room_barriers = barriers_at + comptime!(16 * count as u32);
    let queries_at = shared_address(&queries);
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(k_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(v_map));
        ring.init();
        #[unroll]
        for group in 0..GROUPS {
            QueryRoom::of_group(queries_at, room_barriers, group, form).init();
        }
        mbarrier::fence_init();
    }
    sync_cube();

    let schedule = Schedule::new(&sizes, heads, sequences);
    let index = Index::new(q_bounds, kv_bounds, block_count, block_offset, column_count, column_index, packed);
    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS / 32);
    if group == GROUPS {
        if comptime!(moves_registers(form)) {
            registers::fewer(LOAD_REGISTERS);
        }
        let maps = (
            tma::tensor_map_address::<E, Tiled>(q_map),
            tma::tensor_map_address::<E, Tiled>(k_map),
            tma::tensor_map_address::<E, Tiled>(v_map),
        );
        let sources = Sources::new(maps, k, values, kv_heads, heads / kv_heads);
        let loading = warp % LOADERS;
        let room = QueryRoom::of_group(queries_at, room_barriers, loading % GROUPS, form);
        let mut loader = Loader::new(sources, room, ring, loading, form);
        loader.run(&schedule, &index, &sizes, &mut notes, aligned, causal);
    } else {
        if comptime!(moves_registers(form)) {
            registers::more(COMPUTE_REGISTERS);
        }
        let size!(A) = comptime!(form.value_panels * PANEL / 2);
        let size!(Q) = comptime!(query_words(form).next_power_of_two());
        let room = QueryRoom::of_group(queries_at, room_barriers, group, form);
        let mut attention = Attention::new(ring, room, Scores { before_cap, scale, exact: false }, group, form);
        let output = Output::new(shared_address(&staging), warp, heads, empty_lse, comptime!(GROUP / 32));
        let mut round = 0u32;
        while schedule.has_round(round) {
            let number = schedule.number(round);
            if number < schedule.count {
                let work = Work::new(&schedule, number);
                let first = work.queries(&index, &sizes, 0u32);
                // Where the first warpgroup has no queries, nobody has.
                if first.first < first.end {
                    let own = work.queries(&index, &sizes, group);
                    let mut attended = Attended::<A>::nothing();
                    attention.attend::<A, Q>(&Sight::new(own.position(), causal), &notes, &mut attended);
                    let rows = Rows { query: own.all.first + own.first, count: rows(&own), head: work.head };
                    output.write::<E, V, A>(&attended, &rows, out, lse, scale, form);
                }
            }
            round += 1;
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use super::rows::offline_sizes;
    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, panels: [usize; 3], [packed, aligned, causal]: [bool; 3]| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let form =
            Form { negative: name == "negative", capped: name == "softcap", ..Form::plain(GROUP_ROWS, panels, bf16) };
        let bits = if name == "64_bits" { AddressType::U64 } else { AddressType::U32 };
        Entry::new(format!("vertical_slash_attention.sm90.{}.{name}", form.elem().name()), move |device, target| {
            let map = || map(buffer(), [KEYS, 1, PANEL], elem).expect("made of a handle");
            vertical_slash_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                bits,
                VECTOR,
                map(),
                map(),
                map(),
                offline_sizes(),
                buffer(),
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
                1.0,
                1.0,
                1,
                packed,
                aligned,
                causal,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("192.128", bf16, [3, 2, 0], [true, true, true]),
        entry("128.128", bf16, [2, 2, 0], [false, true, true]),
        entry("128.128.full", f16, [2, 2, 0], [true, true, false]),
        entry("128.128.any_blocks", bf16, [2, 2, 0], [false, false, true]),
        entry("64.64", f16, [1, 1, 0], [false, true, true]),
        entry("negative", bf16, [2, 2, 0], [false, true, true]),
        entry("softcap", bf16, [2, 2, 0], [true, true, true]),
        entry("64_bits", bf16, [3, 2, 0], [false, true, true]),
    ]
}
