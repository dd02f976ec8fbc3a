//! The weighted sum over the experts of each token, with what shared experts computed.

use cubecl::prelude::*;

use crate::portable::launch::{address_type, io_vector_size, is_row};

/// Units of a cube: few, so that a single token has several cubes.
const UNITS: u32 = 64;

/// Arguments of [`launch`]; E is `elem`.
pub struct CombineArgs {
    /// E `[tokens * top_k, width]`: what each pair's expert computed.
    pub rows: BufferArg,
    /// i32 `[tokens, top_k]`: the expert of each pair; of one that there is not, nothing is read.
    pub indices: BufferArg,
    /// f32 `[tokens, top_k]`.
    pub weights: BufferArg,
    /// E `[tokens, width]`: what is added, if `is_shared`; otherwise anything but `out`.
    pub shared: BufferArg,
    /// Whether something is added.
    pub is_shared: bool,
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
    let CombineArgs { is_shared, tokens, top_k, experts, width, elem, .. } = args;
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
        args.shared,
        args.out,
        vectors,
        width / vector,
        experts,
        top_k,
        is_shared,
        elem,
    );
}

/// A unit has a vector of a token. The sum has the order of the token's experts, shared ones last.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn combine_kernel<E: Float, N: Size>(
    rows: &[Vector<E, N>],
    indices: &[i32],
    weights: &[f32],
    shared: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    vectors: usize,
    width: usize,
    experts: usize,
    #[comptime] top_k: usize,
    #[comptime] is_shared: bool,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let (token, column) = (at / width, at % width);
        // All loads of a kind before they are used, so that none waits for another.
        let mut factors = Sequence::<f32>::new();
        let mut known = Sequence::<bool>::new();
        #[unroll]
        for i in 0..top_k {
            let pair = token * top_k + i;
            factors.push(weights[pair]);
            known.push(is_row(indices[pair], experts));
        }
        let mut values = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for i in 0..top_k {
            let mut value = Vector::<f32, N>::new(0.0f32);
            if known[i] {
                value = Vector::cast_from(rows[(token * top_k + i) * width + column]);
            }
            values.push(value);
        }
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..top_k {
            if known[i] {
                sum += values[i] * Vector::new(factors[i]);
            }
        }
        if comptime!(is_shared) {
            sum += Vector::<f32, N>::cast_from(shared[at]);
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
        let form = form!(combine_kernel, cube, [AddressType::U32, vector, _, _, _, _, _, 1, 1, 1, 6, true, elem]);
        Entry::of(kind, "combine_experts", form)
    });
    forms.collect()
}
