//! Operations beside the warps, and what orders them: `tcgen05.commit`, `.wait`, `.fence` (PTX ISA, Pipelined tcgen05
//! Instructions, TensorCore 5th Generation Specialized Synchronization and Async Synchronization Operations).
//!
//! The multiplications, copies, shifts and commits of a pair of CTAs are done at random later times, in the order in
//! which they were issued. Hardware may change the order where no pipeline keeps it; what depends on that is an error
//! when it is issued.
use super::history::{Issued, Operation, Thread};
use crate::error::Fault;
use crate::exec::address::{self, shared_address};
use crate::exec::env::{Env, Work};
use crate::exec::order::{Agent, Clock, Proxy};
use crate::exec::shared::{address_in, rank_and_offset};
use crate::exec::warp::Warp;
use crate::ir::{Addr, Slot};

/// Queues of flights from this on are those of pairs of CTAs.
const QUEUES: u64 = 1 << 32;

/// Those of commits' arrivals, for each pair and each CTA that they come to: one waits for another only there.
const ARRIVALS: u64 = 1 << 34;

/// The agent that stands for a row of operations; each is ordered after what the warp has done so far.
fn extend(env: &mut Env, warp: &Warp, open: Option<Agent>, what: &'static str) -> Agent {
    match open {
        Some(agent) => {
            env.shared.order.also_after(agent, warp.agent);
            agent
        }
        None => env.shared.order.begin_async(warp.agent, Proxy::Async, what),
    }
}

fn note(warp: &Warp, env: &mut Env, agent: Agent, operation: Operation, lane: usize) -> u32 {
    let thread = Thread { warp: warp.agent.index(), lane };
    let (stamp, line) = (env.shared.order.now(agent), env.shared.order.line);
    let number = env.tensor.operations.add(Issued { operation, thread, stamp, published: None, line });
    env.tensor.warps[thread.warp].unpublished.push(number);
    number
}

/// Issues a multiplication, copy or shift: its number, and the agent for its accesses to shared memory.
pub(super) fn issue(warp: &Warp, env: &mut Env, lane: usize, operation: Operation) -> (u32, Agent) {
    let thread = Thread { warp: warp.agent.index(), lane };
    let open = env.tensor.pipelines.entry(thread).or_default().open;
    let agent = extend(env, warp, open, "a tcgen05 operation");
    env.tensor.pipelines.entry(thread).or_default().open = Some(agent);
    (note(warp, env, agent, operation, lane), agent)
}

/// Issues a load or store of a warp: its number.
pub(super) fn issue_transfer(warp: &Warp, env: &mut Env, operation: Operation) -> u32 {
    let index = warp.agent.index();
    let view = &env.tensor.warps[index];
    let agent = if operation == Operation::Load {
        let agent = extend(env, warp, view.loads, "tcgen05.ld");
        env.tensor.warps[index].loads = Some(agent);
        agent
    } else {
        let agent = extend(env, warp, view.stores, "tcgen05.st");
        env.tensor.warps[index].stores = Some(agent);
        agent
    };
    note(warp, env, agent, operation, 0)
}

/// Does work in the order of the pair of CTAs.
pub(super) fn enqueue(warp: &Warp, env: &mut Env, ctas: u32, work: Work) {
    env.later(ctas, Some(QUEUES + warp.rank as u64 / 2), work);
}

fn wait(warp: &Warp, env: &mut Env, agent: Option<Agent>) {
    if let Some(agent) = agent {
        let clock = env.shared.order.end_async(agent);
        let view = &mut env.tensor.warps[warp.agent.index()];
        view.own.join(&clock);
        view.known.join(&clock);
    }
}

/// `.wait::ld`: the registers can be used.
pub(super) fn wait_loads(warp: &mut Warp, env: &mut Env) {
    let agent = env.tensor.warps[warp.agent.index()].loads.take();
    wait(warp, env, agent);
    warp.loading.clear();
}

/// `.wait::st`
pub(super) fn wait_stores(warp: &Warp, env: &mut Env) {
    let agent = env.tensor.warps[warp.agent.index()].stores.take();
    wait(warp, env, agent);
}

/// `.fence::before_thread_sync`: what the warp releases from now on carries its accesses.
pub(super) fn fence_before(warp: &Warp, env: &mut Env) {
    let view = &mut env.tensor.warps[warp.agent.index()];
    env.shared.order.acquire(warp.agent, &view.own);
    let stamp = env.shared.order.now(warp.agent);
    for number in std::mem::take(&mut view.unpublished) {
        env.tensor.operations.publish(number, stamp);
    }
}

/// `.fence::after_thread_sync`: accesses from now on are ordered after what the warp has acquired.
pub(super) fn fence_after(warp: &Warp, env: &mut Env) {
    env.tensor.warps[warp.agent.index()].known.join(env.shared.order.clock(warp.agent));
}

fn arrive(env: &mut Env, by: Agent, address: u64, clock: &Clock) -> Result<(), Fault> {
    env.shared.reach("tcgen05.commit", address)?;
    env.mbarriers.get(&env.shared.order, by, address)?.arrive(address, 1, clock)
}

/// `.commit`: an arrival at mbarriers once the thread's earlier operations are over.
pub(super) fn commit(warp: &Warp, env: &mut Env, lane: usize, mbarrier: Addr, mask: Option<Slot>) -> Result<(), Fault> {
    let address = shared_address(address::address(warp, mbarrier, lane));
    let (_, offset) = rank_and_offset(address);
    let addresses: Vec<u64> = match mask {
        None => vec![address],
        Some(mask) => {
            let mask = warp.regs.row(mask)[lane];
            (0..16).filter(|rank| mask >> rank & 1 == 1).map(|rank| address_in(rank, offset)).collect()
        }
    };
    // The operation uses the mbarrier by the generic proxy (PTX ISA, tcgen05.commit).
    let by = warp.agent;
    for address in &addresses {
        env.shared.reach("tcgen05.commit", *address)?;
        env.mbarriers.get(&env.shared.order, by, *address)?;
    }
    let (thread, rank) = (Thread { warp: by.index(), lane }, warp.rank);
    let open = env.tensor.pipelines.entry(thread).or_default().open.take();
    let ctas = addresses.iter().fold(0, |ctas, address| ctas | 1 << rank_and_offset(*address).0);
    let work = Box::new(move |env: &mut Env| {
        let pipeline = env.tensor.pipelines.entry(thread).or_default();
        if let Some(agent) = open {
            pipeline.over.join(&env.shared.order.end_async(agent));
        }
        let clock = pipeline.over.clone();
        if !env.adversary.arrivals || addresses.len() == 1 {
            return addresses.iter().try_for_each(|address| arrive(env, by, *address, &clock));
        }
        for address in addresses {
            let (to, clock) = (rank_and_offset(address).0, clock.clone());
            let queue = ARRIVALS + (rank as u64 / 2 * 16 + to as u64);
            env.later(1 << to, Some(queue), Box::new(move |env| arrive(env, by, address, &clock)));
        }
        Ok(())
    });
    if let Some(time) = &mut env.time {
        time.tensor_commit(warp.rank);
    }
    enqueue(warp, env, ctas, work);
    Ok(())
}
