//! Tensor maps: descriptors that TMA copies take.
use crate::driver::api;
use std::ffi::{c_int, c_uint, c_void};

/// A descriptor's 128 bytes.
type Map = [u64; 16];

api! {
    fn cuTensorMapEncodeTiled(_map: *mut Map, _kind: c_uint, _rank: c_uint, _address: *mut c_void, _extents: *const u64,
        _strides: *const u64, _box: *const c_uint, _steps: *const c_uint, _interleave: c_uint, _swizzle: c_uint,
        _promotion: c_uint, _fill: c_uint) {
        |_| Err(Code::NotSupported)
    }
    fn cuTensorMapEncodeIm2col(_map: *mut Map, _kind: c_uint, _rank: c_uint, _address: *mut c_void, _extents: *const u64,
        _strides: *const u64, _lower: *const c_int, _upper: *const c_int, _channels: c_uint, _pixels: c_uint,
        _steps: *const c_uint, _interleave: c_uint, _swizzle: c_uint, _promotion: c_uint, _fill: c_uint) {
        |_| Err(Code::NotSupported)
    }
}
