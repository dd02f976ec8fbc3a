//! The weighted sum over the experts of each token.

use cubecl::prelude::*;

use crate::portable::launch::{address_type, io_vector_size, is_row};

/// Units of a cube. Every runtime has this many.
const UNITS: u32 = 256;

/// Arguments of [`launch`]; E is `elem`.
pub struct CombineArgs {
    /// E `[tokens * top_k, width]`: what each pair's expert computed.
    pub rows: BufferArg,
    /// i32 `[tokens, top_k]`: the expert of each pair; of one that there is not, nothing is read.
    pub indices: BufferArg,
    /// f32 `[tokens, top_k]`.
    pub weights: BufferArg,
    /// E `[tokens, width]`, written.
    pub out: BufferArg,
    /// Tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts.
    pub experts: usize,
    /// Channels.
    pub width: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `out`. Without elements nothing is launched.
pub fn launch(client: &Client, args: CombineArgs) {
    let CombineArgs { tokens, top_k, experts, width, elem, .. } = args;
    if tokens * width == 0 {
        return;
    }
    let vector = io_vector_size(client.properties(), &[width], elem.size());
    let vectors = tokens * (width / vector);
    let cube = CubeDim::new_1d(UNITS);
    combine_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, vectors, cube),
        cube,
        address_type(client, &[&args.rows]),
        vector,
        args.rows,
        args.indices,
        args.weights,
        args.out,
        vectors,
        width / vector,
        top_k,
        experts,
        elem,
    );
}

/// A unit has a vector of a token. The sum has the order of the token's experts.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn combine_kernel<E: Float, N: Size>(
    rows: &[Vector<E, N>],
    indices: &[i32],
    weights: &[f32],
    out: &mut [Vector<E, N>],
    vectors: usize,
    width: usize,
    top_k: usize,
    experts: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let (token, column) = (at / width, at % width);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for i in 0..top_k {
            let pair = token * top_k + i;
            if is_row(indices[pair], experts) {
                sum += Vector::<f32, N>::cast_from(rows[pair * width + column]) * Vector::new(weights[pair]);
            }
        }
        out[at] = Vector::cast_from(sum);
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let cube = CubeDim::new_1d(UNITS);
    let forms = FLOATS.into_iter().map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = 16 / elem.size();
        let form = form!(combine_kernel, cube, [AddressType::U32, vector, _, _, _, _, 1, 1, 1, 1, elem]);
        Entry::of(kind, "combine_experts", form)
    });
    forms.collect()
}
