//! The weighted sum over the experts of each token, with what shared experts computed.

use cubecl::prelude::*;

use crate::portable::launch::{address_type, dummy, io_vector_size, is_row};

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
    /// What is added.
    pub shared: SharedRows,
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

/// What shared experts computed.
pub enum SharedRows {
    /// There are none.
    None,
    /// E `[tokens, width]`.
    Apart(BufferArg),
    /// A row for each token, behind those of all pairs.
    Behind,
}

/// As [`SharedRows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    None,
    Apart,
    Behind,
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
    let (shared, place) = match args.shared {
        SharedRows::None => (dummy(client), Place::None),
        SharedRows::Apart(rows) => (rows, Place::Apart),
        SharedRows::Behind => (dummy(client), Place::Behind),
    };
    combine_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, vectors, cube),
        cube,
        address_type(client, &[&args.rows]),
        vector,
        args.rows,
        args.indices,
        args.weights,
        shared,
        args.out,
        vectors,
        width / vector,
        experts,
        top_k,
        place,
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
    #[comptime] place: Place,
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
        if comptime!(place == Place::Apart) {
            sum += Vector::<f32, N>::cast_from(shared[at]);
        } else if comptime!(place == Place::Behind) {
            sum += Vector::<f32, N>::cast_from(rows[vectors * top_k + at]);
        }
        out[at] = Vector::cast_from(sum);
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let cube = CubeDim::new_1d(UNITS);
    let places = [("combine_experts", Place::Apart), ("combine_experts.token", Place::Behind)];
    let entry = |kind, (name, place)| {
        let elem = ElemType::Float(kind);
        let vector = 16 / elem.size();
        let form = form!(combine_kernel, cube, [AddressType::U32, vector, _, _, _, _, _, 1, 1, 1, 6, place, elem]);
        Entry::of(kind, name, form)
    };
    let forms = FLOATS.into_iter().flat_map(|kind| places.map(|place| entry(kind, place)));
    forms.collect()
}
