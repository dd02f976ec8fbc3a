//! Matrices that a warp holds: `mma.sync`, `wmma`, `ldmatrix`, `stmatrix` (PTX ISA 9.7.14).
//!
//! All of these are `.aligned`: the 32 lanes execute them together.
use super::address;
use super::env::Env;
use super::fragment::{Fragment, Role};
use super::mem::{self};
use super::product::{Number, multiply};
use super::registers::{LANES, LaneResult, at};
use super::warp::{Flow, Warp, whole_warp};
use crate::error::Fault;
use crate::ir::{Elem, Layout, MatrixOp, Product, Rows, Space, WmmaAccess};

pub(super) fn run(warp: &mut Warp, env: &mut Env, group: u32, mask: u32, op: &MatrixOp) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    match op {
        MatrixOp::Product(p) if p.a_elem.is_int() => product::<i64>(warp, env, p),
        MatrixOp::Product(p) => product::<f32>(warp, env, p),
        MatrixOp::WmmaLoad(access) => wmma_load(warp, env, access)?,
        MatrixOp::WmmaStore(access) => wmma_store(warp, env, access)?,
        MatrixOp::Load(rows) => load(warp, env, rows)?,
        MatrixOp::Store(rows) => store(warp, env, rows)?,
        other => return Err((Fault::UnknownInstruction(format!("{other:?}")), mask)),
    }
    Ok(Flow::Next)
}

fn product<T: Number>(warp: &mut Warp, env: &mut Env, p: &Product) {
    let of = |role, elem| Fragment::of(p.layout, role, p.shape, elem);
    let a: Vec<T> = of(Role::A, p.a_elem).read(&warp.regs, &p.a);
    let b: Vec<T> = of(Role::B, p.b_elem).read(&warp.regs, &p.b);
    let mut sum: Vec<T> = of(Role::Sum, p.c_elem).read(&warp.regs, &p.c);
    multiply(p.shape.k, p.shape.n, &a, &b, &mut sum);
    of(Role::Sum, p.d_elem).write(&mut warp.regs, &p.d, &sum, p.saturate);
    env.matrix_flops += 2 * (p.shape.m * p.shape.n * p.shape.k) as u64;
}

/// Lane, register, bit and address of each element of a fragment in memory.
fn places(warp: &Warp, access: &WmmaAccess) -> Vec<(usize, usize, u32, u64)> {
    let WmmaAccess { elem, rows, columns, .. } = *access;
    // Sums have no other order than the factors here: the role only tells how many registers f16 has.
    let role = if access.registers.len() == 8 && elem == Elem::F16 { Role::A } else { Role::Sum };
    let fragment = Fragment { layout: Layout::Wmma, role, rows, columns, elem };
    let bytes = (elem.bits() / 8) as u64;
    let minor = if access.row_major { columns } else { rows };
    let mut found = Vec::with_capacity(rows * columns);
    fragment.each(|lane, register, shift, index| {
        let (row, column) = ((index / columns) as u64, (index % columns) as u64);
        let stride = access.stride.map_or(minor as u64, |s| u64::from(warp.regs.row(s)[lane] as u32));
        let offset = if access.row_major { row * stride + column } else { column * stride + row };
        found.push((lane, register, shift, address::address(warp, access.addr, lane).wrapping_add(offset * bytes)));
    });
    found
}

fn wmma_load(warp: &mut Warp, env: &mut Env, access: &WmmaAccess) -> LaneResult<()> {
    let bytes = (access.elem.bits() / 8) as u64;
    let found = places(warp, access);
    for slot in &access.registers {
        *warp.regs.row_mut(*slot) = [0; LANES];
    }
    for (lane, register, shift, address) in found {
        let (space, start) = address::resolve(access.space, address);
        at(lane, address::aligned("wmma.load", start, bytes))?;
        let value = at(lane, mem::load_value(warp, env, space, start, bytes))?;
        warp.regs.row_mut(access.registers[register])[lane] |= value << shift;
    }
    Ok(())
}

fn wmma_store(warp: &mut Warp, env: &mut Env, access: &WmmaAccess) -> LaneResult<()> {
    let bytes = (access.elem.bits() / 8) as u64;
    for (lane, register, shift, address) in places(warp, access) {
        let (space, start) = address::resolve(access.space, address);
        at(lane, address::aligned("wmma.store", start, bytes))?;
        let value = warp.regs.row(access.registers[register])[lane] >> shift & (u64::MAX >> (64 - 8 * bytes));
        at(lane, mem::store_value(warp, env, space, start, (bytes, value)))?;
    }
    Ok(())
}

/// Row `r` of matrix `m` lies where lane `8 * m + r` says; each is 16 bytes (PTX ISA, `ldmatrix`).
fn row_address(warp: &Warp, rows: &Rows, matrix: usize, row: usize) -> LaneResult<(usize, Space, u64)> {
    let lane = 8 * matrix + row;
    let (space, start) = address::resolve(Space::Shared, address::address(warp, rows.addr, lane));
    at(lane, address::aligned("matrix row", start, 16))?;
    Ok((lane, space, start))
}

/// A lane gets two neighbours of row `lane / 4`, or of the column where the matrix is transposed.
fn load(warp: &mut Warp, env: &mut Env, rows: &Rows) -> LaneResult<()> {
    for (m, dst) in rows.registers.iter().enumerate() {
        let mut values = [[0u64; 8]; 8];
        for (r, row) in values.iter_mut().enumerate() {
            let (lane, space, start) = row_address(warp, rows, m, r)?;
            for half in 0..2 {
                let word = at(lane, mem::load_value(warp, env, space, start + 8 * half, 8))?;
                let columns = &mut row[4 * half as usize..][..4];
                columns.iter_mut().enumerate().for_each(|(c, value)| *value = word >> (16 * c) & 0xffff);
            }
        }
        *warp.regs.row_mut(*dst) = std::array::from_fn(|l| {
            let (r, c) = (l / 4, 2 * (l % 4));
            if rows.transposed { values[c][r] | values[c + 1][r] << 16 } else { values[r][c] | values[r][c + 1] << 16 }
        });
    }
    Ok(())
}

/// The reverse of [`load`] (PTX ISA, `stmatrix`).
fn store(warp: &mut Warp, env: &mut Env, rows: &Rows) -> LaneResult<()> {
    for (m, src) in rows.registers.iter().enumerate() {
        let held = *warp.regs.row(*src);
        for r in 0..8 {
            let (lane, space, start) = row_address(warp, rows, m, r)?;
            let element = |c: usize| {
                let (row, column) = if rows.transposed { (c, r) } else { (r, c) };
                held[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff
            };
            for half in 0..2 {
                let word = (0..4).fold(0, |word, c| word | element(4 * half + c) << (16 * c));
                at(lane, mem::store_value(warp, env, space, start + 8 * half as u64, (8, word)))?;
            }
        }
    }
    Ok(())
}
