//! A model on one or several devices: a rank on each.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use burn::tensor::{Device, StreamId};

use crate::decode_graph::panic_message;
use crate::model::DeepseekModel;
use crate::models::ModelConfig;
use crate::parallel::Parallel;
use crate::weights::{LoadAs, LoadProgress, RandomInit};
use crate::{ModelError, Result};

/// Sees how far weights are.
type OnProgress<'p> = &'p mut dyn FnMut(LoadProgress<'_>);

/// The ranks of a model in one process: each has its part of the weights on a device of its own, and a thread while it computes.
/// With one device it is the whole model. Clones share the weights.
#[derive(Debug, Clone)]
pub struct ModelRanks {
    ranks: Vec<Rank>,
}

/// A rank.
#[derive(Debug, Clone)]
pub(crate) struct Rank {
    pub(crate) model: Arc<DeepseekModel>,
    /// The queue of its device for whichever thread works for it: a captured step must have to do with no other one.
    pub(crate) stream: StreamId,
}

/// A model, whole on one device or divided among several.
#[derive(Debug, Clone, Copy)]
pub enum ModelRef<'a> {
    /// Whole, or one rank among others that somebody else runs.
    One(&'a DeepseekModel),
    /// All ranks.
    Ranks(&'a ModelRanks),
}

impl<'a> From<&'a DeepseekModel> for ModelRef<'a> {
    fn from(model: &'a DeepseekModel) -> Self {
        Self::One(model)
    }
}

impl<'a> From<&'a ModelRanks> for ModelRef<'a> {
    fn from(ranks: &'a ModelRanks) -> Self {
        if ranks.size() == 1 { Self::One(ranks.first()) } else { Self::Ranks(ranks) }
    }
}

impl<'a> ModelRef<'a> {
    /// The model itself, or its first rank: configuration, defaults and limits are the same on all.
    pub fn first(self) -> &'a DeepseekModel {
        match self {
            Self::One(model) => model,
            Self::Ranks(ranks) => ranks.first(),
        }
    }

    /// On which devices it is.
    pub(crate) fn each(self) -> Vec<&'a DeepseekModel> {
        match self {
            Self::One(model) => vec![model],
            Self::Ranks(ranks) => ranks.ranks.iter().map(|rank| &*rank.model).collect(),
        }
    }
}

impl ModelRanks {
    /// [`DeepseekModel::load`] onto these devices, on all at once; each reads what its rank has. `on_progress` sees the first.
    ///
    /// # Errors
    /// As [`DeepseekModel::load_rank`] and [`Parallel::group`]: of the first rank that fails.
    pub fn load(
        dir: &Path,
        devices: &[Device],
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        let load_as = load_as.into();
        Self::on_all(devices, on_progress, |parallel, device, on_progress| {
            DeepseekModel::load_rank(dir, parallel, device, load_as, on_progress)
        })
    }

    /// [`DeepseekModel::random`] on these devices: parts of the model that one device has with this seed.
    ///
    /// # Errors
    /// As [`DeepseekModel::random_rank`] and [`Parallel::group`]: of the first rank that fails.
    pub fn random(
        config: &ModelConfig,
        init: impl Into<RandomInit>,
        devices: &[Device],
        load_as: impl Into<LoadAs>,
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        let (init, load_as) = (init.into(), load_as.into());
        Self::on_all(devices, on_progress, |parallel, device, on_progress| {
            DeepseekModel::random_rank(config.clone(), init, parallel, device, load_as, on_progress)
        })
    }

    /// These ranks, which were loaded one by one, with a communicator of the caller's own.
    ///
    /// # Errors
    /// [`ModelError::Request`] unless they are all ranks of a group, in their order.
    pub fn of(ranks: Vec<DeepseekModel>) -> Result<Self> {
        let found: Vec<[usize; 2]> =
            ranks.iter().map(|rank| [rank.parallel().rank(), rank.parallel().size()]).collect();
        let sound = found.iter().enumerate().all(|(number, &[rank, size])| rank == number && size == found.len());
        if !sound || found.is_empty() {
            let actual = found.iter().map(|[rank, size]| format!("{rank} of {size}")).collect::<Vec<_>>().join(", ");
            return Err(ModelError::request("ranks", format!("[{actual}]"), "all ranks of a group, from 0 on"));
        }
        let rank = |model| Rank { model: Arc::new(model), stream: StreamId::allocate() };
        Ok(Self { ranks: ranks.into_iter().map(rank).collect() })
    }

