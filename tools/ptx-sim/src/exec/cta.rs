//! One CTA: its warps, interleaved by a seed.
//!
//! The scheduler picks a warp that can go on and runs it for a random number of instructions. When none can, the CTA is
//! deadlocked: no barrier is ever completed from outside.
use super::barriers::{Barriers, Mbarriers};
use super::sync::{Flow, guarded};
use super::warp::{Geometry, Group, LANES, Wait, Warp};
use super::wgmma::Warpgroup;
use super::{alu, mem, sync};
use crate::decode::cuda_lines;
use crate::error::{Fault, Place, SimError};
use crate::ir::{Kernel, Op, Space};
use crate::launch::Stats;
use crate::memory::{Memory, Shared};
use std::collections::BTreeMap;

/// Instructions that a warp runs at most before another may.
const QUANTUM: u64 = 64;

/// Instructions that lanes of a warp go apart before those at the lowest address are thought to spin.
const PATIENCE: u64 = 1 << 16;

/// What all CTAs of a launch share.
pub(crate) struct Setup<'a> {
    pub kernel: &'a Kernel,
    pub files: &'a BTreeMap<u32, String>,
    pub global: &'a Memory,
    pub params: &'a [u8],
}

/// How a CTA runs.
pub(crate) struct Limits {
    pub shared: u64,
    pub initialised: bool,
    pub seed: u64,
    pub instructions: u64,
}

/// What the warps of a CTA share.
pub(super) struct Env<'a> {
    pub global: &'a Memory,
    pub params: &'a [u8],
    pub shared: Shared,
    pub barriers: Barriers,
    pub mbarriers: Mbarriers,
    /// Warp instructions so far.
    pub executed: u64,
    /// Floating or integer operations of matrix instructions so far; a multiply-add is two.
    pub matrix_flops: u64,
    /// Warps of the CTA.
    pub warps: usize,
    pub warpgroups: Vec<Warpgroup>,
    /// Line of the instruction that runs.
    pub line: u32,
    pub random: Random,
}

