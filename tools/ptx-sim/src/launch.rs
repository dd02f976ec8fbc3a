//! Launches a kernel: checks the arguments, runs the CTAs on all cores.
use crate::adversary::Adversary;
use crate::coverage::Coverage;
use crate::decode::decode;
use crate::error::{Fault, SimError};
use crate::exec::{self, Geometry, Limits, Setup};
use crate::ir::Kernel;
use crate::memory::{Buffer, Memory};
use crate::parse::Module;
use crate::stats::Stats;
use crate::timing::Rates;
use rayon::prelude::*;
use std::time::Instant;

/// Shared memory that a CTA can have at most (compute capability 9.0).
const MAX_SHARED: u64 = 227 * 1024;

/// CTAs that a cluster can have at most (compute capability 9.0, with the launch attribute for more than 8).
const MAX_CLUSTER: u64 = 16;

/// An argument of a kernel.
#[derive(Debug, Clone)]
pub enum Param {
    /// A pointer to the start of an allocation.
    Buffer(Buffer),
    /// A value: a scalar or a struct, as it lies in memory.
    Bytes(Vec<u8>),
}

/// A launch of a kernel.
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    /// The module.
    pub module: &'a Module,
    /// The kernel's name.
    pub entry: &'a str,
    /// CTAs in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y, z; what the kernel requires goes before a single one.
    pub cluster: [u32; 3],
    /// Arguments in order.
    pub params: Vec<Param>,
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u64,
    /// How warps interleave.
    pub seed: u64,
    /// What it does that hardware may do but rarely does.
    pub adversary: Adversary,
    /// Lets shared memory be read that nothing wrote (it reads as zeros).
    pub initialised_shared: bool,
    /// Warp instructions of a CTA, in the mean over its cluster, before [`Fault::TooLong`].
    pub max_instructions: u64,
    /// Takes down which instructions run.
    pub coverage: Option<&'a Coverage>,
    /// Estimates how long a GPU with these rates takes. What happens first by the estimate is then simulated first, so that
    /// the seed changes little.
    pub rates: Option<&'a Rates>,
    /// Runs only this cluster, counted through the grid.
    pub only: Option<u64>,
    /// Other threads run launches of other devices, which this one may wait for: its clusters run in order, timers count
    /// nanoseconds from here on, and warps pause now and then.
    pub beside: Option<Instant>,
}

fn bad(argument: &str, actual: impl ToString, expected: impl ToString) -> SimError {
    let (actual, expected) = (actual.to_string(), expected.to_string());
    Fault::BadLaunch { argument: argument.to_string(), actual, expected }.into()
}

impl<'a> Launch<'a> {
    /// A launch of one CTA of one warp without arguments; the fields say the rest.
    pub fn new(module: &'a Module, entry: &'a str) -> Self {
        Self {
            module,
            entry,
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: [1; 3],
            params: Vec::new(),
            dynamic_shared: 0,
            seed: 1,
            adversary: Adversary::default(),
            initialised_shared: false,
            max_instructions: 1 << 32,
            coverage: None,
            rates: None,
            only: None,
            beside: None,
        }
    }

