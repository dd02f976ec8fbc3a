//! How far the batch is: a line on the terminal, and a report at the end.

use std::time::{Duration, Instant};

use burn_mla::model::Engine;
use indicatif::{ProgressBar, ProgressStyle};

use crate::common::note;

/// Between two updates: stats are counted for each.
const EVERY: Duration = Duration::from_millis(250);

pub struct Progress {
    line: ProgressBar,
    start: Instant,
    last: Instant,
    /// Tokens generated until the last update.
    generated: usize,
}

impl Progress {
    /// On stderr, if that is a terminal.
    pub fn new() -> Self {
        let line = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            line.set_style(style);
        }
        Self { line, start: Instant::now(), last: Instant::now(), generated: 0 }
    }

    pub fn show(&mut self, engine: &Engine, written: usize) {
        let since = self.last.elapsed();
        if since < EVERY || self.line.is_hidden() {
            return;
        }
        let stats = engine.stats();
        let rate = (stats.generated_tokens - self.generated) as f64 / since.as_secs_f64();
        (self.last, self.generated) = (Instant::now(), stats.generated_tokens);
        let (running, waiting) = (engine.running(), engine.waiting());
        let cache = 100 * stats.pages_in_use / stats.pages.max(1);
        let hits = 100.0 * stats.prefix_hit_rate();
        self.line.set_message(format!(
            "{rate:.0} tokens/s, {running} running, {waiting} waiting, {written} written, KV cache {cache} %, prefix hits {hits:.0} %"
        ));
        self.line.tick();
    }

    /// Lets others write to the terminal.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.line.suspend(write)
    }

    pub fn clear(&self) {
        self.line.finish_and_clear();
    }

    /// Counts and speeds, on stderr.
    pub fn report(&self, engine: &Engine, written: usize) {
        let stats = engine.stats();
        let rate = stats.generated_tokens as f64 / self.start.elapsed().as_secs_f64().max(1e-9);
        let line = |name: &str, value: std::fmt::Arguments| note(format_args!("{name:<18}{value}"));
        line("completions", format_args!("{written}"));
        let (hits, hit_rate) = (stats.prefix_hits, 100.0 * stats.prefix_hit_rate());
        let computed = stats.prompt_tokens;
        line(
            "prompt tokens",
            format_args!("{computed} computed, {hits} from the prefix cache (hit rate {hit_rate:.0} %)"),
        );
        if stats.snapshot_slots > 0 {
            let (snapshots, slots) = (stats.snapshots, stats.snapshot_slots);
            line("snapshots", format_args!("{snapshots} kept, of {slots} at most"));
        }
        let (generated, steps) = (stats.generated_tokens, stats.steps);
        line("generated tokens", format_args!("{generated}, {rate:.0} per second, in {steps} steps"));
        let (prefill, seconds) = (stats.prefill_rate(), stats.prefill_time.as_secs_f64());
        line("prefill", format_args!("{seconds:.1} s, {prefill:.0} tokens per second"));
        if let (Some(p50), Some(p99)) = (stats.inter_token_p50, stats.inter_token_p99) {
            let [p50, p99] = [p50, p99].map(|time| time.as_secs_f64() * 1e3);
            line("inter-token", format_args!("{p50:.1} ms (p50), {p99:.1} ms (p99)"));
        }
        line("graphs", format_args!("{}", stats.graphs_in_words()));
        let (preemptions, recomputed) = (stats.preemptions, stats.recomputed_tokens);
        line("preemptions", format_args!("{preemptions}, {recomputed} tokens recomputed"));
        let (per_token, peak) = (stats.cache_bytes_per_token, stats.cache_bytes_peak);
        let pages = stats.pages;
        line("KV cache", format_args!("{pages} pages, {per_token} bytes/token, peak {peak} bytes"));
    }
}
