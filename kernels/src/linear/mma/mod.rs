//! Projections of a few tokens with matrix instructions, for f16 and bf16: the weights come from the memory once, straight into
//! registers.
//!
//! A cube has 16 rows of the weights and a tile of tokens; its planes share the input channels, and add up in shared memory. A
//! product sums over the channels in any order as long as both factors have the same: so a unit takes 16 bytes in a row, which
//! serve two steps of 16 channels. Of a gated output the cube has 8 rows of the gate and 8 of `up`, placed so that a unit gets
//! both. The row of a single token a cube may write for itself before that (`source.rs`), and the expert of a single
//! token's pair it may choose (`choice.rs`). Where rows are short, planes have outputs of their own in place of channels. Of weights
//! in blocks a unit takes 16 or 32 codes of a row at a time (`codes.rs`).
//!
//! The order of a sum depends on the sizes of the matrix alone: a token's output does not change with the other tokens. Where
//! `sm90` computes many tokens with the same bits, it is that of `parts.rs`, for which units exchange their channels.

mod codes;
mod groups;
mod kernel;
mod more;
mod products;
mod row;
mod select;
mod single;
mod unit;
pub(crate) mod vectors;

use cubecl::prelude::*;

use self::kernel::linear_mma_kernel;
use self::select::Form;
pub(super) use self::select::{has_instruction, supported, takes, takes_latents, takes_norm, tile_tokens};
use crate::common::last_cube::counters;
use crate::common::launch::{dummy, share};
use crate::linear::choice::PairExpertsArgs;
use crate::linear::grid::Grid;
use crate::linear::latents::BesideArgs;
use crate::linear::source::RowSourceArgs;
use crate::linear::{Before, Choice, LinearSizes, Products, With};
use crate::residual_norm::UNITS as NORM_UNITS;

/// Units of a plane. The matrix instructions are defined for this number.
const LANES: usize = 32;
/// Planes of a cube, which share the channels.
const PLANES: usize = 8;

/// The matrix instruction: 16 rows, 8 tokens, 16 channels.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Channels that four units load at once.
const CHUNK: usize = 4 * VECTOR;
/// Units of a cube.
const UNITS: usize = LANES * PLANES;
const _: () =
    assert!(LANES * PLANES == NORM_UNITS, "a cube computes the norm of a row in the same order as another launch");

