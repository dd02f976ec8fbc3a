//! One cluster: the warps of its CTAs, interleaved by a seed. Without clusters that is one CTA.
//!
//! The scheduler picks a warp that can go on and runs it for a random number of instructions, or it picks work that is
//! under way and does that. When there is neither, the cluster is deadlocked: no barrier is ever completed from outside.
use super::barriers::{Barriers, ClusterBarrier};
use super::env::{Cta, Env, Random};
use super::flights::{Flights, Origin};
use super::global::{Global, Touched};
use super::mbarriers::Mbarriers;
use super::next::Next;
use super::registers::LANES;
use super::schedule::{any, can_run, first, next_group};
use super::shared::Shared;
use super::sync::guarded;
use super::tcgen05::cores::TensorCores;
use super::time::{self, Plan, Time};
use super::warp::{Flow, Geometry, Group, Wait, Warp};
use super::warpgroup::Warpgroup;
use super::{alu, mem, sync};
use crate::adversary::Adversary;
use crate::coverage::Coverage;
use crate::decode::cuda_lines;
use crate::error::{Fault, Place, SimError};
use crate::ir::{Kernel, Op, Space};
use crate::memory::Memory;
use crate::stats::Stats;
use std::collections::BTreeMap;
use std::time::Instant;

/// Instructions that a warp runs at most before another may.
const QUANTUM: u64 = 64;

/// In every other run, what is under way beside the warps takes so many times as long.
const SLOW: u64 = 16;

/// Instructions that lanes of a warp go apart before those at the lowest address are thought to spin.
const PATIENCE: u64 = 1 << 16;

/// What all CTAs of a launch share.
pub(crate) struct Setup<'a> {
    pub kernel: &'a Kernel,
    pub files: &'a BTreeMap<u32, String>,
    pub global: &'a Memory,
    /// Where clusters have no order between them.
    pub touched: Option<Touched>,
    pub coverage: Option<&'a Coverage>,
    /// What an estimate of the time is made with.
    pub plan: Option<&'a Plan<'a>>,
    /// The module's variables.
    pub variables: &'a Memory,
    pub params: &'a [u8],
}

/// How a cluster runs.
pub(crate) struct Limits {
    /// The cluster's number in the grid.
    pub cluster: u32,
    /// Bytes of shared memory of a CTA.
    pub shared: u64,
    pub initialised: bool,
    pub adversary: Adversary,
    pub seed: u64,
    /// Warp instructions of a CTA.
    pub instructions: u64,
    pub beside: Option<Instant>,
}

