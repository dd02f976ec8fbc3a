//! Weights as FP8 and FP4 codes: what they stand for, by plain loops over their definition, and products with them, against those
//! of the same numbers in memory. Where one kernel reads both, bit for bit.

use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::Path;
use mla_kernels::linear::dequantize::{self, DequantizeArgs};
use mla_kernels::linear::{
    self, BlockLayout, ExpertsOf, FP4_COLUMNS, FP8_COLUMNS, LinearArgs, LinearForm, LinearSizes, PackedArg, PairRows,
    WeightArg, WeightFormat, Work,
};
use rstest::rstest;

use super::experts::{Number, present, values};
use super::support::{arg, for_each_client, read, upload};

/// Matrices of codes, on the host.
struct Packed {
    format: WeightFormat,
    dims: [usize; 3],
    layout: BlockLayout,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Packed {
    /// Every code in turn, but for NaN.
    fn new(format: WeightFormat, dims: [usize; 3], rows_log2: u32) -> Self {
        let [count, rows, columns] = dims;
        let width = if format == WeightFormat::Fp8 { FP8_COLUMNS } else { FP4_COLUMNS };
        let across = columns.div_ceil(width);
        let matrix = rows.div_ceil(1 << rows_log2) * across;
        let number = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 16;
        let code = |i| match format {
            WeightFormat::Fp8 => Some(number(i) as u8).filter(|code| code & 0x7f != 0x7f).unwrap_or(3),
            _ => number(i) as u8 & 15,
        };
        let scale = |i| match format {
            WeightFormat::Fp8 => 0.001 + (number(i) % 1000) as f32 * 1e-5,
            _ => 2f32.powi(-(number(i) as i32 % 7)),
        };
        Self {
            format,
            dims,
            layout: BlockLayout { rows_log2, across, matrix },
            codes: (0..count * rows * columns).map(code).collect(),
            scales: (0..count * matrix).map(scale).collect(),
        }
    }

    fn numbers(&self) -> Vec<f32> {
        let [_, rows, columns] = self.dims;
        let width = if self.format == WeightFormat::Fp8 { FP8_COLUMNS } else { FP4_COLUMNS };
        let number = |(at, &code): (usize, &u8)| {
            let (row, column) = (at / columns, at % columns);
            let block = row / rows * self.layout.matrix + ((row % rows) >> self.layout.rows_log2) * self.layout.across;
            value(self.format, code) * self.scales[block + column / width]
        };
        self.codes.iter().enumerate().map(number).collect()
    }

    fn there(&self, client: &Client) -> WeightArg {
        let words = |bytes: Vec<u8>| {
            let words: Vec<u32> = bytes
                .chunks(4)
                .map(|four| four.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte)))
                .collect();
            arg(&upload(client, &words), words.len())
        };
        let layout = self.layout;
        match self.format {
            WeightFormat::Fp8 => {
                let scales = arg(&upload(client, &self.scales), self.scales.len());
                WeightArg::Fp8(PackedArg { codes: words(self.codes.clone()), scales, layout })
            }
            _ => {
                let codes = words(self.codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect());
                let scales = words(self.scales.iter().map(|scale| (scale.to_bits() >> 23) as u8).collect());
                WeightArg::Fp4(PackedArg { codes, scales, layout })
            }
        }
    }

    /// The numbers on the device, and back.
    fn dequantized<E: Number>(&self, client: &Client) -> Vec<E> {
        let ([count, outputs, inputs], len) = (self.dims, self.codes.len());
        let out = upload(client, &vec![E::of(77.0); len]);
        let (weight, elem) = (self.there(client), E::cube_type());
        let args = DequantizeArgs { weight, out: arg(&out, len), first: 0, count, outputs, inputs, elem };
        dequantize::launch(client, args);
        read(client, out)
    }
}

