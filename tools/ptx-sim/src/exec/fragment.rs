//! Fragments: which lane holds which element of a matrix, and in which register.
use super::product::Number;
use super::registers::{LANES, Registers};
use crate::ir::{Elem, Layout, Shape, Slot};

/// One of the three matrices of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    A,
    B,
    /// C or D.
    Sum,
}

/// A matrix as registers hold it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fragment {
    pub layout: Layout,
    pub role: Role,
    pub rows: usize,
    pub columns: usize,
    pub elem: Elem,
}

impl Fragment {
    /// The fragment of a product's matrix.
    pub fn of(layout: Layout, role: Role, shape: Shape, elem: Elem) -> Self {
        let (rows, columns) = match role {
            Role::A => (shape.m, shape.k),
            Role::B => (shape.k, shape.n),
            Role::Sum => (shape.m, shape.n),
        };
        Self { layout, role, rows, columns, elem }
    }

    /// Row and column of element `part` of register `register` of a lane.
    ///
    /// `mma.sync`: PTX ISA 9.7.14.5, "Matrix Fragments for mma", where the figures of all types of 8 to 32 bits are
    /// one rule; for A and D of `wgmma` the rows of one warp, with more columns in D. With `q` elements in a register,
    /// a quad of lanes holds `4 * q` neighbours of a row of A or of a column of B; D has pairs whatever its type.
    fn position(&self, lane: usize, register: usize, part: usize) -> (usize, usize) {
        let q = self.elem.packed();
        let (group, quad) = (lane / 4, lane % 4);
        match (self.layout, self.role) {
            (Layout::Mma, Role::A) => (group + 8 * (register % 2), q * quad + part + 4 * q * (register / 2)),
            (Layout::Mma, Role::B) => (q * quad + part + 4 * q * register, group),
            (Layout::Mma, Role::Sum) => {
                let i = register * q + part;
                (group + 8 * (i / 2 % 2), 2 * quad + i % 2 + 8 * (i / 4))
            }
            (Layout::Wmma, _) => {
                // Any order: that of rows. Where there are more places than elements, these occur twice.
                (self.linear(lane, register, part) / self.columns, self.linear(lane, register, part) % self.columns)
            }
        }
    }

    fn linear(&self, lane: usize, register: usize, part: usize) -> usize {
        let q = self.elem.packed();
        (lane * q * self.registers() + register * q + part) % (self.rows * self.columns)
    }

    /// Registers of each lane. Of `wmma`, A and B in f16 have eight whatever their shape.
    pub fn registers(&self) -> usize {
        if self.layout == Layout::Wmma && self.elem == Elem::F16 && self.role != Role::Sum {
            return 8;
        }
        self.rows * self.columns / (LANES * self.elem.packed())
    }

    /// Calls `f` with lane, register, the lowest bit in it, and the index by rows, of each element.
    pub fn each(&self, mut f: impl FnMut(usize, usize, u32, usize)) {
        let (q, bits) = (self.elem.packed(), self.elem.bits());
        for register in 0..self.registers() {
            for lane in 0..LANES {
                for part in 0..q {
                    let (row, column) = self.position(lane, register, part);
                    f(lane, register, (part * bits) as u32, row * self.columns + column);
                }
            }
        }
    }

    /// The matrix by rows.
    pub fn read<T: Number>(&self, regs: &Registers, slots: &[Slot]) -> Vec<T> {
        let rows: Vec<_> = slots.iter().map(|slot| regs.row(*slot)).collect();
        let mut values = vec![T::default(); self.rows * self.columns];
        self.each(|lane, register, shift, index| {
            values[index] = T::decode(self.elem, rows[register][lane] as u32 >> shift);
        });
        values
    }

    /// Registers from a matrix by rows.
    pub fn write<T: Number>(&self, regs: &mut Registers, slots: &[Slot], values: &[T], saturate: bool) {
        for slot in slots {
            *regs.row_mut(*slot) = [0; LANES];
        }
        self.each(|lane, register, shift, index| {
            regs.row_mut(slots[register])[lane] |= u64::from(values[index].encode(self.elem, saturate)) << shift;
        });
    }
}
