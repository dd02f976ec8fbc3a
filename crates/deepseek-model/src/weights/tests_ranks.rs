//! What a rank of two has of each tensor.

use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::LocalExperts;
use rstest::rstest;
use safetensors::Dtype;

use super::tests::{Tensors, f32s, report, single};
use super::*;
use crate::config::Quantization;
use crate::models::ModelConfig;
use crate::parallel::{Cut, ExpertCut, HostCommunicator, Parallel};

fn of_rank(checkpoint: &Checkpoint, rank: usize) -> WeightLoader<'_> {
    let blocks = Quantization { block: [128, 128], fp4_experts: false };
    let loader = WeightLoader::new(checkpoint, &Device::flex(), FloatDType::F32, None).with_quantization(Some(blocks));
    loader.with_parallel(Parallel::pretended(rank, 2))
}

fn values<const D: usize>(tensor: Tensor<D>) -> ([usize; D], Vec<f32>) {
    (tensor.dims(), tensor.into_data().try_to_vec().unwrap())
}

/// 0, 1, 2, ... in a matrix `a` of 6 rows of 4, and a vector `v` of 5.
fn plain() -> Tensors {
    let numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
    vec![f32s("a", &[6, 4], &numbers), f32s("v", &[5], &numbers[..5])]
}

#[rstest]
#[case(Cut::Whole, [[0, 6, 0, 4], [0, 6, 0, 4]])]
#[case(Cut::Rows, [[0, 3, 0, 4], [3, 6, 0, 4]])]
#[case(Cut::Columns, [[0, 6, 0, 2], [0, 6, 2, 4]])]
#[case(Cut::Heads(2), [[0, 3, 0, 4], [3, 6, 0, 4]])]
#[case(Cut::Vocabulary, [[0, 3, 0, 4], [3, 6, 0, 4]])]
fn a_rank_has_a_part_of_a_matrix(#[case] cut: Cut, #[case] parts: [[usize; 4]; 2]) {
    let (_dir, checkpoint) = single(plain());
    for (rank, [top, bottom, left, right]) in parts.into_iter().enumerate() {
        let mut loader = of_rank(&checkpoint, rank);
        let (dims, part) = values(loader.tensor("a", [6, 4], cut));
        let expected: Vec<f32> =
            (top..bottom).flat_map(|row| (left..right).map(move |column| (row * 4 + column) as f32)).collect();
        assert_eq!((dims, part), ([bottom - top, right - left], expected), "{cut:?} of rank {rank}");
        loader.tensor("v", [5], Cut::Whole);
        loader.finish().unwrap();
    }
}

/// The vocabulary is the one that need not divide.
#[test]
fn the_last_rank_may_have_fewer_tokens() {
    let (_dir, checkpoint) = single(plain());
    for (rank, expected) in [vec![0.0, 1.0, 2.0], vec![3.0, 4.0]].into_iter().enumerate() {
        let mut loader = of_rank(&checkpoint, rank);
        assert_eq!(values(loader.tensor("v", [5], Cut::Vocabulary)).1, expected);
    }
}

/// Experts come in one tensor each, or in one for all.
#[test]
fn a_rank_has_whole_experts() {
    let numbers: Vec<f32> = (0..32u8).map(f32::from).collect();
    let names = ["e0", "e1", "e2", "e3"];
    let mut tensors: Tensors = vec![f32s("packed", &[4, 2, 4], &numbers)];
    tensors.extend(names.iter().zip(numbers.chunks(8)).map(|(name, numbers)| f32s(name, &[2, 4], numbers)));
    let (_dir, checkpoint) = single(tensors);
    for rank in 0..2 {
        let mut loader = of_rank(&checkpoint, rank);
        let expected = ([2, 2, 4], numbers[16 * rank..][..16].to_vec());
        assert_eq!(values(loader.tensor("packed", [4, 2, 4], Cut::Experts)), expected);
        assert_eq!(values(loader.stacked(&names.map(str::to_string), [4, 2, 4], Cut::Experts)), expected);
        // Of other cuts a rank has a part of each.
        let rows: Tensor<3> = loader.stacked(&names.map(str::to_string), [4, 2, 4], Cut::Rows);
        let expected: Vec<f32> = numbers.chunks(4).skip(rank).step_by(2).flatten().copied().collect();
        assert_eq!(values(rows), ([4, 1, 4], expected));
        let summary = loader.finish().unwrap();
        assert_eq!(summary.tensors, 5);
    }
}

