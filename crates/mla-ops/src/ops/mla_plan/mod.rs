//! [`mla_plan`]: which part of which sequence is computed where.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod planner;
#[cfg(feature = "flex")]
mod reference;
mod splits;

use burn::backend::Dispatch;
#[cfg(feature = "_gpu")]
use burn::backend::DispatchDevice;
use burn::tensor::{Device, Int, Tensor};

use self::backend::MlaPlanBackend;
pub(super) use self::backend::{PlanSpec, SecondLengths};
use self::planner::max_items;
pub use self::splits::Splits;
use crate::MlaError;
use crate::check::{Check, read_i32};
use crate::dispatch::tensors;

const OP: &str = "mla_plan";

/// Keys in a tile. Splits are cut between tiles, so that no tile is loaded twice.
pub(super) const KEY_TILE: usize = 64;

/// Rows of the item list at most: its numbers are counted by i32 indices.
const MAX_ITEMS: usize = i32::MAX as usize / 4;

/// Arguments of [`mla_plan`].
#[derive(Debug, Clone)]
pub struct MlaPlanArgs {
    /// Keys of each sequence, i32 `[B]`.
    pub seq_lens: Tensor<1, Int>,
    /// Query tokens of each sequence (`Sq`).
    pub query_len: usize,
    /// Query heads (`H`).
    pub heads: usize,
    /// Tokens in a page (`S`), a power of two.
    pub page_size: usize,
    /// An upper bound of `seq_lens`, known on the host: usually the page table's width times the page size.
    pub max_seq_len: usize,
    /// How the keys of a sequence are divided.
    pub splits: Splits,
}

/// How one decode step divides its work; made once per step by [`mla_plan`] and used in all layers.
///
/// All sizes are known on the host and depend on nothing that is stored on the device, so that a captured graph can
/// replay the planning with other lengths.
#[derive(Debug, Clone)]
pub struct MlaPlan {
    /// Work items, i32 `[capacity, 4]`: sequence, first key, end key (exclusive), number of the split within its
    /// sequence; ordered by sequence and split. Unused rows at the end have sequence -1.
    pub items: Tensor<2, Int>,
    /// i32 `[cubes + 1]`: cube `c` computes the items `cube_ptr[c] .. cube_ptr[c + 1]`.
    pub cube_ptr: Tensor<1, Int>,
    /// i32 `[B + 1]`: prefix sums of the number of splits of each sequence.
    pub split_ptr: Tensor<1, Int>,
    pub(super) made_for: MadeFor,
    /// Rows of `items`, and cubes, as it was made.
    pub(super) capacity: usize,
    pub(super) cubes: usize,
}

/// The dimensions of a problem that a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MadeFor {
    pub(super) batch: usize,
    pub(super) query_len: usize,
    pub(super) heads: usize,
    pub(super) page_size: usize,
}

/// Divides the keys of all sequences into work items.
///
/// `seq_lens` must be the lengths that the [`mla_decode`](crate::mla_decode) calls of this step see. With other lengths the CPU
/// refuses the plan; elsewhere [`MlaPlan::validate_device_inputs`] does, and every call with `MLA_VALIDATE=1`. Otherwise, keys
/// past a sequence's end are not read even then, but keys may be missing.
///
/// ```
/// use burn::tensor::{Device, TensorData};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{MlaPlanArgs, Splits, mla_plan};
///
/// // 300 keys are 5 tiles of 64, 40 are one: three splits of the first sequence, one of the second.
/// let plan = mla_plan(MlaPlanArgs {
///     seq_lens: index_tensor(vec![300, 40], &Device::flex()),
///     query_len: 1,
///     heads: 16,
///     page_size: 64,
///     max_seq_len: 5 * 64, // columns of the page table, times the page size
///     splits: Splits::Count(3),
/// })?;
/// assert_eq!(plan.split_ptr.into_data(), TensorData::from([0, 3, 4]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes, devices, or a number out of range: nothing is launched.
pub fn mla_plan(args: MlaPlanArgs) -> Result<MlaPlan, MlaError> {
    let spec = args.spec()?;
    Ok(args.launch(spec))
}

