//! Tensor maps: descriptors that TMA copies take.
use crate::code::Code;
use crate::driver::{api, put};
use crate::forward::Real;
use ptx_sim::{TENSOR_MAP_BYTES, TensorElem, TensorMap, TensorSwizzle};
use std::ffi::{c_int, c_uint, c_void};

/// A descriptor, as its 128 bytes.
type Map = [u8; TENSOR_MAP_BYTES];

/// The arguments of `cuTensorMapEncodeTiled` that say what is copied.
struct Tiled {
    kind: c_uint,
    rank: c_uint,
    address: u64,
    extents: *const u64,
    strides: *const u64,
    boxes: *const c_uint,
    steps: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    fill: c_uint,
}

impl Tiled {
    /// The simulator's descriptor.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] where the driver gives it, [`Code::NotSupported`] for what the simulator lacks.
    ///
    /// # Safety
    /// The arrays have as many elements as the rank says, the strides one less.
    unsafe fn encode(&self) -> Result<Map, Code> {
        let rank = self.rank as usize;
        if !(1..=5).contains(&rank) {
            return Err(Code::InvalidValue);
        }
        let lacking = |what: &str| {
            eprintln!("sim-cuda: the simulator has no tensor maps with this {what}");
            Code::NotSupported
        };
        if self.interleave != 0 {
            return Err(lacking("interleaving"));
        }
        // SAFETY: the caller vouches for the arrays.
        let map = unsafe {
            TensorMap {
                elem: TensorElem::from_cuda(self.kind).ok_or_else(|| lacking("type"))?,
                address: self.address,
                dims: array(self.extents, rank),
                strides: array(self.strides, rank - 1),
                boxes: array(self.boxes, rank),
                steps: array(self.steps, rank),
                swizzle: TensorSwizzle::from_cuda(self.swizzle).ok_or_else(|| lacking("swizzle"))?,
                fill_nan: self.fill != 0,
            }
        };
        map.encode().map_err(|error| {
            eprintln!("sim-cuda: {error}");
            Code::InvalidValue
        })
    }
}

/// # Safety
/// There are as many elements, unless there are none.
unsafe fn array<T: Copy>(values: *const T, count: usize) -> Vec<T> {
    // SAFETY: the caller vouches for the elements.
    (0..count).map(|index| unsafe { *values.add(index) }).collect()
}

api! {
    fn cuTensorMapEncodeTiled(map: *mut Map, kind: c_uint, rank: c_uint, address: *mut c_void, extents: *const u64,
        strides: *const u64, boxes: *const c_uint, steps: *const c_uint, interleave: c_uint, swizzle: c_uint,
        _promotion: c_uint, fill: c_uint) {
        |_| {
            let address = address as u64;
            put(map, Tiled { kind, rank, address, extents, strides, boxes, steps, interleave, swizzle, fill }.encode()?)
        }
    } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            let result = call();
            let address = address as u64;
            let tiled = Tiled { kind, rank, address, extents, strides, boxes, steps, interleave, swizzle, fill };
            // The hardware's descriptor is opaque: recorded is the simulator's.
            if result == 0 && let Ok(ours) = tiled.encode() {
                real.shadow().tensor_maps.insert(*map, ours);
            }
            result
        }
    }
    fn cuTensorMapEncodeIm2col(_map: *mut Map, _kind: c_uint, _rank: c_uint, _address: *mut c_void, _extents: *const u64,
        _strides: *const u64, _lower: *const c_int, _upper: *const c_int, _channels: c_uint, _pixels: c_uint,
        _steps: *const c_uint, _interleave: c_uint, _swizzle: c_uint, _promotion: c_uint, _fill: c_uint) {
        |_| Err(Code::NotSupported)
    }
}
