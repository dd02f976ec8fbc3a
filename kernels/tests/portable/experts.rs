//! Mixture of experts: order, products and sum, against plain loops in f64.

use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::experts_mlp::combine::{self, CombineArgs, ExpertOutputs, SharedRows};
use mla_kernels::experts_mlp::sort::{self, SortArgs, TILE, max_tiles};
use mla_kernels::linear::{
    self, LinearArgs, LinearForm, LinearSizes, PairRows, WeightArg, WeightFormat, Work, tile_tokens,
};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, upload};

/// Sorts the pairs: the order, and the tiles that are not empty.
fn sorted(client: &Client, experts_of: &[i32], experts: usize, tile: usize) -> (Vec<i32>, Vec<[i32; TILE]>) {
    let pairs = experts_of.len();
    let count = max_tiles(pairs, experts, tile);
    let (order, tiles) = (upload(client, &vec![-1i32; pairs]), client.empty(4 * TILE * count));
    let args = SortArgs {
        experts_of: arg(&upload(client, experts_of), pairs),
        order: arg(&order, pairs),
        tiles: arg(&tiles, TILE * count),
        pairs,
        experts,
        tile,
    };
    sort::launch(client, args);
    let tiles = read::<i32>(client, tiles);
    let used = tiles.chunks_exact(TILE).map(|t| [t[0], t[1], t[2], t[3], t[4]]).filter(|t| t[2] != 0).collect();
    (read::<i32>(client, order), used)
}

/// Tiles of eight, and those of which an expert's have about the same size: multiples of 32, but for the last one.
#[rstest]
fn experts_sort(
    #[values(1, 6, 255, 256, 257, 1000)] pairs: usize,
    #[values(1, 64, 300)] experts: usize,
    #[values(8, 128)] tile: usize,
) {
    for_each_client(|client| {
        // Some experts that there are not.
        let experts_of: Vec<i32> = (0..pairs).map(|p| (p * p * 7 + p / 3) as i32 % (experts as i32 + 2) - 1).collect();
        let valid = |pair: &i32| (0..experts as i32).contains(&experts_of[*pair as usize]);
        let mut expected: Vec<i32> = (0..pairs as i32).filter(valid).collect();
        expected.sort_by_key(|&pair| experts_of[pair as usize]);
        let mut tiles = Vec::new();
        let mut first = 0;
        for group in expected.chunk_by(|&a, &b| experts_of[a as usize] == experts_of[b as usize]) {
            let even = group.len().div_ceil(group.len().div_ceil(tile)).next_multiple_of(32);
            let first_tile = tiles.len() as i32;
            for part in group.chunks(tile.min(even)) {
                let (expert, count) = (experts_of[part[0] as usize], part.len() as i32);
                tiles.push([expert, first, count, first_tile, group.len() as i32]);
                first += count;
            }
        }
        let (order, actual) = sorted(client, &experts_of, experts, tile);
        assert_eq!(order[..expected.len()], expected);
        assert_eq!(actual, tiles);
    });
}

/// An element type of the kernels.
pub trait Number: CubeElement + Scalar + Copy {
    fn of(value: f32) -> Self;
    fn f64(self) -> f64;
    /// What rounding the output costs, relatively.
    const ROUNDING: f64;
}

macro_rules! number {
    ($type:ty, $of:expr, $to:expr, $rounding:expr) => {
        impl Number for $type {
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn f64(self) -> f64 {
                $to(self)
            }
            const ROUNDING: f64 = $rounding;
        }
    };
}
number!(f32, |x| x, f64::from, 1e-6);
number!(f16, f16::from_f32, |x: f16| f64::from(x.to_f32()), 4.9e-4);
number!(bf16, bf16::from_f32, |x: bf16| f64::from(x.to_f32()), 3.91e-3);

pub fn values<E: Number>(seed: u32, n: usize, factor: f32) -> Vec<E> {
    random(seed, n).into_iter().map(|x| E::of(x * factor)).collect()
}

pub fn present<E: Number>(client: &Client) -> bool {
    E::supported_uses(client).contains(TypeUsage::Buffer)
}

