//! How far the batch is: a line on the terminal, and a report at the end.

use std::time::{Duration, Instant};

use burn_mla::model::Engine;
use indicatif::{ProgressBar, ProgressStyle};

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
        eprintln!("completions       {written}");
        eprintln!(
            "prompt tokens     {} computed, {} from the prefix cache (hit rate {:.0} %)",
            stats.prompt_tokens,
            stats.prefix_hits,
            100.0 * stats.prefix_hit_rate()
        );
        eprintln!("generated tokens  {}, {rate:.0} per second, in {} steps", stats.generated_tokens, stats.steps);
        let (prefill, seconds) = (stats.prefill_rate(), stats.prefill_time.as_secs_f64());
        eprintln!("prefill           {seconds:.1} s, {prefill:.0} tokens per second");
        match stats.graph_steps {
            0 => eprintln!("graphs            none, every kernel was launched: {}", stats.graphs),
            steps => {
                eprintln!("graphs            {steps} steps replayed, {} of them launched ahead", stats.ahead_steps);
            }
        }
        eprintln!("preemptions       {}, {} tokens recomputed", stats.preemptions, stats.recomputed_tokens);
        eprintln!(
            "KV cache          {} bytes/token, peak {} bytes",
            stats.cache_bytes_per_token, stats.cache_bytes_peak
        );
    }
}
