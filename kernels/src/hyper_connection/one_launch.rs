//! What a block reads of a few tokens, with their products, in one launch: the last cube to have a token's products goes on with them.

use cubecl::prelude::*;

use super::in_parts::{self, Numbers, read_token};
use super::project::{self, Bound, project_slice};
use super::select::{self, Shape};
use super::{BlockArgs, PreArgs, ProjectArgs, Sizes};
use crate::common::last_cube::{COUNTERS, counters, is_last};
use crate::common::launch::address_type;
use crate::residual_norm::UNITS;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    project: project::Form,
    read: in_parts::Form,
}

impl Form {
    /// Units of a cube.
    fn units(self) -> usize {
        self.read.units().max(UNITS)
    }
}

/// Where each token has cubes of its own, how it is read: `None` where it is not.
pub(super) fn reader(client: &Client, pre: &PreArgs) -> Option<in_parts::Form> {
    let Sizes { tokens, streams, .. } = pre.sizes;
    let alone = tokens <= COUNTERS && select::tile(client.properties(), tokens, streams) == 1;
    alone.then(|| in_parts::Form::of(client.properties(), pre)).flatten()
}

/// Launches it; there are elements, and a block.
pub(super) fn launch(client: &Client, project: ProjectArgs, pre: PreArgs, read: in_parts::Form) {
    let PreArgs { scale, base, input, block, sizes, norm_eps, eps, .. } = pre;
    let Some(BlockArgs { norm_weight, post: new_post, comb: new_comb, iterations }) = block else { return };
    let Sizes { tokens, width, elem, .. } = sizes;
    let bound = project.bind(client);
    let Bound { streams, weight, outputs, indices, expert_weights, shared, post, comb, mixed, parts, experts, .. } =
        bound;
    let form = Form { project: bound.form, read };
    let Shape { vector, vectors } = select::choose(client.properties(), width, elem);
    let slices = select::slices(width);
    let address = address_type(client, &[&streams, &weight, &outputs, &parts]);
    one_launch_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens * slices, CubeDim::new_single()),
        CubeDim::new_1d(form.units() as u32),
        address,
        vector,
        select::weight_vector(client.properties(), width, elem),
        streams,
        weight,
        outputs,
        indices,
        expert_weights,
        shared,
        post,
        comb,
        mixed,
        parts,
        counters(client),
        scale,
        base,
        norm_weight,
        input,
        new_post,
        new_comb,
        tokens,
        vectors,
        slices,
        experts,
        norm_eps,
        eps,
        iterations,
        form,
        elem,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn one_launch_kernel<E: Float, V: Size, N: Size>(
    streams: &[Vector<E, V>],
    weight: &[Vector<f32, N>],
    outputs: &[Vector<E, V>],
    indices: &[i32],
    expert_weights: &[f32],
    shared: &[Vector<E, V>],
    post: &[f32],
    comb: &[f32],
    mixed: &mut [Vector<E, V>],
    parts: &mut [f32],
    counters: &mut [u32],
    scale: &[f32],
    base: &[f32],
    norm_weight: &[Vector<f32, N>],
    input: &mut [Vector<E, V>],
    new_post: &mut [f32],
    new_comb: &mut [f32],
    tokens: usize,
    vectors: usize,
    slices: usize,
    experts: usize,
    norm_eps: f32,
    eps: f32,
    iterations: usize,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    project_slice(
        streams,
        weight,
        outputs,
        indices,
        expert_weights,
        shared,
        post,
        comb,
        mixed,
        parts,
        tokens,
        vectors,
        slices,
        experts,
        comptime!(form.project),
    );
    let token = CUBE_POS / slices;
    if token < tokens && is_last(counters, token, slices) {
        let numbers = Numbers { slices, norm_eps, eps, iterations };
        // Streams without a block before them stay where they are.
        if comptime!(form.project.mixes) {
            read_token(
                &*mixed,
                &*parts,
                scale,
                base,
                norm_weight,
                input,
                new_post,
                new_comb,
                token,
                &numbers,
                form.read,
            );
        } else {
            read_token(
                streams,
                &*parts,
                scale,
                base,
                norm_weight,
                input,
                new_post,
                new_comb,
                token,
                &numbers,
                form.read,
            );
        }
    }
}

/// DeepSeek-V4's streams: in memory, behind an attention, behind experts.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::experts_mlp::combine::Place;
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let entry = |kind, (name, project): (&str, project::Form)| {
        let elem = ElemType::Float(kind);
        let sizes = Sizes { tokens: 1, streams: 4, width: 4096, elem };
        let read = in_parts::Form::of_sizes(&device, &sizes).expect("four streams");
        let Shape { vector, .. } = select::choose(&device, 4096, elem);
        let weight_vector = select::weight_vector(&device, 4096, elem);
        let form = Form { project, read };
        let cube = CubeDim::new_1d(form.units() as u32);
        #[rustfmt::skip]
        let form = form!(one_launch_kernel, cube,
            [AddressType::U32, vector, weight_vector, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1.0, 1.0, 1, form, elem]);
        Entry::of(kind, name, form)
    };
    let read = project::Form { streams: 4, rows: 24, ..project::Form::READ };
    let rows = project::Form { mixes: true, ..read };
    let forms = [
        ("hyper_connection.one_launch", read),
        ("hyper_connection.one_launch.rows", rows),
        ("hyper_connection.one_launch.experts", project::Form { top_k: 6, place: Place::Behind, ..rows }),
    ];
    FLOATS.into_iter().flat_map(|kind| forms.map(|form| entry(kind, form))).collect()
}
