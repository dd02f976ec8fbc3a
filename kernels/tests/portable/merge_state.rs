//! All forms of merging against sums in f64. Empty parts hold NaN, and buffers to be written hold a value that no
//! result has.

use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::merge_state::{
    MergeStateArgs, MergeStateIntoArgs, MergeStatesArgs, launch_merge_state, launch_merge_state_into,
    launch_merge_states,
};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, skip, upload};

/// An element type of the kernels.
pub trait Elem: CubeElement + Scalar + Copy {
    /// Rounding a number of magnitude 1 or less to this type and back, and for f32 what the device's `exp` is off by.
    const TOLERANCE: f64;
    fn of(value: f32) -> Self;
    fn value(self) -> f64;
}

impl Elem for f32 {
    const TOLERANCE: f64 = 1e-5;
    fn of(value: f32) -> Self {
        value
    }
    fn value(self) -> f64 {
        f64::from(self)
    }
}

impl Elem for f16 {
    const TOLERANCE: f64 = 6e-4;
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn value(self) -> f64 {
        self.to_f64()
    }
}

impl Elem for bf16 {
    const TOLERANCE: f64 = 5e-3;
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn value(self) -> f64 {
        self.to_f64()
    }
}

/// Whether a device computes with this type; says so where it does not.
pub fn supported<E: Elem>(client: &Client) -> bool {
    let uses = E::supported_uses(client);
    let supported = uses.contains(TypeUsage::Conversion) && uses.contains(TypeUsage::Buffer);
    if !supported {
        skip(format_args!("this device has no {}", E::type_name()));
    }
    supported
}

/// Parts of a merge: `lses`, and for each `width` values.
pub struct Parts<E> {
    pub outs: Vec<E>,
    pub lses: Vec<f32>,
    width: usize,
}

impl<E: Elem> Parts<E> {
    /// Random states, some of them empty, alternately marked with -inf and +inf, and others of very different weight.
    pub fn random(seed: u32, count: usize, width: usize) -> Self {
        let mut outs: Vec<E> = random(seed, count * width).into_iter().map(E::of).collect();
        let kinds = random(seed + 1, count);
        let mut lses = random(seed + 2, count);
        for (part, (lse, kind)) in lses.iter_mut().zip(kinds).enumerate() {
            *lse *= match kind {
                0.0..0.3 => 100.0,
                0.3.. => 1e4,
                _ => 3.0,
            };
            if kind < -0.4 {
                *lse = if part % 2 == 0 { f32::NEG_INFINITY } else { f32::INFINITY };
                outs[part * width..][..width].fill(E::of(f32::NAN));
            }
        }
        Self { outs, lses, width }
    }

    fn out(&self, part: usize) -> &[E] {
        &self.outs[part * self.width..][..self.width]
    }

    /// The parts of these numbers merged in f64.
    pub fn merged(&self, parts: impl Iterator<Item = usize>) -> (Vec<f64>, f64) {
        let present: Vec<usize> = parts.filter(|&part| self.lses[part].is_finite()).collect();
        let highest = present.iter().map(|&part| f64::from(self.lses[part])).fold(f64::NEG_INFINITY, f64::max);
        let weight = |part: usize| (f64::from(self.lses[part]) - highest).exp();
        let sum: f64 = present.iter().map(|&part| weight(part)).sum();
        let mut out = vec![0.0; self.width];
        for &part in &present {
            for (total, value) in out.iter_mut().zip(self.out(part)) {
                *total += weight(part) / sum * value.value();
            }
        }
        (out, if present.is_empty() { f64::NEG_INFINITY } else { highest + sum.ln() })
    }
}

