//! The numbers that codes and scales stand for, for products of many rows: a scratch that the kernels for dense weights read.

use cubecl::prelude::*;

use super::weight::{WeightArg, WeightRow, WeightRows};
use crate::common::launch::{address_type_of, io_vector_size};

/// Units of a cube.
const UNITS: u32 = 256;

/// Arguments of [`launch`]; E is `elem`.
pub struct DequantizeArgs {
    /// A stack of matrices `[outputs, inputs]`.
    pub weight: WeightArg,
    /// E `[count, outputs, inputs]`, written.
    pub out: BufferArg,
    /// The first matrix that is taken, and how many are.
    pub first: usize,
    /// Matrices.
    pub count: usize,
    /// Rows of a matrix.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `out`. Without elements nothing is launched.
pub fn launch(client: &Client, args: DequantizeArgs) {
    let DequantizeArgs { weight, out, first, count, outputs, inputs, elem } = args;
    let vector = io_vector_size(client.properties(), &[inputs], elem.size());
    let vectors = count * outputs * (inputs / vector);
    if vectors == 0 {
        return;
    }
    let cube = CubeDim::new_1d(UNITS);
    dequantize_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, vectors, cube),
        cube,
        address_type_of(client, weight.elements().max(out.len())),
        vector,
        weight.rows(client),
        out,
        first,
        outputs,
        inputs / vector,
        vectors,
        elem,
    );
}

/// A unit has a vector of a row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn dequantize_kernel<E: Float, V: Size>(
    weight: WeightRows<E, V>,
    out: &mut [Vector<E, V>],
    first: usize,
    outputs: usize,
    vectors: usize,
    count: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let (row, column) = (at / vectors, at % vectors);
        let matrix = first + row / outputs;
        let row = WeightRow::new(matrix, matrix * outputs * vectors, row % outputs, vectors, column);
        out[at] = weight.load(&row, 0usize);
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use super::weight::{WeightFormat, offline_packed};
    use crate::offline::{Entry, FLOATS, form};
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        [("dequantize.fp8", WeightFormat::Fp8), ("dequantize.fp4", WeightFormat::Fp4)].map(|(name, format)| {
            let (cube, bits, vector) = (CubeDim::new_1d(UNITS), AddressType::U32, 16 / elem.size());
            let form = form!(
                dequantize_kernel,
                cube,
                [bits, vector, offline_packed(format), _, 0, 1, 1, 1, ElemType::Float(kind)]
            );
            Entry::of(kind, name, form)
        })
    });
    forms.collect()
}
