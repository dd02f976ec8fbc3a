//! Runs mutants over cases, cheapest first, until one of them is noticed.
use crate::edit::apply;
use crate::mutant::{Alteration, MapEdit, Mutant};
use ptx_sim::{Coverage, Fault, Module, SimError, TensorMap};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A launch that can be repeated with other instructions and other seeds.
pub trait Case: Sync {
    /// What to call it.
    fn name(&self) -> &str;

    /// The tensor maps among the parameters, with the parameters' numbers.
    fn maps(&self) -> Vec<(usize, TensorMap)> {
        Vec::new()
    }

    /// Runs it.
    ///
    /// # Errors
    /// What the simulator found.
    fn run(&self, run: &Run) -> Result<Outcome, SimError>;
}

/// How a case runs.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// The kernel's module, maybe a changed one.
    pub module: &'a Module,
    /// A tensor map that is changed.
    pub map: Option<MapEdit>,
    /// How warps interleave.
    pub seed: u64,
    /// No CTA runs more warp instructions.
    pub limit: u64,
    /// Takes down which instructions run.
    pub coverage: Option<&'a Coverage>,
}

/// What a launch left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// All memory.
    pub memory: Vec<Vec<u8>>,
    /// Warp instructions of all CTAs, and of the one with most.
    pub instructions: u64,
    /// Warp instructions of the CTA with most.
    pub longest: u64,
}

/// How a mutant was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kill {
    /// Accesses without an order between them, or asynchronous ones without a wait.
    Order,
    /// No warp could go on.
    Deadlock,
    /// An access outside of memory, or misaligned.
    Bounds,
    /// A read of what nothing wrote.
    Uninitialised,
    /// Another result.
    Result,
    /// Ten times the instructions.
    Endless,
    /// Any other error of the simulator.
    Other,
}

impl Kill {
    /// All kinds, in the order of the report.
    pub const ALL: [Self; 7] =
        [Self::Order, Self::Deadlock, Self::Bounds, Self::Uninitialised, Self::Result, Self::Endless, Self::Other];

    fn of(fault: &Fault) -> Self {
        match fault {
            Fault::Deadlock { .. } => Self::Deadlock,
            Fault::OutOfBounds { .. } | Fault::Misaligned { .. } | Fault::ReadOnly { .. } => Self::Bounds,
            Fault::Uninitialised { .. } => Self::Uninitialised,
            Fault::TooLong { .. } => Self::Endless,
            Fault::Race { .. }
            | Fault::GlobalRace { .. }
            | Fault::ProxyFence { .. }
            | Fault::RegisterInFlight
            | Fault::UnfinishedCopy => Self::Order,
            _ => Self::Other,
        }
    }
}

/// What became of a mutant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// A case noticed it.
    Killed {
        /// How.
        by: Kill,
        /// In which case.
        case: String,
        /// With which seed.
        seed: u64,
        /// The error.
        error: String,
    },
    /// No case noticed.
    Survived,
    /// The simulator panicked: a bug of its own.
    Panicked {
        /// In which case.
        case: String,
    },
}

/// A case and what it does without changes.
pub struct Reference<'a> {
    case: &'a dyn Case,
    memory: Vec<Vec<u8>>,
    /// Bytes that depend on the seed: sums whose order the schedule decides.
    loose: Vec<Vec<bool>>,
    instructions: u64,
    limit: u64,
    coverage: Coverage,
}

impl<'a> Reference<'a> {
    /// Runs a case of a kernel with so many instructions without changes, with all seeds.
    ///
    /// # Errors
    /// The kernel itself has an error.
    pub fn new(case: &'a dyn Case, module: &Module, count: usize, seeds: &[u64]) -> Result<Self, SimError> {
        let coverage = Coverage::new(count);
        let run = |seed| case.run(&Run { module, map: None, seed, limit: u64::MAX, coverage: Some(&coverage) });
        let first = run(seeds.first().copied().unwrap_or(1))?;
        let mut loose: Vec<Vec<bool>> = first.memory.iter().map(|bytes| vec![false; bytes.len()]).collect();
        for seed in seeds.iter().skip(1) {
            let other = run(*seed)?;
            for (loose, (a, b)) in loose.iter_mut().zip(first.memory.iter().zip(&other.memory)) {
                loose.iter_mut().zip(a.iter().zip(b)).for_each(|(l, (a, b))| *l |= a != b);
            }
        }
        let limit = first.longest.saturating_mul(10).saturating_add(1000);
        Ok(Self { case, memory: first.memory, loose, instructions: first.instructions, limit, coverage })
    }

    /// The case.
    pub fn name(&self) -> &str {
        self.case.name()
    }

    /// Warp instructions.
    pub fn instructions(&self) -> u64 {
        self.instructions
    }

    /// Whether a change can make a difference: its instruction runs, and a guard that is lost kept a lane away; the launch
    /// has the tensor map.
    pub fn reaches(&self, mutant: &Mutant) -> bool {
        let at = match &mutant.alteration {
            Alteration::Code(edit) => edit.at,
            Alteration::Map(edit) => {
                let takes =
                    |(param, map): &(usize, TensorMap)| *param == edit.param && edit.field.change(map).is_some();
                return self.case.maps().iter().any(takes);
            }
        };
        if mutant.operator == "guard" { self.coverage.held(at) } else { self.coverage.ran(at) }
    }

    /// Bytes of the result that depend on the seed.
    pub fn loose(&self) -> usize {
        self.loose.iter().flatten().filter(|l| **l).count()
    }

    fn differs(&self, memory: &[Vec<u8>]) -> Option<String> {
        for (buffer, (want, got)) in self.memory.iter().zip(memory).enumerate().filter(|(_, (want, got))| want != got) {
            let differs = |i: &usize| want[*i] != got[*i] && !self.loose[buffer][*i];
            if let Some(at) = (0..want.len().min(got.len())).find(differs) {
                return Some(format!("allocation {buffer} differs at byte {at}"));
            }
        }
        None
    }
}

/// Runs one mutant.
pub fn judge(mutant: &Mutant, module: &Module, entry: usize, cases: &[Reference], seeds: &[u64]) -> Verdict {
    let (module, map) = match &mutant.alteration {
        Alteration::Code(edit) => (Cow::Owned(apply(module, entry, edit)), None),
        Alteration::Map(edit) => (Cow::Borrowed(module), Some(*edit)),
    };
    for seed in seeds {
        for reference in cases.iter().filter(|r| r.reaches(mutant)) {
            let case = reference.case.name().to_string();
            let run = Run { module: &module, map, seed: *seed, limit: reference.limit, coverage: None };
            let run = || reference.case.run(&run);
            let (by, error) = match catch_unwind(AssertUnwindSafe(run)) {
                Err(_) => return Verdict::Panicked { case },
                Ok(Err(error)) => (Kill::of(&error.kind), error.to_string()),
                Ok(Ok(outcome)) => match reference.differs(&outcome.memory) {
                    Some(difference) => (Kill::Result, difference),
                    None => continue,
                },
            };
            return Verdict::Killed { by, case, seed: *seed, error: error.chars().take(300).collect() };
        }
    }
    Verdict::Survived
}
