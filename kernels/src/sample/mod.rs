//! The next token of each row, drawn from the tokens that the filters leave.
//!
//! Three launches, as the README says: the largest logit of each row and the histogram of the first digit of its keys, by several
//! cubes; then a cube for each row searches for the borders of the filters and the token.

mod choose;
mod chunks;
pub(crate) mod histogram;
pub(crate) mod mass;
mod philox;
pub(crate) mod row;
pub(crate) mod select;

use cubecl::prelude::*;

use self::choose::choose_kernel;
use self::chunks::{histogram_kernel, maxima_kernel};
use self::select::{CHUNK_UNITS, FIRST_BINS, Form};
use crate::common::launch::{address_type, or_dummy, share};

/// 32-bit numbers of a row of [`SampleArgs::rows`].
pub const PARAMS: usize = row::PARAMS;

/// Arguments of [`launch`]; E is `elem`.
pub struct SampleArgs {
    /// E `[batch, width]`.
    pub logits: BufferArg,
    /// u32 `[batch, PARAMS]`, bits of f32 where nothing else is said: temperature (0 is greedy); top-k, a number, 0 for all; top-p
    /// in units of 2^-32, a number, 0 for all; the logarithm of min-p, -1000 for all; repetition penalty; seed, two numbers, the
    /// lower one first; position, a number; the row of `seen`, a number, none where there is no such row.
    pub rows: BufferArg,
    /// u32 `[masks, ceil(width / 32)]`, written: a bit for each token that the penalty is for, the lowest first; the token drawn
    /// is added. Of each row of `rows` another row. Anything if there are no masks.
    pub seen: BufferArg,
    /// i32 `[batch]`, written: the tokens; -1 where no logit is finite or plus infinity.
    pub tokens: BufferArg,
    /// Rows.
    pub batch: usize,
    /// Logits of a row, below 2^31.
    pub width: usize,
    /// Rows of `seen`.
    pub masks: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Rows of a launch at most: a row has 12 KiB of histogram.
const MAX_ROWS: usize = 1024;

/// Writes `tokens`, and notes them in `seen`. Without logits nothing is launched.
pub fn launch(client: &Client, args: SampleArgs) {
    let SampleArgs { batch, width, masks, elem, .. } = args;
    if batch * width == 0 {
        return;
    }
    let vector = select::vector_size(client.properties(), width, elem);
    let chunk = select::chunk_vectors(vector);
    let chunks = (width / vector).div_ceil(chunk);
    let address = address_type(client, &[&args.logits, &args.seen]);
    let args = SampleArgs { seen: or_dummy(client, args.seen, masks), ..args };
    let buffer = |len: usize| {
        // SAFETY: the buffer is made here, of this length.
        unsafe { BufferArg::from_raw_parts(client.empty(len * size_of::<u32>()), len) }
    };
    let most = batch.min(MAX_ROWS);
    let (maxima, histograms) = (buffer(most * chunks * 2), buffer(most * 3 * FIRST_BINS));
    let shape = Shape { vector, vectors: width / vector, chunk, chunks, words: width.div_ceil(32), address };
    for first_row in (0..batch).step_by(MAX_ROWS) {
        let rows = Rows { first: first_row, count: (batch - first_row).min(MAX_ROWS) };
        launch_rows(client, &args, [&maxima, &histograms], rows, &shape);
    }
}

/// Some rows, one after the other.
struct Rows {
    first: usize,
    count: usize,
}

/// How rows are read.
struct Shape {
    /// Numbers that a unit loads at once.
    vector: usize,
    /// Vectors of a row, and of a part of it.
    vectors: usize,
    chunk: usize,
    /// Parts of a row.
    chunks: usize,
    /// Words of a row of tokens seen.
    words: usize,
    address: AddressType,
}

/// The three launches of some rows.
fn launch_rows(client: &Client, args: &SampleArgs, [maxima, histograms]: [&BufferArg; 2], rows: Rows, shape: &Shape) {
    let (one, masks, elem) = (one(args.width), args.masks, args.elem);
    let &Shape { vector, vectors, chunk, chunks, words, address } = shape;
    let cubes = |count| cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_single());
    let chunk_dim = CubeDim::new_1d(CHUNK_UNITS as u32);
    maxima_kernel::launch(
        client,
        cubes(rows.count * chunks),
        chunk_dim,
        address,
        vector,
        share(&args.logits),
        share(&args.rows),
        share(&args.seen),
        share(maxima),
        share(histograms),
        rows.first,
        rows.count,
        vectors,
        chunks,
        masks,
        words,
        chunk,
        elem,
    );
    histogram_kernel::launch(
        client,
        cubes(rows.count * chunks),
        chunk_dim,
        address,
        vector,
        share(&args.logits),
        share(&args.rows),
        share(&args.seen),
        share(maxima),
        share(histograms),
        rows.first,
        rows.count,
        vectors,
        chunks,
        masks,
        words,
        one,
        chunk,
        elem,
    );
    let form = Form::choose(client.properties(), args.width);
    choose_kernel::launch(
        client,
        cubes(rows.count),
        CubeDim::new_1d(form.units as u32),
        address,
        vector,
        share(&args.logits),
        share(&args.rows),
        share(&args.seen),
        share(maxima),
        share(histograms),
        share(&args.tokens),
        rows.first,
        rows.count,
        vectors,
        chunks,
        masks,
        words,
        one,
        id_bits(args.width),
        form,
        elem,
    );
}

/// Bits of the ids of so many tokens.
fn id_bits(width: usize) -> u32 {
    width.next_power_of_two().ilog2()
}

/// The upper word of the largest logit's weight: so large that the sum of as many as a row has is below 2^64.
pub(crate) fn one(width: usize) -> f32 {
    (1u32 << (31 - id_bits(width))) as f32
}

/// The vocabulary of DeepSeek-V3, and short rows.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let bits = AddressType::U32;
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = select::vector_size(&device, 129_280, elem);
        let chunk = select::chunk_vectors(vector);
        let dim = CubeDim::new_1d(CHUNK_UNITS as u32);
        let entry = |name: &str, width: usize| {
            let form = Form::choose(&device, width);
            let dim = CubeDim::new_1d(form.units as u32);
            let args =
                form!(choose_kernel, dim, [bits, vector, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1.0, 1, form, elem]);
            Entry::of(kind, name, args)
        };
        [
            Entry::of(
                kind,
                "sample.maxima",
                form!(maxima_kernel, dim, [bits, vector, _, _, _, _, _, 1, 1, 1, 1, 1, 1, chunk, elem]),
            ),
            Entry::of(
                kind,
                "sample.histogram",
                form!(histogram_kernel, dim, [bits, vector, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1.0, chunk, elem]),
            ),
            entry("sample.choose", 129_280),
            entry("sample.choose.short", 1024),
        ]
    });
    forms.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row whose logits are all alike weighs less than 2^64.
    #[test]
    fn weights_of_a_row_fit_into_64_bits() {
        for width in [1, 2, 3, 63, 64, 65, 129_280, 1 << 20, i32::MAX as usize] {
            let one = one(width) as u128;
            assert!(one >= 1 && (one << 32) * width as u128 <= 1 << 63, "{width}");
            assert!(1 << id_bits(width) >= width, "{width}");
        }
    }
}
