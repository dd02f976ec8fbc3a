//! Tensor memory of a CTA: 128 lanes of 512 columns of 32 bits (PTX ISA, Tensor Memory), and who has which columns
//! (PTX ISA, `tcgen05.alloc`).
use crate::error::Fault;

pub(super) const LANES: u32 = 128;
pub(super) const COLUMNS: u32 = 512;
/// Columns of the unit of allocation.
const UNIT: u32 = 32;
/// What the upper half of a word holds after its lower half alone was written. The ISA leaves it open, so it is a NaN.
const UPPER_HALF: u32 = 0x7fff_0000;

/// An address: the lane in the upper half, the column in the lower one (PTX ISA, Tensor Memory Addressing).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub lane: u32,
    pub column: u32,
}

impl Place {
    pub fn new(address: u32) -> Self {
        Self { lane: address >> 16, column: address & 0xffff }
    }

    pub fn fault(self, problem: impl Into<String>) -> Fault {
        Fault::TensorMemory { lane: self.lane, column: self.column, problem: problem.into() }
    }
}

/// Columns that `tcgen05.alloc` gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Allocation {
    first: u32,
    columns: u32,
}

/// The tensor memory of one CTA.
pub(super) struct TensorMemory {
    words: Vec<u32>,
    written: Vec<bool>,
    allocations: Vec<Allocation>,
    /// Columns of the last allocation.
    last: u32,
    relinquished: bool,
}

impl TensorMemory {
    pub fn new() -> Self {
        let cells = (LANES * COLUMNS) as usize;
        Self {
            words: vec![0; cells],
            written: vec![false; cells],
            allocations: Vec::new(),
            last: COLUMNS,
            relinquished: false,
        }
    }

    fn free(&self, first: u32, columns: u32) -> bool {
        self.allocations.iter().all(|a| first + columns <= a.first || a.first + a.columns <= first)
    }

    /// Whether an allocation of so many columns is allowed now.
    pub fn check(&self, columns: u32) -> Result<(), Fault> {
        let fault = |problem: String| Err(Fault::TensorAllocation { columns, problem });
        if !(UNIT..=COLUMNS).contains(&columns) || !columns.is_power_of_two() {
            return fault("expected a power of two from 32 to 512".into());
        }
        if self.relinquished {
            return fault("after tcgen05.relinquish_alloc_permit".into());
        }
        if columns > self.last {
            return fault(format!("after one of {}: allocations must not grow", self.last));
        }
        Ok(())
    }

    /// First columns where an allocation fits, in all of some CTAs' memories. Other CTAs may have the rest of a
    /// multiprocessor's columns, so a kernel cannot know which it gets.
    pub fn fitting(memories: &[&Self], columns: u32) -> Vec<u32> {
        let starts = (0..COLUMNS).step_by(columns as usize);
        starts.filter(|&first| memories.iter().all(|m| m.free(first, columns))).collect()
    }

    /// Gives columns; what they held is gone.
    pub fn allocate(&mut self, first: u32, columns: u32) {
        self.allocations.push(Allocation { first, columns });
        self.last = columns;
        for lane in 0..LANES {
            let row = (lane * COLUMNS + first) as usize;
            self.written[row..row + columns as usize].fill(false);
        }
    }

    /// Takes an allocation back; its first column.
    pub fn deallocate(&mut self, address: u32, columns: u32) -> Result<u32, Fault> {
        let place = Place::new(address);
        let given = |a: &Allocation| place.lane == 0 && a.first == place.column && a.columns == columns;
        let Some(index) = self.allocations.iter().position(given) else {
            return Err(place.fault(format!("there is no allocation of {columns} columns to deallocate")));
        };
        Ok(self.allocations.swap_remove(index).first)
    }

    pub fn relinquish(&mut self) {
        self.relinquished = true;
    }

    /// The columns of all allocations.
    pub fn allocated(&self) -> u32 {
        self.allocations.iter().map(|a| a.columns).sum()
    }

