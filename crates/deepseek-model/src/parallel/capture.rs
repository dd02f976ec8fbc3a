//! Captures of ranks, one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Graph};
use mla_ops::capture;

use super::Parallel;
use crate::Result;

/// How often Burn runs a computation before it records it.
const WARM_UPS: usize = 3;

/// A computation that is recorded.
pub(crate) type Step<'a, T> = Box<dyn FnMut() -> T + Send + 'a>;

impl Parallel {
    /// [`capture()`](mla_ops::capture()) on all ranks. While a device records, CUDA gives memory to no thread of the program, and to ask
    /// for it spoils the recording. So all ranks run the computation first, in the memory that the graph keeps; then one records after
    /// the other, while the rest wait. `None` as there.
    ///
    /// # Errors
    /// Ranks that do not answer.
    pub(crate) fn capture<'a, T: Send + 'a>(
        &self,
        device: &Device,
        mut step: Step<'a, T>,
    ) -> Result<Option<Graph<T, Step<'a, T>>>> {
        if self.size() == 1 {
            return Ok(capture(device, step));
        }
        // All meet once before and once after each recording: this rank records behind so many meetings.
        let (turn, met) = (self.rank() + 1, Arc::new(AtomicUsize::new(0)));
        let (ranks, met_before, mut runs) = (self.clone(), met.clone(), 0);
        let in_turn: Step<'a, T> = Box::new(move || {
            let out = step();
            runs += 1;
            if runs == WARM_UPS {
                for _ in 0..turn {
                    // A rank that has left is an error of the meetings below.
                    let _ = ranks.agree(true);
                    met_before.fetch_add(1, Ordering::Relaxed);
                }
            }
            out
        });
        let graph = capture(device, in_turn);
        // All of them where it has failed before: the others wait.
        for _ in met.load(Ordering::Relaxed)..=self.size() {
            self.agree(true)?;
        }
        Ok(graph)
    }
}
