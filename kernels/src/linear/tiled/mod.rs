//! Products of many rows with the matrix instructions of a warp, for f16 and bf16, dense or grouped by head or expert: tiles of tokens
//! and weights in shared memory, which asynchronous copies fill ahead. The README beside this file has the schedule.
//!
//! The order of a sum is that of the channels, whatever the tile and the other rows are. It is not the order of `mma`, which a few
//! rows get: batch-invariant products are not computed here.

mod copies;
mod epilogue;
mod products;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use self::copies::Copies;
use self::epilogue::Output;
use self::products::{Operands, sums};
use crate::linear::grid::{Grid, Rows, Sizes, Tile};
use crate::linear::weight::WeightRows;
use crate::linear::{Division, LinearForm, LinearSizes, Products, Work, mma};
use crate::ptx::copy::{commit_copies, wait_for_copies};
use crate::ptx::shared_address;
use crate::ptx::wgmma::Elem;

/// Units of a plane. The matrix instructions are defined for this number.
const LANES: usize = 32;
/// Planes side by side in the tokens of a tile, and in its rows of the weights.
const TOKEN_PLANES: usize = 2;
const WEIGHT_PLANES: usize = 2;
const UNITS: usize = LANES * TOKEN_PLANES * WEIGHT_PLANES;

/// The matrix instruction: 16 tokens, 8 rows of the weights, 16 channels.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Tokens of a tile.
pub(super) const TOKENS: [usize; 2] = [128, 64];
/// Rows of the weights that a cube multiplies. Of a gated output half of them are of the gate.
const WEIGHT_ROWS: usize = 128;
/// Rows of gate or up that lie side by side: a unit then has both of an output.
const INTERLEAVED: usize = N;
/// Channels of a block, and its vectors in a row.
const CHANNELS: usize = 32;
const VECTORS: usize = CHANNELS / VECTOR;
const ROW_BYTES: u32 = (CHANNELS * 2) as u32;
/// Blocks in shared memory: one is multiplied, the others are on their way. Two cubes of a multiprocessor have room, also where it has
/// 100 KiB.
const STAGES: usize = 3;
/// Tokens whose tiles meet all weights before the next tiles do: these and the weights that are in use stay in the L2 cache.
const TOGETHER: usize = 2048;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    tokens: usize,
    rows: Rows,
    linear: LinearForm,
    /// bf16, otherwise f16.
    bf16: bool,
    /// Whether the last block of channels is full.
    whole: bool,
}

impl Form {
    fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Outputs of a cube.
    fn outputs(self) -> usize {
        outputs(self.linear)
    }

    /// Tokens of a plane, in steps of the matrix instruction, and rows of the weights likewise.
    fn token_steps(self) -> usize {
        self.tokens / TOKEN_PLANES / M
    }

    fn weight_steps(self) -> usize {
        WEIGHT_ROWS / WEIGHT_PLANES / N
    }

    /// Vectors of a stage: rows of tokens, and of weights.
    fn stage(self) -> usize {
        (self.tokens + WEIGHT_ROWS) * VECTORS
    }
}

/// Outputs of a cube.
pub(super) fn outputs(linear: LinearForm) -> usize {
    if linear.gated { WEIGHT_ROWS / 2 } else { WEIGHT_ROWS }
}

/// Whether the device has what the kernel needs, and rows and matrices lie so that 16 bytes can be copied at once.
pub(super) fn supported(client: &Client, sizes: &LinearSizes) -> bool {
    let &LinearSizes { inputs, outputs, carried, matrix_stride, elems, format, .. } = sizes;
    let ([x_elem, elem], division) = (elems, sizes.division);
    let vectors = [inputs, outputs, carried, matrix_stride].into_iter().all(|len| len.is_multiple_of(VECTOR));
    let bytes = STAGES * (TOKENS[0] + WEIGHT_ROWS) * CHANNELS * elem.size();
    format.is_dense()
        && mma::has_instruction(client, elem)
        && client.features().copy_async
        && bytes <= client.properties().hardware.max_shared_memory_size
        && x_elem == elem
        && !matches!(division, Division::Several | Division::Token)
        && vectors
        && inputs * outputs > 0
}

/// Writes the output of at least one row.
pub(super) fn launch(
    client: &Client,
    products: Products,
    work: Work,
    linear: LinearForm,
    tokens: usize,
    address: AddressType,
    elem: ElemType,
) {
    let grid = Grid::new(client, work, tokens, (products.outputs, products.weight.format()));
    let (bf16, whole) = (elem == ElemType::Float(FloatKind::BF16), products.inputs.is_multiple_of(CHANNELS));
    let form = Form { tokens, rows: grid.rows, linear, bf16, whole };
    let cubes = grid.cubes(products.outputs, form.outputs());
    let sizes = grid.sizes(&products, VECTOR);
    // SAFETY: the buffers have the sizes that the arguments state, and tiles and order are those of the sort. Rows past a tile's end
    // are its last one again, channels past the end are not read, and neither they nor outputs past the end are written.
    unsafe {
        linear_tiled_kernel::launch_unchecked(
            client,
            cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
            CubeDim::new_1d(UNITS as u32),
            address,
            VECTOR,
            products.x,
            products.weight.rows(client),
            grid.order,
            grid.tiles,
            products.out,
            sizes,
            products.limit,
            form,
            elem,
        );
    }
}