/// Runs a cluster to its end: what it did. The CTAs are in the order of their ranks.
pub(crate) fn run(setup: &Setup, ctas: &[Geometry], limits: &Limits) -> Result<Stats, SimError> {
    let each = ctas[0].threads().div_ceil(LANES as u32) as usize;
    let of = |geometry| (0..each).map(move |w| Warp::new(setup.kernel, geometry, w, limits.adversary.lanes));
    let mut warps: Vec<Warp> = ctas.iter().flat_map(of).collect();
    let cta = |geometry: &Geometry| Cta {
        position: geometry.cta,
        barriers: Barriers::new(LANES as u64 * each as u64),
        free_registers: 0,
        live: each,
    };
    let mut env = Env {
        global: Global { memory: setup.global, touched: setup.touched.as_ref(), cluster: limits.cluster },
        coverage: setup.coverage,
        variables: Global { memory: setup.variables, touched: None, cluster: limits.cluster },
        params: setup.params,
        shared: Shared::new(ctas.len(), limits.shared, limits.initialised, warps.len()),
        ctas: ctas.iter().map(cta).collect(),
        cluster: ClusterBarrier::new(ctas.iter().map(|g| u64::from(g.threads())).sum()),
        mbarriers: Mbarriers::default(),
        flights: Flights::default(),
        executed: 0,
        matrix_flops: 0,
        tensor: TensorCores::new(if setup.kernel.uses_tensor_memory() { ctas.len() } else { 0 }, warps.len()),
        tensor_bytes: 0,
        warps: each,
        warpgroups: (0..ctas.len() * each.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
        origin: Origin::default(),
        random: Random::new(limits.seed),
        adversary: limits.adversary,
        election: limits.seed >> 8,
        beside: limits.beside,
        touches_peers: false,
        waiting: 0,
        time: setup.plan.map(|plan| Box::new(Time::new(plan, ctas.len(), &warps))),
    };
    let most = limits.instructions.saturating_mul(ctas.len() as u64);
    let haste = if env.random.below(2) == 0 { 1 } else { SLOW };
    let mut ready = Vec::with_capacity(warps.len());
    loop {
        let next = if env.time.is_some() { first(&warps, &mut env) } else { any(&warps, &mut env, &mut ready, haste) };
        let result = match next {
            None => return finish(setup, &warps, &env),
            Some(Next::Warp(index)) => {
                let quantum = if env.time.is_some() { 1 } else { 1 + env.random.below(QUANTUM) };
                let advanced = advance(&mut warps[index], &mut env, setup.kernel, quantum);
                env.pause();
                advanced
            }
            Some(Next::Flight(index)) => {
                env.arrive(index);
                env.deliver(index)
            }
            Some(Next::Tensor(cta)) => {
                env.time.as_mut().into_iter().for_each(|time| time.tensor(cta));
                Ok(())
            }
        };
        result.map_err(|(kind, origin)| {
            let warp = &warps[origin.warp];
            let cta = Some(env.ctas[warp.rank].position);
            let place = Place { cta, warp: Some(warp.index), lanes: origin.lanes, ..place(setup, origin.pc) };
            SimError { kind, place: Box::new(place) }
        })?;
        if env.executed > most {
            let place = Place { cta: Some(env.ctas[0].position), ..Place::default() };
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
fn finish(setup: &Setup, warps: &[Warp], env: &Env) -> Result<Stats, SimError> {
    let positions: Vec<String> = warps
        .iter()
        .flat_map(|w| w.groups.iter().map(move |g| (w, g)))
        .map(|(warp, group)| {
            // A barrier's arrival has happened: the lanes stand behind it.
            let behind = u32::from(matches!(group.wait, Some(Wait::Barrier { .. })));
            let waits = match &group.wait {
                Some(Wait::Lanes(members)) => format!("lanes {members:#010x} of the warp"),
                Some(Wait::Warpgroup { warpgroup, .. }) => format!("the other warps of warpgroup {warpgroup}"),
                Some(Wait::Barrier { id, .. }) => {
                    format!("barrier {id} ({})", env.ctas[warp.rank].barriers.state(*id))
                }
                Some(Wait::Mbarrier { address, parity, .. }) => {
                    format!("mbarrier {address:#x} parity {parity} ({})", env.mbarriers.state(*address))
                }
                Some(Wait::TensorMemory { .. }) => format!("tensor memory ({})", env.tensor.state(warp.rank)),
                Some(Wait::Cluster { .. }) => format!("the cluster barrier ({})", env.cluster.state()),
                Some(Wait::Registers { count }) => {
                    let free = env.ctas[warp.rank].free_registers;
                    format!("{count} more registers ({free} were given back)")
                }
                None => "nothing".to_string(),
            };
            let cta = (env.ctas.len() > 1).then_some(env.ctas[warp.rank].position);
            let place = Place { cta, warp: Some(warp.index), lanes: group.mask, ..place(setup, group.pc - behind) };
            format!("{place}: waits for {waits}")
        })
        .collect();
    if positions.is_empty() {
        let (executed, matrix_flops, tensor_memory_bytes) = (env.executed, env.matrix_flops, env.tensor_bytes);
        let used = env.time.as_ref().map(|time| time.used()).unwrap_or_default();
        return Ok(Stats {
            cycles: used.end.ceil() as u64,
            tensor_cycles: used.tensor as u64,
            shared_cycles: used.shared as u64,
            loaded_bytes: used.loaded as u64,
            stored_bytes: used.stored as u64,
            warp_instructions: executed,
            matrix_flops,
            tensor_memory_bytes,
            longest_cta: executed / env.ctas.len() as u64,
        });
    }
    let place = Place { cta: Some(env.ctas[0].position), ..Place::default() };
    Err(SimError { kind: Fault::Deadlock { positions }, place: Box::new(place) })
}

/// Runs a warp for some instructions, or until it must wait.
fn advance(warp: &mut Warp, env: &mut Env, kernel: &Kernel, quantum: u64) -> Result<(), (Fault, Origin)> {
    let end = env.executed + quantum;
    while let Some(mut chosen) = next_group(warp, env) {
        // Lanes that spin must not keep those away that they wait for. Not before it has taken long: hardware brings lanes
        // together at the join, and a shuffle there among the active lanes needs them all.
        warp.apart = if warp.groups.len() > 1 { warp.apart + 1 } else { 0 };
        let any = if warp.stays_apart { warp.apart > 0 } else { warp.apart > PATIENCE };
        if any && env.random.below(8) == 0 {
            let other = env.random.below(warp.groups.len() as u64) as usize;
            if can_run(&warp.groups[other], warp, env) {
                chosen = other;
            }
        }
        missed_phase(warp, env, chosen)?;
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

/// A wait that slept while its phase and the next were completed cannot tell (PTX ISA, `mbarrier.test_wait`: the phase
/// is the current one or the one before).
fn missed_phase(warp: &Warp, env: &Env, chosen: usize) -> Result<(), (Fault, Origin)> {
    let group = &warp.groups[chosen];
    if let Some(Wait::Mbarrier { address, phase, .. }) = group.wait
        && env.mbarriers.find(address).is_some_and(|b| b.phase > phase + 1)
    {
        let problem = "two phases were completed while a thread waited for the first".to_string();
        let origin = Origin { warp: warp.agent.index(), lanes: group.mask, pc: group.pc };
        return Err((Fault::Mbarrier { address, problem }, origin));
    }
    Ok(())
}

/// Runs one instruction of a group.
fn step(warp: &mut Warp, env: &mut Env, kernel: &Kernel, chosen: usize) -> Result<(), (Fault, Origin)> {
    let (pc, group) = (warp.groups[chosen].pc, warp.groups[chosen].mask);
    let inst = &kernel.code[pc as usize];
    let mask = guarded(warp, group, inst.guard);
    env.executed += 1;
    if let Some(coverage) = env.coverage {
        coverage.mark(pc, mask != 0, mask != group);
    }
    if let Some(time) = &mut env.time {
        time::issue(warp, time, &inst.op, (pc, mask));
    }
    // An instruction whose guard holds nowhere does nothing; a jump with it goes nowhere.
    if mask == 0 {
        warp.groups[chosen].pc = pc + 1;
        return Ok(());
    }
    env.origin = Origin { warp: warp.agent.index(), lanes: mask, pc };
    env.shared.order.line = inst.line;
    // Lanes that are gone do nothing apart any more.
    env.shared.order.lanes = mask | !warp.live();
    // Where groups release one after the other, the clocks of a warp cannot tell what each has released: they are not checked.
    let parted = warp.stays_apart && warp.groups.len() > 1;
    env.shared.order.speak_for = if parted { u32::MAX } else { env.shared.order.lanes };
    let warp_number = warp.agent.index();
    let located = |(fault, lanes)| (fault, Origin { warp: warp_number, lanes, pc });
    if !inst.touches.is_empty() {
        warp.products.touch(&inst.touches, mask).map_err(located)?;
        if inst.touches.iter().any(|slot| warp.loading.contains(slot)) {
            return Err(located((Fault::RegisterInFlight, mask)));
        }
    }
    if alu::run(&mut warp.regs, mask, &inst.op).map_err(|fault| located((fault, mask)))?
        || mem::run(warp, env, mask, &inst.op).map_err(located)?
    {
        warp.groups[chosen].pc = pc + 1;
        return Ok(());
    }
    let flow = sync::run(warp, env, group, mask, &inst.op).map_err(located)?;
    apply(warp, env, chosen, flow)
}

fn apply(warp: &mut Warp, env: &mut Env, chosen: usize, flow: Flow) -> Result<(), (Fault, Origin)> {
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
            // Lanes that have arrived and never wait leave with their arrival.
            let counted = lanes & warp.cluster_arrived;
            let in_time = env.cluster.generation == warp.cluster_generation;
            env.cluster.leave(lanes.count_ones(), if in_time { counted.count_ones() } else { 0 });
            if warp.groups.is_empty() {
                return leave(warp, env);
            }
        }
        Flow::Retry(wait) => group.wait = Some(wait),
        Flow::Sleep(wait) => {
            group.pc = next;
            group.wait = Some(wait);
        }
    }
    Ok(())
}

/// A warp has exited. With the last one the CTA's shared memory goes, which nothing may use then.
fn leave(warp: &Warp, env: &mut Env) -> Result<(), (Fault, Origin)> {
    let order = &env.shared.order;
    env.flights.seen(warp.rank, |stamp| order.seen(warp.agent, stamp));
    let cta = &mut env.ctas[warp.rank];
    cta.barriers.leave(&mut env.shared.order);
    cta.live -= 1;
    if cta.live > 0 {
        return Ok(());
    }
    env.shared.end(warp.rank);
    env.tensor.leaks(warp.rank).map_err(|fault| (fault, env.origin))?;
    env.flights.using(warp.rank).map_or(Ok(()), |origin| Err((Fault::UnfinishedCopy, origin)))
}

/// Whether a kernel has global atomics, so that the order of its CTAs shows.
pub(crate) fn orders_ctas(kernel: &Kernel) -> bool {
    kernel.code.iter().any(|inst| matches!(&inst.op, Op::Atom(op) if op.space != Space::Shared))
}
