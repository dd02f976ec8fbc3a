//! What an access of a warp to memory takes.
use crate::exec::address;
use crate::exec::registers::{LANES, lanes};
use crate::exec::warp::Warp;
use crate::ir::{Addr, MatrixOp, Op, Space};
use std::collections::BTreeSet;

/// Bytes that global memory gives at a time.
pub(super) const SECTOR: u64 = 32;
/// Banks of shared memory, of four bytes each.
const BANKS: u64 = 32;
const WORD: u64 = 4;

/// An access of some lanes.
#[derive(Debug, Default)]
pub(super) struct Access {
    /// Cycles that shared memory is taken for: more than the bytes need where lanes meet in a bank.
    pub wavefronts: u32,
    /// Sectors of global memory.
    pub sectors: Vec<u64>,
    pub writes: bool,
    /// `cp.async`: from global to shared memory.
    pub copies: bool,
}

impl Access {
    pub fn of(warp: &Warp, op: &Op, mask: u32) -> Self {
        match op {
            Op::Load { space, ty, dsts, addr, .. } => {
                Self::lanes(warp, *space, (*addr, address::size(*ty) * dsts.len() as u64, false), mask)
            }
            Op::Store { space, ty, srcs, addr, .. } => {
                Self::lanes(warp, *space, (*addr, address::size(*ty) * srcs.len() as u64, true), mask)
            }
            Op::Atom(op) => Self::lanes(warp, op.space, (op.addr, 4 * op.a.len().max(1) as u64, false), mask),
            Op::CpAsync { bytes, dst, src, .. } => {
                let to = Self::lanes(warp, Space::Shared, (*dst, *bytes, true), mask);
                let from = Self::lanes(warp, Space::Global, (*src, *bytes, false), mask);
                Self { sectors: from.sectors, copies: true, ..to }
            }
            Op::Matrix(op) => match &**op {
                // Eight rows of 16 bytes for each register; that they meet in no bank is for the kernel to see to.
                MatrixOp::Load(rows) => Self { wavefronts: rows.registers.len() as u32, ..Self::default() },
                MatrixOp::Store(rows) => {
                    Self { wavefronts: rows.registers.len() as u32, writes: true, ..Self::default() }
                }
                _ => Self::default(),
            },
            _ => Self::default(),
        }
    }

    fn lanes(warp: &Warp, space: Space, (addr, bytes, writes): (Addr, u64, bool), mask: u32) -> Self {
        let mut places: [Option<u64>; LANES] = [None; LANES];
        let mut found = Self { writes, ..Self::default() };
        let mut sectors = BTreeSet::new();
        for lane in lanes(mask) {
            match address::resolve(space, address::address(warp, addr, lane)) {
                (Space::Shared | Space::Cluster, at) => places[lane] = Some(at),
                (Space::Global, at) => sectors.extend(at / SECTOR..=(at + bytes - 1) / SECTOR),
                _ => {}
            }
        }
        found.sectors = sectors.into_iter().collect();
        found.wavefronts = wavefronts(&places, bytes);
        found
    }

    /// Bytes of global memory.
    pub fn bytes(&self) -> f64 {
        (self.sectors.len() as u64 * SECTOR) as f64
    }
}

/// Lanes go together as far as their bytes fill all banks once; of these, each bank gives one word at a time.
fn wavefronts(places: &[Option<u64>; LANES], bytes: u64) -> u32 {
    let together = (LANES as u64 * WORD / bytes.max(WORD)).max(1) as usize;
    let cycles = |places: &[Option<u64>]| {
        let words = places.iter().flatten().flat_map(|at| at / WORD..(at + bytes).div_ceil(WORD));
        let words: BTreeSet<u64> = words.collect();
        let mut banks = [0u32; BANKS as usize];
        words.iter().for_each(|word| banks[(word % BANKS) as usize] += 1);
        banks.into_iter().max().unwrap_or(0)
    };
    places.chunks(together).map(cycles).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Strides in bytes.
    #[rstest]
    #[case(4, 4, 1)]
    #[case(4, 8, 2)]
    #[case(4, 128, 32)]
    #[case(4, 0, 1)]
    #[case(16, 16, 4)]
    #[case(16, 128, 32)]
    #[case(8, 8, 2)]
    #[case(2, 2, 1)]
    fn banks_that_lanes_meet_in(#[case] bytes: u64, #[case] stride: u64, #[case] cycles: u32) {
        let places = std::array::from_fn(|lane| Some(lane as u64 * stride));
        assert_eq!(wavefronts(&places, bytes), cycles);
    }
}
