//! Lists of slots without their gaps, for kernels that read them like page tables.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{Int, Tensor};

use crate::dispatch::tensors;

/// Of the first `lengths` i32 `[N]` entries of each list of `slots` i32 `[N, K]` those that are not negative, in their order, i32
/// `[N, K]`, and how many there are, i32 `[N]`.
pub(super) fn compact_slots(slots: Tensor<2, Int>, lengths: Tensor<1, Int>) -> (Tensor<2, Int>, Tensor<1, Int>) {
    tensors(<Dispatch as CompactSlotsBackend>::compact_slots(slots.into_dispatch(), lengths.into_dispatch()))
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait CompactSlotsBackend: Backend {
    /// [`compact_slots`].
    #[fusion(meta = |slots, lengths| (slots.clone(), lengths.clone()))]
    fn compact_slots(slots: IntTensor<Self>, lengths: IntTensor<Self>) -> (IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "_gpu")]
mod cube {
    use burn::tensor::DType;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::compact_slots::{CompactSlotsArgs, launch};

    use super::CompactSlotsBackend;
    use crate::tensors::{buffers, contiguous, dims, empty};

    impl CompactSlotsBackend for CubeBackend {
        fn compact_slots(slots: CubeTensor, lengths: CubeTensor) -> (CubeTensor, CubeTensor) {
            let [slots, lengths] = [slots, lengths].map(contiguous);
            let [lists, width] = dims(&slots);
            let (compact, counts) = (empty(&slots, [lists, width], DType::I32), empty(&slots, [lists], DType::I32));
            let args = buffers!(slots, lengths, compact, counts => CompactSlotsArgs {
                slots, lengths, compact, counts, lists, width,
            });
            launch(&counts.client, args);
            (compact, counts)
        }
    }
}

#[cfg(feature = "flex")]
mod reference {
    use burn::backend::{Flex, tensor::IntTensor};
    use burn::tensor::{Int, Tensor};

    use super::CompactSlotsBackend;
    use crate::reference::{IntoFlex, device_i32, host, tensor};

    impl CompactSlotsBackend for Flex {
        fn compact_slots(slots: IntTensor<Self>, lengths: IntTensor<Self>) -> (IntTensor<Self>, IntTensor<Self>) {
            compact_slots(tensor(slots), tensor(lengths)).into_flex()
        }
    }

    /// Behind the slots is -1.
    fn compact_slots(slots: Tensor<2, Int>, lengths: Tensor<1, Int>) -> (Tensor<2, Int>, Tensor<1, Int>) {
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
}
