//! What an engine counts.

use std::time::Duration;

use crate::decode_graph::GraphSupport;

/// Counts and times since an engine began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Devices that the model is divided among.
    pub ranks: usize,
    /// Forward passes.
    pub steps: usize,
    /// Whether decode steps are captured and replayed, and why not.
    pub graphs: GraphSupport,
    /// Those of the forward passes that were replayed from a captured graph.
    pub graph_steps: usize,
    /// Sizes of steps, in requests and pages, that could not be captured, and are launched. 0 unless memory ran out.
    pub uncaptured_sizes: usize,
    /// Those of the forward passes that were launched before the tokens of the step before were on the host.
    pub ahead_steps: usize,
    /// Prompt tokens that were computed, without the hits of the prefix cache; each once.
    pub prompt_tokens: usize,
    /// Tokens that were recomputed after a preemption.
    pub recomputed_tokens: usize,
    /// Tokens with which requests began to run, or ran again: what was looked up in the prefix cache.
    pub prefix_queries: usize,
    /// Those of them whose rows were found there.
    pub prefix_hits: usize,
    /// Times that a request was preempted: it gave up its pages, and is recomputed later.
    pub preemptions: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Those of them that were generated in steps with nothing but one token of each request.
    pub decode_tokens: usize,
    /// Time of those steps, until their tokens are on the host.
    pub decode_time: Duration,
    /// Time of all other steps, until their tokens are on the host. A step that completes no prompt gives none: on a GPU its time is
    /// that of its launches, and the step that completes the prompt, which counts here, too, waits for both.
    pub prefill_time: Duration,
    /// From the engine's beginning until the first token of any request.
    pub time_to_first_token: Option<Duration>,
    /// The median of the times between two tokens of a request (inter-token latency), to 3 %: until its tokens were on the host.
    pub inter_token_p50: Option<Duration>,
    /// Their 99th percentile: steps with chunks of prompts beside the tokens, and preemptions, are in it.
    pub inter_token_p99: Option<Duration>,
    /// Cache memory of a token, all layers, in bytes.
    pub cache_bytes_per_token: usize,
    /// Cache memory in use, pages of former requests included, in bytes.
    pub cache_bytes: usize,
    /// The most that it has been.
    pub cache_bytes_peak: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages that requests hold.
    pub pages_in_use: usize,
    /// Pages that only the prefix cache holds; they are evicted when a request needs them.
    pub pages_idle: usize,
    /// Slots for snapshots of requests' states, from which others go on.
    pub snapshot_slots: usize,
    /// Those of them that have a snapshot.
    pub snapshots: usize,
}

impl EngineStats {
    /// Tokens of prompts that were computed, and recomputed, per second of [`Self::prefill_time`]; 0 where there were none.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens + self.recomputed_tokens, self.prefill_time)
    }

    /// Tokens per second of [`Self::decode_time`]; 0 where there were none.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode_time)
    }

    /// How many steps were replayed, or why none was, and of how many sizes none can be, in words.
    pub fn graphs_in_words(&self) -> String {
        let uncaptured = match self.uncaptured_sizes {
            0 => None,
            1 => Some("steps of one size could not be captured".to_string()),
            sizes => Some(format!("steps of {sizes} sizes could not be captured")),
        };
        match (self.graph_steps, uncaptured) {
            (0, None) => format!("none, every kernel was launched: {}", self.graphs),
            (0, Some(uncaptured)) => format!("none, every kernel was launched: {uncaptured}"),
            (steps, uncaptured) => {
                let others = uncaptured.map(|uncaptured| format!("; {uncaptured}")).unwrap_or_default();
                format!("{steps} steps replayed, {} of them launched ahead{others}", self.ahead_steps)
            }
        }
    }

    /// The hit rate of the prefix cache, 0 to 1.
    pub fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hits as f64 / self.prefix_queries.max(1) as f64
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_tokens_that_were_computed() {
        let (prefill_time, decode_time) = (Duration::from_millis(500), Duration::from_secs(2));
        let stats = EngineStats {
            prompt_tokens: 90,
            recomputed_tokens: 10,
            decode_tokens: 30,
            prefill_time,
            decode_time,
            ..Default::default()
        };
        assert_eq!((stats.prefill_rate(), stats.decode_rate()), (200.0, 15.0));
        assert_eq!(EngineStats::default().prefill_rate(), 0.0);
    }

    #[test]
    fn steps_that_cannot_be_captured_are_named() {
        let words = |graph_steps, uncaptured_sizes| {
            let graphs = GraphSupport::Captured;
            EngineStats { graphs, graph_steps, ahead_steps: 4, uncaptured_sizes, ..Default::default() }
                .graphs_in_words()
        };
        assert_eq!(
            EngineStats::default().graphs_in_words(),
            "none, every kernel was launched: graphs are switched off"
        );
        assert_eq!(words(0, 2), "none, every kernel was launched: steps of 2 sizes could not be captured");
        assert_eq!(words(9, 0), "9 steps replayed, 4 of them launched ahead");
        assert_eq!(words(9, 1), "9 steps replayed, 4 of them launched ahead; steps of one size could not be captured");
    }
}
