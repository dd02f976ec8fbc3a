//! Products of so many rows that they come in tiles, on GPUs that have a kernel for that, against plain loops: rows, channels and
//! outputs that end within a tile, both sizes of tile, numbers that are none.

use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::linear::{self, Choice, LinearArgs, LinearForm, LinearSizes, WeightArg, WeightFormat, Work};
use rstest::rstest;

use super::experts::{Number, dot, present, silu, values};
use super::support::{arg, for_each_client, read, skip, upload};

const LIMIT: f32 = 0.75;

/// Products of rows, or of so many heads of each.
#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    heads: Option<usize>,
    inputs: usize,
    outputs: usize,
    carried: usize,
    /// Elements between the matrices of heads.
    between: usize,
    form: LinearForm,
}

impl Case {
    fn dense([rows, inputs, outputs]: [usize; 3], form: LinearForm) -> Self {
        Self { rows, heads: None, inputs, outputs, carried: 0, between: 0, form }
    }

    /// Rows of a matrix, all heads of them, and elements from one to the next.
    fn matrices(&self) -> [usize; 3] {
        let weight_rows = self.outputs * if self.form.gated { 2 } else { 1 };
        [weight_rows, self.heads.unwrap_or(1), weight_rows * self.inputs + self.between]
    }

    fn choice<E: Number>(&self, client: &Client) -> Choice {
        let (sizes, elems) = ([self.rows, self.inputs, self.outputs], [E::cube_type(); 2]);
        let by_head = |heads| [self.rows, heads, self.inputs, self.outputs, self.carried];
        let dense = LinearSizes::dense(sizes, self.form, elems, WeightFormat::Dense);
        let sizes = self.heads.map_or(dense, |heads| LinearSizes::by_head(by_head(heads), elems, WeightFormat::Dense));
        linear::choose(client, &sizes)
    }

    fn launch<E: Number>(&self, client: &Client, x: &[E], w: &[E]) -> Vec<E> {
        let &Self { rows, inputs, outputs, carried, form, .. } = self;
        let [_, heads, matrix_stride] = self.matrices();
        let len = rows * heads * (outputs + carried);
        // What lies behind the last row is not written.
        let out = upload(client, &vec![E::of(77.0); len + outputs]);
        let args = LinearArgs {
            x: arg(&upload(client, x), x.len()),
            weight: WeightArg::Dense(arg(&upload(client, w), w.len())),
            out: arg(&out, len + outputs),
            work: match self.heads {
                Some(heads) => Work::Heads { rows, heads, carried, matrix_stride },
                None => Work::Dense { rows, others: Vec::new() },
            },
            inputs,
            outputs,
            limit: LIMIT,
            form,
            x_elem: E::cube_type(),
            elem: E::cube_type(),
            batch_invariant: false,
        };
        linear::launch(client, args);
        let mut all = read::<E>(client, out);
        assert!(all.split_off(len).iter().all(|value| value.f64() == 77.0), "written past the end");
        all
    }

    /// An output, and by how much it may be off.
    fn expected<E: Number>(&self, x: &[E], matrix: &[E], output: usize) -> (f64, f64) {
        let product = |row: usize| dot(x, &matrix[row * self.inputs..][..self.inputs]);
        let (gate, size) = product(output);
        if !self.form.gated {
            return (gate, E::ROUNDING * gate.abs() + 1e-6 * size);
        }
        let (up, up_size) = product(self.outputs + output);
        let bound = if self.form.limited { f64::from(LIMIT) } else { f64::INFINITY };
        // These let NaN through, unlike `min`.
        let cut = |value: f64, least: f64| {
            if value > bound {
                bound
            } else if value < least {
                least
            } else {
                value
            }
        };
        let (gate, up) = (cut(gate, f64::NEG_INFINITY), cut(up, -bound));
        let sums = size * (up.abs() + 1e-3) + up_size * (gate.abs() + 1e-3);
        let expected = silu(gate) * up;
        (expected, 2.0 * E::ROUNDING * expected.abs() + 1e-6 * sums)
    }