/// Writes the output of at least one tile.
pub(super) fn launch(
    client: &Client,
    products: Products,
    mut grid: Grid,
    (before, with): (Before, With),
    (choice, sizes): (Choice, &LinearSizes),
    address: AddressType,
    elem: ElemType,
) {
    let &LinearSizes { form: linear, batch_invariant, .. } = sizes;
    let (steps, second, in_parts) = (choice.tokens / N, grid.second_width > 0, choice.in_parts);
    let codes = select::codes_at_once(&products, &grid, elem);
    let several = select::takes_several(&grid, codes);
    if several {
        grid.groups = select::groups_of_cube(client, grid.cubes(products.outputs, select::outputs(linear)));
    }
    let widths = grid.sizes(&products, VECTOR);
    let apart = select::has_short_rows(client, &products, &grid) && !in_parts;
    let is_single = !batch_invariant && !apart && select::takes_single(&products, &grid, elem);
    let longest = select::longest_row(&products, &grid);
    let is_alone = matches!((&before, &with), (Before::Nothing, With::Nothing)) && grid.more.is_empty();
    let single = is_single.then(|| {
        let groups = grid.cubes(products.outputs, select::outputs(linear));
        select::single_of(client, &grid, groups, (products.weight.format(), longest), is_alone)
    });
    let (source, x) = RowSourceArgs::new(client, before, products.x, [products.inputs, UNITS]);
    let own_row = match source {
        _ if is_single => longest / VECTOR,
        RowSourceArgs::Memory => 0,
        _ => products.inputs / VECTOR,
    };
    let routed = grid.route.is_some();
    let form = Form {
        rows: grid.rows,
        linear,
        steps,
        at_once: own_row > 0,
        codes,
        several,
        single,
        second,
        own_row,
        routed,
        in_parts,
        apart,
    };
    let cubes = grid.cubes(products.outputs, form.outputs() * grid.groups);
    let form = form.for_cubes(client, products.inputs, cubes, products.weight.format());
    let more = grid.more.into_iter().map(|matrix| more::bind(client, matrix, (form, cubes), sizes)).collect();
    let pairs = PairExpertsArgs::new(client, grid.route);
    let (mut beside, mut cubes_beside) = (BesideArgs::Nothing, 0);
    let (mut then_norm, mut normed, mut own_counters) = (RowSourceArgs::Memory, dummy(client), dummy(client));
    match with {
        With::Latents(latents) => {
            let width = products.inputs + products.carried;
            (beside, cubes_beside) = latents.bind([grid.tokens, width, VECTOR, UNITS]);
        }
        With::Norm(norm) => {
            let width = norm.width;
            (normed, own_counters) = (share(&norm.out), counters(client));
            (then_norm, _) = RowSourceArgs::new(client, Before::NormRope(*norm), dummy(client), [width, UNITS]);
        }
        With::Nothing | With::Route(_) => {}
    }
    linear_mma_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes + cubes_beside, CubeDim::new_single()),
        CubeDim::new_2d(LANES as u32, form.planes() as u32),
        address,
        VECTOR,
        x,
        products.weight.rows(client),
        grid.second.rows(client),
        grid.order,
        grid.tiles,
        products.out,
        grid.second_out,
        more,
        widths,
        products.limit,
        source,
        beside,
        pairs,
        then_norm,
        normed,
        own_counters,
        form,
        elem,
    );
}
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::FloatKind;

    use self::select::Single;
    use crate::linear::grid::{Rows, offline_sizes as sizes};
    use crate::linear::{LinearForm, WeightFormat, choice, latents, source, weight};
    use crate::norm_rope::Norm;
    use crate::offline::{Arch, Entry, form};
    use crate::route_experts as route;
    let beside = |latents| if latents { latents::offline(UNITS) } else { BesideArgs::Nothing };
    // Rows of a token's head, of V2-Lite, and of V3.
    let source = |name: &str| match name {
        "linear.mma.merged_heads" => source::offline_splits(),
        "linear.mma.normed_pair" => source::offline_normed(6),
        // V4-Flash's groups of heads, and latent of the query.
        _ if name.contains("rope_heads") => source::offline_heads(Norm::None, UNITS),
        _ if name.contains("rms_normed") || name == "norm" => source::offline_heads(Norm::Weighted, UNITS),
        _ if name.contains("normed_pair") => source::offline_normed(8),
        _ => RowSourceArgs::Memory,
    };
    let forms = [FloatKind::F16, FloatKind::BF16].into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let entry = |name: &'static str, rows, gated, limited, steps, at_once| {
            let second = matches!(rows, Rows::TokenGather | Rows::TokenScatter) || name.contains("pair");
            let own_row = match name {
                "linear.mma.merged_heads" => 512 / VECTOR,
                _ if name.contains("rope_heads") => 4096 / VECTOR,
                _ if name.contains("rms_normed") => 1024 / VECTOR,
                "linear.mma.normed_pair" => 2048 / VECTOR,
                _ if name.contains("normed_pair") => 7168 / VECTOR,
                _ if name.contains("single_short") => 1024 / VECTOR,
                "linear.mma.single_up.fp8" | "linear.mma.single_down.fp4" => 2048 / VECTOR,
                _ if name.contains("single") => 4096 / VECTOR,
                _ => 0,
            };
            let route = match name {
                "linear.mma.token_routed_up" | "linear.mma.token_routed_up.parts" => Some(route::V2_LITE),
                "linear.mma.token_routed_up.table" => Some(route::V4_TABLE),
                _ => None,
            };
            let pairs = move || route.map_or(PairExpertsArgs::Listed, choice::offline);
            let (linear, routed) = (LinearForm { gated, limited }, route.is_some());
            let in_parts = name.ends_with("parts");
            let codes = match weight::format_of(name) {
                _ if name.contains("eights") => 0,
                WeightFormat::Dense => 0,
                // V4-Flash's experts.
                WeightFormat::Fp4 if name.contains("experts") && kind == FloatKind::BF16 => select::MOST_CODES,
                _ => select::LEAST_CODES,
            };
            // As many cubes as V3 and V4-Flash have.
            let single = name.contains("single").then_some(match rows {
                _ if name.contains("single_short") => Single::SHORT,
                Rows::Dense => Single::whole(4),
                _ if weight::format_of(name) == WeightFormat::Fp4 => Single::FP4_EXPERTS,
                _ => Single::whole(1),
            });
            // The absorbed projection of a query.
            let apart = name == "linear.mma.turned_heads";
            let several = codes > 0 && matches!(rows, Rows::Gather | Rows::Scatter);
            let form =
                Form { rows, linear, steps, at_once, codes, several, single, second, own_row, routed, in_parts, apart };
            let second_format = if name.contains("mixed") { WeightFormat::Fp8 } else { weight::format_of(name) };
            let (bits, latents) = (AddressType::U32, name == "linear.mma.turned_heads");
            let cube = CubeDim::new_2d(LANES as u32, form.planes() as u32);
            let form = form!(
                linear_mma_kernel,
                cube,
                [
                    bits,
                    VECTOR,
                    _,
                    weight::offline_packed(weight::format_of(name)),
                    weight::offline_packed(second_format),
                    _,
                    _,
                    _,
                    _,
                    more::offline(if name.contains("more") { 3 } else { 0 }, form),
                    sizes(),
                    1.0,
                    source(name),
                    beside(latents),
                    pairs(),
                    source(if name.contains("then_norm") { "norm" } else { "" }),
                    _,
                    _,
                    form,
                    elem
                ]
            );
            // The order of Hopper's other kernel.
            Entry::of(kind, name, form).on(move |arch| if in_parts { arch == Arch::Sm90a } else { arch != Arch::Sm75 })
        };
        [
            entry("linear.mma.8", Rows::Dense, false, false, 1, false),
            entry("linear.mma.few", Rows::Dense, false, false, 1, true),
            entry("linear.mma.few_gated", Rows::Dense, true, false, 1, true),
            entry("linear.mma.pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair.v3", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64", Rows::Dense, false, false, 8, false),
            entry("linear.mma.heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.turned_heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.merged_heads", Rows::Heads, false, false, 1, true),
            entry("linear.mma.rope_heads", Rows::Heads, false, false, 1, true),
            entry("linear.mma.single_rope_heads.fp8", Rows::Heads, false, false, 1, true),
            entry("linear.mma.rms_normed", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_rms_normed_pair.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.experts_up", Rows::Gather, true, true, 1, false),
            entry("linear.mma.experts_down", Rows::Scatter, false, false, 1, false),
            entry("linear.mma.token_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up.table", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_down", Rows::TokenScatter, false, false, 1, false),
            entry("linear.mma.8.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.eights.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.eights.fp4", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64.fp8", Rows::Dense, false, false, 8, false),
            entry("linear.mma.64.fp4", Rows::Dense, false, false, 8, false),
            entry("linear.mma.normed_pair.v3.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.heads.fp8", Rows::Heads, false, false, 1, true),
            entry("linear.mma.experts_up.fp8", Rows::Gather, true, true, 1, true),
            entry("linear.mma.experts_up.fp4", Rows::Gather, true, true, 1, true),
            entry("linear.mma.experts_down.fp4", Rows::Scatter, false, false, 1, true),
            entry("linear.mma.token_up.fp8", Rows::TokenGather, true, false, 1, true),
            entry("linear.mma.token_up.fp4", Rows::TokenGather, true, false, 1, true),
            entry("linear.mma.token_down.fp4", Rows::TokenScatter, false, false, 1, true),
            entry("linear.mma.single.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_short.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_short_pair.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_heads.fp8", Rows::Heads, false, false, 1, true),
            entry("linear.mma.single_normed_pair.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_up.fp8", Rows::TokenGather, true, false, 1, true),
            entry("linear.mma.single_mixed_up.fp4", Rows::TokenGather, true, true, 1, true),
            entry("linear.mma.single_down.fp4", Rows::TokenScatter, false, false, 1, true),
            entry("linear.mma.pair_more", Rows::Dense, false, false, 1, true),
            entry("linear.mma.pair_more.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_pair_more.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.single_pair_more_then_norm.fp8", Rows::Dense, false, false, 1, true),
            entry("linear.mma.few.parts", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64.parts", Rows::Dense, false, false, 8, false),
            entry("linear.mma.normed_pair.v3.parts", Rows::Dense, false, false, 1, true),
            entry("linear.mma.token_routed_up.parts", Rows::TokenGather, true, false, 1, false),
        ]
    });
    forms.collect()
}
