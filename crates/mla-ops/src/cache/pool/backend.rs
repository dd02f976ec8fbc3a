//! Pools as backends take it, and the read of FP8 rows.

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use super::Fp8Rows;
#[cfg(feature = "flex")]
use super::{Pool, Rows};

/// A [`Pool`](super::Pool) as a backend takes it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendPool<B: Backend> {
    /// `[P, S, D]`.
    Dense(FloatTensor<B>),
    /// Words i32, of the shape [`Fp8Rows::stored`].
    Fp8(IntTensor<B>, Fp8Rows),
}

#[cfg(feature = "flex")]
impl BackendPool<burn::backend::Flex> {
    /// The pool again.
    pub(crate) fn pool(self) -> Pool {
        use crate::reference::tensor;
        Pool(match self {
            Self::Dense(rows) => Rows::Dense(tensor(rows)),
            Self::Fp8(words, rows) => Rows::Fp8(tensor(words), rows),
        })
    }

    /// That of a pool.
    pub(crate) fn of(pool: Pool) -> Self {
        use crate::reference::IntoFlex;
        match pool.0 {
            Rows::Dense(rows) => Self::Dense(rows.into_flex()),
            Rows::Fp8(words, rows) => Self::Fp8(words.into_flex(), rows),
        }
    }
}

#[cfg(feature = "_gpu")]
impl BackendPool<burn_cubecl::CubeBackend> {
    /// What is stored.
    pub(crate) fn stored(&self) -> &burn_cubecl::tensor::CubeTensor {
        match self {
            Self::Dense(tensor) | Self::Fp8(tensor, _) => tensor,
        }
    }

    /// `[P, S, D]`.
    pub(crate) fn dims(&self) -> [usize; 3] {
        let stored = crate::tensors::dims(self.stored());
        match self {
            Self::Dense(_) => stored,
            Self::Fp8(_, rows) => rows.dims(stored),
        }
    }

    /// The same with what is stored passed through.
    pub(crate) fn map(
        self,
        change: impl FnOnce(burn_cubecl::tensor::CubeTensor) -> burn_cubecl::tensor::CubeTensor,
    ) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(change(tensor)),
            Self::Fp8(words, rows) => Self::Fp8(change(words), rows),
        }
    }

    /// How kernels know the rows.
    pub(crate) fn format(&self) -> mla_kernels::cache_rows::RowFormat {
        use mla_kernels::cache_rows::RowFormat;
        match self {
            Self::Dense(_) => RowFormat::Dense,
            Self::Fp8(_, rows) => RowFormat::Fp8(rows.layout()),
        }
    }

    /// As kernels take it.
    pub(crate) fn arg(&self) -> mla_kernels::cache_rows::CacheArg {
        use mla_kernels::cache_rows::CacheArg;
        match self {
            Self::Dense(tensor) => CacheArg::Dense(tensor.clone().into_buffer_arg()),
            Self::Fp8(words, rows) => CacheArg::Fp8(words.clone().into_buffer_arg(), rows.layout()),
        }
    }
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
impl BackendPoolMetadata {
    /// The same once more.
    pub(crate) fn same(&self) -> Self {
        match self {
            Self::Dense(spec) => Self::Dense(spec.clone()),
            Self::Fp8(spec, rows) => Self::Fp8(spec.clone(), *rows),
        }
    }
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(super) trait ReadFp8Backend: Backend {
    /// The rows in these slots, dequantised, `[N, D]`: words as stored, slots i32 `[N]`.
    #[fusion(meta = |_words, slots, rows| {
        let [count] = slots.shape.dims();
        crate::fusion::spec([count, rows.width()], rows.dtype)
    })]
    fn read_fp8_rows(words: IntTensor<Self>, slots: IntTensor<Self>, rows: Fp8Rows) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl ReadFp8Backend for burn::backend::Flex {
    fn read_fp8_rows(words: IntTensor<Self>, slots: IntTensor<Self>, rows: Fp8Rows) -> FloatTensor<Self> {
        use crate::reference::{IntoFlex, fp8_rows, tensor};
        fp8_rows::read(tensor(words), tensor(slots), rows).into_flex()
    }
}

#[cfg(feature = "_gpu")]
impl ReadFp8Backend for burn_cubecl::CubeBackend {
    fn read_fp8_rows(words: IntTensor<Self>, slots: IntTensor<Self>, rows: Fp8Rows) -> FloatTensor<Self> {
        use burn::backend::cubecl::dtype_to_elem_type;
        use mla_kernels::cache_rows::{ReadRowsArgs, launch_read_rows};

        use crate::tensors::{contiguous, dims, empty};

        let (words, slots) = (contiguous(words), contiguous(slots));
        let ([pages, page_size, width], [count]) = (rows.dims(dims(&words)), dims(&slots));
        let out = empty(&words, [count, width], rows.dtype);
        let cache = BackendPool::<Self>::Fp8(words, rows).arg();
        let (slots, buffer, slot_count) = (slots.into_buffer_arg(), out.clone().into_buffer_arg(), pages * page_size);
        let elem = dtype_to_elem_type(rows.dtype);
        launch_read_rows(&out.client, ReadRowsArgs { cache, slots, out: buffer, slot_count, count, width, elem });
        out
    }
}

#[cfg(feature = "_gpu")]
impl BackendPool<burn_cubecl::CubeBackend> {
    /// With dense rows, those of FP8 dequantised.
    pub(crate) fn dense(self) -> Self {
        use burn::backend::ops::{FloatTensorOps, IntTensorOps};
        use burn_cubecl::CubeBackend;

        use crate::tensors::{dims, empty};

        match self {
            Self::Dense(_) => self,
            Self::Fp8(words, rows) => {
                let shape = rows.dims(dims(&words));
                let count = shape[0] * shape[1];
                if count == 0 {
                    return Self::Dense(empty(&words, shape, rows.dtype));
                }
                let slots = CubeBackend::int_arange(0..count as i64, &words.device, burn::tensor::IntDType::I32);
                Self::Dense(CubeBackend::float_reshape(CubeBackend::read_fp8_rows(words, slots, rows), shape.into()))
            }
        }
    }
}
