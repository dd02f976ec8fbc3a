//! `tcgen05.ld` and `.st` (PTX ISA, Tensor Memory Data Movement Instructions).
//!
//! Values move at once. That a program waits before it uses them is checked: registers of a load cannot be used before
//! `tcgen05.wait::ld`, and [`History`](super::history::History) knows what is still under way.
use super::fragment::{cell, lanes};
use super::history::Operation;
use super::operand::uniform;
use super::pipeline::issue_transfer;
use super::tmem::{Place, TensorMemory};
use crate::error::Fault;
use crate::exec::env::Env;
use crate::exec::registers::{LANES, LaneResult, Row};
use crate::exec::warp::{Flow, Warp, whole_warp};
use crate::ir::tcgen05::{Fragment, Shape};
use crate::ir::{Addr, Slot};

/// A fragment at its place: lanes from that of the place on, and one or two spans of columns.
struct Window {
    place: Place,
    lanes: u32,
    spans: Vec<(u32, u32)>,
}

impl Window {
    /// Fails where the warp cannot reach.
    fn new(warp: &Warp, fragment: Fragment, registers: u32, address: u32) -> Result<Self, Fault> {
        let (place, lanes) = (Place::new(address), lanes(fragment.shape));
        // PTX ISA, Access restrictions: warp i of a warpgroup reaches lanes 32 i to 32 i + 31.
        let own = 32 * (warp.index as u32 % 4);
        let start = place.lane.wrapping_sub(own);
        if start > 32 - lanes || !start.is_multiple_of(lanes) {
            let problem = format!("warp {} reaches lanes {own} to {}", warp.index, own + 31);
            return Err(place.fault(problem));
        }
        let halves = if fragment.shape == Shape::L16B32x2 { 2 } else { 1 };
        let width = registers * 32 / lanes / halves * if fragment.packed { 2 } else { 1 };
        let spans = (0..halves).map(|half| (place.column + half * fragment.split, width)).collect();
        Ok(Self { place, lanes, spans })
    }
}

/// Where a thread's register lies.
fn place_of(window: &Window, fragment: Fragment, thread: usize, register: usize) -> Place {
    let at = cell(fragment, thread as u32, register as u32);
    Place { lane: window.place.lane + at.lane, column: window.place.column + at.column }
}

/// Checks and notes the access; the place of the fragment.
fn begin(
    warp: &Warp,
    env: &mut Env,
    operation: Operation,
    (fragment, registers): (Fragment, usize),
    address: u32,
) -> Result<Window, Fault> {
    let window = Window::new(warp, fragment, registers as u32, address)?;
    let by = (warp.agent, issue_transfer(warp, env, operation), operation == Operation::Store);
    for span in &window.spans {
        env.tensor.access(warp.rank, by, window.place.lane..window.place.lane + window.lanes, *span)?;
    }
    env.tensor_bytes += 4 * u64::from(window.lanes * window.spans.iter().map(|(_, width)| width).sum::<u32>());
    Ok(window)
}

/// `.ld`
pub(super) fn load(
    warp: &mut Warp,
    env: &mut Env,
    (group, mask): (u32, u32),
    (fragment, dsts, address): (Fragment, &[Slot], Addr),
) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    let address = uniform(warp, address.base, address.offset, mask)?;
    let fault = |fault| (fault, mask);
    let window = begin(warp, env, Operation::Load, (fragment, dsts.len()), address).map_err(fault)?;
    let memory = &env.tensor.ctas[warp.rank].memory;
    for (register, dst) in dsts.iter().enumerate() {
        let mut row: Row = [0; LANES];
        for (thread, value) in row.iter_mut().enumerate() {
            let place = place_of(&window, fragment, thread, register);
            let words = memory.read(place, if fragment.packed { 2 } else { 1 }).map_err(fault)?;
            *value = match words {
                [low, high] => u64::from(low & 0xffff | high << 16),
                _ => u64::from(words[0]),
            };
        }
        *warp.regs.row_mut(*dst) = row;
    }
    warp.loading.extend_from_slice(dsts);
    Ok(Flow::Next)
}

/// `.st`
pub(super) fn store(
    warp: &mut Warp,
    env: &mut Env,
    (group, mask): (u32, u32),
    (fragment, srcs, address): (Fragment, &[Slot], Addr),
) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    let address = uniform(warp, address.base, address.offset, mask)?;
    let window = begin(warp, env, Operation::Store, (fragment, srcs.len()), address).map_err(|fault| (fault, mask))?;
    let memory = &mut env.tensor.ctas[warp.rank].memory;
    for (register, src) in srcs.iter().enumerate() {
        for (thread, value) in warp.regs.row(*src).iter().enumerate() {
            let place = place_of(&window, fragment, thread, register);
            if fragment.packed {
                memory.write(place, TensorMemory::lower_half(*value as u16));
                let next = Place { column: place.column + 1, ..place };
                memory.write(next, TensorMemory::lower_half((*value >> 16) as u16));
            } else {
                memory.write(place, *value as u32);
            }
        }
    }
    Ok(Flow::Next)
}
