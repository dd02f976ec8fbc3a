//! Loads, stores, atomics and asynchronous copies (PTX ISA 9.7.9, 9.7.13).
use super::address::{address, aligned, own, resolve, size};
use super::copies::{self, Copy};
use super::env::Env;
use super::order::Clock;
use super::registers::{LaneResult, at, lanes};
use super::shared::{address_in, rank_and_offset};
use super::warp::Warp;
use crate::error::Fault;
use crate::ir::{Int, Op, Space, Ty};
use crate::memory::Strength;

/// Bytes of the widest load or store (`.v8.b32`, `.v4.b64`).
const MOST_BYTES: usize = 32;

/// Up to eight bytes as a number.
fn little(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// Reads the bytes of a load.
fn load(
    warp: &Warp,
    env: &mut Env,
    (space, strength): (Space, Strength),
    address: u64,
    into: &mut [u8],
) -> Result<(), Fault> {
    let bytes = into.len() as u64;
    match space {
        Space::Shared | Space::Cluster => {
            own(warp, space, "shared load", address, bytes)?;
            if strength.is_strong() {
                return env.shared.read_strong(warp.agent, address, into);
            }
            env.shared.read(warp.agent, address, into)
        }
        Space::Param => {
            let start = address as usize;
            let Some(found) = env.params.get(start..start.saturating_add(into.len())) else {
                let nearest = format!("the parameters are {} bytes", env.params.len());
                return Err(Fault::OutOfBounds { access: "parameter load".into(), address, bytes, nearest });
            };
            into.copy_from_slice(found);
            Ok(())
        }
        Space::Local => Err(Fault::ReadOnly { address }),
        Space::Global | Space::Generic => {
            env.touches_peers |= strength == Strength::System;
            env.memory(address).load_as(strength, address, into)
        }
    }
}

/// Reads the bytes of a load that the kernel uses; compilers widen loads over others. Those become 0xff.
fn load_used(
    warp: &Warp,
    env: &mut Env,
    space: (Space, Strength),
    address: u64,
    (into, used): (&mut [u8], u32),
) -> Result<(), Fault> {
    into.fill(0xff);
    for (i, byte) in into.chunks_exact_mut(1).enumerate().filter(|(i, _)| used >> i & 1 == 1) {
        load(warp, env, space, address + i as u64, byte)?;
    }
    Ok(())
}

pub(super) fn store(
    warp: &Warp,
    env: &mut Env,
    (space, strength): (Space, Strength),
    address: u64,
    from: &[u8],
) -> Result<(), Fault> {
    match space {
        Space::Shared | Space::Cluster => {
            own(warp, space, "shared store", address, from.len() as u64)?;
            if strength.is_strong() {
                return env.shared.write_strong(warp.agent, address, from);
            }
            env.shared.write(warp.agent, address, from)
        }
        Space::Param | Space::Local => Err(Fault::ReadOnly { address }),
        Space::Global | Space::Generic => {
            env.touches_peers |= strength == Strength::System;
            env.memory(address).store_as(strength, address, from)
        }
    }
}

/// Loads a number of up to 8 bytes.
pub(super) fn load_value(warp: &Warp, env: &mut Env, space: Space, address: u64, bytes: u64) -> Result<u64, Fault> {
    let mut value = [0; 8];
    load(warp, env, (space, Strength::Weak), address, &mut value[..bytes as usize])?;
    Ok(u64::from_le_bytes(value))
}

/// Stores a number of up to 8 bytes.
pub(super) fn store_value(
    warp: &Warp,
    env: &mut Env,
    space: Space,
    address: u64,
    (bytes, value): (u64, u64),
) -> Result<(), Fault> {
    store(warp, env, (space, Strength::Weak), address, &value.to_le_bytes()[..bytes as usize])
}

/// A loaded value as its register of this many bits holds it: signed values fill it with their sign.
fn extend(ty: Ty, bits: u32, value: u64) -> u64 {
    let wide = match ty {
        Ty::S8 => value as i8 as u64,
        Ty::Int(Int::S16) => value as i16 as u64,
        Ty::Int(Int::S32) => value as i32 as u64,
        _ => return value,
    };
    wide & u64::MAX >> (64 - bits.min(64))
}

/// Runs a memory operation; `false` if it is of another kind.
pub(super) fn run(warp: &mut Warp, env: &mut Env, mask: u32, op: &Op) -> LaneResult<bool> {
    match *op {
        Op::Load { space, strength, ty, bits, used, ref dsts, addr } => {
            let bytes = size(ty);
            let total = bytes as usize * dsts.len();
            let mut loaded = [0; MOST_BYTES];
            for l in lanes(mask) {
                let (space, start) = resolve(space, address(warp, addr, l));
                at(l, aligned("load", start, total as u64))?;
                let into = &mut loaded[..total];
                let done = match space {
                    Space::Local => warp.local.load(l, start, into),
                    _ if used != u32::MAX => load_used(warp, env, (space, strength), start, (into, used)),
                    _ => load(warp, env, (space, strength), start, into),
                };
                at(l, done)?;
                for (value, dst) in loaded.chunks_exact(bytes as usize).zip(dsts) {
                    warp.regs.row_mut(*dst)[l] = extend(ty, bits, little(value));
                }
            }
        }
        Op::Store { space, strength, ty, ref srcs, addr } => {
            let bytes = size(ty) as usize;
            let total = bytes * srcs.len();
            let mut stored = [0; MOST_BYTES];
            for l in lanes(mask) {
                let (space, start) = resolve(space, address(warp, addr, l));
                at(l, aligned("store", start, total as u64))?;
                for (value, src) in stored.chunks_exact_mut(bytes).zip(srcs) {
                    value.copy_from_slice(&warp.regs.row(*src)[l].to_le_bytes()[..bytes]);
                }
                let done = match space {
                    Space::Local => warp.local.store(l, start, &stored[..total]),
                    _ => store(warp, env, (space, strength), start, &stored[..total]),
                };
                at(l, done)?;
            }
        }
        Op::Atom(ref op) => super::atomic::run(warp, env, mask, op)?,
        Op::CpAsync { bytes, dst, src, size } => {
            let agent = warp.copies.agent(&mut env.shared.order, warp.agent);
            for l in lanes(mask) {
                let (to, from) = (address(warp, dst, l), address(warp, src, l));
                let given = size.map_or(bytes, |s| warp.regs.row(s)[l].min(bytes));
                at(l, own(warp, Space::Shared, "asynchronous copy", to, bytes))?;
                let copy = at(l, read_copy(env, to, from, bytes, given))?;
                at(l, warp.copies.start(l, agent, copy, &mut env.shared))?;
            }
        }
        Op::CpAsyncCommit => lanes(mask).for_each(|l| warp.copies.commit(l)),
        Op::CpAsyncWait { pending } => wait_copies(warp, env, mask, pending).map_err(|fault| (fault, mask))?,
        Op::MapAddress { dst, addr, rank } => {
            for l in lanes(mask) {
                let (_, offset) = rank_and_offset(address(warp, addr, l));
                let rank = warp.regs.row(rank)[l] as usize;
                if rank >= env.ctas.len() {
                    return Err((Fault::NoSuchCta { rank, ctas: env.ctas.len() }, 1 << l));
                }
                warp.regs.row_mut(dst)[l] = address_in(rank, offset);
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// What a copy brings: `given` bytes of memory, then zeros.
fn read_copy(env: &Env, to: u64, from: u64, bytes: u64, given: u64) -> Result<Copy, Fault> {
    aligned("asynchronous copy", to, bytes)?;
    aligned("asynchronous copy", from, bytes)?;
    let mut copied = [0; 16];
    env.global.load(from, &mut copied[..given as usize])?;
    Ok(Copy { dst: to, bytes: copied, count: bytes as usize })
}

fn wait_copies(warp: &mut Warp, env: &mut Env, mask: u32, pending: usize) -> Result<(), Fault> {
    let mut clock = Clock::default();
    for l in lanes(mask) {
        let done = warp.copies.oldest(l, pending);
        copies::land(&done, &mut env.shared)?;
        warp.copies.settle(&done, &mut env.shared.order, &mut clock);
    }
    for flight in warp.copies.take_arriving(&mut clock) {
        env.finish_flight(flight)?;
    }
    env.shared.order.acquire(warp.agent, &clock);
    Ok(())
}