/// xorshift64*: a small generator, so that a seed means the same everywhere.
pub(super) struct Random(u64);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// Runs a CTA to its end: what it did.
pub(crate) fn run(setup: &Setup, geometry: &Geometry, limits: &Limits) -> Result<Stats, SimError> {
    let count = geometry.threads().div_ceil(LANES as u32) as usize;
    let mut warps: Vec<Warp> = (0..count).map(|w| Warp::new(setup.kernel, geometry, w)).collect();
    let mut env = Env {
        global: setup.global,
        params: setup.params,
        shared: Shared::new(limits.shared, limits.initialised),
        barriers: Barriers::new(32 * count as u64),
        mbarriers: Mbarriers::default(),
        executed: 0,
        matrix_flops: 0,
        warps: count,
        warpgroups: (0..count.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
        line: 0,
        // Zero is the one state that the generator never leaves.
        random: Random(limits.seed | 1),
    };
    let mut ready = Vec::with_capacity(count);
    loop {
        ready.clear();
        ready.extend(warps.iter().filter(|w| next_group(w, &env).is_some()).map(|w| w.index));
        if ready.is_empty() {
            return finish(setup, geometry, &warps, &env);
        }
        let index = ready[env.random.below(ready.len() as u64) as usize];
        let quantum = 1 + env.random.below(QUANTUM);
        let result = advance(&mut warps[index], &mut env, setup.kernel, quantum);
        result.map_err(|(kind, lanes, pc)| {
            let place = Place { cta: Some(geometry.cta), warp: Some(index), lanes, ..place(setup, pc) };
            SimError { kind, place: Box::new(place) }
        })?;
        if env.executed > limits.instructions {
            let place = Place { cta: Some(geometry.cta), ..Place::default() };
            let kind = Fault::TooLong { limit: limits.instructions };
            return Err(SimError { kind, place: Box::new(place) });
        }
    }
}

fn place(setup: &Setup, pc: u32) -> Place {
    let inst = &setup.kernel.code[pc as usize];
    Place { line: inst.line, cuda: cuda_lines(setup.files, inst.loc), ..Place::default() }
}

/// Nothing can run: all is done, or nothing ever will.
fn finish(setup: &Setup, geometry: &Geometry, warps: &[Warp], env: &Env) -> Result<Stats, SimError> {
    let positions: Vec<String> = warps
        .iter()
        .flat_map(|w| w.groups.iter().map(move |g| (w, g)))
        .map(|(warp, group)| {
            // A barrier's arrival has happened: the lanes stand behind it.
            let behind = u32::from(matches!(group.wait, Some(Wait::Barrier { .. })));
            let waits = match &group.wait {
                Some(Wait::Lanes(members)) => format!("lanes {members:#010x} of the warp"),
                Some(Wait::Barrier { id, .. }) => format!("barrier {id} ({})", env.barriers.state(*id)),
                Some(Wait::Warpgroup { warpgroup, .. }) => format!("the other warps of warpgroup {warpgroup}"),
                Some(Wait::Mbarrier { address, parity }) => {
                    format!("mbarrier {address:#x} parity {parity} ({})", env.mbarriers.state(*address))
                }
                None => "nothing".to_string(),
            };
            let place = Place { warp: Some(warp.index), lanes: group.mask, ..place(setup, group.pc - behind) };
            format!("{place}: waits for {waits}")
        })
        .collect();
    if positions.is_empty() {
        let (executed, matrix_flops) = (env.executed, env.matrix_flops);
        return Ok(Stats { warp_instructions: executed, matrix_flops, longest_cta: executed });
    }
    let place = Place { cta: Some(geometry.cta), ..Place::default() };
    Err(SimError { kind: Fault::Deadlock { positions }, place: Box::new(place) })
}

fn can_run(group: &Group, warp: &Warp, env: &Env) -> bool {
    match group.wait {
        None => true,
        Some(Wait::Lanes(members)) => members & warp.live() & !group.mask == 0,
        Some(Wait::Barrier { id, generation }) => env.barriers.passed(id, generation),
        Some(Wait::Warpgroup { warpgroup, issued }) => env.warpgroups[warpgroup].passed(issued),
        Some(Wait::Mbarrier { address, parity }) => env.mbarriers.passed(address, parity),
    }
}

/// The group to run: the lowest address of those that can.
fn next_group(warp: &Warp, env: &Env) -> Option<usize> {
    let ready = (0..warp.groups.len()).filter(|&g| can_run(&warp.groups[g], warp, env));
    ready.min_by_key(|&g| warp.groups[g].pc)
}

/// Runs a warp for some instructions, or until it must wait.
fn advance(warp: &mut Warp, env: &mut Env, kernel: &Kernel, quantum: u64) -> Result<(), (Fault, u32, u32)> {
    let end = env.executed + quantum;
    while let Some(mut chosen) = next_group(warp, env) {
        // Lanes that spin must not keep those away that they wait for. Not before it has taken long: hardware brings lanes
        // together at the join, and a shuffle there among the active lanes needs them all.
        warp.apart = if warp.groups.len() > 1 { warp.apart + 1 } else { 0 };
        if warp.apart > PATIENCE && env.random.below(8) == 0 {
            let other = env.random.below(warp.groups.len() as u64) as usize;
            if can_run(&warp.groups[other], warp, env) {
                chosen = other;
            }
        }
        warp.groups[chosen].wait = None;
        let stays = |warp: &Warp| warp.groups.len() == 1 && warp.groups[0].wait.is_none();
        loop {
            if env.executed >= end {
                return Ok(());
            }
            step(warp, env, kernel, chosen)?;
            if !stays(warp) {
                break;
            }
            chosen = 0;
        }
        warp.merge();
    }
    Ok(())
}

/// Runs one instruction of a group.
fn step(warp: &mut Warp, env: &mut Env, kernel: &Kernel, chosen: usize) -> Result<(), (Fault, u32, u32)> {
    let (pc, group) = (warp.groups[chosen].pc, warp.groups[chosen].mask);
    let inst = &kernel.code[pc as usize];
    let mask = guarded(warp, group, inst.guard);
    env.executed += 1;
    // An instruction whose guard holds nowhere does nothing; a jump with it goes nowhere.
    if mask == 0 {
        warp.groups[chosen].pc = pc + 1;
        return Ok(());
    }
    let located = |(fault, lanes)| (fault, lanes, pc);
    if !inst.touches.is_empty() {
        warp.products.touch(&inst.touches, mask).map_err(located)?;
    }
    if alu::run(&mut warp.regs, mask, &inst.op).map_err(|fault| located((fault, mask)))?
        || mem::run(warp, env, mask, &inst.op).map_err(located)?
    {
        warp.groups[chosen].pc = pc + 1;
        return Ok(());
    }
    env.line = inst.line;
    let flow = sync::run(warp, env, group, mask, &inst.op).map_err(located)?;
    apply(warp, env, chosen, flow);
    Ok(())
}

fn apply(warp: &mut Warp, env: &mut Env, chosen: usize, flow: Flow) {
    let group = &mut warp.groups[chosen];
    let next = group.pc + 1;
    match flow {
        Flow::Next => group.pc = next,
        Flow::Jump(target, lanes) => {
            let stay = group.mask & !lanes;
            *group = Group { pc: target, mask: lanes, wait: None };
            if stay != 0 {
                warp.groups.push(Group { pc: next, mask: stay, wait: None });
            }
        }
        Flow::Exit(lanes) => {
            group.mask &= !lanes;
            group.pc = next;
            if group.mask == 0 {
                warp.groups.swap_remove(chosen);
            }
            if warp.groups.is_empty() {
                env.barriers.leave();
            }
        }
        Flow::Retry(wait) => group.wait = Some(wait),
        Flow::Sleep(wait) => {
            group.pc = next;
            group.wait = Some(wait);
        }
    }
}

/// Whether a kernel has global atomics, so that the order of its CTAs shows.
pub(crate) fn orders_ctas(kernel: &Kernel) -> bool {
    kernel.code.iter().any(|inst| matches!(inst.op, Op::Atom { space, .. } if space != Space::Shared))
}
