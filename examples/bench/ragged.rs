//! `ragged_attention`: packed causal batches, with the head sizes of DeepSeek-V3 and of other models.

use std::path::Path;
use std::{fs, io};

use burn::tensor::Tensor;
use burn_mla::ops::{RaggedAttentionArgs, RaggedAttentionOptions, explain_path, ragged_attention};
use serde_json::{Value, json};

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};
use crate::varlen;

/// A row.
#[derive(Debug, Clone, Copy)]
struct Row {
    batch: Batch,
    heads: usize,
    kv_heads: usize,
    dqk: usize,
    dv: usize,
    /// Channels of the keys that all heads share, beside those of a projection that keys and values are views of.
    shared: usize,
    causal: bool,
}

/// The sequences of a row.
#[derive(Debug, Clone, Copy)]
enum Batch {
    /// So many, of as many tokens each.
    Fixed(usize, usize),
    /// So many, of 128 to 1024 tokens, in no order: [`varlen::ragged`].
    Varied(usize),
}

/// Heads of queries and keys, dqk, dv, shared. The peers have the same rows: `peers/bench_ragged.py`.
const MODELS: [[usize; 5]; 7] = [
    [128, 128, 192, 128, 64],
    [128, 128, 192, 128, 0],
    [128, 128, 128, 128, 0],
    [16, 16, 192, 128, 64],
    [16, 16, 192, 128, 0],
    [16, 16, 128, 128, 0],
    [32, 8, 128, 128, 0],
];
const BATCHES: [Batch; 5] =
    [Batch::Fixed(1, 4096), Batch::Fixed(1, 16384), Batch::Fixed(1, 32768), Batch::Fixed(16, 2048), Batch::Varied(64)];

/// The section.
pub fn run(bench: &mut Bench) {
    let row = |[heads, kv_heads, dqk, dv, shared]: [usize; 5], batch, causal| Row {
        batch,
        heads,
        kv_heads,
        dqk,
        dv,
        shared,
        causal,
    };
    let mut full: Vec<Row> =
        MODELS.iter().flat_map(|&model| BATCHES.iter().map(move |&batch| row(model, batch, true))).collect();
    let long = Batch::Fixed(1, 16384);
    full.push(row(MODELS[0], Batch::Fixed(1, 1024), true));
    full.push(row(MODELS[0], Batch::Fixed(16, 1024), true));
    full.push(row([16, 16, 64, 64, 0], long, true));
    full.push(row(MODELS[4], long, false));
    full.push(row(MODELS[5], long, false));
    let small = [
        row([4, 2, 128, 128, 0], Batch::Fixed(2, 70), true),
        row([3, 3, 192, 128, 64], Batch::Fixed(2, 70), true),
        row([2, 1, 128, 128, 0], Batch::Varied(2), true),
    ];
    for row in bench.pick(&full, 4, &small) {
        let Row { heads, kv_heads, dqk, dv, .. } = row;
        let (lens, longest) = (row.batch.lengths(), row.batch.longest());
        let name = format!("ragged {} x {longest}, heads {heads} / {kv_heads}, {dqk} / {dv}", lens.len());
        bench.case(&name, |bench| case(bench, row));
    }
}

impl Batch {
    fn lengths(self) -> Vec<usize> {
        match self {
            Self::Fixed(b, len) => vec![len; b],
            Self::Varied(b) => varlen::ragged(b),
        }
    }

    fn longest(self) -> usize {
        self.lengths().into_iter().max().unwrap_or(0)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fixed(..) => "fixed",
            Self::Varied(_) => "128..1024",
        }
    }
}

impl Row {
    fn volume(&self, bytes: usize) -> Volume {
        let Self { heads, kv_heads, dqk, dv, shared, causal, .. } = *self;
        let lens = self.batch.lengths();
        let squares: f64 = lens.iter().map(|&len| (len * len) as f64).sum();
        // A causal query sees half of the keys, on average.
        let pairs = if causal { squares / 2.0 } else { squares };
        let flops = 2.0 * heads as f64 * pairs * (dqk + dv) as f64;
        let rows = heads * (dqk + dv) + kv_heads * (dqk - shared + dv) + shared;
        let tokens: usize = lens.iter().sum();
        Volume { flops: Some(flops), bytes: Some((tokens * rows * bytes) as f64) }
    }

