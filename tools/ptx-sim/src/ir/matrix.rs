//! Operations on matrices that a warp or a warpgroup holds together (PTX ISA 9.7.14 and 9.7.15).
use super::{Addr, PredSource, Slot, Space};

/// Types of matrix elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elem {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
    F32,
    S32,
}

impl Elem {
    pub fn bits(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::E5m2 | Self::S8 | Self::U8 => 8,
            Self::Tf32 | Self::F32 | Self::S32 => 32,
        }
    }

    /// Elements of a register of 32 bits.
    pub fn packed(self) -> usize {
        32 / self.bits()
    }

    pub fn is_int(self) -> bool {
        matches!(self, Self::S8 | Self::U8 | Self::S32)
    }
}

/// `D[m, n] = A[m, k] B[k, n] + C[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// Whose fragments an instruction has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `mma.sync`: who holds which element is public.
    Mma,
    /// `wmma`: it is not, so that any order will do.
    Wmma,
}

/// A product of fragments: `mma.sync` or `wmma.mma`.
#[derive(Debug, Clone)]
pub(crate) struct Product {
    pub layout: Layout,
    pub shape: Shape,
    pub a_elem: Elem,
    pub b_elem: Elem,
    pub c_elem: Elem,
    pub d_elem: Elem,
    /// Clamps sums of integers.
    pub saturate: bool,
    pub d: Box<[Slot]>,
    pub a: Box<[Slot]>,
    pub b: Box<[Slot]>,
    pub c: Box<[Slot]>,
}

/// `wmma.load` and `wmma.store`.
#[derive(Debug, Clone)]
pub(crate) struct WmmaAccess {
    pub space: Space,
    pub elem: Elem,
    pub rows: usize,
    pub columns: usize,
    /// A row's elements are neighbours in memory.
    pub row_major: bool,
    pub registers: Box<[Slot]>,
    pub addr: Addr,
    /// Elements from one row, or column, to the next.
    pub stride: Option<Slot>,
}

/// Matrices of 8 by 8 elements of 16 bits: `ldmatrix` and `stmatrix`.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub transposed: bool,
    pub registers: Box<[Slot]>,
    pub addr: Addr,
}

/// A of a `wgmma.mma_async`.
#[derive(Debug, Clone)]
pub(crate) enum SourceA {
    Registers(Box<[Slot]>),
    /// A descriptor, and whether neighbours in memory differ in their row.
    Shared(Slot, bool),
}

/// `wgmma.mma_async`.
#[derive(Debug, Clone)]
pub(crate) struct AsyncProduct {
    pub shape: Shape,
    pub a_elem: Elem,
    pub b_elem: Elem,
    pub d_elem: Elem,
    pub d: Box<[Slot]>,
    pub a: SourceA,
    pub b: Slot,
    /// Neighbours in memory differ in their column.
    pub b_transposed: bool,
    /// Without it D starts at zero.
    pub accumulate: PredSource,
    pub negate_a: bool,
    pub negate_b: bool,
    /// Clamps sums of integers.
    pub saturate: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum MatrixOp {
    Product(Product),
    WmmaLoad(WmmaAccess),
    WmmaStore(WmmaAccess),
    Load(Rows),
    Store(Rows),
    Async(AsyncProduct),
    AsyncFence,
    AsyncCommit,
    /// Waits until at most `pending` groups are under way.
    AsyncWait {
        pending: usize,
    },
}

impl MatrixOp {
    /// Whether it is one of `wgmma`.
    pub fn is_async(&self) -> bool {
        matches!(self, Self::Async(_) | Self::AsyncFence | Self::AsyncCommit | Self::AsyncWait { .. })
    }
}
