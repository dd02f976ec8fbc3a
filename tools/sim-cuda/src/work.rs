//! What a stream is given to do.
use crate::code::Code;
use crate::module::Call;
use ptx_sim::Memory;
use std::ffi::c_void;

/// A piece of work. Run at once, or kept as a node of a graph.
#[derive(Debug, Clone)]
pub enum Work {
    /// A kernel.
    Launch(Call),
    /// Bytes that go from one place to another.
    Copy(Rows),
    /// Bytes that all get the same value.
    Fill {
        /// The first of them.
        to: u64,
        /// The value.
        value: u8,
        /// How many.
        bytes: usize,
    },
    /// Memory that a graph allocates.
    Alloc {
        /// Its address.
        address: u64,
    },
    /// Memory of the graph that it frees.
    Free {
        /// Its address.
        address: u64,
    },
}

/// An address of one side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Of the program.
    Host(usize),
    /// Of the device.
    Device(u64),
}

impl Place {
    /// The host's address.
    pub fn host<T>(pointer: *const T) -> Self {
        Self::Host(pointer as usize)
    }

    /// The place so many bytes later.
    pub fn offset(self, bytes: usize) -> Self {
        match self {
            Self::Host(address) => Self::Host(address.wrapping_add(bytes)),
            Self::Device(address) => Self::Device(address.wrapping_add(bytes as u64)),
        }
    }
}

/// Rows of bytes that are copied.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Where the first row is.
    pub from: Place,
    /// Where it goes.
    pub to: Place,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Bytes from one row to the next, where they are.
    pub from_pitch: usize,
    /// The same, where they go.
    pub to_pitch: usize,
}

impl Rows {
    /// The rows one by one: from, to.
    pub fn each(&self) -> impl Iterator<Item = (Place, Place)> {
        let rows = if self.width == 0 { 0 } else { self.height };
        (0..rows).map(|row| {
            (self.from.offset(row.wrapping_mul(self.from_pitch)), self.to.offset(row.wrapping_mul(self.to_pitch)))
        })
    }
}

impl Work {
    /// A copy of bytes that lie together.
    pub fn copy(from: Place, to: Place, bytes: usize) -> Self {
        Self::Copy(Rows { from, to, width: bytes, height: 1, from_pitch: bytes, to_pitch: bytes })
    }

    /// The type of its node in a graph (`CUgraphNodeType`).
    pub fn node_type(&self) -> u32 {
        match self {
            Self::Launch(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill { .. } => 2,
            Self::Alloc { .. } => 10,
            Self::Free { .. } => 11,
        }
    }

    /// What it is, in messages.
    pub fn name(&self) -> String {
        match self {
            Self::Launch(call) => format!("kernel {}", call.function.entry().name),
            Self::Copy(_) => "memcpy".to_string(),
            Self::Fill { .. } => "memset".to_string(),
            Self::Alloc { .. } => "allocation".to_string(),
            Self::Free { .. } => "free".to_string(),
        }
    }

    /// Addresses of the device that it names. A kernel may name others in its memory.
    pub fn device_addresses(&self) -> Vec<u64> {
        match self {
            Self::Launch(call) => call.words().collect(),
            Self::Copy(rows) => {
                let places = rows.each().flat_map(|(from, to)| [from, to]);
                places
                    .filter_map(|place| if let Place::Device(address) = place { Some(address) } else { None })
                    .collect()
            }
            Self::Fill { to, .. } => vec![*to],
            Self::Alloc { .. } | Self::Free { .. } => Vec::new(),
        }
    }

    /// Addresses of the host that it names.
    pub fn host_addresses(&self) -> Vec<usize> {
        let Self::Copy(rows) = self else { return Vec::new() };
        let places = [rows.from, rows.to].into_iter();
        places.filter_map(|place| if let Place::Host(address) = place { Some(address) } else { None }).collect()
    }

    /// What the driver says before anything runs.
    ///
    /// # Errors
    /// [`Code::InvalidValue`], [`Code::NotSupported`].
    pub fn check(&self, memory: &Memory) -> Result<(), Code> {
        match self {
            Self::Launch(call) if call.dynamic_shared > call.function.dynamic_shared => Err(Code::InvalidValue),
            Self::Copy(rows) if matches!((rows.from, rows.to), (Place::Host(_), Place::Host(_))) => {
                Err(Code::NotSupported)
            }
            Self::Copy(rows) => rows.each().flat_map(|(from, to)| [from, to]).try_for_each(|place| match place {
                Place::Device(address) => inside(memory, address, rows.width),
                Place::Host(_) => Ok(()),
            }),
            Self::Fill { to, bytes, .. } => inside(memory, *to, *bytes),
            _ => Ok(()),
        }
    }
}

/// Copies rows.
///
/// # Errors
/// [`Code::InvalidValue`] of a copy that leaves an allocation.
///
/// # Safety
/// Places of the host have as many bytes as are copied.
pub unsafe fn copy(memory: &Memory, rows: &Rows) -> Result<(), Code> {
    // SAFETY: the caller vouches for the rows.
    rows.each().try_for_each(|(from, to)| unsafe { row(memory, from, to, rows.width) })
}

/// Gives bytes of the device the same value.
///
/// # Errors
/// [`Code::InvalidValue`] of bytes that are not all allocated.
pub fn fill(memory: &Memory, to: u64, value: u8, bytes: usize) -> Result<(), Code> {
    memory.copy_to(to, &vec![value; bytes]).map_err(refuse)
}

/// A copy that leaves an allocation is the program's mistake and no kernel's: it fails, and nothing else does.
fn refuse(fault: ptx_sim::Fault) -> Code {
    eprintln!("sim-cuda: {fault}");
    Code::InvalidValue
}

fn inside(memory: &Memory, address: u64, bytes: usize) -> Result<(), Code> {
    let fits = |(buffer, size): (ptx_sim::Buffer, u64)| address - memory.address(buffer) + bytes as u64 <= size;
    if memory.around(address).is_some_and(fits) {
        return Ok(());
    }
    memory.copy_from(address, bytes as u64).map(|_| ()).map_err(refuse)
}

/// # Safety
/// Places of the host have as many bytes.
unsafe fn row(memory: &Memory, from: Place, to: Place, bytes: usize) -> Result<(), Code> {
    let data = match from {
        // SAFETY: the caller vouches for the bytes.
        Place::Host(address) => unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec(),
        Place::Device(address) => memory.copy_from(address, bytes as u64).map_err(refuse)?,
    };
    match to {
        Place::Host(address) => {
            let to = (address as *mut c_void).cast();
            // SAFETY: the caller vouches for the room.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bytes) };
            Ok(())
        }
        Place::Device(address) => memory.copy_to(address, &data).map_err(refuse),
    }
}
