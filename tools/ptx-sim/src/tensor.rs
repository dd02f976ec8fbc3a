//! Tensor maps: how a tensor lies in global memory and which box of it a copy takes (PTX ISA, "Tensors"; CUDA driver
//! API, `cuTensorMapEncodeTiled`).
//!
//! The 128 bytes that the driver makes of it are opaque. Ours have a form of their own, which only the simulator reads.

/// Bytes of a tensor map.
pub const TENSOR_MAP_BYTES: usize = 128;
/// What our tensor maps begin with.
const MAGIC: [u8; 8] = *b"ptx-sim\x01";
/// Dimensions of a tensor at most.
const MOST_DIMS: usize = 5;

/// Types of elements (`CUtensorMapDataType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorElem {
    /// Integers of this many bytes.
    Int(u8),
    /// Floats of this many bytes; NaNs can fill what lies outside.
    Float(u8),
}

impl TensorElem {
    /// The type of a number of `CUtensorMapDataType`; packed ones of 4 and 6 bits are not known.
    pub fn from_cuda(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::Int(1),
            1 => Self::Int(2),
            2 | 3 => Self::Int(4),
            4 | 5 => Self::Int(8),
            6 | 9 => Self::Float(2),
            7 | 10 | 11 | 12 => Self::Float(4),
            8 => Self::Float(8),
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Int(bytes) | Self::Float(bytes) => bytes.into(),
        }
    }
}

/// How units of 16 bytes are permuted in shared memory (`CUtensorMapSwizzle`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorSwizzle {
    /// They are not.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl TensorSwizzle {
    /// The swizzle of a number of `CUtensorMapSwizzle`; those of 128 bytes with larger atoms are not known.
    pub fn from_cuda(swizzle: u32) -> Option<Self> {
        [Self::None, Self::Bytes32, Self::Bytes64, Self::Bytes128].get(swizzle as usize).copied()
    }

    /// Bytes that the units are permuted in.
    fn span(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }

    /// Where a byte goes: bits 4 and up of the address are changed by bits 7 and up (PTX ISA, "Swizzling Modes").
    pub(crate) fn place(self, address: u64) -> u64 {
        let units = self.span().map_or(0, |span| span / 16 - 1);
        address ^ (address >> 7 & units) << 4
    }
}

/// A tensor in global memory and the box that copies take of it. Dimensions come fastest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMap {
    /// Type of the elements.
    pub elem: TensorElem,
    /// Where the tensor begins.
    pub address: u64,
    /// Elements of each dimension.
    pub dims: Vec<u64>,
    /// Bytes from one element to the next, of each dimension but the first.
    pub strides: Vec<u64>,
    /// Elements of a box.
    pub boxes: Vec<u32>,
    /// Every how many elements of the box are taken; of the first dimension all are.
    pub steps: Vec<u32>,
    /// How boxes lie in shared memory.
    pub swizzle: TensorSwizzle,
    /// What lies outside the tensor is NaN and not zero.
    pub fill_nan: bool,
}

/// A tensor map that the driver would refuse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor map: {what} is {actual}, expected {expected}")]
pub struct TensorMapError {
    /// The field.
    pub what: &'static str,
    /// Its value.
    pub actual: u64,
    /// What it may be.
    pub expected: &'static str,
}

fn demand(holds: bool, what: &'static str, actual: u64, expected: &'static str) -> Result<(), TensorMapError> {
    if holds { Ok(()) } else { Err(TensorMapError { what, actual, expected }) }
}

impl TensorMap {
    /// Bytes of a row of the box.
    pub(crate) fn row_bytes(&self) -> u64 {
        u64::from(self.boxes[0]) * self.elem.bytes()
    }

    /// Bytes from a row to the next in shared memory.
    pub(crate) fn pitch(&self) -> u64 {
        self.swizzle.span().unwrap_or(self.row_bytes())
    }

    /// Elements that a box has of a dimension.
    pub(crate) fn taken(&self, dim: usize) -> u64 {
        u64::from(if dim == 0 { self.boxes[0] } else { self.boxes[dim].div_ceil(self.steps[dim]) })
    }