/// An expert may be several tensors: a rank has all of them, or the experts do not divide.
#[test]
fn the_matrices_of_an_expert_stay_together() {
    let numbers: Vec<f32> = (0..64u8).map(f32::from).collect();
    const NAMES: [&str; 8] = ["e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7"];
    let names = |experts: usize| NAMES[..2 * experts].iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let tensors = |experts: usize| -> Tensors {
        NAMES[..2 * experts].iter().zip(numbers.chunks(4)).map(|(name, numbers)| f32s(name, &[2, 2], numbers)).collect()
    };
    let (_dir, checkpoint) = single(tensors(4));
    for rank in 0..2 {
        let mut loader = of_rank(&checkpoint, rank);
        let own = loader.experts(&names(4), [4, 4, 2], Cut::Experts);
        assert_eq!(values(own.dense()), ([2, 4, 2], numbers[16 * rank..][..16].to_vec()));
        // Or a row of each, and a column.
        let rows = loader.experts(&names(4), [4, 4, 2], Cut::Rows);
        let expected: Vec<f32> = numbers[..32].chunks(2).skip(rank).step_by(2).flatten().copied().collect();
        assert_eq!(values(rows.dense()), ([4, 2, 2], expected));
        let columns = loader.experts(&names(4), [4, 4, 2], Cut::Columns);
        let expected: Vec<f32> = numbers[..32].iter().skip(rank).step_by(2).copied().collect();
        assert_eq!(values(columns.dense()), ([4, 4, 1], expected));
        loader.finish().unwrap();
    }
    // Six tensors divide, three experts do not.
    let (_dir, checkpoint) = single(tensors(3));
    let mut loader = of_rank(&checkpoint, 1);
    assert_eq!(loader.experts(&names(3), [3, 4, 2], Cut::Experts).dims(), [1, 4, 2]);
    assert!(report(loader).to_string().contains("e0 has 3 experts for 2 ranks"));
}

#[test]
fn a_routing_has_the_numbers_of_a_ranks_experts() {
    let local = |rank, size, cut| Parallel::pretended(rank, size).local_experts(16, cut);
    let whole = ExpertCut::Whole;
    assert_eq!([local(0, 4, whole), local(3, 4, whole)], [0, 12].map(|first| Some(LocalExperts { first, count: 4 })));
    // A rank that is alone, or has some of each, has nothing to tell apart.
    assert_eq!([local(0, 1, whole), local(3, 4, ExpertCut::Channels)], [None; 2]);
}

/// The widths are those of V4-Flash and V3, of V2-Lite, and of tiny models.
#[rstest]
#[case(2048, Some(128), 8, ExpertCut::Channels)]
#[case(2048, Some(128), 32, ExpertCut::Whole)]
#[case(1408, Some(128), 2, ExpertCut::Whole)]
#[case(1408, None, 2, ExpertCut::Channels)]
#[case(24, None, 2, ExpertCut::Whole)]
#[case(24, None, 3, ExpertCut::Channels)]
#[case(16, None, 3, ExpertCut::Whole)]
#[case(0, None, 2, ExpertCut::Whole)]
fn channels_are_divided_where_all_ranks_have_whole_blocks(
    #[case] width: usize,
    #[case] block: Option<usize>,
    #[case] ranks: usize,
    #[case] expected: ExpertCut,
) {
    let quantization = block.map(|block| Quantization { block: [block; 2], fp4_experts: false });
    assert_eq!(ExpertCut::of(width, quantization, ranks), expected);
}

/// Experts of a random table: in a row of three or more all different, and some of either half; in all equally often.
#[test]
fn random_tables_choose_among_all_ranks() {
    for (rows, k, experts) in [(512, 6, 256), (64, 6, 8), (128, 3, 64), (30, 4, 97)] {
        let table = random::table([rows, k], experts);
        let mut count = vec![0; experts];
        for row in table.chunks(k) {
            let first = row.iter().filter(|&&expert| (expert as usize) < experts / 2).count();
            assert!((1..k).contains(&first), "{row:?} of {experts}");
            assert!((1..k).all(|at| !row[..at].contains(&row[at])), "{row:?}");
            row.iter().for_each(|&expert| count[expert as usize] += 1);
        }
        let (least, most) = (count.iter().min().unwrap(), count.iter().max().unwrap());
        assert!(most - least <= 1, "{least} to {most} of {experts}");
    }
    assert_eq!(random::table([2, 2], 1), [0; 4]);
}

