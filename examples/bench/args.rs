//! The command line.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_mla::model::SamplingParams;
use burn_mla::ops::{DeviceName, Path};
use clap::{Parser, ValueEnum};

use crate::codes::BlocksArg;
use crate::common::{DTypeArg, KvCacheArg, WeightsArg};
use crate::models::RandomWeights;

/// Time the operations on a device.
#[derive(Debug, Parser)]
pub struct Args {
    /// Sections to run, separated by commas; all if absent.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SECTIONS")]
    pub only: Vec<Section>,
    /// cuda, cuda:N, wgpu or flex (the CPU). Whole models are divided among several, with commas between them; operations run on
    /// the first.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "cuda")]
    device: Vec<DeviceName>,
    /// Of queries, caches and states.
    #[arg(long, value_enum, default_value_t = DTypeArg::Bf16)]
    pub dtype: DTypeArg,
    /// The kernel of `mla_decode`: sm100, sm90, portable-mma, portable or reference; the fastest that the device has if absent.
    #[arg(long)]
    pub path: Option<Path>,
    /// The model of the sections e2e, prefill and ttft, with random weights: a config.json in any folder, as those of
    /// examples/bench/models. Without --only it is timed by e2e.
    #[arg(long, value_name = "CONFIG_JSON", conflicts_with = "smoke")]
    pub random_weights: Option<PathBuf>,
    /// Whole models in e2e and prefill: batch-invariant.
    #[arg(long)]
    pub deterministic: bool,
    /// Whole models in e2e: captured steps alone. Launched ones of several GPUs take long.
    #[arg(long)]
    pub captured: bool,
    /// Tokens of the prompts of e2e. With 264 all steps of a batch are one captured step.
    #[arg(long, value_name = "N", default_value_t = 264, value_parser = clap::value_parser!(u16).range(1..))]
    pub context: u16,
    /// Requests that generate at a time in e2e, 1, 8 and 64 if absent; rows of linear, tokens of experts.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=16384))]
    pub batches: Vec<usize>,
    /// Whole models in e2e: a sampling temperature; 0 is greedy.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// The same: sample from the most probable tokens whose probabilities sum to P.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// The same: sample from the K most probable tokens.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Seed of the weights of whole models.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub weights_seed: u64,
    /// Weights of the models of e2e and prefill: in FP8 and FP4 as they are published (`stored`), or `dense`; if absent as the
    /// configuration says, which those of this program leave open.
    #[arg(long, value_enum)]
    pub weights: Option<WeightsArg>,
    /// Weights of `linear` and `experts`: in blocks of such codes.
    #[arg(long, value_enum)]
    pub blocks: Option<BlocksArg>,
    /// KV cache of the models of e2e and prefill; of decode and sparse the rows.
    #[arg(long, value_enum)]
    pub kv_cache: Option<KvCacheArg>,
    /// Layers of that model; all if absent.
    #[arg(long, value_name = "N", requires = "random_weights")]
    pub layers: Option<usize>,
    /// A few shapes of each section.
    #[arg(long, conflicts_with = "smoke")]
    pub quick: bool,
    /// Tiny shapes, which only show that the program works on a device.
    #[arg(long)]
    pub smoke: bool,
    /// Instead of the sections: measure whether the tables of kernels choose the fastest for `linear`, `experts_mlp` and
    /// `mla_decode`, on both sides of each size at which the choice changes. Fails where a choice takes over 10 % longer than the
    /// best.
    #[arg(long, conflicts_with_all = ["only", "path"])]
    pub check_tables: bool,
    /// Of operations only shapes whose description has this text in it, such as `b: 64, s_q: 1, h_q: 16`.
    #[arg(long, value_name = "TEXT")]
    pub shape: Option<String>,
    /// The experts of `experts` are drawn for each token, in place of all equally often.
    #[arg(long)]
    pub random_experts: bool,
    /// Timed calls per case; slow cases have fewer.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    pub iters: u16,
    /// Start no case after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub limit: Option<u64>,
    /// Write everything to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write inputs and results of the smaller shapes of `ragged_attention` to this folder, for peers/bench_ragged.py --same.
    #[arg(long, value_name = "FOLDER")]
    pub save: Option<PathBuf>,
    /// Be the fresh process of the section ttft.
    #[arg(long, hide = true)]
    pub ttft_child: bool,
    /// Time nothing; set the rows of a file of this program against the best of those of other programs.
    #[arg(long, num_args = 2, value_names = ["OURS", "PEERS"])]
    pub compare: Option<Vec<PathBuf>>,
}

