//! What the arguments must fulfil.

use burn::tensor::{DType, Tensor};

use super::{OP, SparseMlaArgs, SparseMlaOptions, SparseScope};
use crate::MlaError;
use crate::check::{Check, read_i32};

/// The names of a scope's tensors in errors.
const FIRST: [&str; 3] = ["scope.rows", "scope.indices", "scope.lengths"];
const SECOND: [&str; 3] = ["second.rows", "second.indices", "second.lengths"];

impl SparseMlaArgs {
    pub(super) fn check_tensors(&self, op: &'static str) -> Result<Check, MlaError> {
        let check = Check::new(op, "q", &self.q)?;
        check.float("q", &self.q)?;
        let [_, _, heads, width] = self.q.dims();
        let actual = format!("a query of {heads} heads of width {width}");
        check.value("q", heads > 0 && width > 0, actual, || "at least 1 head, and 1 channel".into())?;
        self.scope.check(&check, FIRST, &self.q)?;
        if let Some(second) = &self.second {
            second.check(&check, SECOND, &self.q)?;
        }
        if let Some(sink) = &self.sink {
            check.float_as("sink", sink, DType::F32, "sinks are f32")?;
            check.dims("sink", sink.dims(), [Some(heads)], || format!("[H] = [{heads}]"))?;
        }
        Ok(check)
    }

    pub(super) fn check_options(&self, check: &Check, options: &SparseMlaOptions) -> Result<(), MlaError> {
        let (&SparseMlaOptions { value_width, softmax_scale, .. }, [.., width]) = (options, self.q.dims());
        check.value("value_width", (1..=width).contains(&value_width), value_width, || {
            format!("1 to {width}, the width of a row")
        })?;
        check.value("softmax_scale", softmax_scale.is_finite(), softmax_scale, || "a finite number".into())
    }

    /// Reads slots, lengths and plan back and checks every entry that the call would use.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first length outside `0 ..= K`, slot that is neither -1 nor one of the rows, or query token for
    /// which the plan was made with lists of another length.
    /// Before that, wrong shapes and dtypes as in [`sparse_mla`](crate::sparse_mla()).
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors(OP)?;
        self.validate_values(OP)
    }

    pub(super) fn validate_values(&self, op: &'static str) -> Result<(), MlaError> {
        self.scope.validate_values(op, [FIRST[1], FIRST[2]])?;
        self.second.as_ref().map_or(Ok(()), |second| second.validate_values(op, [SECOND[1], SECOND[2]]))?;
        self.plan.as_ref().map_or(Ok(()), |plan| plan.validate_values(self))
    }
}

impl SparseScope {
    fn check(&self, check: &Check, names: [&'static str; 3], q: &Tensor<4>) -> Result<(), MlaError> {
        let [rows, indices, lengths] = names;
        let [batch, query_len, _, width] = q.dims();
        self.rows.check(check, rows, q.dtype(), "the dtype of `q`")?;
        let words = || format!("[P, S, D] with D = {width}, the width of `q`");
        check.dims(rows, self.rows.dims(), [None, None, Some(width)], words)?;
        let [pages, page_size, _] = self.rows.dims();
        check.index_range(rows, pages.saturating_mul(page_size))?;
        check.int(indices, &self.indices)?;
        let words = || format!("[B, Sq, K] with B = {batch}, Sq = {query_len}");
        check.dims(indices, self.indices.dims(), [Some(batch), Some(query_len), None], words)?;
        check.index_range(indices, self.indices.dims()[2])?;
        if let Some(tensor) = &self.lengths {
            check.int(lengths, tensor)?;
            let words = || format!("[B, Sq] = [{batch}, {query_len}]");
            check.dims(lengths, tensor.dims(), [Some(batch), Some(query_len)], words)?;
        }
        Ok(())
    }

    fn validate_values(
        &self,
        op: &'static str,
        [indices_name, lengths_name]: [&'static str; 2],
    ) -> Result<(), MlaError> {
        let ([pages, page_size, _], [_, query_len, most]) = (self.rows.dims(), self.indices.dims());
        let indices = read_i32(op, indices_name, &self.indices)?;
        let lengths = match &self.lengths {
            Some(lengths) => read_i32(op, lengths_name, lengths)?,
            None => vec![most as i32; indices.len() / most.max(1)],
        };
        for (token, &length) in lengths.iter().enumerate() {
            let place = [token / query_len, token % query_len];
            let wrong = |argument, index: &[usize], actual, expected| {
                let index = place.iter().chain(index).copied().collect();
                Err(MlaError::DeviceValue { op, argument, index, actual, expected })
            };
            if !(0..=most as i32).contains(&length) {
                return wrong(
                    lengths_name,
                    &[],
                    length,
                    format!("0 to {most}, the entries of a row of `{indices_name}`"),
                );
            }
            for (k, &slot) in indices[token * most..][..length as usize].iter().enumerate() {
                if !(-1..(pages * page_size) as i32).contains(&slot) {
                    return wrong(indices_name, &[k], slot, format!("a slot below {}, or -1", pages * page_size));
                }
            }
        }
        Ok(())
    }
}