/// The number of a code, by the definition.
fn value(format: WeightFormat, code: u8) -> f32 {
    let (sign, exponent, fraction, bias) = match format {
        WeightFormat::Fp8 => (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0, 7),
        _ => (code >> 3, i32::from(code >> 1 & 3), f32::from(code & 1) / 2.0, 1),
    };
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

fn is_number<E: Number>(client: &Client, packed: &Packed) {
    if present::<E>(client) {
        let expected: Vec<E> = packed.numbers().into_iter().map(E::of).collect();
        let actual = packed.dequantized::<E>(client);
        let same = |(a, b): (&E, &E)| a.f64().to_bits() == b.f64().to_bits();
        assert!(actual.iter().zip(&expected).all(same), "{:?} of {:?}", packed.dims, packed.format);
    }
}

/// Rows of whole words and of single codes; blocks that end within a row, and matrices within a block.
#[rstest]
fn packed_codes_are_their_numbers(
    #[values((WeightFormat::Fp8, 7), (WeightFormat::Fp8, 4), (WeightFormat::Fp4, 0))] format: (WeightFormat, u32),
    #[values([1, 256, 256], [3, 5, 34], [2, 130, 132], [1, 3, 2])] dims: [usize; 3],
) {
    for_each_client(|client| {
        let packed = Packed::new(format.0, dims, format.1);
        is_number::<f32>(client, &packed);
        is_number::<f16>(client, &packed);
        is_number::<bf16>(client, &packed);
    });
}

/// A launch with weights, and what it writes; `len` numbers.
fn output<E: Number>(client: &Client, weight: WeightArg, work: &dyn Fn() -> Work, sizes: &Sizes) -> Vec<E> {
    let &Sizes { inputs, outputs, form, rows_of_x, rows_of_out, .. } = sizes;
    let x = values::<E>(5, rows_of_x * (inputs + sizes.carried), 1.0);
    let len = rows_of_out * (outputs + sizes.carried);
    let out = upload(client, &vec![E::of(0.0); len]);
    let args = LinearArgs {
        x: arg(&upload(client, &x), x.len()),
        weight,
        out: arg(&out, len),
        work: work(),
        inputs,
        outputs,
        limit: 0.5,
        form,
        x_elem: E::cube_type(),
        elem: E::cube_type(),
        batch_invariant: false,
    };
    linear::launch(client, args);
    read(client, out)
}

/// Of a launch.
struct Sizes {
    inputs: usize,
    outputs: usize,
    carried: usize,
    form: LinearForm,
    rows_of_x: usize,
    rows_of_out: usize,
}

fn same<E: Number>(client: &Client, packed: &Packed, work: &dyn Fn() -> Work, sizes: &Sizes) {
    if !present::<E>(client) {
        return;
    }
    let dense = packed.dequantized::<E>(client);
    let dense = WeightArg::Dense(arg(&upload(client, &dense), dense.len()));
    let expected = output::<E>(client, dense, work, sizes);
    let actual = output::<E>(client, packed.there(client), work, sizes);
    let elems = [E::cube_type(); 2];
    let problem =
        LinearSizes::dense([sizes.rows_of_x, sizes.inputs, sizes.outputs], sizes.form, elems, WeightFormat::Dense);
    // Others than the plain kernel add in another order.
    let allowed = match linear::choose(client, &problem).path {
        Path::Plain => 0.0,
        _ => 4.0 * E::ROUNDING * expected.iter().fold(0.0, |most: f64, value| most.max(value.f64().abs())),
    };
    for (place, (a, b)) in actual.iter().zip(&expected).enumerate() {
        let off = (a.f64() - b.f64()).abs();
        assert!(off <= allowed, "{:?}, {:?}, number {place}: off by {off:e}", packed.dims, packed.format);
    }
}

/// All ways in which rows find their matrix, with everything that a launch does beside products.
#[rstest]
fn packed_products_are_those_of_their_numbers(
    #[values((WeightFormat::Fp8, 7), (WeightFormat::Fp8, 3), (WeightFormat::Fp4, 0))] format: (WeightFormat, u32),
    #[values([256, 48], [132, 7], [34, 130])] widths: [usize; 2],
    #[values(1, 5)] rows: usize,
) {
    let [inputs, outputs] = widths;
    let plain = LinearForm::default();
    let gated = LinearForm { gated: true, limited: true };
    for_each_client(|client| {
        type Case = ([usize; 3], Box<dyn Fn() -> Work>, Sizes);
        let mut cases: Vec<Case> = Vec::new();
        for form in [plain, gated] {
            let halves = if form.gated { 2 } else { 1 };
            let sizes = Sizes { inputs, outputs, carried: 0, form, rows_of_x: rows, rows_of_out: rows };
            let work = move || Work::Dense { rows, others: Vec::new() };
            cases.push(([1, halves * outputs, inputs], Box::new(work), sizes));
        }
        let heads = Sizes { inputs, outputs, carried: 2, form: plain, rows_of_x: 3 * rows, rows_of_out: 3 * rows };
        let matrix_stride = inputs * outputs;
        let work = move || Work::Heads { rows, heads: 3, carried: 2, matrix_stride };
        cases.push(([3, outputs, inputs], Box::new(work), heads));
        let experts = upload(client, &[2i32, 0, 7]);
        let token = move || Work::Token {
            experts_of: ExpertsOf::Listed(arg(&experts, 3)),
            pairs: 3,
            experts: 4,
            rows: PairRows::Gather { top_k: 3 },
            shared: None,
        };
        let sizes = Sizes { inputs, outputs, carried: 0, form: gated, rows_of_x: 1, rows_of_out: 3 };
        cases.push(([4, 2 * outputs, inputs], Box::new(token), sizes));
        for (dims, work, sizes) in cases {
            let packed = Packed::new(format.0, dims, format.1);
            same::<f32>(client, &packed, &*work, &sizes);
            same::<f16>(client, &packed, &*work, &sizes);
            same::<bf16>(client, &packed, &*work, &sizes);
        }
    });
}
