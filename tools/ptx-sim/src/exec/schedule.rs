//! What is done next: anything that can be, or what comes first by the estimate of time.
use super::cta::{Env, next_group};
use super::warp::Warp;

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Warp(usize),
    Flight(usize),
    /// The tensor cores of a CTA begin or end a product.
    Tensor(usize),
}

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
    let next = time.first(ready.into_iter(), &env.flights);
    env.time = Some(time);
    next
}
