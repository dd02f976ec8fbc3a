//! Comparisons of numbers.
use crate::ir::{Compare, Int};

/// Whether a comparison holds.
pub(super) fn ordered<T: PartialOrd>(cmp: Compare, x: T, y: T) -> bool {
    match cmp {
        Compare::Eq => x == y,
        // Of NaNs only `neu` is true.
        Compare::Ne => x.partial_cmp(&y).is_some_and(|order| order.is_ne()),
        Compare::Lt => x < y,
        Compare::Le => x <= y,
        Compare::Gt => x > y,
        Compare::Ge => x >= y,
        Compare::Unordered(inner) => x.partial_cmp(&y).is_none() || ordered(*inner, x, y),
        Compare::Num => x.partial_cmp(&y).is_some(),
        Compare::Nan => x.partial_cmp(&y).is_none(),
    }
}

/// Compares two values of an integer type.
pub(super) fn compare_ints(cmp: Compare, ty: Int, x: u64, y: u64) -> bool {
    match ty {
        Int::S16 => ordered(cmp, x as i16, y as i16),
        Int::S32 => ordered(cmp, x as i32, y as i32),
        Int::S64 => ordered(cmp, x as i64, y as i64),
        _ => ordered(cmp, x, y),
    }
}