    fn check<E: Number>(&self, client: &Client) {
        if !present::<E>(client) {
            return;
        }
        if has_tiles(client) {
            let choice = self.choice::<E>(client);
            assert!(choice.to_string().ends_with("tiled"), "{choice}");
        }
        let &Self { rows, inputs, outputs, carried, .. } = self;
        let [_, heads, matrix] = self.matrices();
        let width = inputs + carried;
        let (mut x, mut w) = (values::<E>(1, rows * heads * width, 1.0), values::<E>(2, heads * matrix, 1.0));
        // Rows and outputs that are no numbers are nobody else's business.
        let (bad_row, bad_output) = (rows * heads / 2, outputs / 2);
        x[bad_row * width..][..width].fill(E::of(f32::NAN));
        w[bad_output * inputs..][..inputs].fill(E::of(f32::NAN));
        let actual = self.launch(client, &x, &w);
        for (number, (x, actual)) in x.chunks(width).zip(actual.chunks(outputs + carried)).enumerate() {
            let (x, rest) = x.split_at(inputs);
            for (o, actual) in actual[..outputs].iter().enumerate() {
                let (expected, allowed) = self.expected(x, &w[number % heads * matrix..], o);
                let (actual, is_bad) = (actual.f64(), number == bad_row || number % heads == 0 && o == bad_output);
                assert_eq!(expected.is_finite(), !is_bad, "row {number}, output {o}: {expected}");
                let off = (actual - expected).abs();
                assert!(if is_bad { !actual.is_finite() } else { off <= allowed }, "row {number}, output {o}: {off:e}");
            }
            let copied = |(a, b): (&E, &E)| a.f64() == b.f64() || a.f64().is_nan() && b.f64().is_nan();
            assert!(rest.iter().zip(&actual[outputs..]).all(copied), "row {number}");
        }
    }
}

/// Whether the device has the kernel: NVIDIA GPUs from sm_80 on, but Hopper, which has another one.
fn has_tiles(client: &Client) -> bool {
    let generation = client.properties().identity.fingerprint.strip_prefix("ptx_sm").map(str::parse::<u32>);
    matches!(generation, Some(Ok(version)) if version >= 80 && version != 90)
}

const PLAIN: LinearForm = LinearForm { gated: false, limited: false };
const GATED: LinearForm = LinearForm { gated: true, limited: false };
const LIMITED: LinearForm = LinearForm { gated: true, limited: true };

/// On a GPU with few multiprocessors, such as a simulated one, the last ones of each have the larger tile.
#[rstest]
#[case::a_rest_of_each([65, 72, 136], PLAIN)]
#[case::less_than_a_block([130, 8, 8], PLAIN)]
#[case::several_groups([200, 136, 264], PLAIN)]
#[case::large_tiles([512, 64, 128], PLAIN)]
#[case::large_tiles_and_a_rest([490, 168, 120], PLAIN)]
#[case::gated([130, 72, 72], GATED)]
#[case::gated_within_a_group([70, 40, 8], LIMITED)]
#[case::gated_in_large_tiles([512, 96, 64], LIMITED)]
fn many_rows_dense(#[case] sizes: [usize; 3], #[case] form: LinearForm) {
    for_each_client(|client| {
        Case::dense(sizes, form).check::<bf16>(client);
        Case::dense(sizes, form).check::<f16>(client);
    });
}

/// Rows, heads, inputs, outputs, carried channels.
#[rstest]
#[case([65, 2, 40, 24, 8])]
#[case([70, 3, 128, 136, 0])]
#[case([256, 2, 32, 72, 24])]
fn many_rows_by_head(#[case] sizes: [usize; 5], #[values(0, 8)] between: usize) {
    let [rows, heads, inputs, outputs, carried] = sizes;
    for_each_client(|client| {
        let case = Case { rows, heads: Some(heads), inputs, outputs, carried, between, form: PLAIN };
        case.check::<bf16>(client);
        case.check::<f16>(client);
    });
}

/// A row has the same bits in tiles of either size, beside whatever other rows.
#[rstest]
fn many_rows_are_independent(#[values(PLAIN, GATED)] form: LinearForm) {
    for_each_client(|client| {
        if !has_tiles(client) {
            return skip("no tiles of rows");
        }
        let cases = [512, 100].map(|rows| Case::dense([rows, 104, 64], form));
        let choices = cases.map(|case| case.choice::<bf16>(client));
        let [weight_rows, ..] = cases[0].matrices();
        let (x, w) = (values::<bf16>(3, 512 * 104, 1.0), values::<bf16>(4, weight_rows * 104, 1.0));
        let [all, some] = cases.map(|case| case.launch(client, &x[..case.rows * 104], &w));
        let same = some.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "other bits: {choices:?}");
    });
}