    /// Fails unless the columns of a lane exist and are allocated.
    pub fn reach(&self, place: Place, columns: u32) -> Result<(), Fault> {
        let last = place.column + columns;
        if place.lane >= LANES || last > COLUMNS {
            return Err(place.fault(format!("{columns} columns from there do not exist")));
        }
        // Each unit is of one allocation.
        let owned = |column: u32| !self.free(column / UNIT * UNIT, UNIT);
        match (place.column..last).find(|&column| !owned(column)) {
            Some(column) => Err(Place { column, ..place }.fault("the column is not allocated")),
            None => Ok(()),
        }
    }

    fn index(place: Place) -> usize {
        (place.lane * COLUMNS + place.column) as usize
    }

    /// Words of a lane that [`TensorMemory::reach`] allows.
    pub fn read(&self, place: Place, columns: u32) -> Result<&[u32], Fault> {
        let cells = Self::index(place)..Self::index(place) + columns as usize;
        if let Some(i) = self.written[cells.clone()].iter().position(|w| !w) {
            return Err(Place { column: place.column + i as u32, ..place }.fault("read of a cell that nothing wrote"));
        }
        Ok(&self.words[cells])
    }

    pub fn write(&mut self, place: Place, word: u32) {
        self.words[Self::index(place)] = word;
        self.written[Self::index(place)] = true;
    }

    /// Words of a lane, to be written all.
    pub fn row_mut(&mut self, place: Place, columns: u32) -> &mut [u32] {
        let cells = Self::index(place)..Self::index(place) + columns as usize;
        self.written[cells.clone()].fill(true);
        &mut self.words[cells]
    }

    /// A word of which only the lower half means something.
    pub fn lower_half(bits: u16) -> u32 {
        UPPER_HALF | u32::from(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(lane: u32, column: u32) -> Place {
        Place { lane, column }
    }

    /// Powers of two from 32 to 512, that do not grow, and none after the permit is gone.
    #[test]
    fn allocations_have_rules() {
        let mut memory = TensorMemory::new();
        for columns in [0, 16, 48, 1024] {
            assert!(memory.check(columns).is_err());
        }
        memory.check(128).unwrap();
        memory.allocate(0, 128);
        assert!(memory.check(256).unwrap_err().to_string().contains("must not grow"));
        memory.relinquish();
        assert!(memory.check(32).unwrap_err().to_string().contains("relinquish"));
    }

    #[test]
    fn room_is_what_nobody_has() {
        let (mut a, mut b) = (TensorMemory::new(), TensorMemory::new());
        a.allocate(0, 256);
        b.allocate(256, 128);
        assert_eq!(TensorMemory::fitting(&[&a], 128), [256, 384]);
        assert_eq!(TensorMemory::fitting(&[&a, &b], 128), [384]);
        assert!(TensorMemory::fitting(&[&a, &b], 256).is_empty());
        assert!(a.deallocate(0, 128).is_err());
        assert_eq!(a.deallocate(0, 256).unwrap(), 0);
        assert_eq!((a.allocated(), b.allocated()), (0, 128));
    }

    #[test]
    fn cells_outside_allocations_are_errors() {
        let mut memory = TensorMemory::new();
        memory.allocate(64, 64);
        memory.reach(at(127, 64), 64).unwrap();
        assert!(memory.reach(at(0, 63), 1).is_err());
        assert!(memory.reach(at(0, 96), 33).unwrap_err().to_string().contains("column 128"));
        assert!(memory.reach(at(128, 64), 1).is_err());
        assert!(memory.reach(at(0, 511), 2).is_err());
    }

    /// An allocation does not keep what its columns held.
    #[test]
    fn cells_that_nothing_wrote_are_errors() {
        let mut memory = TensorMemory::new();
        memory.allocate(0, 32);
        memory.write(at(5, 3), 7);
        assert_eq!(memory.read(at(5, 3), 1).unwrap(), [7]);
        assert!(memory.read(at(5, 3), 2).unwrap_err().to_string().contains("column 4"));
        memory.deallocate(0, 32).unwrap();
        memory.allocate(0, 32);
        assert!(memory.read(at(5, 3), 1).is_err());
    }

    #[test]
    fn the_lane_is_in_the_upper_half() {
        assert_eq!(Place::new(0x0060_0102), at(96, 258));
    }
}
