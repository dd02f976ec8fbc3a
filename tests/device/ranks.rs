//! Ranks of one process, each on a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Tensor, TensorData};
use burn_mla::model::{Communicator, ModelError, Parallel};
use burn_mla::ops::Addend;

/// How long a rank waits for the others, of which one may hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where ranks exchange values, by way of the host.
#[derive(Debug)]
struct Exchange {
    round: Mutex<Round>,
    changed: Condvar,
    /// Whether a rank has ended, with its last value or without it.
    has_left: AtomicBool,
}

/// What the ranks have brought, and how many have taken all of it.
#[derive(Debug)]
struct Round {
    parts: Vec<Option<TensorData>>,
    taken: usize,
}

impl Exchange {
    fn new(size: usize) -> Self {
        Self {
            round: Mutex::new(Round { parts: vec![None; size], taken: 0 }),
            changed: Condvar::new(),
            has_left: AtomicBool::new(false),
        }
    }

    /// What all ranks bring, in their order.
    fn all(&self, rank: usize, part: TensorData) -> Result<Vec<TensorData>, ModelError> {
        let mut round = self.round.lock().expect("no rank panics in here");
        // The others may not have taken what this rank brought before.
        round = self.wait(round, |round| round.parts[rank].is_some())?;
        round.parts[rank] = Some(part);
        self.changed.notify_all();
        round = self.wait(round, |round| round.parts.iter().any(Option::is_none))?;
        let all = round.parts.iter().flatten().cloned().collect();
        round.taken += 1;
        if round.taken == round.parts.len() {
            *round = Round { parts: vec![None; round.parts.len()], taken: 0 };
            self.changed.notify_all();
        }
        Ok(all)
    }

    fn wait<'r>(
        &self,
        round: MutexGuard<'r, Round>,
        is_early: impl Fn(&Round) -> bool,
    ) -> Result<MutexGuard<'r, Round>, ModelError> {
        let waits = |round: &mut Round| is_early(round) && !self.has_left.load(Ordering::Relaxed);
        let (round, _) = self.changed.wait_timeout_while(round, PATIENCE, waits).expect("no rank panics in here");
        match is_early(&round) {
            false => Ok(round),
            true => Err(ModelError::Communicator { reason: "a rank did not answer".into() }),
        }
    }
}

/// A rank's end of an exchange.
#[derive(Debug)]
struct End {
    rank: usize,
    exchange: Arc<Exchange>,
}

impl Drop for End {
    fn drop(&mut self) {
        let _round = self.exchange.round.lock();
        self.exchange.has_left.store(true, Ordering::Relaxed);
        self.exchange.changed.notify_all();
    }
}

impl Communicator for End {
    fn all_reduce(&self, x: Addend) -> Result<Addend, ModelError> {
        let x = x.materialise();
        let (device, dtype, dims) = (x.device(), x.dtype(), x.dims());
        // In the order of the ranks, whoever adds.
        let mut sum = vec![0.0; dims[0] * dims[1]];
        for part in self.exchange.all(self.rank, x.into_data())? {
            let part: Vec<f32> = part.convert_dtype(DType::F32).try_to_vec().expect("f32");
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        Ok(Tensor::<2>::from_data(TensorData::new(sum, dims), (&device, dtype)).into())
    }

    fn all_gather(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let (device, dtype) = (x.device(), x.dtype());
        let parts = self.exchange.all(self.rank, x.into_data())?;
        let tensors = parts.into_iter().map(|part| Tensor::from_data(part, (&device, dtype)));
        Ok(Tensor::cat(tensors.collect(), 1))
    }
}

/// What each of `size` ranks computes, in their order.
pub fn on_ranks<T: Send>(size: usize, compute: impl Fn(Parallel) -> T + Sync) -> Vec<T> {
    let exchange = Arc::new(Exchange::new(size));
    thread::scope(|scope| {
        let start = |rank| {
            let end = End { rank, exchange: exchange.clone() };
            let parallel = Parallel::new(rank, size, Arc::new(end)).expect("a rank among them");
            let compute = &compute;
            scope.spawn(move || compute(parallel))
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}