/// A cube has a tile of tokens and a group of outputs.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn linear_tiled_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    weight: WeightRows<E, V>,
    order: &[i32],
    tiles: &[i32],
    out: &mut [Vector<E, V>],
    sizes: Sizes,
    limit: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut ring = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(STAGES * form.stage()), 128usize);
    let (number, group) = tile_of_cube(&sizes, form);
    let tile = Tile::read(tiles, number, sizes.max_tiles, &sizes, form.tokens, form.rows);
    if tile.count > 0 {
        let ring_at = shared_address(&ring);
        let copies = Copies::new(order, &tile, &sizes, group, form);
        let blocks = sizes.vectors.div_ceil(VECTORS);
        #[unroll]
        for ahead in 0..comptime!(STAGES - 1) {
            if ahead < blocks {
                copies.start(x, &weight, &mut ring, ahead, form);
            }
            commit_copies();
        }
        let def = MmaDefinition::<E, E, f32>::new(M, N, K);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let operands = Operands::new(form);
        let mut acc = sums::<NC>(form);
        let mut block = 0usize;
        while block < blocks {
            // Of this unit's copies, those for the block have arrived; after that, all units'.
            wait_for_copies(comptime!(STAGES as u32 - 2));
            sync_cube();
            // All planes are done with the block before, whose stage is filled anew.
            if block + comptime!(STAGES - 1) < blocks {
                copies.start(x, &weight, &mut ring, block + comptime!(STAGES - 1), form);
            }
            // None where there are no blocks: groups are counted.
            commit_copies();
            let stage = (block % STAGES) as u32 * comptime!((form.stage() * VECTOR * 2) as u32);
            operands.multiply::<E, NC>(&def, ring_at + stage, &mut acc, form);
            block += 1;
        }
        // The ring becomes the staging of the output.
        sync_cube();
        let output = Output { staging_at: ring_at, group, limit };
        output.stage::<NC>(&acc, &operands, form);
        sync_cube();
        output.store::<E, V>(order, out, &tile, &sizes, form);
        if comptime!(form.rows == Rows::Heads) {
            output.carry::<E, V>(x, out, &tile, &sizes);
        }
    }
}

/// The number of the cube's tile and of its group of outputs: those that run at the same time share tokens and weights. Past the
/// last cube that is needed, a tile that there is not.
#[cube]
fn tile_of_cube(sizes: &Sizes, #[comptime] form: Form) -> (usize, usize) {
    let together = comptime!(TOGETHER / form.tokens);
    let groups = sizes.outputs.div_ceil(form.outputs());
    let mut number = sizes.max_tiles;
    let mut group = 0usize.runtime();
    if CUBE_POS < sizes.max_tiles * groups {
        let first = CUBE_POS / (together * groups) * together;
        let place = CUBE_POS % (together * groups);
        let height = min(together, sizes.max_tiles - first);
        number = first + place % height;
        group = place / height;
    }
    (number, group)
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::grid::offline_sizes;
    use crate::linear::weight;
    use crate::offline::{Arch, Entry, form};
    let entry = |name: &str, kind, rows, gated, tokens| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let linear = LinearForm { gated, limited: gated };
        let form = Form { tokens, rows, linear, bf16, whole: !name.ends_with("rest") };
        let bits = if name.ends_with("64_bits") { AddressType::U64 } else { AddressType::U32 };
        let cube = CubeDim::new_1d(UNITS as u32);
        let kernel = form!(
            linear_tiled_kernel,
            cube,
            [bits, VECTOR, _, weight::offline(), _, _, _, offline_sizes(), 1.0, form, elem]
        );
        // Hopper has a kernel of its own.
        let entry = Entry::of(kind, &format!("linear.tiled.{name}"), kernel).unchecked();
        entry.on(|arch| arch != Arch::Sm75 && arch != Arch::Sm90a)
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("128", bf16, Rows::Dense, false, 128),
        entry("64", f16, Rows::Dense, false, 64),
        entry("gated.128", bf16, Rows::Dense, true, 128),
        entry("experts_up.128", bf16, Rows::Gather, true, 128),
        entry("experts_up.64", bf16, Rows::Gather, true, 64),
        entry("experts_up.128.64_bits", bf16, Rows::Gather, true, 128),
        entry("experts_down.128", bf16, Rows::Scatter, false, 128),
        entry("experts_down.64", bf16, Rows::Scatter, false, 64),
        entry("heads.128", bf16, Rows::Heads, false, 128),
        entry("heads.128.rest", f16, Rows::Heads, false, 128),
    ]
}
