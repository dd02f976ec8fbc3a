//! Pinned memory of the host.
use crate::code::Code;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;

/// Names an allocation. Unlike its address, nothing that comes later has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedId {
    /// Where it starts.
    pub address: usize,
    serial: u64,
}

/// The allocations of pinned memory.
#[derive(Debug, Default)]
pub struct Pinned {
    allocations: BTreeMap<usize, (Layout, u64)>,
    count: u64,
}

impl Pinned {
    /// Allocates zeros.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for no bytes, or more than there are.
    pub fn alloc(&mut self, bytes: usize) -> Result<*mut c_void, Code> {
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| Code::InvalidValue)?;
        if bytes == 0 {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the layout has bytes.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return Err(Code::InvalidValue);
        }
        self.count += 1;
        self.allocations.insert(address as usize, (layout, self.count));
        Ok(address.cast())
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] unless [`alloc`](Self::alloc) gave the address.
    pub fn free(&mut self, address: *mut c_void) -> Result<(), Code> {
        let (layout, _) = self.allocations.remove(&(address as usize)).ok_or(Code::InvalidValue)?;
        // SAFETY: it was allocated with this layout, and it is not freed.
        unsafe { dealloc(address.cast(), layout) };
        Ok(())
    }

    /// The allocation that an address lies in; none for memory that the program has from elsewhere.
    pub fn around(&self, address: usize) -> Option<PinnedId> {
        let (&start, &(layout, serial)) = self.allocations.range(..=address).next_back()?;
        (address - start < layout.size()).then_some(PinnedId { address: start, serial })
    }

    /// Whether an allocation is still there.
    pub fn has(&self, id: PinnedId) -> bool {
        self.around(id.address) == Some(id)
    }
}
