//! [`Rows`]: what a projection reads.

use burn::tensor::{DType, Tensor};

use super::residual::Normed;
use crate::MlaError;
use crate::check::Check;

/// Rows `[N, d]`, in memory, or a [`Normed`] that may be computed in the launch of what reads it.
#[derive(Debug)]
pub enum Rows<'a, 'r> {
    /// f32, f16 or bf16, any strides.
    InMemory(Tensor<2>),
    /// The norm of a residual stream.
    Normed(&'a mut Normed<'r>),
}

impl From<Tensor<2>> for Rows<'_, '_> {
    fn from(rows: Tensor<2>) -> Self {
        Self::InMemory(rows)
    }
}

impl<'a, 'r> From<&'a mut Normed<'r>> for Rows<'a, 'r> {
    fn from(normed: &'a mut Normed<'r>) -> Self {
        Self::Normed(normed)
    }
}

impl<'r> Rows<'_, 'r> {
    /// The same rows for one of several readers.
    pub fn reborrow(&mut self) -> Rows<'_, 'r> {
        match self {
            Self::InMemory(rows) => Rows::InMemory(rows.clone()),
            Self::Normed(normed) => Rows::Normed(normed),
        }
    }

    /// `[N, d]`.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::InMemory(rows) => rows.dims(),
            Self::Normed(normed) => normed.dims(),
        }
    }

    /// Of the rows.
    pub fn dtype(&self) -> DType {
        match self {
            Self::InMemory(rows) => rows.dtype(),
            Self::Normed(normed) => normed.dtype(),
        }
    }

    /// The rows in memory.
    pub fn tensor(self) -> Tensor<2> {
        match self {
            Self::InMemory(rows) => rows,
            Self::Normed(normed) => normed.tensor(),
        }
    }

    /// The checks of a call whose argument `x` this is.
    pub(crate) fn check(&self, op: &'static str) -> Result<Check, MlaError> {
        let like = match self {
            Self::InMemory(rows) => rows,
            Self::Normed(normed) => normed.like(),
        };
        let check = Check::new(op, "x", like)?;
        check.float("x", like)?;
        check.elements("x", like)?;
        Ok(check)
    }
}
