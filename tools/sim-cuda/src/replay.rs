//! Graphs of a real driver. Where launches are recorded, those of a graph are given to the driver one by one, so that
//! memory can be read between them.
use crate::code::Code;
use crate::forward::Real;
use crate::module::Call;
use crate::real_graphs::Issue;
use crate::work::{Place, Work};
use std::ffi::{c_uchar, c_uint, c_void};

impl Real {
    /// Keeps work that a stream has taken, if it captures. None: work that is not known.
    pub fn issued(&self, stream: usize, issue: Option<Issue>) {
        if self.shadow().graphs.capturing() && self.captures(stream) {
            self.shadow().graphs.issued(issue);
        }
    }

    /// Whether a stream captures.
    pub fn captures(&self, stream: usize) -> bool {
        let mut status: c_uint = 0;
        // SAFETY: the type is that of cuda.h.
        let ask = unsafe { self.symbol::<unsafe extern "C" fn(usize, *mut c_uint) -> u32>("cuStreamIsCapturing") };
        // SAFETY: the status can be written.
        ask.is_some_and(|ask| unsafe { ask(stream, &mut status) } == 0) && status == 1
    }

    /// Launches a graph with `run`, or its nodes one by one, if launches are recorded and all of its nodes are known.
    ///
    /// # Safety
    /// Memory that the graph uses is still there.
    pub unsafe fn replay(&self, executable: usize, stream: usize, run: impl FnOnce() -> u32) -> u32 {
        if self.shadow().graphs.capturing() && self.captures(stream) {
            self.issued(stream, None);
            return run();
        }
        let known = self.shadow().graphs.executable(executable);
        let Some(captured) = known.filter(|captured| self.records() && !captured.partial) else { return run() };
        // SAFETY: the caller vouches for the memory.
        let results = captured.issues.iter().map(|issue| unsafe { self.again(issue, stream) });
        results.into_iter().find(|result| *result != 0).unwrap_or(0)
    }

    /// # Safety
    /// Memory that the work uses is still there.
    unsafe fn again(&self, issue: &Issue, stream: usize) -> u32 {
        match (&issue.work, &issue.launch) {
            (Work::Launch(call), Some((function, params))) => {
                // SAFETY: the driver took the same call before.
                self.launch(Some(call), || unsafe { self.kernel(call, *function, params, stream) })
            }
            (Work::Copy(rows), _) => {
                // SAFETY: the caller vouches for the memory.
                let results = rows.each().map(|(from, to)| unsafe { self.row(from, to, rows.width, stream) });
                results.into_iter().find(|result| *result != 0).unwrap_or(0)
            }
            (Work::Fill { to, value, bytes }, _) => {
                type Fill = unsafe extern "C" fn(u64, c_uchar, usize, usize) -> u32;
                // SAFETY: the type is that of cuda.h, and the driver checks the address.
                unsafe {
                    self.symbol::<Fill>("cuMemsetD8Async").map_or(MISSING, |fill| fill(*to, *value, *bytes, stream))
                }
            }
            _ => MISSING,
        }
    }

    /// # Safety
    /// The parameters are those of the kernel.
    unsafe fn kernel(&self, call: &Call, function: usize, params: &[Vec<u8>], stream: usize) -> u32 {
        type Pointers = *mut *const c_void;
        type Launch = unsafe extern "C" fn(usize, u32, u32, u32, u32, u32, u32, u32, usize, Pointers, Pointers) -> u32;
        let mut pointers: Vec<_> = params.iter().map(|bytes| bytes.as_ptr().cast::<c_void>()).collect();
        let ([x, y, z], [bx, by, bz]) = (call.grid, call.block);
        let (shared, params) = (call.dynamic_shared, pointers.as_mut_ptr());
        // SAFETY: the type is that of cuda.h; the caller vouches for the parameters.
        unsafe {
            self.symbol::<Launch>("cuLaunchKernel").map_or(MISSING, |launch| {
                launch(function, x, y, z, bx, by, bz, shared, stream, params, std::ptr::null_mut())
            })
        }
    }

    /// # Safety
    /// Places of the host have as many bytes.
    unsafe fn row(&self, from: Place, to: Place, bytes: usize, stream: usize) -> u32 {
        // Addresses of both kinds are 64 bits.
        type Copy = unsafe extern "C" fn(u64, u64, usize, usize) -> u32;
        let (name, from, to) = match (from, to) {
            (Place::Host(from), Place::Device(to)) => ("cuMemcpyHtoDAsync_v2", from as u64, to),
            (Place::Device(from), Place::Host(to)) => ("cuMemcpyDtoHAsync_v2", from, to as u64),
            (Place::Device(from), Place::Device(to)) => ("cuMemcpyDtoDAsync_v2", from, to),
            (Place::Host(_), Place::Host(_)) => return MISSING,
        };
        // SAFETY: the type is that of cuda.h; the caller vouches for the host's memory.
        unsafe { self.symbol::<Copy>(name).map_or(MISSING, |copy| copy(to, from, bytes, stream)) }
    }
}

/// What there is no function for.
const MISSING: u32 = Code::NotSupported as u32;
