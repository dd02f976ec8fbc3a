//! The weighted sum over the experts of each token, with what shared experts computed.

use cubecl::prelude::*;

use crate::common::launch::{address_type, dummy, io_vector_size, is_row};

/// Units of a cube: few, so that a single token has several cubes.
const UNITS: u32 = 64;

/// Arguments of [`launch`]; E is `elem`.
pub struct CombineArgs {
    /// What is summed.
    pub outputs: ExpertOutputs,
    /// E `[tokens, width]`, written.
    pub out: BufferArg,
    /// Tokens.
    pub tokens: usize,
    /// Channels.
    pub width: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// What the experts of each token computed.
pub struct ExpertOutputs {
    /// E `[tokens * top_k, width]`: what each pair's expert computed.
    pub rows: BufferArg,
    /// i32 `[tokens, top_k]`: the expert of each pair; of one that there is not, nothing is read.
    pub indices: BufferArg,
    /// f32 `[tokens, top_k]`.
    pub weights: BufferArg,
    /// What is added.
    pub shared: SharedRows,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts.
    pub experts: usize,
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
pub(crate) enum Place {
    None,
    Apart,
    Behind,
}

impl SharedRows {
    /// As arguments of a kernel.
    pub(crate) fn bind(self, client: &Client) -> (BufferArg, Place) {
        match self {
            Self::None => (dummy(client), Place::None),
            Self::Apart(rows) => (rows, Place::Apart),
            Self::Behind => (dummy(client), Place::Behind),
        }
    }
}

/// Writes `out`. Without elements nothing is launched.
pub fn launch(client: &Client, args: CombineArgs) {
    let CombineArgs { outputs, out, tokens, width, elem } = args;
    if tokens * width == 0 {
        return;
    }
    let vector = io_vector_size(client.properties(), &[width], elem.size());
    let vectors = tokens * (width / vector);
    let cube = CubeDim::new_1d(UNITS);
    let (shared, place) = outputs.shared.bind(client);
    combine_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, vectors, cube),
        cube,
        address_type(client, &[&outputs.rows]),
        vector,
        outputs.rows,
        outputs.indices,
        outputs.weights,
        shared,
        out,
        vectors,
        width / vector,
        outputs.experts,
        outputs.top_k,
        place,
        elem,
    );
}

/// A unit has a vector of a token.
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
        let token = TokenExperts::read(indices, weights, at / width, experts, top_k);
        out[at] = token.sum(rows, shared, at % width, width, vectors, place);
    }
}

/// The experts of a token. All loads of a kind stand before they are used, so that none waits for another.
#[derive(CubeType)]
pub(crate) struct TokenExperts {
    token: usize,
    weights: Sequence<f32>,
    /// Whether there are such experts.
    known: Sequence<bool>,
    #[cube(comptime)]
    top_k: usize,
}

#[cube]
impl TokenExperts {
    pub(crate) fn read(
        indices: &[i32],
        weights: &[f32],
        token: usize,
        experts: usize,
        #[comptime] top_k: usize,
    ) -> TokenExperts {
        let mut factors = Sequence::<f32>::new();
        let mut known = Sequence::<bool>::new();
        #[unroll]
        for i in 0..top_k {
            let pair = token * top_k + i;
            factors.push(weights[pair]);
            known.push(is_row(indices[pair], experts));
        }
        TokenExperts { token, weights: factors, known, top_k }
    }

    /// A vector of the weighted sum, in the order of the token's experts, shared ones last. There are `width` of them, and
    /// `vectors` of all tokens.
    pub(crate) fn sum<E: Float, N: Size>(
        &self,
        rows: &[Vector<E, N>],
        shared: &[Vector<E, N>],
        column: usize,
        width: usize,
        vectors: usize,
        #[comptime] place: Place,
    ) -> Vector<E, N> {
        let (top_k, at) = (comptime!(self.top_k), self.token * width + column);
        let mut values = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for i in 0..top_k {
            let mut value = Vector::<f32, N>::new(0.0f32);
            if self.known[i] {
                value = Vector::cast_from(rows[(self.token * top_k + i) * width + column]);
            }
            values.push(value);
        }
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..top_k {
            if self.known[i] {
                sum += values[i] * Vector::new(self.weights[i]);
            }
        }
        if comptime!(place == Place::Apart) {
            sum += Vector::<f32, N>::cast_from(shared[at]);
        } else if comptime!(place == Place::Behind) {
            sum += Vector::<f32, N>::cast_from(rows[vectors * top_k + at]);
        }
        Vector::cast_from(sum)
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
