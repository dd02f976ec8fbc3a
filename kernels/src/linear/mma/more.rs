//! Dense matrices beside the first one or two of a launch: cubes of their own, which multiply as those of a launch apart do.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::select::Form;
use super::unit::{inputs_of_unit, multiply_all, rows_of_unit, store, write};
use super::{K, M, N, VECTOR};
use crate::linear::grid::{Part, Sizes, Tile};
use crate::linear::weight::{WeightFormat, WeightRows};
use crate::linear::{LinearSizes, OtherMatrix, select};

/// One of them.
#[derive(CubeType, CubeLaunch)]
pub(super) struct DenseMatrix<E: Float, V: Size> {
    weight: WeightRows<E, V>,
    out: &'static mut [E],
    outputs: usize,
    #[cube(comptime)]
    form: Form,
}

/// What the kernel takes for a matrix beside a first one of this form and these sizes, where there are so many cubes.
pub(super) fn bind<E: Float, V: Size>(
    client: &Client,
    matrix: OtherMatrix,
    (form, cubes): (Form, usize),
    first: &LinearSizes,
) -> DenseMatrixLaunch<E, V> {
    let OtherMatrix { weight, out, outputs } = matrix;
    let matrix_stride = first.form.matrix(first.inputs, outputs);
    let sizes = LinearSizes { outputs, matrix_stride, format: WeightFormat::Dense, ..*first };
    let form = form.of_more(select::in_parts(client, &sizes));
    let form = form.for_cubes(client, first.inputs, cubes, WeightFormat::Dense);
    DenseMatrixLaunch::new(weight.rows(client), out, outputs, form)
}

/// So many, with nothing to launch.
#[cfg(feature = "offline")]
pub(super) fn offline<E: Float, V: Size>(count: usize, form: Form) -> SequenceArg<DenseMatrix<E, V>> {
    let form = Form { at_once: true, ..form.of_more(false) };
    let matrix = |_| DenseMatrixLaunch::new(crate::linear::weight::offline(), crate::offline::buffer(), 1, form);
    (0..count).map(matrix).collect()
}

#[cube]
impl<E: Float, V: Size> DenseMatrix<E, V> {
    /// Its cubes.
    pub fn cubes(&self, sizes: &Sizes) -> usize {
        self.outputs.div_ceil(comptime!(self.form.outputs())) * sizes.max_tiles
    }

    /// Multiplies and writes what its cube number `cube` has. Called by all units of that.
    #[allow(clippy::too_many_arguments)]
    pub fn multiply(
        &mut self,
        x: &[Vector<E, V>],
        order: &[i32],
        tiles: &[i32],
        cube: usize,
        sizes: &Sizes,
        sums: &mut [f32],
        first_out: &mut [E],
        limit: f32,
    ) {
        let form = comptime!(self.form);
        let size!(NC) = MmaDefinition::<E, E, f32>::new(M, N, K).vector_size(MatrixIdent::Accumulator);
        let (vectors, outputs) = (sizes.vectors, self.outputs);
        let part = Part { vectors, outputs, cube, is_second: true.runtime() };
        let groups = outputs.div_ceil(form.outputs());
        let tile = Tile::read(tiles, cube / groups, sizes.max_tiles, sizes, form.tokens(), form.rows);
        let output = cube % groups * form.outputs();
        let (own, other) = rows_of_unit(&tile, &part, output, sizes.matrix_stride, form.chunk(), form);
        let inputs = inputs_of_unit(order, &tile, sizes, form);
        let mut acc = Array::<Vector<f32, NC>>::new(comptime!(2 * form.steps));
        #[unroll]
        for i in 0..comptime!(2 * form.steps) {
            acc[i] = Vector::new(0.0f32);
        }
        let chunks = vectors / comptime!(form.chunk() / VECTOR);
        multiply_all(x, &self.weight, &own, &other, &inputs, chunks, &mut acc, form);
        store(&acc, sums, form);
        sync_cube();
        let lanes = V::value().comptime();
        write(&*sums, order, &tile, &part, output, sizes, first_out, self.out, lanes, limit, form);
    }
}
