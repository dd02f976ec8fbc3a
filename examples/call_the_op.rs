//! Calls `mla_decode` on Burn tensors.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_mla::ops::{MlaDecodeArgs, MlaDecodeOptions, MlaError, MlaQuery, mla_decode};

fn main() -> Result<(), MlaError> {
    let device = Device::flex();
    let args = MlaDecodeArgs {
        q: MlaQuery::Whole(Tensor::random([1, 1, 16, 576], Distribution::Default, &device)), // [B, Sq, H, D]
        kv_cache: Tensor::<3>::random([8, 64, 576], Distribution::Default, &device).into(),  // [P, S, D]
        page_table: Tensor::<2, Int>::from_data([[5, 2]], (&device, DType::I32)),            // [B, maxP]
        seq_lens: Tensor::<1, Int>::from_data([100], (&device, DType::I32)),                 // [B]
    };
    let options = MlaDecodeOptions::new(512, 0.07); // width of the values, softmax scale
    let (out, lse) = mla_decode(args, &options, None)?.materialise(); // [1, 1, 16, 512], [1, 1, 16]
    println!("{:?} {:?}", out.dims(), lse.dims());
    Ok(())
}
