//! [`sparse_mla_plan`]: which part of which query token's lists is attended to where.

use burn::tensor::{DType, Int, Tensor};

use super::{OP as ATTENTION, SparseMlaArgs, SparseMlaProblem};
use crate::check::{Check, read_i32};
use crate::ops::mla_plan::{KEY_TILE, MadeFor, MlaPlan, PlanSpec, SecondLengths, plan_of};
use crate::{MlaError, Splits};

const OP: &str = "sparse_mla_plan";

/// The names of a scope's lengths and their bound in errors.
const FIRST: [&str; 2] = ["first.lengths", "first.most"];
const SECOND: [&str; 2] = ["second.lengths", "second.most"];

/// How long the lists of a scope are.
#[derive(Debug, Clone)]
pub struct ListLengths {
    /// `K`: entries of a list at most, the width of [`SparseScope::indices`](crate::SparseScope::indices).
    pub most: usize,
    /// i32 `[B, Sq]`: [`SparseScope::lengths`](crate::SparseScope::lengths). Absent: all lists have as many entries.
    pub lengths: Option<Tensor<2, Int>>,
}

/// Arguments of [`sparse_mla_plan`].
#[derive(Debug, Clone)]
pub struct SparseMlaPlanArgs {
    /// The lists of the first scope.
    pub first: ListLengths,
    /// Those of the second, if there is one.
    pub second: Option<ListLengths>,
    /// Query heads (`H`).
    pub heads: usize,
}

/// How [`sparse_mla`](crate::sparse_mla()) divides the lists of a step among the cubes of a GPU; made once per step by
/// [`sparse_mla_plan`] and used in all layers whose lists are as long.
///
/// Its sizes are known on the host and depend on nothing that is stored on the device, so that a captured graph can replay the planning
/// with other lengths.
#[derive(Debug, Clone)]
pub struct SparseMlaPlan {
    /// Of query tokens as sequences, with the entries of their lists in whole tiles as keys.
    pub(super) plan: MlaPlan,
    /// Tiles of the lists of each scope at most.
    tiles: [usize; 2],
}

/// Divides the lists of all query tokens into work items, as even as [`Splits::Auto`](crate::Splits::Auto) does the keys of sequences.
///
/// Where some lists are much longer than the others this takes less time than as many splits for each, which is what
/// [`sparse_mla`](crate::sparse_mla()) does without a plan; where all are as long it takes up to a tenth more. A call has room for the
/// results of all items, f32 `[N + cubes, H, Dv]`: plans are for decode steps. At least one scope has lengths: lists that are all as long need no plan.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use mla_ops::{ListLengths, SparseMlaArgs, SparseMlaOptions, SparseMlaPlanArgs, SparseScope, sparse_mla, sparse_mla_plan};
///
/// let device = Device::flex();
/// let lengths = Tensor::<2, Int>::from_data([[3], [1]], (&device, DType::I32));
/// let first = ListLengths { most: 3, lengths: Some(lengths.clone()) };
/// let plan = sparse_mla_plan(SparseMlaPlanArgs { first, second: None, heads: 4 })?;
///
/// let (q, rows) = (Tensor::<4>::ones([2, 1, 4, 12], &device), Tensor::<3>::ones([3, 2, 12], &device));
/// let indices = Tensor::<3, Int>::from_data([[[5, 0, 3]], [[2, 0, 0]]], (&device, DType::I32));
/// let scope = SparseScope { lengths: Some(lengths), ..SparseScope::new(rows, indices) };
/// let args = SparseMlaArgs { plan: Some(plan), ..SparseMlaArgs::new(q, scope) };
/// let (out, _) = sparse_mla(args, &SparseMlaOptions::new(8, 0.5))?;
/// assert_eq!(out.dims(), [2, 1, 4, 8]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes, devices, no lengths at all, or a number out of range: nothing is launched.
pub fn sparse_mla_plan(args: SparseMlaPlanArgs) -> Result<SparseMlaPlan, MlaError> {
    let SparseMlaPlanArgs { first, second, heads } = args;
    let mut scopes = vec![(FIRST, first)];
    scopes.extend(second.map(|second| (SECOND, second)));
    let given = scopes.iter().find_map(|([name, _], lists)| lists.lengths.clone().map(|lengths| (*name, lengths)));
    let Some((name, like)) = given else {
        return Err(MlaError::Value {
            op: OP,
            argument: FIRST[0],
            actual: "no lengths".into(),
            expected: "lengths in one scope at least: lists that are all as long need no plan".into(),
        });
    };
    let check = Check::new(OP, name, &like)?;
    check.value("heads", heads > 0, heads, || "at least 1".into())?;
    let mut tiles = [0; 2];
    for (tiles, (names, lists)) in tiles.iter_mut().zip(&scopes) {
        lists.check(&check, *names, like.dims())?;
        *tiles = lists.most.div_ceil(KEY_TILE);
    }
    let ([batch, query_len], keys) = (like.dims(), (tiles[0] + tiles[1]) * KEY_TILE);
    // A number of the plan counts the entries of both lists.
    let last = scopes.last().map_or(FIRST[1], |([_, most], _)| most);
    check.index_range(last, keys)?;
    let tokens = batch.saturating_mul(query_len);
    let spec = PlanSpec::new(&check, (name, tokens), heads, keys, Splits::Auto)?;
    // The sum of both does not depend on their order: one that has lengths comes first.
    let mut bounds = tiles.map(|tiles| tiles * KEY_TILE);
    let mut lengths = scopes.into_iter().map(|(_, lists)| lists.lengths.map(of_tokens));
    let (first, second) = match (lengths.next().flatten(), lengths.next().flatten()) {
        (Some(first), second) => (first, second),
        (None, second) => {
            bounds.swap(0, 1);
            (second.unwrap_or_else(|| of_tokens(like)), None)
        }
    };
    let second = second.map_or(SecondLengths::None, |second| SecondLengths::Lengths(second.into_dispatch()));
    // Each query token is a sequence, as in the decode step that other GPUs make of it.
    let made_for = MadeFor { batch: tokens, query_len: 1, heads, page_size: 1 };
    Ok(SparseMlaPlan { plan: plan_of(first, second, PlanSpec { lists: Some(bounds), ..spec }, made_for), tiles })
}

