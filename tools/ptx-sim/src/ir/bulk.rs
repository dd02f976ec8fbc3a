//! Bulk copies (PTX ISA, `cp.async.bulk` and `cp.async.bulk.tensor`).
use super::{Addr, Slot};

/// Where a copy's bytes are counted in, and which CTAs get them.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub dst: Addr,
    pub barrier: Addr,
    /// A bit for each CTA of the cluster (`.multicast::cluster`).
    pub multicast: Option<Slot>,
    /// The mbarrier may be the pair's other CTA's (`.cta_group::2`).
    pub pair: bool,
}

/// A box of a tensor.
#[derive(Debug, Clone)]
pub(crate) struct TensorBox {
    pub map: Addr,
    pub coords: Box<[Slot]>,
    /// Four rows (`.tile::gather4`).
    pub gather: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum BulkOp {
    LoadTensor(TensorBox, Target),
    Load {
        src: Addr,
        bytes: Slot,
        target: Target,
    },
    /// From the own shared memory to that of a CTA of the cluster.
    Push {
        src: Addr,
        bytes: Slot,
        target: Target,
    },
    /// `adds`: `.reduce.add`.
    StoreTensor {
        tensor: TensorBox,
        src: Addr,
        adds: bool,
    },
    Store {
        dst: Addr,
        src: Addr,
        bytes: Slot,
    },
    Commit,
    /// `reads`: until the sources have been read (`.read`).
    Wait {
        pending: usize,
        reads: bool,
    },
}
