//! Ranks that exchange values by way of the host: for the CPU, wgpu, and GPUs that cannot do better.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::tensor::{DType, Tensor, TensorData};
use mla_ops::Addend;

use super::Communicator;
use crate::{ModelError, Result};

/// How long a rank waits on the host for the others. All compute the same sizes, so that none is much later than another; a rank that ends
/// says so at once ([`Communicator::leave`]). This is for one that hangs.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// A rank's end of an exchange within this process, each on a thread of its own.
#[derive(Debug)]
pub struct HostCommunicator {
    rank: usize,
    meeting: Arc<Meeting>,
}

impl HostCommunicator {
    /// Those of ranks 0 to `size`.
    pub fn group(size: usize) -> Vec<Self> {
        let meeting = Arc::new(Meeting::new(size, PATIENCE));
        (0..size).map(|rank| Self { rank, meeting: meeting.clone() }).collect()
    }

    /// What all ranks bring to this call.
    fn exchange(&self, x: Tensor<2>) -> Result<Vec<Arc<TensorData>>> {
        let data = x.try_into_data().map_err(ModelError::device)?;
        let brought = self.meeting.exchange(self.rank, Brought::Numbers(Arc::new(data)))?;
        let numbers = brought.into_iter().map(|brought| match brought {
            Brought::Numbers(data) => Ok(data),
            Brought::Vote(_) => Err(at_different_calls()),
        });
        numbers.collect()
    }
}

impl Communicator for HostCommunicator {
    fn all_reduce(&self, x: Addend) -> Result<Addend> {
        let x = x.materialise();
        let (device, dtype, dims) = (x.device(), x.dtype(), x.dims());
        let mut sum = vec![0.0; dims[0] * dims[1]];
        // In the order of the ranks, whoever adds: the same bits on each.
        for part in self.exchange(x)? {
            let part: Vec<f32> = (*part)
                .clone()
                .convert_dtype(DType::F32)
                .try_to_vec()
                .map_err(|error| ModelError::device(format!("{error:?}")))?;
            if part.len() != sum.len() {
                return Err(at_different_calls());
            }
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        Ok(Tensor::<2>::from_data(TensorData::new(sum, dims), (&device, dtype)).into())
    }

    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>> {
        let (device, dtype, rows) = (x.device(), x.dtype(), x.dims()[0]);
        let parts = self.exchange(x)?;
        let widths = parts.iter().map(|part| part.shape()[1]);
        if widths.sum::<usize>() != columns || parts.iter().any(|part| part.shape()[0] != rows) {
            return Err(at_different_calls());
        }
        let tensors = parts.into_iter().map(|part| Tensor::from_data((*part).clone(), (&device, dtype)));
        Ok(Tensor::cat(tensors.collect(), 1))
    }

    fn agree(&self, yes: bool) -> Result<bool> {
        self.meeting.agree(self.rank, yes)
    }

    fn leave(&self, reason: &str) {
        self.meeting.leave(self.rank, reason);
    }

    fn describe(&self) -> String {
        "sums by way of the host".into()
    }
}

/// A call has ended on one rank alone, or the ranks were given different requests.
fn at_different_calls() -> ModelError {
    ModelError::Communicator { reason: "they are at different calls".into() }
}

/// What a rank brings to a call.
#[derive(Debug, Clone)]
enum Brought {
    Numbers(Arc<TensorData>),
    Vote(bool),
}

/// Where the threads of all ranks wait for one another.
#[derive(Debug)]
pub(super) struct Meeting {
    round: Mutex<Round>,
    changed: Condvar,
    patience: Duration,
}

/// What the ranks have brought, and how many have taken all of it.
#[derive(Debug)]
struct Round {
    brought: Vec<Option<Brought>>,
    taken: usize,
    /// Why a rank takes part no more.
    left: Option<String>,
}

impl Meeting {
    pub(super) fn new(size: usize, patience: Duration) -> Self {
        let round = Round { brought: vec![None; size], taken: 0, left: None };
        Self { round: Mutex::new(round), changed: Condvar::new(), patience }
    }

    /// Whether all ranks say yes.
    pub(super) fn agree(&self, rank: usize, yes: bool) -> Result<bool> {
        let votes = self.exchange(rank, Brought::Vote(yes))?;
        let votes = votes.into_iter().map(|brought| match brought {
            Brought::Vote(yes) => Ok(yes),
            Brought::Numbers(_) => Err(at_different_calls()),
        });
        Ok(votes.collect::<Result<Vec<bool>>>()?.into_iter().all(|yes| yes))
    }

    /// Ends what other ranks wait for, now and later.
    pub(super) fn leave(&self, rank: usize, reason: &str) {
        self.lock().left.get_or_insert_with(|| format!("rank {rank} has ended: {reason}"));
        self.changed.notify_all();
    }

    /// What all ranks bring, in their order.
    fn exchange(&self, rank: usize, own: Brought) -> Result<Vec<Brought>> {
        // The others may not have taken what this rank brought before; one that has left will bring nothing.
        let mut round = self.wait(self.lock(), |round| round.left.is_some() || round.brought[rank].is_some())?;
        round.brought[rank] = Some(own);
        self.changed.notify_all();
        round = self.wait(round, |round| round.brought.iter().any(Option::is_none))?;
        let all = round.brought.iter().flatten().cloned().collect();
        round.taken += 1;
        if round.taken == round.brought.len() {
            round.brought.fill(None);
            round.taken = 0;
            self.changed.notify_all();
        }
        Ok(all)
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'r>(
        &self,
        round: MutexGuard<'r, Round>,
        is_early: impl Fn(&Round) -> bool,
    ) -> Result<MutexGuard<'r, Round>> {
        let waits = |round: &mut Round| round.left.is_none() && is_early(round);
        let waited = self.changed.wait_timeout_while(round, self.patience, waits);
        let (round, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !is_early(&round) {
            return Ok(round);
        }
        let silent = || format!("a rank has not answered for {} s", self.patience.as_secs_f64());
        Err(ModelError::Communicator { reason: round.left.clone().unwrap_or_else(silent) })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn meeting(size: usize, patience: Duration) -> Arc<Meeting> {
        Arc::new(Meeting::new(size, patience))
    }

    #[test]
    fn ranks_agree_if_all_do() {
        let meeting = meeting(3, PATIENCE);
        let votes = [[true; 3], [true, false, true], [false; 3], [true; 3]];
        thread::scope(|scope| {
            for rank in 0..3 {
                let meeting = meeting.clone();
                scope.spawn(move || {
                    let agreed: Vec<bool> =
                        votes.iter().map(|votes| meeting.agree(rank, votes[rank]).unwrap()).collect();
                    assert_eq!(agreed, [true, false, false, true]);
                });
            }
        });
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_left() {
        let meeting = meeting(2, PATIENCE);
        let waiting = thread::spawn({
            let meeting = meeting.clone();
            move || meeting.agree(0, true)
        });
        meeting.leave(1, "it is out of memory");
        let refused = waiting.join().unwrap().unwrap_err().to_string();
        assert_eq!(refused, "the ranks cannot exchange values: rank 1 has ended: it is out of memory");
        meeting.leave(0, "another reason");
        assert_eq!(meeting.agree(0, true).unwrap_err().to_string(), refused, "the first reason stays");
    }

    #[test]
    fn patience_ends() {
        let refused = meeting(2, Duration::from_millis(20)).agree(1, true).unwrap_err().to_string();
        assert!(refused.contains("has not answered for 0.02 s"), "{refused}");
    }
}
