//! Vectors of tokens, and what instructions take of them.

use cubecl::prelude::*;

use super::select::Form;

/// Vector number `vector` of a row of tokens, from the unit's first on; zeros, where there is none and that is to be checked.
#[cube]
pub(super) fn tokens_at<E: Float, V: Size>(
    rows: &[Vector<E, V>],
    row: usize,
    vector: usize,
    is_there: bool,
    #[comptime] form: Form,
) -> Vector<E, V> {
    if comptime!(form.at_once) {
        let mut values = Vector::<E, V>::new(E::from_int(0));
        if is_there {
            values = rows[row + vector];
        }
        values
    } else {
        rows[row + vector]
    }
}

/// Pair number `index` of the numbers in a vector, as an operand of the instruction.
#[cube]
pub(crate) fn pair<E: Float, V: Size, NA: Size>(vector: Vector<E, V>, #[comptime] index: usize) -> Vector<E, NA> {
    let words = Vector::<u32, Const<4>>::reinterpret(vector);
    Vector::<E, NA>::reinterpret(words.extract(index))
}
