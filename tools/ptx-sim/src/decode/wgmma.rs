//! Matrix instructions of warpgroups (PTX ISA 9.7.15).
use super::Decoder;
use super::matrix::{elem, shape, types_fit};
use crate::error::Fault;
use crate::ir::{AsyncProduct, Elem, MatrixOp, Op, Shape, SourceA};
use crate::parse::Operand;

/// 64 rows, 8 to 256 columns, 32 bytes of k.
fn shape_fits(shape: Shape, elem: Elem) -> bool {
    let columns = if elem.is_int() && shape.n > 32 { 16 } else { 8 };
    let n = (8..=256).contains(&shape.n) && (shape.n == 24 || shape.n.is_multiple_of(columns));
    shape.m == 64 && shape.k * elem.bits() == 256 && n
}

impl Decoder<'_, '_> {
    pub(super) fn wgmma(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let op = match parts {
            ["wgmma", "fence", "sync", "aligned"] => Some(MatrixOp::AsyncFence),
            ["wgmma", "commit_group", "sync", "aligned"] => Some(MatrixOp::AsyncCommit),
            ["wgmma", "wait_group", "sync", "aligned"] => {
                Some(MatrixOp::AsyncWait { pending: self.immediate()? as usize })
            }
            ["wgmma", "mma_async", "sync", "aligned", s, rest @ .., d, a, b] => self.mma_async(s, rest, [d, a, b])?,
            _ => None,
        };
        Ok(op.map(|op| Op::Matrix(Box::new(op))))
    }

    fn mma_async(&mut self, s: &str, rest: &[&str], types: [&str; 3]) -> Result<Option<MatrixOp>, Fault> {
        let saturate = match rest {
            [] => false,
            ["satfinite"] => true,
            _ => return Ok(None),
        };
        let (Some(shape), [Some(d_elem), Some(a_elem), Some(b_elem)]) = (shape(s), types.map(elem)) else {
            return Ok(None);
        };
        if !shape_fits(shape, a_elem) || !types_fit(a_elem, b_elem, d_elem) || saturate && !a_elem.is_int() {
            return Ok(None);
        }
        let d = self.dests()?;
        self.check_parts(&d, 16 * shape.n / (32 * d_elem.packed()))?;
        let mut a = if matches!(self.peek(), Some(Operand::Vector(_))) {
            let registers = self.sources(32)?;
            self.check_parts(&registers, 4)?;
            SourceA::Registers(registers)
        } else {
            SourceA::Shared(self.descriptor()?, false)
        };
        let b = self.descriptor()?;
        let accumulate = self.pred()?;
        // Integers have no further operands, only types of 16 bits can be transposed.
        let (mut negate_a, mut negate_b, mut b_transposed) = (false, false, false);
        if !a_elem.is_int() {
            negate_a = self.sign()?;
            negate_b = self.sign()?;
        }
        if a_elem.bits() == 16 {
            if let SourceA::Shared(_, transposed) = &mut a {
                *transposed = self.flag()?;
            }
            b_transposed = self.flag()?;
        }
        Ok(Some(MatrixOp::Async(AsyncProduct {
            shape,
            a_elem,
            b_elem,
            d_elem,
            d,
            a,
            b,
            b_transposed,
            accumulate,
            negate_a,
            negate_b,
            saturate,
        })))
    }

    /// A descriptor is read when the instruction is issued: its register is free after that.
    fn descriptor(&mut self) -> Result<u32, Fault> {
        let slot = self.source(64)?;
        self.names.touched.retain(|touched| *touched != slot);
        Ok(slot)
    }

    fn sign(&mut self) -> Result<bool, Fault> {
        match self.immediate()? as i64 {
            1 => Ok(false),
            -1 => Ok(true),
            other => Err(self.bad(&format!("{other}, expected 1 or -1"))),
        }
    }

    fn flag(&mut self) -> Result<bool, Fault> {
        match self.immediate()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(&format!("{other}, expected 0 or 1"))),
        }
    }
}