/// Random weights of the ranks are parts of one model's.
#[test]
fn the_parts_of_random_weights_are_those_of_one_tensor() {
    let loader =
        |parallel| WeightLoader::random(7.into(), &Device::flex(), FloatDType::F32, 0, None).with_parallel(parallel);
    let whole: Tensor<2> = loader(Parallel::single()).tensor("a.weight", [6, 4], Cut::Rows);
    let parts = [0, 1].map(|rank| {
        let parallel = Parallel::pretended(rank, 2);
        loader(parallel).tensor::<2>("a.weight", [6, 4], Cut::Rows)
    });
    assert_eq!(values(Tensor::cat(parts.to_vec(), 0)), values(whole));
}

/// Codes that are all different from their neighbours, 256 by 384, in blocks of 128 with a scale each.
fn blocks() -> Tensors {
    let codes = (0..256 * 384usize).map(|at| (at * 31 % 126) as u8).collect();
    vec![
        ("w.weight", Dtype::F8_E4M3, vec![256, 384], codes),
        f32s("w.weight_scale_inv", &[2, 3], &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
    ]
}

#[test]
fn a_part_of_a_quantised_weight_has_its_own_scales() {
    let (_dir, checkpoint) = single(blocks());
    let whole: Tensor<2> = of_rank(&checkpoint, 0).tensor("w.weight", [256, 384], Cut::Whole);
    for rank in 0..2 {
        let part: Tensor<2> = of_rank(&checkpoint, rank).tensor("w.weight", [256, 384], Cut::Rows);
        assert_eq!(values(part), values(whole.clone().narrow(0, 128 * rank, 128)), "rank {rank}");
    }
}

#[test]
fn columns_of_a_quantised_weight_have_their_own_scales() {
    let codes = (0..128 * 512usize).map(|at| (at * 31 % 126) as u8).collect();
    let (_dir, checkpoint) = single(vec![
        ("w.weight", Dtype::F8_E4M3, vec![128, 512], codes),
        f32s("w.weight_scale_inv", &[1, 4], &[1.0, 2.0, 4.0, 8.0]),
    ]);
    let whole: Tensor<2> = of_rank(&checkpoint, 0).tensor("w.weight", [128, 512], Cut::Whole);
    for rank in 0..2 {
        let part: Tensor<2> = of_rank(&checkpoint, rank).tensor("w.weight", [128, 512], Cut::Columns);
        assert_eq!(values(part), values(whole.clone().narrow(1, 256 * rank, 256)), "rank {rank}");
    }
}

#[test]
fn blocks_are_not_divided() {
    let (_dir, checkpoint) = single(blocks());
    for rank in 0..2 {
        let mut loader = of_rank(&checkpoint, rank);
        assert_eq!(loader.tensor("w.weight", [256, 384], Cut::Columns).dims(), [256, 192]);
        let report = report(loader);
        assert_eq!(report.wrong_cut.len(), 1, "{report}");
        assert!(report.to_string().contains("w.weight is cut at its columns"), "{report}");
        assert!(report.to_string().contains("whole blocks of 128"), "{report}");
    }
}

#[rstest]
#[case(Cut::Rows, "5 rows for 2 ranks")]
#[case(Cut::Heads(5), "5 heads for 2 ranks")]
fn parts_that_are_not_equal_are_refused(#[case] cut: Cut, #[case] expected: &str) {
    let (_dir, checkpoint) = single(plain());
    let mut loader = of_rank(&checkpoint, 1);
    loader.tensor("a", [6, 4], Cut::Whole);
    assert_eq!(loader.tensor("v", [5], cut).dims(), [2]);
    let report = report(loader).to_string();
    assert!(report.contains(expected), "{report}");
}

#[test]
fn a_rank_is_below_their_number() {
    let communicator = Arc::new(HostCommunicator::group(2).remove(0));
    assert!(Parallel::new(2, 2, communicator).unwrap_err().to_string().contains("`rank` is 2"));
}

/// Every layer names cuts that divide, and knows its own sizes: a rank of two of the tiny models loads, and what is counted are the
/// bytes that it takes.
#[rstest]
fn each_rank_of_a_model_loads(#[values("v2lite-tiny", "v3-tiny", "v32-tiny", "v4-tiny")] fixture: &str) {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(fixture);
    let config = ModelConfig::read(&dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for rank in 0..2 {
        let mut loader = of_rank(&checkpoint, rank).with_quantization(config.quantization());
        config.load(&mut loader, &Device::flex());
        let summary = loader.finish().unwrap();
        let experts = checkpoint.tensors.iter().filter(|(name, _)| name.contains(".experts."));
        let experts: u64 = experts.map(|(_, entry)| entry.len()).sum();
        let most = checkpoint.total_bytes() - experts / 2;
        assert!(
            experts > 0 && summary.bytes <= most,
            "rank {rank} of {fixture}: {} bytes, {most} at most",
            summary.bytes
        );
    }
}
