//! `atom` and `red` (PTX ISA 9.7.13.5 and 9.7.13.7).
use super::address::{self, own};
use super::env::Env;
use super::registers::{LaneResult, at, lanes};
use super::warp::Warp;
use super::{double, float, half};
use crate::error::Fault;
use crate::ir::{Atom, AtomOp, AtomTy, Clamp, DoubleKind, FloatBinary, HalfKind, HalfOp, Int, Round, SINK, Space, Ty};

/// Bytes of an element.
fn size(ty: AtomTy) -> u64 {
    match ty {
        AtomTy::Half { packed: false, .. } | AtomTy::Int(Int::U16 | Int::S16) => 2,
        AtomTy::F64 | AtomTy::Int(Int::U64 | Int::S64) => 8,
        AtomTy::F32 | AtomTy::Half { .. } | AtomTy::Int(_) => 4,
    }
}

fn add(ty: AtomTy, old: u64, x: u64) -> u64 {
    match ty {
        AtomTy::F32 => float::binary(FloatBinary::Add, false, old, x),
        AtomTy::F64 => double::run(DoubleKind::Add, Round::Nearest, old, x, 0),
        AtomTy::Half { bf16, packed } => {
            let ty = if bf16 { Ty::Bf16 } else { Ty::F16 };
            let op = HalfOp { kind: HalfKind::Add, ty, packed, ftz: false, clamp: Clamp::None, nan: false };
            half::run(&op, old, x, 0)
        }
        AtomTy::Int(_) => old.wrapping_add(x),
    }
}

fn combine(op: Atom, ty: AtomTy, old: u64, x: u64, y: u64) -> u64 {
    let number = |v: u64| match ty {
        AtomTy::Int(Int::S32) => i128::from(v as i32),
        AtomTy::Int(Int::S64) => i128::from(v as i64),
        AtomTy::Int(Int::U64) => i128::from(v),
        _ => i128::from(v as u32),
    };
    let either = |first: bool, a: u64, b: u64| if first { a } else { b };
    match op {
        Atom::Add => add(ty, old, x),
        Atom::Min => either(number(x) < number(old), x, old),
        Atom::Max => either(number(x) > number(old), x, old),
        Atom::And => old & x,
        Atom::Or => old | x,
        Atom::Xor => old ^ x,
        Atom::Exch => x,
        Atom::Cas => either(old == x, y, old),
        Atom::Inc => either(old >= x, 0, old.wrapping_add(1)),
        Atom::Dec => either(old == 0 || old > x, x, old.wrapping_sub(1)),
    }
}

/// Lanes one after the other; of vectors each element by itself, which is all that PTX promises.
pub(super) fn run(warp: &mut Warp, env: &mut Env, mask: u32, op: &AtomOp) -> LaneResult<()> {
    let bytes = size(op.ty);
    for l in lanes(mask) {
        let (space, start) = address::resolve(op.space, address::address(warp, op.addr, l));
        at(l, address::aligned("atomic", start, bytes * op.a.len() as u64))?;
        for (i, a) in op.a.iter().enumerate() {
            let (x, y) = (warp.regs.row(*a)[l], warp.regs.row(op.b)[l]);
            let address = start + i as u64 * bytes;
            let new = |old| combine(op.op, op.ty, old, x, y);
            let reads = op.op != Atom::Exch;
            let old = at(l, update(warp, env, (space, address, reads), bytes, new))?;
            let dst = op.dsts.get(i).copied().unwrap_or(SINK);
            warp.regs.row_mut(dst)[l] = old;
        }
    }
    Ok(())
}

fn update(
    warp: &Warp,
    env: &mut Env,
    (space, address, reads): (Space, u64, bool),
    bytes: u64,
    new: impl Fn(u64) -> u64,
) -> Result<u64, Fault> {
    match space {
        Space::Global | Space::Generic => env.memory(address).update(address, bytes, new),
        Space::Shared | Space::Cluster => {
            own(warp, space, "shared atomic", address, bytes)?;
            env.shared.update(warp.agent, (address, reads), bytes, new)
        }
        Space::Param | Space::Local => Err(Fault::ReadOnly { address }),
    }
}
