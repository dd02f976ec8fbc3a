//! Products in blocks of rows of one size.

use burn::tensor::Tensor;

/// Rows of a product at a time. Matrix libraries choose their loops, and with them the order of sums, by the shape of the
/// whole product; if all products with a weight have this many rows, all rows are summed in one order. A multiple of the
/// columns that gemm keeps in registers (6 with AVX-512, 4 with AVX2 and NEON), so that no row is on the edge of a tile.
const ROWS: usize = 12;

/// `lhs [.., M, K]` times `rhs [.., K, N]` in blocks of [`ROWS`] rows; `E` is `D + 1`.
pub(super) fn matmul_in_blocks<const D: usize, const E: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    let mut shape = lhs.dims();
    let (rows, width) = (shape[D - 2], rhs.dims()[D - 1]);
    let blocks = rows.div_ceil(ROWS);
    let missing = blocks * ROWS - rows;
    let lhs = match missing {
        0 => lhs,
        _ => {
            shape[D - 2] = missing;
            Tensor::cat(vec![lhs.clone(), Tensor::zeros(shape, (&lhs.device(), lhs.dtype()))], D - 2)
        }
    };
    // The blocks become the first dimension, along which the right side is the same memory.
    let mut blocked = [0; E];
    blocked[..D - 2].copy_from_slice(&lhs.dims()[..D - 2]);
    blocked[D - 2..].copy_from_slice(&[blocks, ROWS, lhs.dims()[D - 1]]);
    let mut repeated = [blocks; E];
    repeated[1..].copy_from_slice(&rhs.dims());
    let lhs = blocks_first::<E>(lhs.reshape(blocked), false);
    let product = blocks_first::<E>(lhs.matmul(rhs.expand(repeated)), true);
    shape[D - 2] = blocks * ROWS;
    shape[D - 1] = width;
    product.reshape(shape).narrow(D - 2, 0, rows)
}

/// Moves dimension `E - 3` to the front, or back.
fn blocks_first<const E: usize>(tensor: Tensor<E>, back: bool) -> Tensor<E> {
    let mut order: [isize; E] = std::array::from_fn(|dim| dim as isize);
    match back {
        false => order[..E - 2].rotate_right(1),
        true => order[..E - 2].rotate_left(1),
    }
    tensor.permute(order)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};
    use rstest::rstest;

    use super::*;
    use crate::{Determinism::BatchInvariant, matmul};

    fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
        tensor.into_data().try_into_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    }

    /// Shapes on both sides of the thresholds at which gemm takes another path.
    #[rstest]
    fn a_row_does_not_depend_on_the_others(
        #[values((192, 4), (576, 65), (1100, 300), (3, 17), (2, 9), (64, 2048))] shape: (usize, usize),
        #[values(false, true)] transposed: bool,
    ) {
        let (depth, width) = shape;
        let device = Device::flex();
        let normal = Distribution::Normal(0.0, 1.0);
        let rhs: Tensor<2> = match transposed {
            true => Tensor::random([width, depth], normal, &device).transpose(),
            false => Tensor::random([depth, width], normal, &device),
        };
        let lhs: Tensor<2> = Tensor::random([130, depth], normal, &device);
        let product = |lhs: Tensor<2>| matmul(lhs, rhs.clone(), BatchInvariant).unwrap();
        let all = bits(product(lhs.clone()));
        for (first, rows) in [(0, 1), (5, 1), (129, 1), (3, 7), (11, 13), (1, 64), (40, 90)] {
            let part = bits(product(lhs.clone().narrow(0, first, rows)));
            assert!(part == all[first * width..(first + rows) * width], "{rows} rows from {first}");
        }
        let plain = lhs.clone().matmul(rhs.clone());
        let blocks = product(lhs);
        let error = (plain - blocks).abs().max().into_scalar::<f32>();
        assert!(error < 1e-6 * depth as f32, "off by {error}");
    }

    #[test]
    fn batches_of_products_have_blocks_too() {
        let device = Device::flex();
        let normal = Distribution::Normal(0.0, 1.0);
        let rhs: Tensor<3> = Tensor::random([3, 48, 128], normal, &device);
        let lhs: Tensor<3> = Tensor::random([29, 3, 48], normal, &device).swap_dims(0, 1);
        let all = matmul(lhs.clone(), rhs.clone(), BatchInvariant).unwrap();
        assert_eq!(all.dims(), [3, 29, 128]);
        let error = (lhs.clone().matmul(rhs.clone()) - all.clone()).abs().max().into_scalar::<f32>();
        assert!(error < 1e-4, "off by {error}");
        let one = matmul(lhs.narrow(1, 17, 1), rhs, BatchInvariant).unwrap();
        assert!(bits(one) == bits(all.narrow(1, 17, 1)));
    }
}