    /// Runs the kernel. Clusters run in parallel; with atomics on global memory they run in order, so that a seed gives one
    /// result.
    ///
    /// # Errors
    /// [`SimError`] of a CTA that failed, or of a launch that does not fit the kernel.
    pub fn run(&self, memory: &Memory) -> Result<Stats, SimError> {
        let kernel = decode(self.module, self.entry)?;
        let params = self.arguments(&kernel, memory)?;
        self.check(&kernel)?;
        let ordered = exec::orders_ctas(&kernel);
        let plan = self.rates.map(|rates| exec::Plan::new(&kernel, rates));
        let setup = Setup {
            kernel: &kernel,
            files: &self.module.files,
            global: memory,
            variables: &Memory::of_variables(&self.module.globals),
            touched: (!ordered).then(|| exec::Touched::new(memory)),
            coverage: self.coverage,
            plan: plan.as_ref(),
            params: &params,
        };
        let cluster = self.cluster(&kernel)?;
        let across = [0, 1, 2].map(|axis| self.grid[axis] / cluster[axis]);
        let one = |index: u64| {
            let [x, y] = [u64::from(across[0]), u64::from(across[1])];
            let first = [index % x, index / x % y, index / x / y];
            let cta = |rank: u32| {
                let within = [rank % cluster[0], rank / cluster[0] % cluster[1], rank / cluster[0] / cluster[1]];
                let cta = [0, 1, 2].map(|axis| first[axis] as u32 * cluster[axis] + within[axis]);
                Geometry { grid: self.grid, block: self.block, cta, cluster, rank: rank as usize }
            };
            let ctas: Vec<_> = (0..cluster.iter().product()).map(cta).collect();
            let limits = Limits {
                cluster: index as u32,
                shared: kernel.static_shared + self.dynamic_shared,
                initialised: self.initialised_shared,
                adversary: self.adversary,
                seed: (self.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9),
                instructions: self.max_instructions,
                beside: self.beside,
            };
            exec::run(&setup, &ctas, &limits)
        };
        if let Some(index) = self.only {
            return one(index);
        }
        let count = across.iter().map(|&n| u64::from(n)).product();
        // A cluster that waits must not keep the threads from those that it waits for.
        if ordered || self.beside.is_some() {
            (0..count).map(one).sum()
        } else {
            (0..count).into_par_iter().map(one).sum()
        }
    }

    /// The cluster's CTAs (PTX ISA, `.reqnctapercluster`): the grid is a multiple of it.
    fn cluster(&self, kernel: &Kernel) -> Result<[u32; 3], SimError> {
        let cluster = if self.cluster == [1; 3] { kernel.cluster.unwrap_or(self.cluster) } else { self.cluster };
        let ctas: u64 = cluster.iter().map(|&n| u64::from(n)).product();
        let shown = format!("{cluster:?}");
        if let Some(required) = kernel.cluster.filter(|r| *r != cluster) {
            return Err(bad("cluster", shown, format!("{required:?}")));
        }
        if !(1..=MAX_CLUSTER).contains(&ctas) {
            return Err(bad("cluster", shown, format!("1 to {MAX_CLUSTER} CTAs")));
        }
        if (0..3).any(|axis| !self.grid[axis].is_multiple_of(cluster[axis])) {
            return Err(bad("grid", format!("{:?}", self.grid), format!("a multiple of the cluster {shown}")));
        }
        Ok(cluster)
    }

    fn check(&self, kernel: &Kernel) -> Result<(), SimError> {
        let threads: u64 = self.block.iter().map(|&n| u64::from(n)).product();
        let most = kernel.max_threads.map_or(1024, |m| m.iter().product::<u32>()).min(1024);
        if threads == 0 || threads > u64::from(most) {
            return Err(bad("block", threads, format!("1 to {most} threads")));
        }
        if let Some(required) = kernel.required_threads.filter(|r| *r != self.block) {
            return Err(bad("block", format!("{:?}", self.block), format!("{required:?}")));
        }
        if self.grid.contains(&0) {
            return Err(bad("grid", format!("{:?}", self.grid), "no zeros"));
        }
        let shared = kernel.static_shared + self.dynamic_shared;
        if shared > MAX_SHARED {
            return Err(bad("shared memory", shared, format!("at most {MAX_SHARED} bytes")));
        }
        Ok(())
    }

    /// The parameter space.
    fn arguments(&self, kernel: &Kernel, memory: &Memory) -> Result<Vec<u8>, SimError> {
        if self.params.len() != kernel.params.len() {
            return Err(bad("params", self.params.len(), format!("{} arguments", kernel.params.len())));
        }
        let mut space = Vec::new();
        for (index, (param, (offset, bytes))) in self.params.iter().zip(&kernel.params).enumerate() {
            let value = match param {
                Param::Buffer(buffer) => memory.address(*buffer).to_le_bytes().to_vec(),
                Param::Bytes(bytes) => bytes.clone(),
            };
            if value.len() as u64 != *bytes {
                return Err(bad(&format!("params[{index}]"), value.len(), format!("{bytes} bytes")));
            }
            space.resize(*offset as usize, 0);
            space.extend(value);
        }
        Ok(space)
    }
}
