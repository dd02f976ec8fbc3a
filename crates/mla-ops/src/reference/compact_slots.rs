use burn::tensor::{Int, Tensor};

use super::{device_i32, host};

/// slots i32 `[N, K]` without their gaps, in their order, and how many there are, i32 `[N]`. Behind them is -1.
pub(crate) fn compact_slots(slots: Tensor<2, Int>, lengths: Tensor<1, Int>) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let ([lists, width], device) = (slots.dims(), slots.device());
    let (slots, lengths) = (host(slots), host(lengths));
    let mut compact = Vec::with_capacity(lists * width);
    let mut counts = Vec::with_capacity(lists);
    for (list, length) in lengths.into_iter().enumerate() {
        let length = length.clamp(0, width as i32) as usize;
        compact.extend(slots[list * width..][..length].iter().filter(|&&slot| slot >= 0));
        counts.push((compact.len() - list * width) as i32);
        compact.resize((list + 1) * width, -1);
    }
    (device_i32(compact, [lists, width], &device), device_i32(counts, [lists], &device))
}
