//! Rows that are named one by one, dequantised.

use cubecl::prelude::*;

use super::{CacheArg, CacheRows};
use crate::common::launch::{address_type_of, io_vector_size, is_row};

/// Units of a cube.
const UNITS: u32 = 256;

/// Arguments of [`launch_read_rows`]; E is `elem`.
pub struct ReadRowsArgs {
    /// The rows of a cache.
    pub cache: CacheArg,
    /// i32 `[count]`: which rows.
    pub slots: BufferArg,
    /// E `[count, width]`, written; zeros for a row that is none.
    pub out: BufferArg,
    /// Rows of the cache.
    pub slot_count: usize,
    /// Rows that are read.
    pub count: usize,
    /// Channels of a row.
    pub width: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `out`. Without rows nothing is launched.
pub fn launch_read_rows(client: &Client, args: ReadRowsArgs) {
    let ReadRowsArgs { cache, slots, out, slot_count, count, width, elem } = args;
    let [codes, rope, scaled] = cache.format().parts(width);
    let vector = io_vector_size(client.properties(), &[codes, rope, scaled], elem.size());
    let vectors = count * (width / vector);
    if vectors == 0 {
        return;
    }
    let cube = CubeDim::new_1d(UNITS);
    read_rows_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, vectors, cube),
        cube,
        address_type_of(client, cache.buffer().len().max(out.len())),
        vector,
        cache.rows(client, [slot_count, width, vector]),
        slots,
        out,
        slot_count,
        width / vector,
        vectors,
        elem,
    );
}

/// A unit has a vector of a row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn read_rows_kernel<E: Float, V: Size>(
    cache: CacheRows<E, V>,
    slots: &[i32],
    out: &mut [Vector<E, V>],
    slot_count: usize,
    vectors: usize,
    count: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let slot = slots[at / vectors];
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if is_row(slot, slot_count) {
            values = cache.load(usize::cast_from(slot), at % vectors);
        }
        out[at] = values;
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use super::{OFFLINE_FP8, OFFLINE_FP8_KEYS, OFFLINE_FP8_V4, offline_rows};
    use crate::offline::{Entry, FLOATS, form};
    let entry = |name, kind: cubecl::ir::FloatKind, format, width| {
        let (cube, bits, vector) = (CubeDim::new_1d(UNITS), AddressType::U32, 16 / ElemType::Float(kind).size());
        let form = form!(
            read_rows_kernel,
            cube,
            [bits, vector, offline_rows(format, [width, vector]), _, _, 1, 1, 1, ElemType::Float(kind)]
        );
        Entry::of(kind, name, form)
    };
    let v3 = FLOATS.map(|kind| entry("read_rows.fp8", kind, OFFLINE_FP8, 576));
    let v4 = FLOATS.map(|kind| entry("read_rows.fp8_e8m0", kind, OFFLINE_FP8_V4, 512));
    let keys = FLOATS.map(|kind| entry("read_rows.fp8_keys", kind, OFFLINE_FP8_KEYS, 128));
    v3.into_iter().chain(v4).chain(keys).collect()
}