    /// A rank on each device, made on a thread of its own but for the first.
    fn on_all(
        devices: &[Device],
        on_progress: &mut dyn FnMut(LoadProgress<'_>),
        make: impl Fn(Parallel, &Device, OnProgress<'_>) -> Result<DeepseekModel> + Sync,
    ) -> Result<Self> {
        let group = Parallel::group(devices)?;
        if let ([alone], [device]) = (&group[..], devices) {
            let model = Arc::new(make(alone.clone(), device, on_progress)?);
            return Ok(Self { ranks: vec![Rank { model, stream: StreamId::current() }] });
        }
        let streams: Vec<StreamId> = devices.iter().map(|_| StreamId::allocate()).collect();
        let make = &make;
        let mut places = group.into_iter().zip(devices).zip(streams);
        let first = places.next();
        let ranks: Vec<Result<Rank>> = thread::scope(|scope| {
            let rank = |((parallel, device), stream): ((Parallel, &Device), StreamId), on_progress: OnProgress<'_>| {
                let model = stream.executes(|| make(parallel, device, on_progress))?;
                Ok(Rank { model: Arc::new(model), stream })
            };
            let others: Vec<_> = places.map(|place| scope.spawn(move || rank(place, &mut |_| {}))).collect();
            let first = first.map(|place| rank(place, on_progress));
            first.into_iter().chain(others.into_iter().map(|rank| rank.join().unwrap_or_else(panicked))).collect()
        });
        Ok(Self { ranks: ranks.into_iter().collect::<Result<Vec<_>>>()? })
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The first rank: configuration, defaults and limits are the same on all.
    pub fn first(&self) -> &DeepseekModel {
        &self.ranks[0].model
    }

    /// All of them, in their order.
    pub(crate) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// What the first rank computes, while all compute the same: every rank runs `compute` on a thread of its own, with the same
    /// steps in the same order.
    ///
    /// # Errors
    /// That of the rank that failed first, as far as that can be told: others then fail for want of it, and none of them can be used
    /// again.
    pub fn on_each<T: Send>(&self, compute: impl Fn(&DeepseekModel) -> Result<T> + Sync) -> Result<T> {
        if let [alone] = &self.ranks[..] {
            return compute(&alone.model);
        }
        let run = |rank: &Rank| {
            let compute = || rank.stream.executes(|| compute(&rank.model));
            let outcome = panic::catch_unwind(AssertUnwindSafe(compute)).unwrap_or_else(panicked);
            if let Err(error) = &outcome {
                rank.model.parallel().leave(&error.to_string());
            }
            outcome
        };
        let run = &run;
        let outcomes: Vec<Result<T>> = thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter().map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|rank| rank.join().unwrap_or_else(panicked)).collect()
        });
        first_or_cause(outcomes)
    }
}

/// What the first rank gives, or the error that the others' errors follow from.
pub(crate) fn first_or_cause<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let mut first = None;
    let mut cause: Option<ModelError> = None;
    for outcome in outcomes {
        match outcome {
            Ok(value) => first = first.or(Some(value)),
            // What a communicator says follows from another rank's error, if there is one.
            Err(error) => {
                let explains = !matches!(error, ModelError::Communicator { .. });
                let follows = matches!(cause, Some(ModelError::Communicator { .. }));
                if cause.is_none() || (explains && follows) {
                    cause = Some(error);
                }
            }
        }
    }
    match (cause, first) {
        (None, Some(value)) => Ok(value),
        (Some(error), _) => Err(error),
        (None, None) => Err(ModelError::Communicator { reason: "there is no rank".into() }),
    }
}

/// A rank whose thread has panicked.
pub(crate) fn panicked<T>(payload: Box<dyn Any + Send>) -> Result<T> {
    Err(ModelError::Communicator { reason: format!("a rank has panicked: {}", panic_message(&*payload)) })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::PathBuf;

    use burn::tensor::FloatDType;
    use mla_ops::Determinism;
    use rstest::rstest;

    use super::*;
    use crate::cache::CacheSize;

    /// What is compiled ahead for a rank: no other one is there, and the shapes are those of all.
    #[rstest]
    #[case("v3-tiny", 4)]
    #[case("v4-tiny", 2)]
    fn a_rank_that_nobody_answers_has_all_shapes(#[case] name: &str, #[case] ranks: usize) {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
        let config = ModelConfig::read(&dir).unwrap();
        let load_as = FloatDType::F32.into();
        let model = DeepseekModel::without_weights(config.clone(), ranks, &Device::flex(), load_as).unwrap();
        let size = CacheSize { num_pages: 1, page_size: 16, max_requests: 1, max_tokens: 16 };
        let mut cache = model.new_cache(size).unwrap();
        let request = cache.admit().unwrap();
        let chunk = cache.append(request, &[1, 2, 3]).unwrap();
        let logits = model.next_token_logits(&[chunk], &mut cache, Determinism::Fast).unwrap();
        assert_eq!(logits.dims(), [1, config.vocab_size()]);
        assert!(DeepseekModel::without_weights(config, 3, &Device::flex(), load_as).is_err());
    }
}
