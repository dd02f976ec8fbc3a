//! What can go wrong, with the place in PTX and CUDA.
use std::fmt;

/// Text that is no PTX that we know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, found {found}")]
pub struct ParseError {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// What should stand there.
    pub expected: String,
    /// What stands there.
    pub found: String,
}

/// A line of CUDA source, known through `.loc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaLine {
    /// File of `.file`.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
}

impl fmt::Display for CudaLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Where an error happened. Fields are empty before anything runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Line of the PTX text, from 1; 0 if no line is to blame.
    pub line: u32,
    /// The CUDA line, then the line that it was inlined into.
    pub cuda: Vec<CudaLine>,
    /// The CTA's index in the grid.
    pub cta: Option<[u32; 3]>,
    /// The warp within the CTA.
    pub warp: Option<usize>,
    /// The lanes that did it.
    pub lanes: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "PTX line {}", self.line)?;
        }
        for cuda in &self.cuda {
            write!(f, " ({cuda})")?;
        }
        if let Some([x, y, z]) = self.cta {
            write!(f, ", CTA {x},{y},{z}")?;
        }
        if let Some(warp) = self.warp {
            write!(f, ", warp {warp}, lanes {:#010x}", self.lanes)?;
        }
        Ok(())
    }
}

/// A launch that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}; {place}")]
pub struct SimError {
    /// What happened.
    pub kind: Fault,
    /// Where.
    pub place: Box<Place>,
}

