//! Loads, stores, atomics and asynchronous copies (PTX ISA 9.7.9, 9.7.13).
use super::copies::Copy;
use super::cta::Env;
use super::float;
use super::warp::{LANES, Warp};
use crate::error::Fault;
use crate::ir::{Addr, Atom, AtomTy, FloatBinary, Int, Op, Space, Ty};
use crate::memory::{PARAM_WINDOW, SHARED_WINDOW};

/// A fault and the lanes that caused it.
pub(super) type LaneResult<T> = Result<T, (Fault, u32)>;

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |l| mask >> l & 1 == 1)
}

/// Puts the lane to a fault.
pub(super) fn at<T>(lane: usize, result: Result<T, Fault>) -> LaneResult<T> {
    result.map_err(|fault| (fault, 1 << lane))
}

fn size(ty: Ty) -> u64 {
    match ty {
        Ty::U8 | Ty::S8 => 1,
        Ty::Int(Int::U16 | Int::S16) | Ty::F16 | Ty::Bf16 => 2,
        Ty::Int(Int::U32 | Int::S32) | Ty::F32 => 4,
        Ty::Int(Int::U64 | Int::S64) => 8,
    }
}

/// The space of an address and the address in it.
pub(super) fn resolve(space: Space, address: u64) -> (Space, u64) {
    match space {
        Space::Generic if address >> 44 == PARAM_WINDOW >> 44 => (Space::Param, address - PARAM_WINDOW),
        Space::Generic if address >> 44 == SHARED_WINDOW >> 44 => (Space::Shared, address - SHARED_WINDOW),
        Space::Generic => (Space::Global, address),
        other => (other, address),
    }
}

pub(super) fn aligned(access: &str, address: u64, bytes: u64) -> Result<(), Fault> {
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    Err(Fault::Misaligned { access: access.to_string(), address, bytes })
}

pub(super) fn load(env: &Env, space: Space, address: u64, bytes: u64) -> Result<u64, Fault> {
    match space {
        Space::Shared => env.shared.load(address, bytes),
        Space::Param => {
            let start = address as usize;
            let range = start..start.saturating_add(bytes as usize);
            let Some(found) = env.params.get(range) else {
                let nearest = format!("the parameters are {} bytes", env.params.len());
                return Err(Fault::OutOfBounds { access: "parameter load".into(), address, bytes, nearest });
            };
            let mut value = [0; 8];
            value[..found.len()].copy_from_slice(found);
            Ok(u64::from_le_bytes(value))
        }
        Space::Global | Space::Generic => env.global.load(address, bytes),
    }
}

pub(super) fn store(env: &mut Env, space: Space, address: u64, bytes: u64, value: u64) -> Result<(), Fault> {
    match space {
        Space::Shared => env.shared.store(address, bytes, value),
        Space::Param => Err(Fault::ReadOnly { address }),
        Space::Global | Space::Generic => env.global.store(address, bytes, value),
    }
}

/// A loaded value as its register holds it: narrow signed values fill 32 bits with their sign.
fn extend(ty: Ty, value: u64) -> u64 {
    match ty {
        Ty::S8 => u64::from(value as i8 as i32 as u32),
        _ => value,
    }
}

pub(super) fn address(warp: &Warp, addr: Addr, lane: usize) -> u64 {
    warp.regs.row(addr.base)[lane].wrapping_add(addr.offset)
}

/// Runs a memory operation; `false` if it is of another kind.
pub(super) fn run(warp: &mut Warp, env: &mut Env, mask: u32, op: &Op) -> LaneResult<bool> {
    match *op {
        Op::Load { space, ty, ref dsts, addr } => {
            let bytes = size(ty);
            for l in lanes(mask) {
                let (space, start) = resolve(space, address(warp, addr, l));
                at(l, aligned("load", start, bytes * dsts.len() as u64))?;
                for (i, dst) in dsts.iter().enumerate() {
                    let value = at(l, load(env, space, start + i as u64 * bytes, bytes))?;
                    warp.regs.row_mut(*dst)[l] = extend(ty, value);
                }
            }
        }
        Op::Store { space, ty, ref srcs, addr } => {
            let bytes = size(ty);
            for l in lanes(mask) {
                let (space, start) = resolve(space, address(warp, addr, l));
                at(l, aligned("store", start, bytes * srcs.len() as u64))?;
                for (i, src) in srcs.iter().enumerate() {
                    at(l, store(env, space, start + i as u64 * bytes, bytes, warp.regs.row(*src)[l]))?;
                }
            }
        }
        Op::Atom { op, ty, space, dst, addr, a, b } => {
            for l in lanes(mask) {
                let (x, y) = (warp.regs.row(a)[l], warp.regs.row(b)[l]);
                let start = address(warp, addr, l);
                warp.regs.row_mut(dst)[l] = at(l, atomic(env, op, ty, resolve(space, start), x, y))?;
            }
        }
        Op::CpAsync { bytes, dst, src, size } => {
            for l in lanes(mask) {
                let (to, from) = (address(warp, dst, l), address(warp, src, l));
                let given = size.map_or(bytes, |s| warp.regs.row(s)[l].min(bytes));
                let copy = at(l, read_copy(env, to, from, bytes, given))?;
                at(l, warp.copies.start(l, copy, &mut env.shared))?;
            }
        }
        Op::CpAsyncCommit => lanes(mask).for_each(|l| warp.copies.commit(l)),
        Op::CpAsyncWait { pending } => {
            for l in lanes(mask) {
                at(l, warp.copies.wait(l, pending, &mut env.shared))?;
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
    let mut copied = vec![0; bytes as usize];
    for (i, byte) in copied[..given as usize].iter_mut().enumerate() {
        *byte = env.global.load(from + i as u64, 1)? as u8;
    }
    Ok(Copy { dst: to, bytes: copied })
}

fn combine(op: Atom, ty: AtomTy, old: u64, x: u64, y: u64) -> u64 {
    let signed = |v: u64| match ty {
        AtomTy::Int(Int::S32) => i128::from(v as i32),
        AtomTy::Int(Int::S64) => i128::from(v as i64),
        AtomTy::Int(Int::U64) => i128::from(v),
        _ => i128::from(v as u32),
    };
    match op {
        Atom::Add if ty == AtomTy::F32 => float::binary(FloatBinary::Add, false, old, x),
        Atom::Add => old.wrapping_add(x),
        Atom::Min => {
            if signed(x) < signed(old) {
                x
            } else {
                old
            }
        }
        Atom::Max => {
            if signed(x) > signed(old) {
                x
            } else {
                old
            }
        }
        Atom::And => old & x,
        Atom::Or => old | x,
        Atom::Xor => old ^ x,
        Atom::Exch => x,
        Atom::Cas => {
            if old == x {
                y
            } else {
                old
            }
        }
    }
}

fn atomic(env: &mut Env, op: Atom, ty: AtomTy, place: (Space, u64), x: u64, y: u64) -> Result<u64, Fault> {
    let bytes = if matches!(ty, AtomTy::Int(Int::U64 | Int::S64)) { 8 } else { 4 };
    let (space, address) = place;
    aligned("atomic", address, bytes)?;
    if space == Space::Global {
        return env.global.update(address, bytes, |old| combine(op, ty, old, x, y));
    }
    let old = load(env, space, address, bytes)?;
    store(env, space, address, bytes, combine(op, ty, old, x, y))?;
    Ok(old)
}