    /// What `cuTensorMapEncodeTiled` demands (CUDA driver API, "Tensor Map Object Management"), without interleaving.
    fn check(&self) -> Result<(), TensorMapError> {
        let rank = self.dims.len();
        demand((1..=MOST_DIMS).contains(&rank), "rank", rank as u64, "1 to 5")?;
        demand(self.strides.len() == rank - 1, "number of strides", self.strides.len() as u64, "the rank less 1")?;
        demand(self.boxes.len() == rank, "number of box dimensions", self.boxes.len() as u64, "the rank")?;
        demand(self.steps.len() == rank, "number of element strides", self.steps.len() as u64, "the rank")?;
        demand(self.address.is_multiple_of(16), "address", self.address, "a multiple of 16")?;
        for &dim in &self.dims {
            demand((1..=1 << 32).contains(&dim), "dimension", dim, "1 to 2^32")?;
        }
        for &stride in &self.strides {
            demand(stride.is_multiple_of(16) && stride < 1 << 40, "stride", stride, "a multiple of 16 below 2^40")?;
        }
        for &extent in &self.boxes {
            demand((1..=256).contains(&extent), "box dimension", extent.into(), "1 to 256")?;
        }
        for &step in &self.steps {
            demand((1..=8).contains(&step), "element stride", step.into(), "1 to 8")?;
        }
        let row = self.row_bytes();
        demand(row.is_multiple_of(16), "row of the box in bytes", row, "a multiple of 16")?;
        let span = self.swizzle.span().unwrap_or(u64::MAX);
        demand(row <= span, "row of the box in bytes", row, "at most what is swizzled")?;
        let float = matches!(self.elem, TensorElem::Float(_));
        demand(float || !self.fill_nan, "filling with NaN", 1, "only for floats")
    }

    /// The 128 bytes that a kernel gets.
    ///
    /// # Errors
    /// [`TensorMapError`] where the driver says "invalid value".
    pub fn encode(&self) -> Result<[u8; TENSOR_MAP_BYTES], TensorMapError> {
        self.check()?;
        let (kind, bytes) = match self.elem {
            TensorElem::Int(bytes) => (0, bytes),
            TensorElem::Float(bytes) => (1, bytes),
        };
        let mut out = MAGIC.to_vec();
        out.extend([kind, bytes, self.dims.len() as u8, self.swizzle as u8, self.fill_nan.into(), 0, 0, 0]);
        out.extend(self.address.to_le_bytes());
        // Up to 2^32 fits into 32 bits less 1, up to 256 into 8.
        self.dims.iter().for_each(|dim| out.extend(((dim - 1) as u32).to_le_bytes()));
        self.strides.iter().for_each(|stride| out.extend(stride.to_le_bytes()));
        self.boxes.iter().for_each(|extent| out.push((extent - 1) as u8));
        self.steps.iter().for_each(|step| out.push(*step as u8));
        let mut map = [0; TENSOR_MAP_BYTES];
        map[..out.len()].copy_from_slice(&out);
        Ok(map)
    }

    /// The tensor map in these bytes, if it is one of ours.
    pub fn decode(map: &[u8; TENSOR_MAP_BYTES]) -> Option<Self> {
        let mut rest = map.strip_prefix(&MAGIC)?;
        let mut take = |count: usize| {
            let (now, later) = rest.split_at_checked(count)?;
            rest = later;
            let mut value = [0; 8];
            value[..count].copy_from_slice(now);
            Some(u64::from_le_bytes(value))
        };
        let (kind, bytes, rank) = (take(1)?, take(1)? as u8, take(1)? as usize);
        let elem = if kind == 0 { TensorElem::Int(bytes) } else { TensorElem::Float(bytes) };
        let swizzle = TensorSwizzle::from_cuda(take(1)? as u32)?;
        let fill_nan = take(4)? != 0;
        let address = take(8)?;
        let dims = (0..rank).map(|_| take(4).map(|n| n + 1)).collect::<Option<_>>()?;
        let strides = (1..rank).map(|_| take(8)).collect::<Option<_>>()?;
        let boxes = (0..rank).map(|_| take(1).map(|n| n as u32 + 1)).collect::<Option<_>>()?;
        let steps = (0..rank).map(|_| take(1).map(|n| n as u32)).collect::<Option<_>>()?;
        let found = Self { elem, address, dims, strides, boxes, steps, swizzle, fill_nan };
        found.check().is_ok().then_some(found)
    }
}
