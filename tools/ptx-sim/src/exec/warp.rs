//! A warp: registers of 32 lanes, and where its lanes stand.
//!
//! Lanes that stand at the same instruction form a group. Of the groups that can go on, the one with the lowest
//! address runs; groups that meet become one. Compilers lay blocks out so that a join lies behind its branches, so
//! lanes reconverge at the join; where one does not, only speed suffers. Unlike a stack of joins this lets lanes of one
//! warp wait for each other (PTX ISA 3.1, independent thread scheduling): after long, another group that can go on runs
//! now and then instead.
//!
//! With [`Adversary::lanes`](crate::Adversary::lanes) groups meet only where they wait for each other, and any of them runs.
use super::order::Agent;
use super::registers::{LANES, LaneResult, Registers};
use super::shared::address_in;
use crate::error::Fault;
use crate::ir::{Kernel, Slot, Special};

/// What a group waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Other lanes, at the same instruction.
    Lanes(u32),
    /// The named barrier's next completion after this generation.
    Barrier { id: u64, generation: u64 },
    /// All warps of a warpgroup to have issued this many products.
    Warpgroup { warpgroup: usize, issued: u64 },
    /// The phase of this parity to complete; it was the one of this number when the wait began.
    Mbarrier { address: u64, parity: u64, phase: u64 },
    /// Room for an allocation of so many columns of tensor memory, or the peer CTA's part in what both do.
    TensorMemory { columns: Option<u32> },
    /// The cluster barrier's completion after this generation.
    Cluster { generation: u64 },
    /// Registers for each thread of the warp that others of the CTA give back.
    Registers { count: u32 },
}

/// What an instruction does to the group that ran it.
pub(super) enum Flow {
    Next,
    /// These lanes go elsewhere.
    Jump(u32, u32),
    /// These lanes are done.
    Exit(u32),
    /// Runs again when the wait is over.
    Retry(Wait),
    /// Goes on behind the instruction when the wait is over.
    Sleep(Wait),
}

/// Lanes that stand at the same instruction.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub pc: u32,
    pub mask: u32,
    pub wait: Option<Wait>,
}

/// A warp of a CTA.
pub(crate) struct Warp {
    /// Its number in the CTA.
    pub index: usize,
    /// The CTA's rank in the cluster.
    pub rank: usize,
    /// Its number in the cluster, as an agent.
    pub agent: Agent,
    /// Lanes that have arrived at the cluster barrier and not waited yet.
    pub cluster_arrived: u32,
    /// The cluster barrier's generation that they arrived in.
    pub cluster_generation: u64,
    pub regs: Registers,
    pub groups: Vec<Group>,
    /// Instructions since all lanes stood together.
    pub apart: u64,
    /// Groups meet only where they wait for each other.
    pub stays_apart: bool,
    pub copies: super::copies::Copies,
    /// Registers that a `tcgen05.ld` has yet to fill.
    pub loading: Vec<Slot>,
    pub bulk: super::bulk_groups::Groups,
    /// Registers of each thread, if the launch says how many there are.
    pub registers: Option<u32>,
    pub products: super::warpgroup::Products,
    pub local: super::local::Local,
}

/// A thread's surroundings, for its special registers.
pub(crate) struct Geometry {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cta: [u32; 3],
    /// CTAs of a cluster.
    pub cluster: [u32; 3],
    /// The CTA's rank in its cluster.
    pub rank: usize,
}

impl Geometry {
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}