impl MlaPlanArgs {
    /// All checks, and the sizes of the plan.
    pub(super) fn spec(&self) -> Result<PlanSpec, MlaError> {
        let check = Check::new(OP, "seq_lens", &self.seq_lens)?;
        check.int("seq_lens", &self.seq_lens)?;
        check.page_size("page_size", self.page_size)?;
        check.value("heads", self.heads > 0, self.heads, || "at least 1".into())?;
        check.index_range("max_seq_len", self.max_seq_len)?;
        self.splits.check(&check)?;
        if check.sees_values() {
            self.validate_device_inputs()?;
        }
        let [batch] = self.seq_lens.dims();
        let rows = self.query_len.saturating_mul(self.heads);
        PlanSpec::new(&check, ("max_seq_len", batch), rows, self.max_seq_len, self.splits)
    }

    /// Makes the plan that [`spec`](Self::spec) has checked.
    pub(super) fn launch(self, spec: PlanSpec) -> MlaPlan {
        let Self { seq_lens, query_len, heads, page_size, .. } = self;
        let [batch] = seq_lens.dims();
        plan_of(seq_lens, SecondLengths::None, spec, MadeFor { batch, query_len, heads, page_size })
    }

    /// Reads `seq_lens` back and checks that every length is in `0 ..= max_seq_len`.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] for the first length out of range.
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        let lens = read_i32(OP, "seq_lens", &self.seq_lens)?;
        check_lengths(OP, &lens, self.max_seq_len, "max_seq_len")
    }
}

impl PlanSpec {
    /// The sizes of a plan for so many sequences, with so many query rows each and keys at most; `bound` is the argument that they
    /// have from.
    pub(super) fn new(
        check: &Check,
        (bound, batch): (&'static str, usize),
        rows: usize,
        max_seq_len: usize,
        splits: Splits,
    ) -> Result<Self, MlaError> {
        let cubes = parallel_cubes(check.device(), rows);
        let capacity = max_items(batch, cubes, splits, max_seq_len, KEY_TILE);
        check.value("splits", capacity <= MAX_ITEMS, format!("{splits:?}: up to {capacity} work items"), || {
            format!("fewer and longer splits, at most {MAX_ITEMS} work items")
        })?;
        let tiles = batch.saturating_mul(max_seq_len.div_ceil(KEY_TILE)).saturating_add(cubes);
        check.value(bound, tiles <= i32::MAX as usize, max_seq_len, || {
            format!("less, so that {batch} sequences have at most {} tiles of {KEY_TILE} keys", i32::MAX)
        })?;
        let spec = Self { tile: KEY_TILE, cubes, splits, max_seq_len, capacity, lists: None };
        #[cfg(feature = "_gpu")]
        cube::check_limits(check, batch, &spec)?;
        Ok(spec)
    }
}

/// The plan whose sizes have been checked.
pub(super) fn plan_of(
    seq_lens: Tensor<1, Int>,
    second: SecondLengths<Dispatch>,
    spec: PlanSpec,
    made_for: MadeFor,
) -> MlaPlan {
    let (capacity, cubes) = (spec.capacity, spec.cubes);
    let (items, cube_ptr, split_ptr) =
        tensors(<Dispatch as MlaPlanBackend>::mla_plan(seq_lens.into_dispatch(), second, spec));
    MlaPlan { items, cube_ptr, split_ptr, made_for, capacity, cubes }
}

/// Every length is in `0 ..= max`.
pub(super) fn check_lengths(op: &'static str, lens: &[i32], max: usize, what: &str) -> Result<(), MlaError> {
    match lens.iter().position(|&len| usize::try_from(len).map_or(true, |len| len > max)) {
        None => Ok(()),
        Some(b) => Err(MlaError::DeviceValue {
            op,
            argument: "seq_lens",
            index: vec![b],
            actual: lens[b],
            expected: format!("0 to {max} ({what})"),
        }),
    }
}

/// How many cubes fill a device, where each tile of query rows has cubes of its own. The CPU computes whole sequences:
/// splitting them gains nothing.
fn parallel_cubes(device: &Device, rows: usize) -> usize {
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(device) = device.as_dispatch() {
        return mla_kernels::mla_decode::parallel_cubes(&device.client(), rows);
    }
    let _ = (device, rows);
    1
}
