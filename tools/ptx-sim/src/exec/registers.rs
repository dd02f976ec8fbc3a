//! The registers of a warp, and what is said of its lanes.
use crate::error::Fault;
use crate::ir::{PredSlot, PredSource, Slot};

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;
/// One register of all lanes.
pub(crate) type Row = [u64; LANES];

/// The registers of a warp.
pub(crate) struct Registers {
    rows: Vec<Row>,
    preds: Vec<u32>,
    /// The lanes' carry flags.
    pub carry: u32,
}

impl Registers {
    /// Registers with these values, and so many predicates that hold nowhere.
    pub fn new(rows: Vec<Row>, preds: usize) -> Self {
        Self { rows, preds: vec![0; preds], carry: 0 }
    }

    pub fn row(&self, slot: Slot) -> &Row {
        &self.rows[slot as usize]
    }

    pub fn row_mut(&mut self, slot: Slot) -> &mut Row {
        &mut self.rows[slot as usize]
    }

    /// How many there are.
    pub fn slots(&self) -> usize {
        self.rows.len()
    }

    /// How many predicates there are.
    pub fn preds(&self) -> usize {
        self.preds.len()
    }

    /// The lanes where a predicate holds.
    pub fn pred(&self, source: PredSource) -> u32 {
        let lanes = self.preds[source.slot as usize];
        if source.negated { !lanes } else { lanes }
    }

    pub fn set_pred(&mut self, mask: u32, slot: PredSlot, lanes: u32) {
        let pred = &mut self.preds[slot as usize];
        *pred = *pred & !mask | lanes & mask;
    }

    #[inline(always)]
    pub fn map_lanes(&mut self, mask: u32, dst: Slot, a: Slot, b: Slot, f: impl Fn(usize, u64, u64) -> u64) {
        let (x, y) = (self.rows[a as usize], self.rows[b as usize]);
        let out = &mut self.rows[dst as usize];
        if mask == u32::MAX {
            for l in 0..LANES {
                out[l] = f(l, x[l], y[l]);
            }
        } else {
            for l in 0..LANES {
                if mask >> l & 1 == 1 {
                    out[l] = f(l, x[l], y[l]);
                }
            }
        }
    }

    #[inline(always)]
    pub fn map2(&mut self, mask: u32, dst: Slot, a: Slot, b: Slot, f: impl Fn(u64, u64) -> u64) {
        self.map_lanes(mask, dst, a, b, |_, x, y| f(x, y));
    }

    #[inline(always)]
    pub fn map(&mut self, mask: u32, dst: Slot, a: Slot, f: impl Fn(u64) -> u64) {
        self.map_lanes(mask, dst, a, a, |_, x, _| f(x));
    }

    #[inline(always)]
    pub fn map3(&mut self, mask: u32, dst: Slot, a: Slot, b: Slot, c: Slot, f: impl Fn(u64, u64, u64) -> u64) {
        let z = self.rows[c as usize];
        self.map_lanes(mask, dst, a, b, |l, x, y| f(x, y, z[l]));
    }
}

/// A fault and the lanes that caused it.
pub(super) type LaneResult<T> = Result<T, (Fault, u32)>;

pub(super) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |l| mask >> l & 1 == 1)
}

/// Puts the lane to a fault.
pub(super) fn at<T>(lane: usize, result: Result<T, Fault>) -> LaneResult<T> {
    result.map_err(|fault| (fault, 1 << lane))
}
