//! `tcgen05.cp` and `.shift` (PTX ISA, Tensor Memory Data Movement Instructions).
use super::cores::peer;
use super::descriptor::{CHUNK, shared_matrix};
use super::history::Operation;
use super::pipeline::{enqueue, issue as begin};
use super::tmem::Place;
use crate::error::Fault;
use crate::exec::address;
use crate::exec::env::Env;
use crate::exec::shared::address_in;
use crate::exec::warp::Warp;
use crate::ir::tcgen05::CopyShape;
use crate::ir::{Addr, Slot};

/// Columns that a shift moves: 32 bytes.
const SHIFTED: u32 = 8;
/// Lanes of a warp's part of tensor memory.
const PART: u32 = 32;

impl CopyShape {
    /// Rows in shared memory, and 16-byte chunks of each.
    fn size(self) -> (u32, u32) {
        match self {
            Self::L128B256 => (128, 2),
            Self::L4B256 => (4, 2),
            Self::L128B128 => (128, 1),
            Self::L64B128Pairs02 | Self::L64B128Pairs01 => (64, 1),
            Self::L32B128 => (32, 1),
        }
    }

    /// Lanes that a row goes to, from that of the address. Four rows go to one lane of each warp's part.
    fn lanes(self, row: u32) -> Vec<u32> {
        match self {
            Self::L128B256 | Self::L128B128 => vec![row],
            Self::L4B256 => vec![PART * row],
            Self::L64B128Pairs02 => vec![row, row + 2 * PART],
            Self::L64B128Pairs01 => {
                let first = row % PART + row / PART * 2 * PART;
                vec![first, first + PART]
            }
            Self::L32B128 => (0..4).map(|part| row + PART * part).collect(),
        }
    }
}

/// `.cp`
pub(super) fn issue(
    warp: &Warp,
    env: &mut Env,
    lane: usize,
    shape: CopyShape,
    (address, descriptor): (Addr, Slot),
) -> Result<(), Fault> {
    let place = Place::new(address::address(warp, address, lane) as u32);
    let matrix = shared_matrix(warp.regs.row(descriptor)[lane], false)?;
    let (rows, chunks) = shape.size();
    let operation = Operation::Copy { rows: shape == CopyShape::L4B256 };
    let (number, agent) = begin(warp, env, lane, operation);
    let rank = warp.rank;
    for row in 0..rows {
        for part in 0..chunks {
            env.shared.claim_read(agent, address_in(rank, matrix.chunk(row.into(), CHUNK * u64::from(part))), CHUNK)?;
        }
        for to in shape.lanes(row) {
            let lane = place.lane + to;
            env.tensor.access(rank, (warp.agent, number, true), lane..lane + 1, (place.column, 4 * chunks))?;
            env.tensor_bytes += CHUNK * u64::from(chunks);
        }
    }
    let work = Box::new(move |env: &mut Env| {
        for row in 0..rows {
            for part in 0..chunks {
                let mut bytes = [0; CHUNK as usize];
                env.shared.peek(address_in(rank, matrix.chunk(row.into(), CHUNK * u64::from(part))), &mut bytes)?;
                for to in shape.lanes(row) {
                    let place = Place { lane: place.lane + to, column: place.column + 4 * part };
                    let words = env.tensor.ctas[rank].memory.row_mut(place, 4);
                    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *word = u32::from_le_bytes(*bytes);
                    }
                }
            }
        }
        Ok(())
    });
    enqueue(warp, env, 1 << rank, work);
    Ok(())
}

/// `.shift.down`: 32 bytes of each of 32 lanes, from the next lane; the last keeps its own.
pub(super) fn shift(warp: &Warp, env: &mut Env, lane: usize, group: u8, address: Addr) -> Result<(), Fault> {
    let place = Place::new(address::address(warp, address, lane) as u32);
    if !place.lane.is_multiple_of(PART) {
        return Err(place.fault("the lane of tcgen05.shift must be a multiple of 32"));
    }
    let ranks = if group == 2 { vec![warp.rank, peer(warp.rank)] } else { vec![warp.rank] };
    let (number, _) = begin(warp, env, lane, Operation::Shift);
    for rank in &ranks {
        let by = (warp.agent, number, true);
        env.tensor.access(*rank, by, place.lane..place.lane + PART, (place.column, SHIFTED))?;
    }
    let work = Box::new(move |env: &mut Env| {
        for rank in ranks {
            let memory = &mut env.tensor.ctas[rank].memory;
            for lane in place.lane..place.lane + PART - 1 {
                let next = memory.read(Place { lane: lane + 1, ..place }, SHIFTED)?.to_vec();
                memory.row_mut(Place { lane, ..place }, SHIFTED).copy_from_slice(&next);
            }
        }
        Ok(())
    });
    enqueue(warp, env, 0, work);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::collections::BTreeSet;

    /// `.multicast`: which warps' parts of 32 lanes row 0 and the last row go to.
    #[rstest]
    #[case(CopyShape::L128B256, vec![0], vec![127])]
    #[case(CopyShape::L128B128, vec![0], vec![127])]
    #[case(CopyShape::L4B256, vec![0], vec![96])]
    #[case(CopyShape::L64B128Pairs02, vec![0, 64], vec![63, 127])]
    #[case(CopyShape::L64B128Pairs01, vec![0, 32], vec![95, 127])]
    #[case(CopyShape::L32B128, vec![0, 32, 64, 96], vec![31, 63, 95, 127])]
    fn rows_go_to_these_lanes(#[case] shape: CopyShape, #[case] first: Vec<u32>, #[case] last: Vec<u32>) {
        assert_eq!((shape.lanes(0), shape.lanes(shape.size().0 - 1)), (first, last));
    }

    #[rstest]
    fn every_lane_gets_one_row(
        #[values(CopyShape::L64B128Pairs02, CopyShape::L64B128Pairs01, CopyShape::L32B128)] shape: CopyShape,
    ) {
        let lanes: BTreeSet<u32> = (0..shape.size().0).flat_map(|row| shape.lanes(row)).collect();
        assert_eq!(lanes, (0..128).collect());
    }
}