    fn fields(&self) -> [(&'static str, Value); 10] {
        let lens = self.batch.lengths();
        let mean = lens.iter().sum::<usize>() as f64 / lens.len() as f64;
        [
            ("b", json!(lens.len())),
            ("s_q", json!(self.batch.longest())),
            ("lens", json!(self.batch.name())),
            ("mean_len", rounded(mean, 2)),
            ("h_q", json!(self.heads)),
            ("h_kv", json!(self.kv_heads)),
            ("dqk", json!(self.dqk)),
            ("dv", json!(self.dv)),
            ("shared", json!(self.shared)),
            ("causal", json!(self.causal)),
        ]
    }
}

fn case(bench: &mut Bench, row: Row) -> Result<(), String> {
    let softmax_scale = (row.dqk as f32).powf(-0.5);
    let lens = row.batch.lengths();
    let (args, options) = (
        arguments(bench, row, &lens),
        RaggedAttentionOptions { softmax_scale, softcap: None, causal: row.causal, window: None },
    );
    let path = explain_path(&args.problem(), &bench.device).path.to_string();
    let call = || ragged_attention(args.clone(), &options).map_err(|error| error.to_string());
    let (out, lse) = call()?;
    if let Some(folder) = &bench.save {
        save(folder, row, &args, &out).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let difference = check(bench, &args, &options, lens[lens.len() - 1], (out, lse))?;
    let times = bench.timer.measure(call)?;
    let extra = [("path", json!(path)), ("rel_rms", rounded(difference, 8))];
    bench.report.row("ragged", &row.fields(), &times, row.volume(bench.dtype.size()), &extra);
    Ok(())
}

fn arguments(bench: &Bench, row: Row, lens: &[usize]) -> RaggedAttentionArgs {
    let Row { heads, kv_heads, dqk, dv, shared, .. } = row;
    let ends = lens.iter().scan(0_usize, |end, &len| {
        *end += len;
        Some(*end)
    });
    let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).map(|end| end as i32).collect();
    let (device, tokens) = (&bench.device, lens.iter().sum::<usize>());
    let cu_seqlens = data::ints(cu_seqlens, [lens.len() + 1], device);
    let rows = |heads: usize, width| data::normal([tokens, heads, width], bench.dtype, device);
    let (k, k_pe, v) = match shared {
        0 => (rows(kv_heads, dqk), None, rows(kv_heads, dv)),
        shared => {
            let kv = rows(kv_heads, dqk - shared + dv);
            let k_pe = data::normal([tokens, shared], bench.dtype, device);
            (kv.clone().narrow(2, 0, dqk - shared), Some(k_pe), kv.narrow(2, dqk - shared, dv))
        }
    };
    RaggedAttentionArgs { q: rows(heads, dqk), k, k_pe, v, cu_seqlens, cu_seqlens_k: None }
}

/// Writes q, k of whole heads, v and out as they are in memory, and what they are, as JSON; nothing where q, of which no
/// other tensor has more, is large.
fn save(folder: &Path, row: Row, args: &RaggedAttentionArgs, out: &Tensor<3>) -> io::Result<()> {
    const MOST_BYTES: usize = 40 << 20;
    let ([tokens, _, _], [_, kv_heads, _]) = (args.q.dims(), args.k.dims());
    if args.q.shape().num_elements() * args.q.dtype().size() > MOST_BYTES {
        return Ok(());
    }
    let k = match &args.k_pe {
        Some(k_pe) => Tensor::cat(vec![args.k.clone(), k_pe.clone().unsqueeze_dim(1).repeat_dim(1, kv_heads)], 2),
        None => args.k.clone(),
    };
    let tensors = [("q", args.q.clone()), ("k", k), ("v", args.v.clone()), ("out", out.clone())];
    fs::create_dir_all(folder)?;
    let Row { heads, dqk, dv, shared, .. } = row;
    let name = format!("ragged-{tokens}-{heads}-{kv_heads}-{dqk}-{dv}-{shared}");
    let mut about = json!({ "lens": row.batch.lengths(), "causal": row.causal, "dtype": format!("{:?}", out.dtype()) });
    for (part, tensor) in tensors {
        about[part] = json!(tensor.dims());
        fs::write(folder.join(format!("{name}.{part}")), tensor.into_data().as_bytes())?;
    }
    fs::write(folder.join(format!("{name}.json")), about.to_string())
}

/// The last token of the last sequence, which sees all of it, in the first and the last head.
fn check(
    bench: &Bench,
    args: &RaggedAttentionArgs,
    options: &RaggedAttentionOptions,
    len: usize,
    (out, lse): (Tensor<3>, Tensor<2>),
) -> Result<f64, String> {
    let ([tokens, heads, dv], [_, kv_heads, _]) = (out.dims(), args.k.dims());
    let mut difference = data::Difference::default();
    for h in [0, heads - 1] {
        let rows = |tensor: &Tensor<3>, h: usize, n: usize| tensor.clone().slice([tokens - n..tokens, h..h + 1]);
        let kv_head = h / (heads / kv_heads);
        let mut k = rows(&args.k, kv_head, len);
        if let Some(k_pe) = &args.k_pe {
            let k_pe = k_pe.clone().slice(tokens - len..tokens).unsqueeze_dim(1);
            k = Tensor::cat(vec![k, k_pe], 2);
        }
        let (q, k) = (data::floats(rows(&args.q, h, 1))?, data::floats(k)?);
        let v = data::floats(rows(&args.v, kv_head, len))?;
        let keys = data::Rows { keys: &k, values: &v, stride: dv, width: dv };
        let expected = data::attend(&q, &keys, f64::from(options.softmax_scale));
        let lse = data::floats(lse.clone().slice([tokens - 1..tokens, h..h + 1]))?;
        difference.add(&data::floats(rows(&out, h, 1))?, lse[0], &expected);
    }
    difference.check(bench.dtype)
}
