//! Times the operations on one device and writes a row per case.
//!
//!     cargo run --release --features cuda --example bench -- --device cuda --out bench.json
//!     cargo run --release --example bench -- --compare bench.json peers.json
//!
//! The folder `peers` times FlashMLA, FlashInfer, FlashAttention-3 and vLLM in the same way; `compare_with_peers.sh` runs
//! both programs and prints the comparisons.
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
//! reads its keys once for each sequence, and has FLOPs for its scores alone. Where Hopper scores many query tokens together, `scores_us`
//! is how much longer the call takes with twice the heads, which has the same choice of keys, and `of_selection` the part of `us` that
//! is not scores. `plan` and `plan_host` have no check here.
//!
//! `vertical_slash_attention` has columns (`vertical`) and diagonals (`slash`, in runs of neighbours) at random for each head, in blocks
//! of 64. `of_square` is the part of the causal square that its queries see. It alone is counted as FLOPs, so `tflops` stand beside
//! those of `ragged` for the same heads; `ragged_us` is how long that takes for the same sequence with all keys. The index is made before,
//! its time is a row of `vertical_slash_index`, without FLOPs or bytes.
//!
//! `e2e_decode` has no `us`: `tokens_per_s` and `ms_per_step` are by the wall clock, from one generated token to the next, in
//! `steps` with one token of each request, of which `graph_steps` were replayed: with graphs all of them (`--captured` leaves out the
//! others). `weights_gb` are the weights that a step reads, of the routed experts those that so many tokens choose if all are as likely; `gbps` and
//! `of_copy` count them alone. With `--deterministic` the engine is, and its prompts of `e2e_prefill`, too. `experts_chosen` are the
//! different routed experts of the first step, the mean over the layers: weights are normally distributed (0.02), as models are
//! trained from. `--temperature`, `--top-p` and `--top-k` sample the tokens of `e2e_decode`, by default they are greedy.
//!
//! `e2e_prefill`: `b` prompts of `context` random tokens in steps of 16,384 at most, of launched kernels, by the wall clock until
//! their first tokens are on the host. `ms` and `tokens_per_s` are the mean of 8 such batches, of 65,536 tokens of 2, `ms_first`
//! is the one before them, which compiles and tunes; `weight_gflop_per_token` are the products with weights, as a bound. `e2e_ttft`: `ms` from the start of a process to the first token of one prompt, `ms_from_device` from an open
//! device, `ms_from_weights` from the last weight; `ms_asking` is the pass that names the kernels, `ms_loading` the weights, while
//! kernels are compiled. What earlier processes compiled lies on the disk. `e2e_shapes`: kernels that were `compiled` (or read from
//! the disk) in 196 steps with requests of random lengths, after a warm-up of so many.
//!
//! `e2e_prefix`: milliseconds until the first token of a prompt and of the next one, which begins with the same `common` tokens and
//! finds `hits` of them; means of 3 such pairs behind one that compiles. `e2e_long`: `prompt_s` until the first token of a prompt, what has
//! to be compiled for it included, and `ms_per_step` of 64 replayed steps behind it and 24 others.
//!
//! With `--check-tables` there are rows of `table`: what a table chooses (`chosen`, `us`), the best of all that could be chosen
//! (`best`, `us_best`), and `all`. An implementation has its name, the tokens of its tiles, and in how many parts it splits the
//! channels.
//!
//! `all_reduce` (two GPUs) has no `us`: `us_each` is what each of the 20 sums of a graph takes, with a product before it, by the wall
//! clock over 50 replays; `all_reduce_nccl` the same by Burn's, which needs `libnccl.so`.
//!
//! `linear` has `2*m*n*k` FLOPs and moves x, the weight and out; `experts` has `6*tokens*top_k*hidden*width` and moves x, out and
//! the weights of the `chosen` experts. With `--blocks` weights are codes, whose bytes count, and `rel_rms` is against what they stand for.

mod all_reduce;
mod args;
mod cases;
mod ceilings;
mod codes;
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
mod mixed;
mod models;
mod prefill;
mod prompts;
mod ragged;
mod report;
mod shapes;
mod sparse;
mod sparse_lists;
mod tables;
mod timing;
mod varlen;
mod vertical_slash;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use args::{Args, Section};
use burn::tensor::{DType, FloatDType};
use cases::{Bench, Size};
use common::fail;
use models::ModelCase;
use report::Report;
use timing::Timer;

fn main() -> ExitCode {
    let args: Args = match common::parse() {
        Ok(args) => args,
        Err(code) => return code,
    };
    let outcome = match &args.compare {
        _ if args.ttft_child => first_token::child(&args).map(|()| ExitCode::SUCCESS),
        Some(files) => compare::print(&files[0], &files[1]).map(|()| ExitCode::SUCCESS),
        None => run(&args),
    };
    outcome.unwrap_or_else(fail)
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let devices = args.devices()?;
    let device = devices[0].clone();
    let dtype = DType::from(FloatDType::from(args.dtype));
    if !device.supports_dtype(dtype) {
        return Err(format!("{} does not compute in {dtype:?}; choose another --dtype", args.device_names()));
    }
    let random = args.random().as_ref().map(ModelCase::read).transpose()?;
    let report = Report::create(args.out.clone(), meta::collect(&args.device_names(), &device, dtype))?;
    let size = match (args.smoke, args.quick) {
        (true, _) => Size::Smoke,
        (_, true) => Size::Quick,
        _ => Size::Full,
    };
    let mut bench = Bench {
        timer: Timer::new(&device, usize::from(args.iters), size == Size::Smoke),
        end: args.limit.and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds))),
        device,
        devices,
        dtype,
        path: args.path,
        weights_seed: args.weights_seed,
        weights: args.weights,
        blocks: args.blocks,
        kv_cache: args.kv_cache,
        deterministic: args.deterministic,
        captured: args.captured,
        sampling: args.sampling()?,
        context: usize::from(args.context),
        batches: args.batches.clone(),
        save: args.save.clone(),
        size,
        shape: args.shape.clone(),
        random_experts: args.random_experts,
        report,
        copy_gbps: None,
    };
    if args.check_tables {
        tables::run(&mut bench);
        return bench.report.finish();
    }
    sections(&mut bench, &args.only, random.as_ref());
    bench.report.finish()
}