/// Compares the rows of a result with what `expected` gives for each.
#[track_caller]
pub fn check<E: Elem>(out: &[E], lse: &[f32], width: usize, expected: impl Fn(usize) -> (Vec<f64>, f64)) {
    for (row, &lse) in lse.iter().enumerate() {
        let (wanted_out, wanted_lse) = expected(row);
        let close = (f64::from(lse) - wanted_lse).abs() <= 1e-5 * wanted_lse.abs().max(1.0);
        assert!(close || f64::from(lse) == wanted_lse, "lse of row {row}: {lse}, not {wanted_lse}");
        for (column, (wanted, value)) in wanted_out.iter().zip(&out[row * width..]).enumerate() {
            let value = value.value();
            assert!((value - wanted).abs() <= E::TOLERANCE, "out[{row}, {column}]: {value}, not {wanted}");
        }
    }
}

/// What buffers to be written hold before.
pub const UNWRITTEN: f32 = 77.0;

/// Two buffers for a result of `rows` rows.
pub fn results<E: Elem>(client: &Client, rows: usize, width: usize) -> [cubecl::server::Handle; 2] {
    [upload(client, &vec![E::of(UNWRITTEN); rows * width]), upload(client, &vec![UNWRITTEN; rows])]
}

fn merge_two<E: Elem>(client: &Client, rows: usize, width: usize) {
    if !supported::<E>(client) {
        return;
    }
    // The parts of row `r` are `r` and `rows + r`.
    let parts = Parts::<E>::random(7, 2 * rows, width);
    let (out_a, out_b) = parts.outs.split_at(rows * width);
    let (lse_a, lse_b) = parts.lses.split_at(rows);
    let [out, lse] = results::<E>(client, rows, width);
    launch_merge_state(
        client,
        MergeStateArgs {
            out_a: arg(&upload(client, out_a), rows * width),
            lse_a: arg(&upload(client, lse_a), rows),
            out_b: arg(&upload(client, out_b), rows * width),
            lse_b: arg(&upload(client, lse_b), rows),
            out: arg(&out, rows * width),
            lse: arg(&lse, rows),
            rows,
            width,
            elem: E::cube_type(),
        },
    );
    check::<E>(&read(client, out), &read(client, lse), width, |row| parts.merged([row, rows + row].into_iter()));
}

/// Widths with every vector size from 1 to that of 16 bytes, below and above what a row of units covers.
#[rstest]
#[case(1, 1)]
#[case(7, 3)]
#[case(130, 6)]
#[case(65, 20)]
#[case(33, 128)]
#[case(17, 192)]
#[case(9, 512)]
#[case(3, 577)]
#[case(5, 1032)]
fn two_states(#[case] rows: usize, #[case] width: usize) {
    for_each_client(|client| {
        merge_two::<f32>(client, rows, width);
        merge_two::<f16>(client, rows, width);
        merge_two::<bf16>(client, rows, width);
    });
}

/// Every pairing of an ordinary lse, both marks of an empty part, and one that underflows beside the ordinary one.
#[test]
fn every_pairing() {
    let kinds = [0.5, f32::NEG_INFINITY, f32::INFINITY, -300.0, 1e30];
    let pairs: Vec<[f32; 2]> = kinds.iter().flat_map(|&a| kinds.map(|b| [a, b])).collect();
    let (rows, width) = (pairs.len(), 4);
    let lses: Vec<f32> = (0..2).flat_map(|part| pairs.iter().map(move |pair| pair[part])).collect();
    let value = |part: usize| if lses[part].is_finite() { 0.25 + part as f32 / 256.0 } else { f32::NAN };
    let outs: Vec<f32> = (0..2 * rows).flat_map(|part| [value(part); 4]).collect();
    let parts = Parts { outs, lses: lses.clone(), width };
    for_each_client(|client| {
        let [out, lse] = results::<f32>(client, rows, width);
        launch_merge_state(
            client,
            MergeStateArgs {
                out_a: arg(&upload(client, &parts.outs[..rows * width]), rows * width),
                lse_a: arg(&upload(client, &lses[..rows]), rows),
                out_b: arg(&upload(client, &parts.outs[rows * width..]), rows * width),
                lse_b: arg(&upload(client, &lses[rows..]), rows),
                out: arg(&out, rows * width),
                lse: arg(&lse, rows),
                rows,
                width,
                elem: f32::cube_type(),
            },
        );
        let lse: Vec<f32> = read(client, lse);
        check::<f32>(&read(client, out), &lse, width, |row| parts.merged([row, rows + row].into_iter()));
        assert_eq!(lse.iter().filter(|&&lse| lse == f32::NEG_INFINITY).count(), 4);
    });
}

