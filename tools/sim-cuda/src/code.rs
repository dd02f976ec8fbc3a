//! Results of the driver API (`CUresult`).
use std::ffi::{CStr, c_uint};

/// What a function of the driver API returns.
pub type CuResult = c_uint;

/// An error of the driver API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// An argument that cannot be.
    InvalidValue = 1,
    /// The device has no memory left.
    OutOfMemory = 2,
    /// An argument names no device.
    InvalidDevice = 101,
    /// No context, or none that is there.
    InvalidContext = 201,
    /// PTX that does not parse, or has instructions that the simulator does not know.
    InvalidPtx = 218,
    /// A handle that names nothing.
    InvalidHandle = 400,
    /// What is asked for cannot be in this state.
    IllegalState = 401,
    /// The module has no such function.
    NotFound = 500,
    /// The event has not happened yet.
    NotReady = 600,
    /// A kernel accessed memory that is not there.
    IllegalAddress = 700,
    /// A launch needs more than the device has.
    OutOfResources = 701,
    /// The device accesses that other's memory already.
    PeerAccessAlreadyEnabled = 704,
    /// The device does not access that other's memory.
    PeerAccessNotEnabled = 705,
    /// A kernel accessed memory that is misaligned.
    MisalignedAddress = 716,
    /// A kernel failed.
    LaunchFailed = 719,
    /// Not in this driver.
    NotSupported = 801,
    /// Not while a stream captures.
    CaptureUnsupported = 900,
    /// An error before has invalidated the capture.
    CaptureInvalidated = 901,
    /// Two captures would become one.
    CaptureMerge = 902,
    /// The capture began in another stream.
    CaptureUnmatched = 903,
    /// A stream of the capture has work that its first stream did not wait for.
    CaptureUnjoined = 904,
    /// A stream that captures would wait for one that does not.
    CaptureIsolation = 905,
    /// The event was recorded in a stream that captured.
    CapturedEvent = 907,
    /// The capture began in another thread.
    CaptureWrongThread = 908,
    /// The simulator itself failed.
    Unknown = 999,
}

impl Code {
    const ALL: [Self; 25] = [
        Self::InvalidValue,
        Self::OutOfMemory,
        Self::InvalidDevice,
        Self::InvalidContext,
        Self::InvalidPtx,
        Self::InvalidHandle,
        Self::IllegalState,
        Self::NotFound,
        Self::NotReady,
        Self::IllegalAddress,
        Self::OutOfResources,
        Self::PeerAccessAlreadyEnabled,
        Self::PeerAccessNotEnabled,
        Self::MisalignedAddress,
        Self::LaunchFailed,
        Self::NotSupported,
        Self::CaptureUnsupported,
        Self::CaptureInvalidated,
        Self::CaptureMerge,
        Self::CaptureUnmatched,
        Self::CaptureUnjoined,
        Self::CaptureIsolation,
        Self::CapturedEvent,
        Self::CaptureWrongThread,
        Self::Unknown,
    ];

    /// Name and description of a result.
    pub fn texts(result: CuResult) -> Option<(&'static CStr, &'static CStr)> {
        if result == 0 {
            return Some((c"CUDA_SUCCESS", c"no error"));
        }
        Some(match Self::ALL.into_iter().find(|code| *code as u32 == result)? {
            Self::InvalidValue => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
            Self::OutOfMemory => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
            Self::InvalidDevice => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
            Self::InvalidContext => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
            Self::InvalidPtx => (c"CUDA_ERROR_INVALID_PTX", c"PTX that the simulator does not know"),
            Self::InvalidHandle => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
            Self::IllegalState => (c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in this state"),
            Self::NotFound => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
            Self::NotReady => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
            Self::IllegalAddress => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
            Self::OutOfResources => (c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources for a launch"),
            Self::PeerAccessAlreadyEnabled => {
                (c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled")
            }
            Self::PeerAccessNotEnabled => (c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled"),
            Self::MisalignedAddress => (c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
            Self::LaunchFailed => (c"CUDA_ERROR_LAUNCH_FAILED", c"the simulator found an error in a kernel"),
            Self::NotSupported => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported by the simulator"),
            Self::CaptureUnsupported => {
                (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when a stream captures")
            }
            Self::CaptureInvalidated => {
                (c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"an error before has invalidated the capture")
            }
            Self::CaptureMerge => (c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"the wait would merge two captures"),
            Self::CaptureUnmatched => {
                (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture was not initiated in this stream")
            }
            Self::CaptureUnjoined => {
                (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"the capture has a fork that was not joined to its stream")
            }
            Self::CaptureIsolation => {
                (c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"a stream that captures would wait for one that does not")
            }
            Self::CapturedEvent => (c"CUDA_ERROR_CAPTURED_EVENT", c"the event was recorded in a stream that captured"),
            Self::CaptureWrongThread => {
                (c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"the capture was initiated in another thread")
            }
            Self::Unknown => (c"CUDA_ERROR_UNKNOWN", c"the simulator failed"),
        })
    }
}

/// What the driver returns for a result of ours.
pub fn status(result: Result<(), Code>) -> CuResult {
    result.map_or_else(|code| code as CuResult, |()| 0)
}
