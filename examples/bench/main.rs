//! Times the operations on one device and writes a row per case.
//!
//!     cargo run --release --features cuda --example bench -- --device cuda --out bench.json
//!     cargo run --release --example bench -- --compare bench.json peers.json
//!
//! The folder `peers` times FlashMLA, FlashInfer and vLLM in the same way; `compare_with_peers.sh` runs both programs
//! and prints the comparison.
//!
//! Before every timed call 256 MiB are written, so that L2 has none of its inputs. A row holds, in microseconds:
//!
//! | field | what |
//! |---|---|
//! | `us` | median of the replays of a graph of one call; of the plain calls where no graph could be captured (`how`) |
//! | `us_min`, `us_p90`, `n` | the least and the 90th percentile of the same runs, and how many there were |
//! | `us_stream` | median of plain calls, with their allocations and launches |
//! | `us_host`, `us_stream_host` | median time that the host took to queue a timed call of `us`, of `us_stream` |
//! | `timing` | `device`: the device's own clock; `system`: the host's clock between two waits for the device |
//! | `tflops`, `gbps` | computed from `us` |
//! | `rel_rms` | how far some of the results are from f64, in root mean square; a wrong result is an error and no row |
//! | `of_copy` | GB/s as a part of those of a copy of memory |
//! | `how`, `graph_error` | `graph`, `stream` or `host` (`us` is the host's time), and why there is no graph |
//!
//! With `timing: device` a time goes from an event before the call to one after it, both on the call's queue, and the
//! host reads them only when all calls are queued. Should the queue run dry within a call, the gap counts. So the flush
//! is queued before the first event, and the host queues the call while the flush runs: where `us_host` is below the
//! ceilings' `flush_us`, `us` has no gap in it, and likewise `us_stream`. `ceilings.*.empty_kernel_us` is what the
//! method reads for a kernel that does nothing; it is not subtracted. wgpu stamps the kernels and waits for them, so
//! there `us_host` says nothing; with `timing: system` launches are in all times.
//!
//! The operations of dense decode are `dense`, to which the plan is given; `dense+schedule`, which makes it; `plan`,
//! `mla_plan` alone; and `plan_host`, the host's time from the call of `mla_plan` on an idle device until the plan is
//! there.
//!
//! Counted as in FlashMLA's tests: dense decode has `b*h_q*s_q*2*(576+512)*mean_len` FLOPs (a causal mask is not
//! subtracted) and moves q, the keys and out; causal ragged attention counts half of its square. Sparse decode has
//! `2*h_q*(d+512)` FLOPs for each key that a query sees, and moves q, each row that any query sees, once, and out; the index
//! reads its keys. `plan`, `plan_host` and `lightning_index` have no check here.
//!
//! `e2e_decode` has no `us`: `tokens_per_s` and `ms_per_step` are by the wall clock, from one generated token to the next, in
//! `steps` with one token of each request, of which `graph_steps` were replayed: with graphs all of them. `weights_gb` are the
//! weights that a step reads, of the routed experts those that so many tokens choose if all are as likely; `gbps` and
//! `of_copy` count them alone.
//!
//! `e2e_prefill`: `b` prompts of `context` random tokens in one step of launched kernels, by the wall clock until their first
//! tokens are on the host. `ms` and `tokens_per_s` are the mean of 8 such batches, `ms_first` is the one before them, which
//! compiles and tunes. `e2e_ttft`: `ms` from the start of a process to the first token of one prompt, `ms_from_device` from an open
//! device, `ms_from_weights` from the last weight; what earlier processes compiled and tuned may lie on disk.
//!
//! `linear` has `2*m*n*k` FLOPs and moves x, the weight and out; `experts` has `6*tokens*top_k*hidden*width` and moves x, out and
//! the weights of the `chosen` experts.

mod ceilings;
// Its model loader serves the other programs.
#[allow(dead_code)]
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod compression;
mod data;
mod decode;
mod end_to_end;
mod experts;
mod first_token;
mod indexing;
mod linear;
mod meta;
mod models;
mod prefill;
mod ragged;
mod report;
mod sparse;
mod timing;
mod varlen;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, FloatDType};
use burn_mla::ops::{DeviceName, Path};
use clap::{Parser, ValueEnum};
use common::{DTypeArg, fail};
use models::{ModelCase, RandomWeights};
use report::Report;
use timing::Timer;