/// The product of a row with a row of weights, and the sum of the absolute products.
pub fn dot<E: Number>(x: &[E], w: &[E]) -> (f64, f64) {
    let products = x.iter().zip(w).map(|(a, b)| a.f64() * b.f64());
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

pub fn silu(gate: f64) -> f64 {
    gate / (1.0 + (-gate).exp())
}

/// A row of x for each token and head, with more channels than the product takes, and matrices that are `matrix` numbers apart.
fn products<E: Number>(
    client: &Client,
    work: Work,
    [rows, heads, inputs, outputs, carried]: [usize; 5],
    matrix: usize,
) {
    if !present::<E>(client) {
        return;
    }
    let row = inputs + carried;
    let (x, w) = (values::<E>(1, rows * heads * row, 1.0), values::<E>(2, heads * matrix, 1.0));
    let len = rows * heads * (outputs + carried);
    // What lies behind the last row is not written.
    let out = upload(client, &vec![E::of(77.0); len + outputs]);
    let args = LinearArgs {
        x: arg(&upload(client, &x), x.len()),
        weight: WeightArg::Dense(arg(&upload(client, &w), w.len())),
        out: arg(&out, len + outputs),
        work,
        inputs,
        outputs,
        limit: 0.0,
        form: LinearForm::default(),
        x_elem: E::cube_type(),
        elem: E::cube_type(),
        batch_invariant: false,
    };
    linear::launch(client, args);
    let actual = read::<E>(client, out);
    for (number, (x, actual)) in x.chunks(row).zip(actual.chunks(outputs + carried)).enumerate() {
        let (x, rest) = x.split_at(inputs);
        for (o, w) in w[number % heads * matrix..][..outputs * inputs].chunks(inputs).enumerate() {
            let (expected, size) = dot(x, w);
            let error = (actual[o].f64() - expected).abs();
            assert!(error <= E::ROUNDING * expected.abs() + 1e-6 * size, "row {number}, output {o}: {error:e}");
        }
        assert!(rest.iter().zip(&actual[outputs..]).all(|(a, b)| a.f64() == b.f64()), "row {number}");
    }
    assert!(actual[len..].iter().all(|value| value.f64() == 77.0));
}

#[rstest]
fn experts_dense_linear(
    #[values(1, 3, 8, 9, 33, 65)] rows: usize,
    #[values([64, 16], [288, 40], [33, 7], [1024, 3], [1408, 24], [64, 515])] widths: [usize; 2],
) {
    let [inputs, outputs] = widths;
    for_each_client(|client| {
        let (sizes, matrix) = ([rows, 1, inputs, outputs, 0], outputs * inputs);
        products::<f32>(client, Work::Dense { rows, others: Vec::new() }, sizes, matrix);
        products::<f16>(client, Work::Dense { rows, others: Vec::new() }, sizes, matrix);
        products::<bf16>(client, Work::Dense { rows, others: Vec::new() }, sizes, matrix);
    });
}

/// The absorbed projections of the attention, and odd sizes; with matrices that matrix instructions cannot load.
#[rstest]
fn experts_linear_by_head(
    #[values([1, 16, 128, 48, 64], [9, 3, 64, 24, 0], [3, 5, 33, 7, 2], [17, 2, 96, 40, 3])] sizes: [usize; 5],
    #[values(0, 64, 3)] between: usize,
) {
    let [rows, heads, inputs, outputs, carried] = sizes;
    let matrix = outputs * inputs + between;
    let work = || Work::Heads { rows, heads, carried, matrix_stride: matrix };
    for_each_client(|client| {
        products::<f32>(client, work(), sizes, matrix);
        products::<f16>(client, work(), sizes, matrix);
        products::<bf16>(client, work(), sizes, matrix);
    });
}

/// All of it: sorted pairs, gated products, products back in the order of the pairs, and the weighted sum, if `limited` with
/// what shared experts computed.
fn experts_mlp<E: Number>(client: &Client, [tokens, experts, top_k]: [usize; 3], limited: bool) {
    const HIDDEN: usize = 96;
    const WIDTH: usize = 64;
    const LIMIT: f32 = 0.75;
    if !present::<E>(client) {
        return;
    }
    let pairs = tokens * top_k;
    let x = values::<E>(1, tokens * HIDDEN, 1.0);
    let gate_up = values::<E>(2, experts * 2 * WIDTH * HIDDEN, 0.3);
    let down = values::<E>(3, experts * HIDDEN * WIDTH, 0.3);
    let weights = random(4, pairs);
    let shared = values::<E>(5, tokens * HIDDEN, 1.0);
    // Different experts for each token; the third token has one that there is not.
    let mut indices: Vec<i32> = (0..pairs).map(|p| ((p / top_k * 5 + p % top_k * 3) % experts) as i32).collect();
    if tokens > 2 {
        indices[2 * top_k] = experts as i32;
    }
    let elem = E::cube_type();
    let bytes = elem.size();
    let upload_pairs = || arg(&upload(client, &indices), pairs);
    let (order, middle) = (client.empty(4 * pairs), client.empty(bytes * pairs * WIDTH));
    // Rows that were not written must not be read.
    let rows = upload(client, &vec![E::of(f32::NAN); pairs * HIDDEN]);
    let out = client.empty(bytes * tokens * HIDDEN);
    let sizes = |inputs: usize| {
        let gated = LinearForm { gated: true, limited };
        let (outputs, form) = if inputs == HIDDEN { (WIDTH, gated) } else { (HIDDEN, LinearForm::default()) };
        LinearSizes::experts([pairs, experts, inputs, outputs], form, elem, WeightFormat::Dense, false)
    };
    for inputs in [HIDDEN, WIDTH] {
        let tile = tile_tokens(client, &sizes(inputs));
        let count = TILE * max_tiles(pairs, experts, tile);
        let tiles = client.empty(4 * count);
        let (order_arg, tiles_arg) = (arg(&order, pairs), arg(&tiles, count));
        let args = SortArgs { experts_of: upload_pairs(), order: order_arg, tiles: tiles_arg, pairs, experts, tile };
        sort::launch(client, args);
        let up = inputs == HIDDEN;
        let work = Work::Experts {
            order: arg(&order, pairs),
            tiles: arg(&tiles, count),
            pairs,
            experts,
            rows: if up { PairRows::Gather { top_k } } else { PairRows::Scatter },
        };
        let weight = if up { &gate_up } else { &down };
        let args = LinearArgs {
            x: if up { arg(&upload(client, &x), x.len()) } else { arg(&middle, pairs * WIDTH) },
            weight: WeightArg::Dense(arg(&upload(client, weight), weight.len())),
            out: if up { arg(&middle, pairs * WIDTH) } else { arg(&rows, pairs * HIDDEN) },
            work,
            inputs,
            outputs: if up { WIDTH } else { HIDDEN },
            limit: LIMIT,
            form: LinearForm { gated: up, limited: up && limited },
            x_elem: elem,
            elem,
            batch_invariant: false,
        };
        linear::launch(client, args);
    }
    let outputs = ExpertOutputs {
        rows: arg(&rows, pairs * HIDDEN),
        indices: upload_pairs(),
        weights: arg(&upload(client, &weights), pairs),
        shared: if limited { SharedRows::Apart(arg(&upload(client, &shared), shared.len())) } else { SharedRows::None },
        top_k,
        experts,
    };
    let out_arg = arg(&out, tokens * HIDDEN);
    combine::launch(client, CombineArgs { outputs, out: out_arg, tokens, width: HIDDEN, elem });
    let actual = read::<E>(client, out);
    let limit = if limited { f64::from(LIMIT) } else { f64::INFINITY };
    for (token, x) in x.chunks(HIDDEN).enumerate() {
        let mut expected = vec![0.0f64; HIDDEN];
        let mut size = 1e-3f64;
        if limited {
            expected = shared[token * HIDDEN..][..HIDDEN].iter().map(|value| value.f64()).collect();
            size = 1.0;
        }
        for pair in token * top_k..(token + 1) * top_k {
            let expert = indices[pair] as usize;
            if expert >= experts {
                continue;
            }
            let gate_up = &gate_up[expert * 2 * WIDTH * HIDDEN..][..2 * WIDTH * HIDDEN];
            let product = |row: usize| dot(x, &gate_up[row * HIDDEN..][..HIDDEN]).0;
            let h: Vec<f64> = (0..WIDTH)
                .map(|i| silu(product(i).min(limit)) * product(WIDTH + i).clamp(-limit, limit))
                .map(|h| E::of(h as f32).f64())
                .collect();
            for (channel, sum) in expected.iter_mut().enumerate() {
                let row = &down[(expert * HIDDEN + channel) * WIDTH..][..WIDTH];
                let y: f64 = row.iter().zip(&h).map(|(w, h)| w.f64() * h).sum();
                *sum += y * f64::from(weights[pair]);
                size = size.max(y.abs());
            }
        }
        // Three roundings to the dtype: of the activations, of each expert's output and of the sum.
        let allowed = 3.0 * E::ROUNDING * size * top_k as f64 + 1e-5 * size;
        for (channel, expected) in expected.iter().enumerate() {
            let actual = actual[token * HIDDEN + channel].f64();
            assert!((actual - expected).abs() <= allowed, "token {token}, {channel}: {actual}, expected {expected}");
        }
    }
}

#[rstest]
#[case::decode([1, 16, 3])]
#[case::few([5, 16, 4])]
#[case::more_than_a_tile([70, 4, 2])]
#[case::one_expert([20, 1, 1])]
fn experts_mlp_of_tokens(#[case] sizes: [usize; 3], #[values(false, true)] limited: bool) {
    for_each_client(|client| {
        experts_mlp::<f32>(client, sizes, limited);
        experts_mlp::<f16>(client, sizes, limited);
        experts_mlp::<bf16>(client, sizes, limited);
    });
}
