//! What is done next: anything that can be, or what comes first by the estimate of time.
use super::env::Env;
use super::next::Next;
use super::warp::{Group, Wait, Warp};

/// A warp that can go on, or work that is under way; the latter once in `haste` times.
pub(super) fn any(warps: &[Warp], env: &mut Env, ready: &mut Vec<usize>, haste: u64) -> Option<Next> {
    ready.clear();
    ready.extend((0..warps.len()).filter(|&w| next_group(&warps[w], env).is_some()));
    let in_time = ready.is_empty() || haste == 1 || env.random.below(haste) == 0;
    let flights = usize::from(env.flights.len() > 0 && in_time);
    if ready.len() + flights == 0 {
        return None;
    }
    let choice = env.random.below((ready.len() + flights) as u64) as usize;
    Some(match ready.get(choice) {
        Some(&index) => Next::Warp(index),
        None => Next::Flight(env.random.below(env.flights.len() as u64) as usize),
    })
}

/// What comes first by the estimate of time.
pub(super) fn first(warps: &[Warp], env: &mut Env) -> Option<Next> {
    let mut time = env.time.take()?;
    let mut ready = Vec::with_capacity(warps.len());
    for (index, warp) in warps.iter().enumerate() {
        // Taken out, the time does not say which products are over.
        env.time = Some(time);
        let group = next_group(warp, env);
        time = env.time.take()?;
        match group {
            Some(group) => ready.push((index, time.wake(index, warp.groups[group].pc))),
            None => time.block(index),
        }
    }
    let next = time.first(ready.into_iter(), env.flights.first());
    env.time = Some(time);
    next
}

/// Whether what a group waits for has come.
pub(super) fn can_run(group: &Group, warp: &Warp, env: &Env) -> bool {
    match group.wait {
        None => true,
        Some(Wait::Lanes(members)) => members & warp.live() & !group.mask == 0,
        Some(Wait::Warpgroup { warpgroup, issued }) => env.has_products(warpgroup, issued),
        Some(Wait::Barrier { id, generation }) => env.ctas[warp.rank].barriers.passed(id, generation),
        Some(Wait::Mbarrier { address, parity, phase }) => {
            env.mbarriers.find(address).is_none_or(|b| b.passed(parity) || b.phase > phase)
        }
        Some(Wait::TensorMemory { columns }) => env.tensor.can_go_on(warp.rank, columns),
        Some(Wait::Registers { count }) => env.ctas[warp.rank].free_registers >= count,
        Some(Wait::Cluster { generation }) => env.cluster.generation > generation,
    }
}

/// The group to run: the lowest address of those that can.
pub(super) fn next_group(warp: &Warp, env: &Env) -> Option<usize> {
    let ready = (0..warp.groups.len()).filter(|&g| can_run(&warp.groups[g], warp, env));
    ready.min_by_key(|&g| warp.groups[g].pc)
}
