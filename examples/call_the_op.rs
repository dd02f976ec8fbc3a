//! Calls `mla_decode` on Burn tensors.

use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_mla::ops::{MlaDecodeArgs, MlaDecodeOptions, MlaError, MlaQuery, Splits, mla_decode};

fn main() -> Result<(), MlaError> {
    let device = Device::flex();
    let ids = |ids: Vec<i32>| TensorData::new(ids, [2]);
    let args = MlaDecodeArgs {
        q: MlaQuery::Whole(Tensor::random([1, 1, 16, 576], Distribution::Default, &device)), // [B, Sq, H, D]
        kv_cache: Tensor::<3>::random([8, 64, 576], Distribution::Default, &device).into(),  // [P, S, D]
        page_table: Tensor::<1, Int>::from_data(ids(vec![5, 2]), (&device, DType::I32)).reshape([1, 2]),
        seq_lens: Tensor::from_data(TensorData::new(vec![100], [1]), (&device, DType::I32)),
    };
    let splits = Splits::Auto;
    let options = MlaDecodeOptions { value_width: 512, softmax_scale: 0.07, causal: true, splits, path: None };
    let (out, lse) = mla_decode(args, &options, None)?.materialise(); // [1, 1, 16, 512], [1, 1, 16]
    println!("{:?} {:?}", out.dims(), lse.dims());
    Ok(())
}
