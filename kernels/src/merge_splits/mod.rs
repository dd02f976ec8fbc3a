//! Merges the splits of a decode step: as many states for each sequence as the plan on the device says.
//!
//! States, and which of them are empty, are as in [`merge_state`](crate::merge_state). A row of a sequence may have a hundred
//! splits, in a batch of one, or one: where there are few rows, groups of units go over the splits side by side, and their
//! sums are then merged through shared memory; where there are many, a cube takes several rows.
//!
//! The bits of a sequence depend on its own splits alone, and not on how many cubes and groups its batch gives it: they are
//! summed in chains, as many as the number of splits says, and those one after the other. A projection of what is merged can
//! do it by itself (`linear/source.rs`), with the same bits.

mod kernel;
mod select;

use cubecl::prelude::*;

use self::kernel::merge_splits_kernel;
#[cfg(feature = "cuda")]
pub(crate) use self::kernel::{Merged, Splits, Weights, chains};
#[cfg(feature = "cuda")]
pub(crate) use self::select::MAX_LOADS;
use self::select::Shape;
use crate::common::launch::{address_type, share};
use crate::compiler::names_all_sizes;

/// Arguments of [`launch`].
pub struct MergeSplitsArgs {
    /// f32 `[items, rows, width]`: the items of a sequence one after the other.
    pub outs: BufferArg,
    /// f32 `[items, rows]`.
    pub lses: BufferArg,
    /// i32 `[batch + 1]`: the items of sequence `b` are `split_ptr[b] .. split_ptr[b + 1]`.
    pub split_ptr: BufferArg,
    /// `[batch, rows, width]`, written.
    pub out: BufferArg,
    /// f32 `[batch, rows]`, written.
    pub lse: BufferArg,
    /// Sequences.
    pub batch: usize,
    /// Items that there may be, which says how many splits to expect.
    pub items: usize,
    /// Query tokens of a sequence times heads.
    pub rows: usize,
    /// Channels of a value.
    pub width: usize,
    /// Whether the results of sequences with one item are in `out` and `lse` already. They are left alone then.
    pub single_items_done: bool,
    /// Of `out`.
    pub elem: ElemType,
}

/// Merges the splits of each sequence. With an empty result nothing is launched.
pub fn launch(client: &Client, args: MergeSplitsArgs) {
    if args.batch * args.rows == 0 {
        return;
    }
    let sizes = args.sizes();
    let shape = select::choose(client.properties(), &sizes);
    if names_all_sizes() {
        for shape in select::all(shape, &sizes) {
            launch_shape(client, &args, shape);
        }
    }
    launch_shape(client, &args, shape);
}

fn launch_shape(client: &Client, args: &MergeSplitsArgs, shape: Shape) {
    let cubes = args.batch * args.rows.div_ceil(shape.cube_rows) * shape.chunks;
    merge_splits_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        shape.form.cube_dim(),
        address_type(client, &[&args.outs, &args.lses, &args.out]),
        shape.vector_size,
        share(&args.outs),
        share(&args.lses),
        share(&args.split_ptr),
        share(&args.out),
        share(&args.lse),
        args.batch,
        args.rows,
        args.width / shape.vector_size,
        shape.chunks,
        shape.cube_rows,
        f32::NEG_INFINITY,
        shape.form,
        args.elem,
    );
}

/// Values of 512 channels, of sequences with few splits and with many.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use self::select::MergeSizes;
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let shapes = [("merge_splits.few", 1 << 14, 1, true), ("merge_splits.many", 16, 128, false)];
    let entry = |kind, (name, rows, splits, single_items_done)| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let sizes = MergeSizes { rows, width: 512, splits, single_items_done };
        let Shape { form, vector_size, .. } = select::choose(&Arch::Sm90a.properties(), &sizes);
        let dim = form.cube_dim();
        let form = form!(merge_splits_kernel, dim, [bits, vector_size, _, _, _, _, _, 1, 1, 1, 1, 1, 0.0, form, elem]);
        Entry::of(kind, name, form)
    };
    let forms = FLOATS.into_iter().flat_map(|kind| shapes.map(|form| entry(kind, form)));
    // Those of a decode step on an H200, by their groups of units, for the estimate of its time (`tools/estimate.sh`).
    let steps = [
        ("merge_splits.step.16", 64, 133, true),
        ("merge_splits.step.8", 128, 67, true),
        ("merge_splits.step.4", 256, 34, true),
        ("merge_splits.step.2", 512, 17, true),
        ("merge_splits.step.1", 1024, 9, true),
        ("merge_splits.step.1.rows.2", 4096, 3, true),
    ];
    let steps = steps.map(|form| entry(FloatKind::BF16, form).on(|arch| arch == Arch::Sm90a));
    forms.chain(steps).collect()
}
