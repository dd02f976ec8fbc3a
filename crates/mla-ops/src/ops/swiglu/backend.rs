//! What a backend has to do for [`swiglu`](super::swiglu), and what it does.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use crate::Determinism;
use crate::weight::BackendWeight;

/// [`swiglu`](crate::swiglu()) of a few rows on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait SwigluBackend: Backend {
    /// x `[N, in]`, gate and up `[2 I, in]`: `[N, I]`.
    #[fusion(meta = |x, gate_up, _, _| fusion::swiglu(x, gate_up))]
    fn swiglu(
        x: FloatTensor<Self>,
        #[extension_type] gate_up: BackendWeight<Self>,
        limit: Option<f32>,
        determinism: Determinism,
    ) -> FloatTensor<Self>;
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::Shape;

    use crate::weight::BackendWeightMetadata;

    pub(super) fn swiglu(x: &TensorSpec, gate_up: &BackendWeightMetadata) -> TensorSpec {
        let ([rows, _], [both, _]) = (x.shape.dims(), gate_up.dims());
        TensorSpec::new(Shape::new([rows, both / 2]), gate_up.dtype())
    }
}

#[cfg(feature = "_gpu")]
impl SwigluBackend for burn_cubecl::CubeBackend {
    fn swiglu(
        x: FloatTensor<Self>,
        gate_up: BackendWeight<Self>,
        limit: Option<f32>,
        determinism: Determinism,
    ) -> FloatTensor<Self> {
        let [both, _] = gate_up.dims();
        let form = mla_kernels::linear::LinearForm { gated: true, limited: limit.is_some() };
        crate::ops::linear::cube::rows(x, gate_up, both / 2, (form, limit.unwrap_or_default()), determinism)
    }
}

#[cfg(feature = "flex")]
impl SwigluBackend for burn::backend::Flex {
    fn swiglu(
        x: FloatTensor<Self>,
        gate_up: BackendWeight<Self>,
        limit: Option<f32>,
        determinism: Determinism,
    ) -> FloatTensor<Self> {
        use crate::reference::{IntoFlex, tensor};
        super::reference::swiglu(tensor(x), &gate_up.weight(), limit, determinism).into_flex()
    }
}
