//! What the lanes of a warp do apart. A lane that releases something, for instance by an arrival at an mbarrier, speaks for
//! other lanes only if these have met it since (PTX ISA, `bar.warp.sync`, and "Causality order" of the memory model).

/// Accesses of a warp's lanes that the other lanes are not ordered after.
#[derive(Debug, Clone, Default)]
pub(super) struct Apart {
    /// Lanes that have such accesses.
    lanes: u32,
    /// The warp's epoch in which each of them had the first, and the last.
    first: [u32; 32],
    last: [u32; 32],
    /// The epoch that was noted last, and for which lanes.
    noted: (u32, u32),
}

fn each(lanes: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| lanes >> lane & 1 == 1)
}

impl Apart {
    /// Lanes access memory.
    pub fn note(&mut self, epoch: u32, lanes: u32) {
        if self.noted.0 == epoch && lanes & !self.noted.1 == 0 {
            return;
        }
        let before = if self.noted.0 == epoch { self.noted.1 } else { 0 };
        self.noted = (epoch, before | lanes);
        for lane in each(lanes) {
            if self.lanes >> lane & 1 == 0 {
                self.first[lane] = epoch;
            }
            self.last[lane] = epoch;
        }
        self.lanes |= lanes;
    }

    /// The last epoch that these lanes speak for.
    pub fn until(&self, lanes: u32) -> u32 {
        each(self.lanes & !lanes).map(|lane| self.first[lane] - 1).min().unwrap_or(u32::MAX)
    }

    /// These lanes meet: whether that changes anything.
    pub fn meet(&mut self, lanes: u32) -> bool {
        let changes = self.lanes & lanes != 0;
        self.lanes &= !lanes;
        self.noted = (0, 0);
        changes
    }

    /// The warp acquires what it has released itself, up to an epoch.
    pub fn acquire(&mut self, epoch: u32) {
        for lane in each(self.lanes) {
            if self.last[lane] <= epoch {
                self.lanes &= !(1 << lane);
            } else {
                self.first[lane] = self.first[lane].max(epoch + 1);
            }
        }
    }
}
