//! What launchers and kernels of several operations use: grids over rows, widths of indices, buffers.

use cubecl::prelude::*;

/// Multiprocessors of a device that does not say: a small GPU.
const MULTIPROCESSORS: usize = 16;

/// Multiprocessors of a device.
pub(crate) fn multiprocessors(client: &Client) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.map_or(MULTIPROCESSORS, |n| n as usize)
}

/// Whether an index from the device names one of `count` rows.
#[cube]
pub(crate) fn is_row(index: i32, count: usize) -> bool {
    let mut valid = index >= 0;
    if valid {
        valid = usize::cast_from(index) < count;
    }
    valid
}

/// Units for a matrix: `CUBE_DIM_X` of them side by side work on a row, `CUBE_DIM_Y` rows belong to a cube, and no row
/// belongs to two cubes.
pub(crate) struct RowGrid {
    pub cube_count: CubeCount,
    pub cube_dim: CubeDim,
    /// See [`io_vector_size`].
    pub vector_size: usize,
}

impl RowGrid {
    /// Units of a cube. Every runtime has this many.
    pub const UNITS: usize = 128;

    /// For at least one row, whose parts are `widths` elements of `elem_size` bytes.
    pub fn new(client: &Client, rows: usize, widths: &[usize], elem_size: usize) -> Self {
        let (cube_dim, vector_size) = Self::cube(client.properties(), widths, elem_size);
        Self { cube_count: Self::cubes(client, rows, cube_dim), cube_dim, vector_size }
    }

    /// Cubes for so many rows.
    pub fn cubes(client: &Client, rows: usize, cube_dim: CubeDim) -> CubeCount {
        // One unit per row, counted in the cubes that the runtime then spreads over the axes as their limits demand:
        // there may be more cubes than asked for, hence the kernels' bounds checks.
        cubecl::calculate_cube_count_elemwise(client, rows, CubeDim::new_1d(cube_dim.y))
    }

    /// The units of a cube and the elements that each loads at once.
    pub fn cube(device: &DeviceProperties, widths: &[usize], elem_size: usize) -> (CubeDim, usize) {
        let vector_size = io_vector_size(device, widths, elem_size);
        let units_per_row = Self::columns(widths.iter().sum::<usize>() / vector_size);
        (CubeDim::new_2d(units_per_row as u32, (Self::UNITS / units_per_row) as u32), vector_size)
    }

    /// Units of a row of so many vectors.
    pub fn columns(vectors: usize) -> usize {
        vectors.next_power_of_two().min(Self::UNITS)
    }
}

/// Elements that a unit loads at once: of the widths that the device loads well (16 bytes on all that we know), the largest
/// that divides the rows.
pub(crate) fn io_vector_size(device: &DeviceProperties, widths: &[usize], elem_size: usize) -> usize {
    let divides = |size: &usize| widths.iter().all(|width| width % size == 0);
    device.io_optimized_vector_sizes(elem_size).find(divides).unwrap_or(1)
}

/// The row of a unit in a [`RowGrid`].
#[cube]
pub(crate) fn grid_row() -> usize {
    CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize
}

/// The width of `usize` in a kernel that works on these buffers.
///
/// CubeCL compiles a kernel with 32 bits unless the launch says otherwise. It says so from 2^31 elements in a buffer
/// on: half of what fits, so that sums of two indices and the overhang of a grid fit too. Runtimes that know 32 bits
/// only (WGSL) do not bind buffers of that many elements.
pub(crate) fn address_type(client: &Client, buffers: &[&BufferArg]) -> AddressType {
    address_type_of(client, buffers.iter().map(|buffer| buffer.len()).max().unwrap_or(0))
}

/// The same for kernels that count so many elements, whatever their buffers hold.
pub(crate) fn address_type_of(client: &Client, len: usize) -> AddressType {
    let wanted = AddressType::from_len_signed(len);
    if client.properties().supports_address(wanted) { wanted } else { AddressType::U32 }
}

/// The buffer, or a few bytes in place of an empty one: not every runtime can bind a buffer without bytes.
pub(crate) fn or_dummy(client: &Client, buffer: BufferArg, len: usize) -> BufferArg {
    if len == 0 { dummy(client) } else { buffer }
}

/// A buffer that no kernel reads or writes.
pub(crate) fn dummy(client: &Client) -> BufferArg {
    // SAFETY: the buffer is made here; one element of any type, or one vector load, fits into it.
    unsafe { BufferArg::from_raw_parts(client.empty(16), 1) }
}

/// A second argument for the same buffer, which a later launch reads.
pub(crate) fn share(buffer: &BufferArg) -> BufferArg {
    match buffer {
        // SAFETY: the length is the one that the buffer was passed with.
        BufferArg::Handle { handle } => unsafe {
            BufferArg::from_raw_parts_binding(handle.handle.clone(), buffer.len())
        },
        BufferArg::Alias { input_pos, .. } => BufferArg::alias(*input_pos, buffer.len()),
    }
}