fn special(special: Special, geometry: &Geometry, thread: u32) -> u64 {
    let [x, y, _] = geometry.block;
    let lane = u64::from(thread) % LANES as u64;
    let all = u64::from(u32::MAX);
    u64::from(match special {
        Special::Tid(0) => thread % x,
        Special::Tid(1) => thread / x % y,
        Special::Tid(_) => thread / (x * y),
        Special::Ntid(axis) => geometry.block[axis],
        Special::Ctaid(axis) => geometry.cta[axis],
        Special::Nctaid(axis) => geometry.grid[axis],
        Special::WarpId => thread / LANES as u32,
        Special::ClusterId(axis) => geometry.cta[axis] / geometry.cluster[axis],
        Special::NclusterId(axis) => geometry.grid[axis] / geometry.cluster[axis],
        Special::ClusterCtaid(axis) => geometry.cta[axis] % geometry.cluster[axis],
        Special::ClusterNctaid(axis) => geometry.cluster[axis],
        Special::ClusterCtarank => geometry.rank as u32,
        Special::ClusterNctarank => geometry.cluster.iter().product(),
        Special::Shared(offset) => return address_in(geometry.rank, offset),
        Special::LaneId => return lane,
        Special::LaneMask("eq") => return 1 << lane,
        Special::LaneMask("lt") => return (1 << lane) - 1,
        Special::LaneMask("le") => return (2 << lane) - 1,
        Special::LaneMask("gt") => return all & !((2 << lane) - 1),
        Special::LaneMask(_) => return all & !((1 << lane) - 1),
    })
}

impl Warp {
    pub fn new(kernel: &Kernel, geometry: &Geometry, index: usize, stays_apart: bool) -> Self {
        let mut rows = vec![[0; LANES]; kernel.slots];
        for (slot, bits) in &kernel.constants {
            rows[*slot as usize] = [*bits; LANES];
        }
        let first = (index * LANES) as u32;
        for (slot, kind) in &kernel.specials {
            rows[*slot as usize] = std::array::from_fn(|l| special(*kind, geometry, first + l as u32));
        }
        let lanes = (geometry.threads() - first).min(LANES as u32);
        let mask = u32::MAX >> (LANES as u32 - lanes);
        let regs = Registers::new(rows, kernel.preds);
        let warps = geometry.threads().div_ceil(LANES as u32) as usize;
        Self {
            index,
            rank: geometry.rank,
            agent: Agent::warp(geometry.rank * warps + index),
            cluster_arrived: 0,
            cluster_generation: 0,
            regs,
            groups: vec![Group { pc: 0, mask, wait: None }],
            apart: 0,
            stays_apart,
            copies: Default::default(),
            loading: Vec::new(),
            bulk: Default::default(),
            registers: kernel.max_registers,
            products: Default::default(),
            local: super::local::Local::new(kernel.local),
        }
    }

    /// Lanes that have not exited.
    pub fn live(&self) -> u32 {
        self.groups.iter().fold(0, |mask, g| mask | g.mask)
    }

    /// Joins groups that stand at the same instruction, unless one of them is past a barrier's arrival there.
    pub fn merge(&mut self) {
        let mut i = 0;
        while i < self.groups.len() {
            let here = &self.groups[i];
            let live = self.live();
            let meets = |g: &Group| match (&g.wait, &here.wait) {
                _ if !self.stays_apart => !g.at_barrier() && !here.at_barrier(),
                (Some(Wait::Lanes(theirs)), Some(Wait::Lanes(members))) => theirs & live == members & live,
                _ => false,
            };
            let joins = |g: &Group| g.pc == here.pc && meets(g);
            match (i + 1..self.groups.len()).find(|&j| joins(&self.groups[j])) {
                Some(j) => {
                    let other = self.groups.swap_remove(j);
                    self.groups[i].mask |= other.mask;
                    self.groups[i].wait = None;
                }
                None => i += 1,
            }
        }
    }
}

impl Group {
    fn at_barrier(&self) -> bool {
        matches!(self.wait, Some(Wait::Barrier { .. }))
    }
}

/// An `.aligned` instruction: the warp's other lanes come, too, or need not come.
pub(super) fn aligned(warp: &Warp, group: u32) -> LaneResult<Option<Flow>> {
    let missing = warp.live() & !group;
    if missing != 0 && warp.stays_apart {
        return Err((Fault::LanesApart { missing }, group));
    }
    Ok((missing != 0).then_some(Flow::Retry(Wait::Lanes(warp.live()))))
}

/// Waits for the warp's other lanes; all 32 must come, and execute.
pub(super) fn whole_warp(warp: &Warp, group: u32, mask: u32) -> LaneResult<Option<Flow>> {
    if let Some(flow) = aligned(warp, group)? {
        return Ok(Some(flow));
    }
    if mask != u32::MAX {
        return Err((Fault::NotAligned { executing: mask }, mask));
    }
    Ok(None)
}
