//! Which tokens of a step an indexer scores together, and the keys that it picks for them.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::cache::{CacheConfig, Pool, RowFormat};
use mla_ops::{
    Determinism, LightningIndexArgs, LightningIndexOptions, LightningIndexProblem, Path, explain_path, lightning_index,
};

use crate::Result;
use crate::step::ints;

/// The lengths of lists of at most `most` of the keys that tokens see.
pub(crate) fn list_lengths(visible: &[i32], most: usize) -> impl Iterator<Item = i32> {
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    visible.iter().map(move |&visible| visible.min(most))
}

/// What the queries and keys of an indexer are like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexSizes {
    pub(crate) heads: usize,
    pub(crate) width: usize,
    pub(crate) page_size: usize,
    pub(crate) dtype: DType,
    pub(crate) keys: RowFormat,
}

/// Where some tokens of a step, one after the other, find the keys that an indexer picks from: as many tokens of each of `B`
/// sequences.
#[derive(Debug)]
pub(crate) struct IndexedKeys {
    /// The tokens among those of the step.
    pub(crate) tokens: Range<usize>,
    /// i32 `[B, maxP]`: the pages of each sequence.
    pub(crate) page_table: Tensor<2, Int>,
    /// i32 `[B, Sq]`: how many keys each token sees.
    pub(crate) visible: Tensor<2, Int>,
}

impl IndexSizes {
    /// Those of so many heads of a width, of keys in a cache with so many of them in a page.
    pub(crate) fn new([heads, width]: [usize; 2], page_size: usize, cache: &CacheConfig) -> Self {
        // Other pools have other formats.
        let in_fp8 = cache.pools.iter().any(|pool| pool.format == RowFormat::Fp8IndexKeys);
        let keys = if in_fp8 { RowFormat::Fp8IndexKeys } else { RowFormat::Dense };
        Self { heads, width, page_size, dtype: cache.dtype.into(), keys }
    }

    /// Whether so many tokens of a sequence are scored faster together. Then a token's bits depend on how many they are.
    fn together(&self, tokens: usize, determinism: Determinism, device: &Device) -> bool {
        let &Self { heads, width, page_size, dtype, keys } = self;
        let problem = LightningIndexProblem { batch: 1, query_len: tokens, heads, width, page_size, dtype, keys };
        tokens > 1 && !determinism.is_batch_invariant() && explain_path(&problem, device).path == Path::Sm90
    }
}

impl IndexedKeys {
    /// For sequences with so many tokens; `pages` gives a table i32 `[n, maxP]` of the pages of `n` sequences, which it is given by
    /// their numbers, and `visible` has a number for each token.
    pub(crate) fn of_step<E>(
        lens: &[usize],
        pages: impl Fn(Vec<i32>) -> Result<Tensor<2, Int>, E>,
        visible: &[i32],
        (sizes, determinism): (&IndexSizes, Determinism),
        device: &Device,
    ) -> Result<Vec<Self>, E> {
        let mut first = 0;
        let groups = groups(lens, |tokens| sizes.together(tokens, determinism, device));
        let keys = |(owners, query_len): (Vec<i32>, usize)| {
            let batch = owners.len();
            let tokens = first..first + batch * query_len;
            first = tokens.end;
            let visible = ints(visible[tokens.clone()].to_vec(), device).reshape([batch, query_len]);
            Ok(Self { tokens, page_table: pages(owners)?, visible })
        };
        groups.into_iter().map(keys).collect()
    }
}

/// The sequences of each group, and their tokens: neighbours with as many. Tokens that are not scored together are sequences of
/// their own.
fn groups(lens: &[usize], together: impl Fn(usize) -> bool) -> Vec<(Vec<i32>, usize)> {
    let mut groups: Vec<(Vec<i32>, usize)> = Vec::new();
    for (owner, &len) in (0..).zip(lens) {
        let (count, query_len) = if together(len) { (1, len) } else { (len, 1) };
        match groups.last_mut() {
            Some((owners, tokens)) if *tokens == query_len => owners.extend(vec![owner; count]),
            _ => groups.push((vec![owner; count], query_len)),
        }
    }
    groups
}

