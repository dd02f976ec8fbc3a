//! What decides which implementation of an operation runs.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use cubecl::client::Client;
#[cfg(feature = "_gpu")]
use mla_kernels::Available;

use super::Path;

/// The sizes and dtypes of a call, as far as they decide which implementation of its operation runs:
/// [`MlaDecodeProblem`](crate::MlaDecodeProblem), [`RaggedAttentionProblem`](crate::RaggedAttentionProblem),
/// [`VerticalSlashAttentionProblem`](crate::VerticalSlashAttentionProblem),
/// [`SparseMlaProblem`](crate::SparseMlaProblem), [`LightningIndexProblem`](crate::LightningIndexProblem) and
/// [`LinearProblem`](crate::LinearProblem). The other operations have one implementation on a device.
pub trait Problem: Sizes {}

impl<P: Sizes> Problem for P {}

/// What a [`Problem`] has to say. It is not public: problems are those of this crate.
pub trait Sizes {
    /// What decides, for a reader.
    fn words(&self) -> String;

    /// Of its float tensors.
    fn dtypes(&self) -> Vec<DType>;

    /// Of its large tensors.
    fn shapes(&self) -> Vec<Vec<usize>>;

    /// What a GPU has for it, the fastest first: the operation's launch reads the same table. Dtypes are f32, f16 or bf16, and
    /// there is memory for the tensors.
    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation>;
}

/// An implementation that a device has.
#[derive(Debug, Clone, Copy)]
pub struct Implementation {
    /// Which one.
    pub path: Path,
    /// What it needs, for a reader.
    pub needs: &'static str,
}

impl Implementation {
    /// The only one of the CPU.
    pub(super) const REFERENCE: Self = Self { path: Path::Reference, needs: "tensor operations alone" };

    /// The rows of a kernel's table, by the names that they have here.
    #[cfg(feature = "_gpu")]
    pub(crate) fn of_kernels(available: Vec<Available>) -> Vec<Self> {
        available.into_iter().map(|Available { path, needs }| Self { path: path.into(), needs }).collect()
    }
}

/// Elements of a tensor that no device has memory for. Whoever asks about fewer makes no number overflow.
const TOO_MANY: u64 = 1 << 40;

/// Whether a device could have memory for tensors of these shapes.
pub(super) fn could_be(shapes: &[Vec<usize>]) -> bool {
    let elements = |shape: &Vec<usize>| shape.iter().try_fold(1u64, |product, &len| product.checked_mul(len as u64));
    shapes.iter().all(|shape| elements(shape).is_some_and(|elements| elements < TOO_MANY))
}