/// A group of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Section {
    /// What the device can do: copy, read, matmul, an empty kernel; at the start and at the end.
    Ceilings,
    /// `mla_decode`, and `mla_plan` for the shapes of one length.
    Dense,
    /// `merge_state`.
    Merge,
    /// `page_table` and `kv_indices`.
    #[value(name = "page_table")]
    PageTable,
    /// `write_latent`.
    Write,
    /// `ragged_attention`.
    Ragged,
    /// `sparse_mla`, also over lists of different lengths, and `lightning_index`.
    Sparse,
    /// `vertical_slash_attention`, and `vertical_slash_index`.
    #[value(name = "vertical_slash")]
    VerticalSlash,
    /// `norm_rope` and `compress_kv`.
    Compression,
    /// Tokens per second of whole models with random weights, with and without graphs; only by name: V2-Lite needs 32 GB, 6
    /// layers of V3 77 GB.
    #[value(name = "e2e")]
    EndToEnd,
    /// The same of 6 layers of V4-Flash, 80 GB; only by name.
    #[value(name = "e2e-v4")]
    EndToEndV4,
    /// Prompt tokens per second of whole models with random weights: V2-Lite, and 4 layers of V3; only by name.
    Prefill,
    /// The same of 6 layers of V4-Flash; only by name.
    PrefillV4,
    /// Time to first token of a prompt and of another one that begins with the same 8192 tokens, of 6 layers of V4-Flash; only by
    /// name.
    Prefix,
    /// Prompts of up to 500,000 tokens and decode steps behind them, of 6 layers of V4-Flash; only by name.
    Long,
    /// Inter-token latency (p50, p99) of requests that generate while prompts arrive, by the tokens of prompts in a step beside them, of
    /// V2-Lite and 4 layers of V3; only by name.
    Mixed,
    /// Time to first token of a prompt of 2048 tokens in a fresh process, of V2-Lite; only by name.
    Ttft,
    /// Kernels compiled for requests of random lengths after a warm-up, of V2-Lite; only by name.
    Shapes,
    /// `linear` with weights of V2-Lite, V3 and V4-Flash; only by name, as it compiles and tunes many shapes.
    Linear,
    /// `experts_mlp` with the experts of a layer of V2-Lite, V3 and V4-Flash; only by name: V3's are 23 GB.
    Experts,
    /// `PeerRank::all_reduce` over the first two GPUs, and NCCL's; only by name.
    #[value(name = "all_reduce")]
    AllReduce,
}

impl Args {
    /// The devices, opened.
    pub fn devices(&self) -> Result<Vec<Device>, String> {
        self.device.iter().map(|name| name.open().map_err(|error| error.to_string())).collect()
    }

    /// Their names.
    pub fn device_names(&self) -> String {
        self.device.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    /// How whole models choose tokens.
    ///
    /// # Errors
    /// A number out of its range.
    pub fn sampling(&self) -> Result<SamplingParams, String> {
        let &Self { temperature, top_k, top_p, .. } = self;
        let sampling = SamplingParams { temperature, top_k, top_p, ..SamplingParams::greedy() };
        sampling.validate().map_err(|error| error.to_string()).map(|()| sampling)
    }

    /// The model that was asked for.
    pub fn random(&self) -> Option<RandomWeights> {
        self.random_weights.clone().map(|config| RandomWeights { config, layers: self.layers })
    }
}