/// The best keys of each token, i32 `[N, 1, k]`, from its index queries `[N, Hi, di]`, the weights of these `[N, Hi]` (f32 or of its dtype) and the
/// pool of index keys; -1 where there are fewer.
pub(crate) fn pick(
    q: &Tensor<3>,
    head_weights: &Tensor<2>,
    pool: &Pool,
    keys: &[IndexedKeys],
    options: &LightningIndexOptions,
) -> Result<Tensor<3, Int>> {
    let [tokens, heads, width] = q.dims();
    let pick = |IndexedKeys { tokens: own, page_table, visible }: &IndexedKeys| {
        let [batch, query_len] = visible.dims();
        let (q, head_weights) = match own.len() {
            len if len == tokens => (q.clone(), head_weights.clone()),
            len => (q.clone().narrow(0, own.start, len), head_weights.clone().narrow(0, own.start, len)),
        };
        let args = LightningIndexArgs {
            q: q.reshape([batch, query_len, heads, width]),
            keys: pool.clone(),
            page_table: page_table.clone(),
            head_weights: head_weights.reshape([batch, query_len, heads]),
            visible: visible.clone(),
        };
        Ok(lightning_index(args, options)?.reshape([batch * query_len, 1, options.k]))
    };
    let mut picked: Vec<Tensor<3, Int>> = keys.iter().map(pick).collect::<Result<_>>()?;
    Ok(if picked.len() == 1 { picked.remove(0) } else { Tensor::cat(picked, 0) })
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;

    use super::*;

    /// Prompts with as many tokens are one group, and so are tokens one by one, whichever sequences they are of.
    #[test]
    fn neighbours_with_as_many_tokens() {
        let groups = |lens: &[usize]| groups(lens, |tokens| tokens >= 8);
        assert_eq!(groups(&[1, 1, 1]), [(vec![0, 1, 2], 1)]);
        assert_eq!(
            groups(&[2, 1, 8, 8, 9, 3, 1]),
            [(vec![0, 0, 1], 1), (vec![2, 3], 8), (vec![4], 9), (vec![5, 5, 5, 6], 1)]
        );
        assert_eq!(groups(&[]), []);
    }

    /// The CPU scores tokens one by one, and so does every device where a token's bits have to be its own.
    #[test]
    fn one_by_one() {
        let config = CacheConfig::new(Vec::new(), 1, 64, FloatDType::BF16);
        let (device, sizes) = (Device::flex(), IndexSizes::new([64, 128], 64, &config));
        for determinism in [Determinism::Fast, Determinism::BatchInvariant] {
            let page_table = ints(vec![4, 5, 6, 7], &device).reshape([2, 2]);
            let pages = |owners| Ok::<_, crate::ModelError>(page_table.clone().select(0, ints(owners, &device)));
            let keys =
                IndexedKeys::of_step(&[3, 1], pages, &[1, 2, 3, 9], (&sizes, determinism), &device).expect("keys");
            assert_eq!(keys.len(), 1);
            let values =
                |tensor: &Tensor<2, Int>| tensor.to_data().convert::<i32>().try_to_vec::<i32>().expect("numbers");
            assert_eq!(keys[0].tokens, 0..4);
            assert_eq!(values(&keys[0].page_table), [4, 5, 4, 5, 4, 5, 6, 7]);
            assert_eq!((keys[0].visible.dims(), values(&keys[0].visible)), ([4, 1], vec![1, 2, 3, 9]));
        }
    }

    /// Tokens in groups get what each gets alone.
    #[test]
    fn groups_pick_as_tokens_do() {
        let (device, options) =
            (Device::flex(), LightningIndexOptions { k: 3, scale: 0.5, form: mla_ops::IndexForm::Slots });
        let numbers = |shape: [usize; 3], step: i64| {
            let len = shape.iter().product::<usize>() as i64;
            let numbers = Tensor::<1, Int>::arange(0..len, &device).mul_scalar(step).remainder_scalar(13).sub_scalar(6);
            numbers.float().reshape(shape)
        };
        let (q, weights, pool) = (numbers([7, 2, 4], 5), numbers([1, 7, 2], 3).reshape([7, 2]), numbers([6, 4, 4], 7));
        let table = |rows: &[[i32; 2]]| ints(rows.concat(), &device).reshape([rows.len(), 2]);
        let keys = |tokens: Range<usize>, rows: &[[i32; 2]], visible: &[i32]| {
            let visible = ints(visible.to_vec(), &device).reshape([rows.len(), visible.len() / rows.len()]);
            IndexedKeys { tokens, page_table: table(rows), visible }
        };
        let groups = [keys(0..1, &[[5, 0]], &[8]), keys(1..7, &[[1, 2], [4, 3]], &[1, 6, 7, 2, 8, 0])];
        let alone = [keys(0..7, &[[5, 0], [1, 2], [1, 2], [1, 2], [4, 3], [4, 3], [4, 3]], &[8, 1, 6, 7, 2, 8, 0])];
        let [together, alone] = [&groups[..], &alone].map(|keys| {
            let picked = pick(&q, &weights, &pool.clone().into(), keys, &options).expect("legal");
            assert_eq!(picked.dims(), [7, 1, 3]);
            picked.into_data()
        });
        assert_eq!(together, alone);
    }
}
