//! The time between two tokens of a request (inter-token latency), as its reader would measure it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Parts of an octave: the middle of one is within 3 % of what is in it.
const PARTS: usize = 16;

/// When requests had their last tokens, and how often which time passed until the next.
#[derive(Debug, Default)]
pub(super) struct InterTokenLatency {
    last: HashMap<u64, Instant>,
    /// By [`place`]; empty before the first.
    counts: Vec<u64>,
    total: u64,
}

impl InterTokenLatency {
    /// A request has a token now.
    pub(super) fn token(&mut self, request: u64, now: Instant) {
        if let Some(before) = self.last.insert(request, now) {
            self.note(now.saturating_duration_since(before));
        }
    }

    /// A request has its last token, or will have none.
    pub(super) fn ended(&mut self, request: u64) {
        self.last.remove(&request);
    }

    /// The least time of which so large a part of all times is not longer, to 3 %; `None` where there are none.
    pub(super) fn percentile(&self, percent: u64) -> Option<Duration> {
        let rank = (u128::from(self.total) * u128::from(percent)).div_ceil(100).max(1);
        let mut below = 0;
        let place = self.counts.iter().position(|&count| {
            below += u128::from(count);
            below >= rank
        });
        place.map(|place| Duration::from_nanos(middle(place)))
    }

    fn note(&mut self, time: Duration) {
        self.counts.resize(PARTS * u64::BITS as usize, 0);
        self.counts[place(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))] += 1;
        self.total += 1;
    }
}

/// Octave and part of it that so many nanoseconds are in.
fn place(nanos: u64) -> usize {
    let nanos = nanos.max(PARTS as u64);
    let octave = nanos.ilog2() - PARTS.ilog2();
    // The most significant bit is that of the octave.
    (octave as usize + 1) * PARTS + (nanos >> octave) as usize - 2 * PARTS
}

/// Nanoseconds in the middle of a place.
fn middle(place: usize) -> u64 {
    let (octave, part) = (place / PARTS, (place % PARTS) as u64);
    ((PARTS as u64 + part) << octave) + ((1 << octave) >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_in_order_and_narrow() {
        let mut before = 0;
        for nanos in (0..60).flat_map(|octave| (0..40).map(move |part| (16u64 << octave) / 40 * (40 + part))) {
            let here = place(nanos);
            assert!(here >= before, "{nanos}");
            before = here;
            let error = (middle(here) as f64 - nanos.max(16) as f64).abs() / nanos.max(16) as f64;
            assert!(error <= 1.0 / 32.0, "{nanos}: {}", middle(here));
        }
        assert!(place(u64::MAX) < PARTS * u64::BITS as usize);
    }

    #[test]
    fn percentiles_are_those_of_the_times_between_tokens() {
        let (mut latency, start) = (InterTokenLatency::default(), Instant::now());
        assert_eq!(latency.percentile(50), None);
        latency.token(1, start);
        assert_eq!(latency.percentile(99), None, "a first token comes after no other");
        // Of 100 times 97 are 10 ms, and three 80 ms; another request's tokens in between change nothing.
        let mut now = start;
        for token in 0..100 {
            let ms = if token < 97 { 10 } else { 80 };
            now += Duration::from_millis(ms);
            latency.token(1, now);
            latency.token(100 + token, now);
            latency.ended(100 + token);
        }
        for (percent, ms) in [(50, 10.0), (97, 10.0), (98, 80.0), (99, 80.0), (100, 80.0)] {
            let found = latency.percentile(percent).expect("times").as_secs_f64() * 1e3;
            assert!((found - ms).abs() <= 0.04 * ms, "{percent}: {found}");
        }
        latency.ended(1);
        assert!(latency.last.is_empty());
    }
}