/// All sections that were asked for.
fn sections(bench: &mut Bench, only: &[Section], random: Option<&ModelCase>) {
    let wanted = |section| only.is_empty() || only.contains(&section);
    if wanted(Section::Ceilings) {
        ceilings::run(bench, "start");
    }
    if wanted(Section::Dense) {
        decode::run(bench);
    }
    if wanted(Section::Merge) {
        indexing::merge(bench);
    }
    if wanted(Section::PageTable) {
        indexing::page_table(bench);
    }
    if wanted(Section::Write) {
        indexing::write(bench);
    }
    if wanted(Section::Ragged) {
        ragged::run(bench);
    }
    if wanted(Section::Sparse) {
        sparse::run(bench);
        sparse_lists::run(bench);
    }
    if wanted(Section::VerticalSlash) {
        vertical_slash::run(bench);
    }
    if wanted(Section::Compression) {
        compression::run(bench);
    }
    named_sections(bench, only, random);
    if wanted(Section::Ceilings) {
        ceilings::run(bench, "end");
    }
}

/// Those that run only by name, or where only the program is tried; `random` is the model that was asked for.
fn named_sections(bench: &mut Bench, only: &[Section], random: Option<&ModelCase>) {
    let smoke = bench.size == Size::Smoke;
    let wanted = |section| smoke || only.contains(&section);
    let size = bench.size;
    let cases = |v3_layers| random.map_or_else(|| models::published(size, v3_layers), |case| vec![case.clone()]);
    if wanted(Section::Linear) {
        linear::run(bench);
    }
    if wanted(Section::Experts) {
        experts::run(bench);
    }
    if only.contains(&Section::AllReduce) {
        all_reduce::run(bench);
    }
    let other = [Section::Prefill, Section::Prefix, Section::Long, Section::Mixed, Section::Ttft, Section::Shapes]
        .iter()
        .any(|section| only.contains(section));
    if wanted(Section::EndToEnd) || (random.is_some() && !other) {
        end_to_end::run(bench, cases(if size == Size::Quick { 4 } else { 6 }));
    }
    if only.contains(&Section::EndToEndV4) {
        end_to_end::run(bench, vec![models::v4_flash()]);
    }
    if wanted(Section::Prefill) {
        prefill::run(bench, cases(4));
    }
    if only.contains(&Section::PrefillV4) {
        prefill::run(bench, vec![models::v32(), models::v4_flash()]);
    }
    let v4_cases = || random.map_or_else(|| models::small_or(size, models::v4_flash()), |case| vec![case.clone()]);
    if wanted(Section::Prefix) {
        prompts::run_prefix(bench, v4_cases());
    }
    if wanted(Section::Long) {
        prompts::run_long(bench, v4_cases());
    }
    if wanted(Section::Mixed) {
        mixed::run(bench, cases(4));
    }
    if only.contains(&Section::Shapes) {
        shapes::run(bench, &random.cloned().unwrap_or_else(models::v2_lite));
    }
    if only.contains(&Section::Ttft) {
        first_token::run(bench, &random.cloned().unwrap_or_else(models::v2_lite));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use clap::Parser;

    use super::*;

    /// Each table has rows.
    #[test]
    fn tables_are_checked() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("bench.json");
        let words = ["bench", "--device", "flex", "--dtype", "f32", "--smoke", "--iters", "3", "--check-tables"];
        let mut args = Args::parse_from(words);
        args.out = Some(out.clone());
        run(&args).expect("a report");
        let file: serde_json::Value = serde_json::from_slice(&std::fs::read(out).expect("a file")).expect("JSON");
        assert_eq!(file["errors"], serde_json::json!([]));
        for op in ["linear", "experts", "dense"] {
            let is_of = |row: &serde_json::Value| row["case"].as_str().is_some_and(|case| case.starts_with(op));
            assert!(file["rows"].as_array().is_some_and(|rows| rows.iter().any(is_of)), "{op}");
        }
    }

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
            "sparse_lists",
            "lightning_index",
            "vertical_slash_attention",
            "vertical_slash_index",
            "norm_rope",
            "norm_rope_composed",
            "compress_kv",
            "linear",
            "experts",
            "e2e_decode",
            "e2e_prefill",
            "e2e_mixed",
        ];
        for op in ops {
            assert!(file["rows"].as_array().is_some_and(|rows| rows.iter().any(|row| row["op"] == op)), "{op}");
        }
    }
}
