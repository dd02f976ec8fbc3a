//! What a device must have for cubes of 256 units.

use cubecl::features::TypeUsage;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use thiserror::Error;

/// Units of a cube: what every wgpu device has.
pub(crate) const UNITS: usize = 256;

/// What a device lacks for these cubes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// Not f32, f16 or bf16, or the device has no buffers of it or no conversion to f32.
    #[error("the kernel cannot compute with elements of type {0} on this device")]
    Elem(ElemType),
    /// Too little shared memory.
    #[error("a cube needs {needed} bytes of shared memory, the device has {available}")]
    SharedMemory {
        /// Bytes of a cube.
        needed: usize,
        /// Bytes that the device has for it.
        available: usize,
    },
    /// Too few units.
    #[error("a cube needs {UNITS} units, the device has {0}")]
    Units(u32),
}

/// Whether a device has the element type, and room for a cube with `shared_bytes`.
pub(crate) fn check_device(client: &Client, elem: ElemType, shared_bytes: usize) -> Result<(), DeviceError> {
    let hardware = &client.properties().hardware;
    let known = matches!(elem, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16));
    let usage = client.features().type_usage(elem);
    if !known || !usage.contains(TypeUsage::Buffer) || !usage.contains(TypeUsage::Conversion) {
        return Err(DeviceError::Elem(elem));
    }
    let available = hardware.max_shared_memory_size;
    if available < shared_bytes {
        return Err(DeviceError::SharedMemory { needed: shared_bytes, available });
    }
    if (hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize) < UNITS {
        return Err(DeviceError::Units(hardware.max_units_per_cube));
    }
    Ok(())
}
