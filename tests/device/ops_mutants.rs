//! Small problems that together reach all paths of the specialised kernels. `tools/mutate.sh` records their launches and
//! sees which changes of the kernels these notice.

use burn::tensor::DType;
use mla_ops::{Path, Splits};
use rstest::rstest;

use crate::devices::for_each_device;
use crate::ops_fixture::DecodeCase;

/// One block of keys; an empty sequence, a split in two, a second tile of query rows that is not full; more blocks than
/// stages and two items for one cube; queries that see nothing; more pages than lanes; pages of more keys than a block.
#[rstest]
#[case(DecodeCase { lens: vec![5], heads: 3, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![140, 0, 1], query_len: 2, heads: 33, page_size: 64, splits: Splits::Tokens(64), ..latents() })]
#[case(DecodeCase { lens: vec![300, 65], heads: 16, page_size: 32, splits: Splits::Count(1), ..latents() })]
#[case(DecodeCase { lens: vec![2, 66], query_len: 4, heads: 5, page_size: 64, ..latents() })]
#[case(DecodeCase { lens: vec![1100], heads: 2, page_size: 32, splits: Splits::Count(1), ..latents() })]
#[case(DecodeCase { lens: vec![130, 33], query_len: 2, heads: 64, page_size: 128, ..latents() })]
fn ops_mutants_decode(#[case] case: DecodeCase) {
    for_each_device(|device| {
        let fastest = case.paths(device)[0];
        if fastest != Path::Portable {
            DecodeCase { path: Some(fastest), ..case.clone() }.inputs(21).check(device);
        }
    });
}

fn latents() -> DecodeCase {
    DecodeCase { widths: (576, 512), dtype: DType::BF16, ..Default::default() }
}
