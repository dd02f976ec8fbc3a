//! Operations of the fifth generation of tensor cores (PTX ISA, TensorCore 5th Generation Family Instructions).
use super::{Addr, PredSource, Slot, Space};

/// A `tcgen05` operation. `group` is `.cta_group`: 1, or 2 for a pair of CTAs.
#[derive(Debug, Clone)]
pub(crate) enum Tcgen05 {
    Alloc {
        group: u8,
        space: Space,
        dst: Addr,
        columns: Slot,
    },
    Dealloc {
        group: u8,
        address: Slot,
        columns: Slot,
    },
    Relinquish {
        group: u8,
    },
    Mma(Mma),
    Commit {
        group: u8,
        mbarrier: Addr,
        /// The CTAs of the cluster whose barrier gets an arrival; else only the addressed one.
        mask: Option<Slot>,
    },
    Load {
        fragment: Fragment,
        dsts: Box<[Slot]>,
        address: Addr,
    },
    Store {
        fragment: Fragment,
        srcs: Box<[Slot]>,
        address: Addr,
    },
    WaitLoads,
    WaitStores,
    FenceBefore,
    FenceAfter,
    /// With `.cta_group::1`.
    Copy {
        shape: CopyShape,
        address: Addr,
        descriptor: Slot,
    },
    Shift {
        group: u8,
        address: Addr,
    },
}

impl Tcgen05 {
    /// `.cta_group`, where the instruction has one.
    pub fn group(&self) -> Option<u8> {
        match self {
            Self::Alloc { group, .. }
            | Self::Dealloc { group, .. }
            | Self::Relinquish { group }
            | Self::Commit { group, .. }
            | Self::Shift { group, .. }
            | Self::Mma(Mma { group, .. }) => Some(*group),
            Self::Copy { .. } => Some(1),
            _ => None,
        }
    }
}

/// `tcgen05.mma` of `.kind::f16`. What `.collector` says about reuse changes no result.
#[derive(Debug, Clone)]
pub(crate) struct Mma {
    pub group: u8,
    /// `.ws`.
    pub weight_stationary: bool,
    pub d: Addr,
    pub a: MatrixA,
    pub b: Slot,
    pub instruction: Slot,
    pub enable_input_d: PredSource,
    /// D is scaled by 2 to the minus this.
    pub scale_input_d: u32,
    pub disable_output_lane: Option<Box<[Slot]>>,
    pub zero_column_mask: Option<Slot>,
}

/// Where matrix A is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatrixA {
    /// A descriptor of shared memory.
    Shared(Slot),
    Tensor(Addr),
}

/// What `tcgen05.ld` and `.st` move for a warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub shape: Shape,
    /// Columns between the halves of `.16x32bx2`.
    pub split: u32,
    /// `.pack::16b` and `.unpack::16b`: a register holds the lower halves of two columns.
    pub packed: bool,
}

/// `.shape` of `tcgen05.ld` and `.st`: lanes and bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    L16B64,
    L16B128,
    L16B256,
    L32B32,
    L16B32x2,
}

/// `.shape` and `.multicast` of `tcgen05.cp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyShape {
    L128B256,
    L4B256,
    L128B128,
    /// `.64x128b.warpx2::02_13`
    L64B128Pairs02,
    /// `.64x128b.warpx2::01_23`
    L64B128Pairs01,
    /// `.32x128b.warpx4`
    L32B128,
}
