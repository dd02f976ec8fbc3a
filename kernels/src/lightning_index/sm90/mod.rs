//! Ranks of the scores of many query tokens of a sequence, for Hopper (sm_90a): tile loads by TMA, products by wgmma, persistent
//! cubes. The README beside this file has the schedule.

mod form;
mod load;
mod scores;
mod work;

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use self::form::{COLUMNS, COMPUTE_REGISTERS, GROUP, GROUPS, KEYS, LOAD_REGISTERS, MOST_TOKENS, PANEL, UNITS, WARPS};
pub(super) use self::form::{Form, form};
use self::load::{Queries, Source};
use self::scores::{Group, Output};
use self::work::{Rows, RowsLaunch, Share, tiles_of};
use super::problem::{LightningIndexArgs, LightningIndexError};
use crate::common::launch::{multiprocessors, share};
use crate::common::select::Path;
use crate::ptx::{mbarrier, registers, shared_address, tma, warp};
use crate::tiles::ring::Ring;

/// Numbers in shared memory: the weights of all columns, and behind them how many ranks each query token has.
const WORDS: usize = GROUPS as usize * COLUMNS + MOST_TOKENS;
const _: () = assert!(UNITS as usize + 2 <= WORDS, "the work is divided where they come later");

/// Scores the keys of `rows` query tokens, from `first_row` on.
pub(super) fn launch(
    client: &Client,
    args: &LightningIndexArgs,
    form: Form,
    address: AddressType,
    [first_row, rows]: [usize; 2],
) -> Result<(), LightningIndexError> {
    let sizes = &args.sizes;
    let [first_tile, tiles] = tiles_of([first_row, rows], sizes.query_len, form);
    let blocks = tiles.saturating_mul(sizes.max_keys().div_ceil(KEYS));
    // SAFETY: the buffers have the sizes that the arguments state. Tile loads outside of the tensors give zeros, and ranks of
    // query tokens that the launch has not, or of keys that they do not see, are not written.
    unsafe {
        score_sm90_kernel::launch_unchecked(
            client,
            CubeCount::Static(multiprocessors(client).min(blocks) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address,
            map(&args.q, [sizes.rows() * sizes.heads, sizes.width], COLUMNS, sizes.elem)?,
            map(args.keys.buffer(), [sizes.slots(), sizes.width], form.box_keys, sizes.elem)?,
            share(&args.page_table),
            share(&args.head_weights),
            share(&args.visible),
            share(&args.scores),
            RowsLaunch::new(
                first_row as u32,
                (first_row + rows) as u32,
                first_tile as u32,
                tiles as u32,
                sizes.query_len as u32,
                sizes.max_keys() as u32,
                sizes.k as u32,
            ),
            sizes.score_stride(),
            sizes.max_pages,
            sizes.page_size.ilog2(),
            args.scale,
            form,
            sizes.elem,
            args.weights_elem,
        );
    }
    Ok(())
}

/// A matrix in panels of 64 channels of so many rows.
fn map(
    matrix: &BufferArg,
    [rows, width]: [usize; 2],
    box_rows: usize,
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, LightningIndexError> {
    let BufferArg::Handle { handle } = share(matrix) else { return Err(LightningIndexError::NoKernel(Path::Sm90)) };
    // A map has no dimension of 0; without rows nothing is loaded.
    let (shape, strides) = ([rows.max(1), width], [width, 1]);
    // SAFETY: the matrix has as many rows of as many channels.
    Ok(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &[box_rows, PANEL], elem, TensorMapSwizzle::B128) })
}

/// A warp loads, two warpgroups compute the blocks of the cube, each for half of a tile's query tokens.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn score_sm90_kernel<E: Float, W: Float>(
    q_map: &TensorMap<E, Tiled>,
    key_map: &TensorMap<E, Tiled>,
    page_table: &[i32],
    head_weights: &[W],
    visible: &[i32],
    scores: &mut [u32],
    rows: Rows,
    stride: usize,
    max_pages: usize,
    page_shift: u32,
    scale: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
    #[define(W)] _weights_elem: ElemType,
) {
    let stages = comptime!(form.stages());
    let query_words = comptime!((GROUPS * form.query_bytes()) as usize / 4);
    let queries = Shared::<[u32]>::new_aligned_slice(query_words, 1024usize);
    let keys = Shared::<[u32]>::new_aligned_slice(comptime!((stages * form.key_bytes()) as usize / 4), 1024usize);
    let mut words = Shared::<[u32]>::new_aligned_slice(WORDS, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!((2 * stages + 2 * GROUPS) as usize), 128usize);
    let barriers_at = shared_address(&barriers);
    let ring = Ring::new(shared_address(&keys), barriers_at, comptime!(form.key_bytes()), stages);
    let queries = Queries::new(shared_address(&queries), barriers_at + comptime!(16 * stages), form);
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(key_map));
        ring.init(WARPS);
        queries.init();
        mbarrier::fence_init();
    }
    let mut share = Share::new(&rows, visible, &mut words, form);
    // The barriers are initialised as well: all units have met.

    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS / 32);
    if group == GROUPS {
        registers::fewer(LOAD_REGISTERS);
        if warp == WARPS {
            let source = Source {
                rows,
                queries: tma::tensor_map_address::<E, Tiled>(q_map),
                keys: tma::tensor_map_address::<E, Tiled>(key_map),
                max_pages,
                page_shift,
            };
            source.load_all(visible, page_table, share, queries, ring, form);
        }
    } else {
        registers::more(COMPUTE_REGISTERS);
        let mut computes = Group::new(group, ring, queries, shared_address(&words), form);
        let output = Output { first_row: rows.first_row, stride, scale };
        while share.left > 0 {
            let part = share.next(&rows, visible, form);
            computes.prepare::<W>(&rows, visible, head_weights, &part.tile, &mut words);
            computes.score(&part, &words, &output, scores);
        }
    }
}

/// With DeepSeek's 64 heads of 128 channels, with short pages, and with few and small heads.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, [heads, width, box_keys]: [usize; 3]| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let form = Form { heads, panels: width / PANEL, box_keys, bf16 };
        let name = format!("lightning_index.score_sm90.{name}{}", form.elem().name());
        Entry::new(name, move |device, target| {
            let map = |rows: usize| {
                let BufferArg::Handle { handle } = buffer() else { unreachable!("made of a handle") };
                let (shape, strides) = ([rows, PANEL], [PANEL, 1]);
                // SAFETY: nothing is launched with it.
                unsafe { tma::tiled_map(handle.handle, &shape, &strides, &shape, elem, TensorMapSwizzle::B128) }
            };
            score_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                map(COLUMNS),
                map(box_keys),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                RowsLaunch::new(0, 1, 0, 1, 1, 64, 1),
                64,
                1,
                6,
                1.0,
                form,
                elem,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("", bf16, [64, 128, 64]),
        entry("", f16, [64, 128, 64]),
        entry("short_pages.", bf16, [64, 128, 16]),
        entry("few_heads.", bf16, [16, 64, 8]),
        entry("many_heads.", bf16, [128, 128, 128]),
    ]
}