/// Time the operations on a device.
#[derive(Debug, Parser)]
struct Args {
    /// Sections to run, separated by commas; all if absent.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SECTIONS")]
    only: Vec<Section>,
    /// cuda, cuda:N, wgpu or flex (the CPU).
    #[arg(long, default_value_t = DeviceName::Cuda(0))]
    device: DeviceName,
    /// Of queries, caches and states.
    #[arg(long, value_enum, default_value_t = DTypeArg::Bf16)]
    dtype: DTypeArg,
    /// The kernel of `mla_decode`: sm100, sm90, portable-mma, portable or reference; the fastest that the device has if absent.
    #[arg(long)]
    path: Option<Path>,
    /// The model of the sections e2e, prefill and ttft, with random weights: a config.json in any folder, as those of
    /// examples/bench/models. Without --only it is timed by e2e.
    #[arg(long, value_name = "CONFIG_JSON", conflicts_with = "smoke")]
    random_weights: Option<PathBuf>,
    /// Seed of the weights of whole models.
    #[arg(long, value_name = "N", default_value_t = 1)]
    weights_seed: u64,
    /// Layers of that model; all if absent.
    #[arg(long, value_name = "N", requires = "random_weights")]
    layers: Option<usize>,
    /// A few shapes of each section.
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Tiny shapes, which only show that the program works on a device.
    #[arg(long)]
    smoke: bool,
    /// Timed calls per case; slow cases have fewer.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    iters: u16,
    /// Start no case after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Write everything to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Be the fresh process of the section ttft.
    #[arg(long, hide = true)]
    ttft_child: bool,
    /// Time nothing; set the rows of a file of this program against the best of those of other programs.
    #[arg(long, num_args = 2, value_names = ["OURS", "PEERS"])]
    compare: Option<Vec<PathBuf>>,
}

/// A group of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
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
    /// `sparse_mla` and `lightning_index`.
    Sparse,
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
    /// Time to first token of a prompt of 2048 tokens in a fresh process, of V2-Lite; only by name.
    Ttft,
    /// `linear` with weights of V2-Lite, V3 and V4-Flash; only by name, as it compiles and tunes many shapes.
    Linear,
    /// `experts_mlp` with the experts of a layer of V2-Lite, V3 and V4-Flash; only by name: V3's are 23 GB.
    Experts,
}

/// Which shapes of a section to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Full,
    Quick,
    Smoke,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.compare {
        _ if args.ttft_child => first_token::child(&args).map(|()| ExitCode::SUCCESS),
        Some(files) => compare::print(&files[0], &files[1]).map(|()| ExitCode::SUCCESS),
        None => run(&args),
    };
    outcome.unwrap_or_else(fail)
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let device = args.device.open().map_err(|error| error.to_string())?;
    let dtype = DType::from(FloatDType::from(args.dtype));
    if !device.supports_dtype(dtype) {
        return Err(format!("{} does not compute in {dtype:?}; choose another --dtype", args.device));
    }
    let report = Report::create(args.out.clone(), meta::collect(&args.device.to_string(), &device, dtype))?;
    let size = match (args.smoke, args.quick) {
        (true, _) => Size::Smoke,
        (_, true) => Size::Quick,
        _ => Size::Full,
    };
    let mut bench = Bench {
        timer: Timer::new(&device, usize::from(args.iters), size == Size::Smoke),
        end: args.limit.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
        device,
        dtype,
        path: args.path,
        weights_seed: args.weights_seed,
        size,
        report,
        copy_gbps: None,
    };
    bench.sections(&args.only, args.random().as_ref().map(ModelCase::read).transpose()?.as_ref());
    bench.report.finish()
}

impl Args {
    /// The model that was asked for.
    fn random(&self) -> Option<RandomWeights> {
        self.random_weights.clone().map(|config| RandomWeights { config, layers: self.layers })
    }
}

/// What the sections share.
struct Bench {
    device: Device,
    dtype: DType,
    /// What runs `mla_decode`, where that is not left to the operation.
    path: Option<Path>,
    weights_seed: u64,
    size: Size,
    timer: Timer,
    report: Report,
    /// After this no case starts.
    end: Option<Instant>,
    /// What a copy of memory reached, where the ceilings were measured.
    copy_gbps: Option<f64>,
}