/// `[B, Sq]` -> `[B * Sq]`.
fn of_tokens(lengths: Tensor<2, Int>) -> Tensor<1, Int> {
    let [batch, query_len] = lengths.dims();
    match batch * query_len {
        // Burn reshapes no tensor without elements.
        0 => Tensor::empty([0], (&lengths.device(), lengths.dtype())),
        tokens => lengths.reshape([tokens]),
    }
}

impl ListLengths {
    fn check(&self, check: &Check, [lengths, most]: [&'static str; 2], shape: [usize; 2]) -> Result<(), MlaError> {
        check.index_range(most, self.most)?;
        let Some(tensor) = &self.lengths else { return Ok(()) };
        check.int(lengths, tensor)?;
        let [batch, query_len] = shape;
        let words = || format!("[B, Sq] = [{batch}, {query_len}], as in the other scope");
        check.dims(lengths, tensor.dims(), [Some(batch), Some(query_len)], words)?;
        if check.sees_values() {
            let values = read_i32(OP, lengths, tensor)?;
            if let Some(at) = values.iter().position(|&len| usize::try_from(len).map_or(true, |len| len > self.most)) {
                let (index, expected) =
                    (vec![at / query_len, at % query_len], format!("0 to {} (`{most}`)", self.most));
                return Err(MlaError::DeviceValue { op: OP, argument: lengths, index, actual: values[at], expected });
            }
        }
        Ok(())
    }
}

impl SparseMlaPlan {
    /// It was made for as many query tokens and heads, and lists of as many tiles, and there can be room for its results.
    pub(super) fn check(
        &self,
        check: &Check,
        args: &SparseMlaArgs,
        problem: &SparseMlaProblem,
    ) -> Result<(), MlaError> {
        self.plan.check(check, &problem.as_decode())?;
        let tiles = args.list_tiles();
        let words = |[first, second]: [usize; 2]| {
            format!("lists of up to {} and {} entries", first * KEY_TILE, second * KEY_TILE)
        };
        let actual = format!("a plan for {}", words(self.tiles));
        check.value("plan", self.tiles == tiles, actual, || format!("one for {}", words(tiles)))?;
        let results = [self.plan.items.dims()[0], problem.heads, problem.value_width];
        check.allocation("plan", DType::F32, results)
    }

    /// Its items have each tile of the lists once.
    pub(super) fn validate_values(&self, args: &SparseMlaArgs) -> Result<(), MlaError> {
        let [batch, query_len, ..] = args.q.dims();
        let mut keys = vec![0; batch * query_len];
        for scope in [Some(&args.scope), args.second.as_ref()].into_iter().flatten() {
            let most = scope.indices.dims()[2] as i32;
            let lengths = match &scope.lengths {
                Some(lengths) => read_i32(ATTENTION, "lengths", lengths)?,
                None => vec![most; keys.len()],
            };
            for (keys, length) in keys.iter_mut().zip(lengths) {
                *keys += (length.max(0) as usize).next_multiple_of(KEY_TILE) as i32;
            }
        }
        self.plan.validate_values(&keys).map_err(|error| match error {
            MlaError::DeviceValue { argument, index, actual, expected: _, .. } => {
                let token = index.first().copied().unwrap_or(0);
                let expected = format!(
                    "{}, those of its lists in whole tiles of {KEY_TILE}: plan again when lengths change",
                    keys[token]
                );
                let index = vec![token / query_len, token % query_len];
                MlaError::DeviceValue { op: ATTENTION, argument, index, actual, expected }
            }
            other => other,
        })
    }
}

impl SparseMlaArgs {
    /// Tiles of the lists of each scope at most.
    fn list_tiles(&self) -> [usize; 2] {
        let tiles = |indices: &Tensor<3, Int>| indices.dims()[2].div_ceil(KEY_TILE);
        [tiles(&self.scope.indices), self.second.as_ref().map_or(0, |second| tiles(&second.indices))]
    }
}