fn merge_many<E: Elem>(client: &Client, [tokens, count, heads, width]: [usize; 4]) {
    if !supported::<E>(client) {
        return;
    }
    let states = tokens * count * heads;
    let rows = tokens * heads;
    let parts = Parts::<E>::random(11, states, width);
    let [out, lse] = results::<E>(client, rows, width);
    launch_merge_states(
        client,
        MergeStatesArgs {
            outs: arg(&upload(client, &parts.outs), states * width),
            lses: arg(&upload(client, &parts.lses), states),
            out: arg(&out, rows * width),
            lse: arg(&lse, rows),
            tokens,
            parts: count,
            heads,
            width,
            elem: E::cube_type(),
        },
    );
    check::<E>(&read(client, out), &read(client, lse), width, |row| {
        parts.merged((0..count).map(|part| (row / heads * count + part) * heads + row % heads))
    });
}

#[rstest]
#[case([3, 1, 2, 8])]
#[case([5, 2, 3, 12])]
#[case([2, 7, 63, 64])]
#[case([1, 130, 1, 512])]
#[case([9, 4, 5, 33])]
#[case([4, 0, 3, 16])]
#[case([2, 3, 5, 0])]
fn many_states(#[case] shape: [usize; 4]) {
    for_each_client(|client| {
        merge_many::<f32>(client, shape);
        merge_many::<f16>(client, shape);
        merge_many::<bf16>(client, shape);
    });
}

fn accumulate<E: Elem>(client: &Client, rows: usize, width: usize) {
    if !supported::<E>(client) {
        return;
    }
    const STEPS: usize = 5;
    let parts = Parts::<E>::random(17, STEPS * rows, width);
    // The empty state, whose out may hold anything.
    let acc_out = upload(client, &vec![f32::NAN; rows * width]);
    let acc_lse = upload(client, &vec![f32::NEG_INFINITY; rows]);
    for step in 0..STEPS {
        launch_merge_state_into(
            client,
            MergeStateIntoArgs {
                acc_out: arg(&acc_out, rows * width),
                acc_lse: arg(&acc_lse, rows),
                out: arg(&upload(client, &parts.outs[step * rows * width..][..rows * width]), rows * width),
                lse: arg(&upload(client, &parts.lses[step * rows..][..rows]), rows),
                rows,
                width,
                elem: E::cube_type(),
            },
        );
    }
    // In f32 whatever the type of the parts is: compared as f32, with nothing rounded to `E` in between.
    check::<f32>(&read(client, acc_out), &read(client, acc_lse), width, |row| {
        parts.merged((0..STEPS).map(|step| step * rows + row))
    });
}

#[rstest]
#[case(1, 1)]
#[case(131, 7)]
#[case(40, 96)]
#[case(13, 512)]
#[case(6, 1032)]
fn accumulator(#[case] rows: usize, #[case] width: usize) {
    for_each_client(|client| {
        accumulate::<f32>(client, rows, width);
        accumulate::<f16>(client, rows, width);
        accumulate::<bf16>(client, rows, width);
    });
}

/// Sizes of 0 launch nothing, and so leave results as they are.
#[test]
fn nothing_to_merge() {
    for_each_client(|client| {
        let buffer = upload(client, &[UNWRITTEN; 4]);
        let empty = || arg(&buffer, 0);
        let elem = f32::cube_type();
        launch_merge_states(
            client,
            MergeStatesArgs {
                outs: empty(),
                lses: empty(),
                out: empty(),
                lse: empty(),
                tokens: 0,
                parts: 2,
                heads: 2,
                width: 2,
                elem,
            },
        );
        assert_eq!(read::<f32>(client, buffer), [UNWRITTEN; 4]);
    });
}