impl From<Fault> for SimError {
    fn from(kind: Fault) -> Self {
        Self { kind, place: Box::default() }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The module has no kernel of this name.
    #[error("the module has no kernel {0}")]
    NoEntry(String),
    /// An instruction that the simulator does not know.
    #[error("unknown instruction: {0}")]
    UnknownInstruction(String),
    /// An operand that the instruction cannot have, or a name that nothing declares.
    #[error("{instruction}: bad operand: {operand}")]
    BadOperand {
        /// The opcode.
        instruction: String,
        /// The operand.
        operand: String,
    },
    /// A launch that does not fit the kernel.
    #[error("launch: {argument} is {actual}, expected {expected}")]
    BadLaunch {
        /// The argument.
        argument: String,
        /// What it is.
        actual: String,
        /// What it should be.
        expected: String,
    },
    /// An allocation at an address where there can be none.
    #[error("no allocation of {bytes} bytes at {address:#x}: {problem}")]
    BadAllocation {
        /// The address.
        address: u64,
        /// Its size.
        bytes: u64,
        /// Why not.
        problem: String,
    },
    /// An access outside all allocations, or beyond the end of one.
    #[error("{access} of {bytes} bytes at {address:#x} is out of bounds: {nearest}")]
    OutOfBounds {
        /// "global load" and so on.
        access: String,
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u64,
        /// The nearest memory that exists.
        nearest: String,
    },
    /// An address that is no multiple of the access's size.
    #[error("{access} of {bytes} bytes at {address:#x} is misaligned")]
    Misaligned {
        /// "global load" and so on.
        access: String,
        /// The address.
        address: u64,
        /// Bytes of the access.
        bytes: u64,
    },
    /// A read of shared memory that nothing wrote.
    #[error("read of uninitialised shared memory at {address:#x}")]
    Uninitialised {
        /// The first such byte.
        address: u64,
    },
    /// Accesses to shared memory without an order between them.
    #[error("data race: {access} at shared address {address:#x} is not ordered after {earlier}")]
    Race {
        /// "shared load" and so on.
        access: String,
        /// The first such byte.
        address: u64,
        /// The other access.
        earlier: String,
    },
    /// Accesses to global memory by CTAs between which there is no order.
    #[error("data race: global {access} at {address:#x}, which another CTA {other} in this launch")]
    GlobalRace {
        /// "load" or "store".
        access: &'static str,
        /// The first such byte, rounded down to two.
        address: u64,
        /// "read" or "wrote".
        other: &'static str,
    },
    /// An access to memory that kernels of several devices access, by which it is no synchronisation between them.
    #[error(
        "data race: global {access} at {address:#x}, which kernels of several devices access, is not strong with the scope .sys"
    )]
    PeerRace {
        /// "load", "store" or "atomic".
        access: &'static str,
        /// The address.
        address: u64,
    },
    /// An access by a bulk copy or a matrix instruction after a generic write without `fence.proxy.async` between.
    #[error(
        "no fence.proxy.async between the write at shared address {address:#x} by {write} and its use by the async proxy"
    )]
    ProxyFence {
        /// The first such byte.
        address: u64,
        /// Who wrote it.
        write: String,
    },
    /// A bulk copy that hardware refuses.
    #[error("bulk copy: {problem}")]
    Bulk {
        /// What is wrong.
        problem: String,
    },
    /// `setmaxnreg` with a count that cannot be.
    #[error("setmaxnreg {count}: {problem}")]
    Registers {
        /// The count.
        count: u32,
        /// What is wrong.
        problem: String,
    },
    /// A CTA that ended before work on its shared memory that nothing had waited for.
    #[error("the CTA ended while this was still under way in its shared memory")]
    UnfinishedCopy,
    /// A register that a `tcgen05.ld` has yet to fill.
    #[error("a register of a tcgen05.ld is used before tcgen05.wait::ld")]
    RegisterInFlight,
    /// An access to tensor memory that is not allowed.
    #[error("tensor memory at lane {lane}, column {column}: {problem}")]
    TensorMemory {
        /// The lane of the first such cell.
        lane: u32,
        /// Its column.
        column: u32,
        /// What is wrong.
        problem: String,
    },
    /// An allocation of tensor memory that is not allowed.
    #[error("tcgen05.alloc of {columns} columns: {problem}")]
    TensorAllocation {
        /// Columns asked for.
        columns: u32,
        /// What is wrong.
        problem: String,
    },
    /// A `tcgen05` operation of a pair of CTAs that this CTA cannot issue.
    #[error(".cta_group::2: {problem}")]
    CtaGroup {
        /// What is wrong.
        problem: &'static str,
    },
    /// A write to memory that cannot be written.
    #[error("write to read-only memory at {address:#x}")]
    ReadOnly {
        /// The address.
        address: u64,
    },
    /// A shuffle from a lane that does not take part in it.
    #[error("shuffle reads lane {source_lane}, which does not take part")]
    InactiveLane {
        /// The lane read.
        source_lane: u32,
    },
    /// A `.sync` instruction whose member mask lacks an executing lane.
    #[error("lanes {executing:#010x} execute, the member mask is {members:#010x}")]
    NotMember {
        /// The executing lanes.
        executing: u32,
        /// The mask.
        members: u32,
    },
    /// An `.aligned` instruction of matrices that not all of a warp's lanes execute.
    #[error("lanes {executing:#010x} execute what all 32 of the warp must")]
    NotAligned {
        /// The executing lanes.
        executing: u32,
    },
    /// An `.aligned` instruction that a part of a warp comes to, where nothing brings the other lanes there.
    #[error(
        "lanes {missing:#010x} of the warp are elsewhere, and all its lanes must execute this together: no bar.warp.sync since they parted"
    )]
    LanesApart {
        /// The lanes that are not there.
        missing: u32,
    },
    /// The kernel gave up.
    #[error("trap")]
    Trap,
    /// A product of a warpgroup, or what is done to its registers, against the rules of `wgmma`.
    #[error("wgmma: {problem}")]
    Wgmma {
        /// What is wrong.
        problem: String,
    },
    /// A descriptor of a matrix or an instruction that describes nothing.
    #[error("descriptor {descriptor:#x}: {problem}")]
    Descriptor {
        /// The descriptor.
        descriptor: u64,
        /// What is wrong.
        problem: String,
    },
    /// An operation on an mbarrier that is not initialised, or that breaks its count.
    #[error("mbarrier at {address:#x}: {problem}")]
    Mbarrier {
        /// Address of the barrier.
        address: u64,
        /// What is wrong.
        problem: String,
    },
    /// A named barrier used with contradictory counts.
    #[error("barrier {id}: {problem}")]
    Barrier {
        /// The barrier's number.
        id: u64,
        /// What is wrong.
        problem: String,
    },
    /// A rank that no CTA of the cluster has.
    #[error("no CTA of rank {rank} in a cluster of {ctas}")]
    NoSuchCta {
        /// The rank.
        rank: usize,
        /// CTAs of the cluster.
        ctas: usize,
    },
    /// The cluster barrier used in the wrong order.
    #[error("cluster barrier: a thread {problem}")]
    ClusterBarrier {
        /// What is wrong.
        problem: &'static str,
    },
    /// No warp can go on.
    #[error("deadlock:{}", positions.iter().map(|p| format!("\n  {p}")).collect::<String>())]
    Deadlock {
        /// What each warp waits for, and where.
        positions: Vec<String>,
    },
    /// More instructions than the launch allows.
    #[error("a CTA ran more than {limit} warp instructions")]
    TooLong {
        /// The limit.
        limit: u64,
    },
}