impl Bench {
    fn sections(&mut self, only: &[Section], random: Option<&ModelCase>) {
        let wanted = |section| only.is_empty() || only.contains(&section);
        if wanted(Section::Ceilings) {
            ceilings::run(self, "start");
        }
        if wanted(Section::Dense) {
            decode::run(self);
        }
        if wanted(Section::Merge) {
            indexing::merge(self);
        }
        if wanted(Section::PageTable) {
            indexing::page_table(self);
        }
        if wanted(Section::Write) {
            indexing::write(self);
        }
        if wanted(Section::Ragged) {
            ragged::run(self);
        }
        if wanted(Section::Sparse) {
            sparse::run(self);
        }
        if wanted(Section::Compression) {
            compression::run(self);
        }
        self.named_sections(only, random);
        if wanted(Section::Ceilings) {
            ceilings::run(self, "end");
        }
    }

    /// Those that run only by name, or where only the program is tried; `random` is the model that was asked for.
    fn named_sections(&mut self, only: &[Section], random: Option<&ModelCase>) {
        let smoke = self.size == Size::Smoke;
        let wanted = |section| smoke || only.contains(&section);
        let size = self.size;
        let cases = |v3_layers| random.map_or_else(|| models::published(size, v3_layers), |case| vec![case.clone()]);
        if wanted(Section::Linear) {
            linear::run(self);
        }
        if wanted(Section::Experts) {
            experts::run(self);
        }
        let other = [Section::Prefill, Section::Ttft].iter().any(|section| only.contains(section));
        if wanted(Section::EndToEnd) || (random.is_some() && !other) {
            end_to_end::run(self, cases(if size == Size::Quick { 4 } else { 6 }));
        }
        if only.contains(&Section::EndToEndV4) {
            end_to_end::run(self, vec![models::v4_flash()]);
        }
        if wanted(Section::Prefill) {
            prefill::run(self, cases(4));
        }
        if only.contains(&Section::PrefillV4) {
            prefill::run(self, vec![models::v4_flash()]);
        }
        if only.contains(&Section::Ttft) {
            first_token::run(self, &random.cloned().unwrap_or_else(models::v2_lite));
        }
    }

    /// Runs one case. What goes wrong in it, a panic included, is noted, and the next case runs.
    fn case(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Result<(), String>) {
        if self.end.is_some_and(|end| Instant::now() > end) {
            self.report.skip(name);
            return;
        }
        if let Err(error) = caught(|| run(self)) {
            self.report.error(name, &error);
        }
        // Sizes vary from case to case: what one leaves in the pool, the next cannot use.
        self.device.memory_cleanup();
    }

    /// The shapes to run: all, every `step`-th, or the tiny ones.
    fn pick<T: Clone>(&self, full: &[T], step: usize, smoke: &[T]) -> Vec<T> {
        match self.size {
            Size::Full => full.to_vec(),
            Size::Quick => full.iter().step_by(step).cloned().collect(),
            Size::Smoke => smoke.to_vec(),
        }
    }
}

/// A panic as an error: Burn's operations have no other way to refuse.
fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panicked: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")))
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// All sections on the CPU: every operation has a row, and results that are wrong would be errors.
    #[test]
    fn smoke() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("bench.json");
        let mut args = Args::parse_from(["bench", "--device", "flex", "--dtype", "f32", "--smoke", "--iters", "3"]);
        args.out = Some(out.clone());
        run(&args).expect("a report");
        let file: serde_json::Value = serde_json::from_slice(&std::fs::read(out).expect("a file")).expect("JSON");
        assert_eq!(file["errors"], serde_json::json!([]));
        let ops = [
            "dense",
            "dense+schedule",
            "plan",
            "plan_host",
            "merge",
            "page_table",
            "kv_indices",
            "write",
            "ragged",
            "sparse_decode",
            "lightning_index",
            "norm_rope",
            "norm_rope_composed",
            "compress_kv",
            "linear",
            "experts",
            "e2e_decode",
            "e2e_prefill",
        ];
        for op in ops {
            assert!(file["rows"].as_array().is_some_and(|rows| rows.iter().any(|row| row["op"] == op)), "{op}");
        }
    }
}
