//! What a call of [`compress_kv`](super::compress_kv) must fulfil.

use burn::tensor::{DType, FloatDType};

use super::{CompressKvArgs, CompressKvOptions, EntryCache, OP};
use crate::MlaError;
use crate::check::{Check, check_cu_seqlens, check_slots, read_i32};

impl CompressKvArgs {
    /// Everything that a call must fulfil.
    pub(in crate::ops) fn check_call(&self, options: &CompressKvOptions) -> Result<(), MlaError> {
        let check = self.check_tensors()?;
        self.check_options(&check, options)?;
        #[cfg(feature = "_gpu")]
        super::cube::check_limits(&check, self, options)?;
        check.contiguous("state", &self.state)?;
        check.only_handle("state", &self.state)?;
        if let Some(EntryCache { cache, .. }) = &self.cache {
            let dtype = DType::from(options.dtype);
            cache.check(&check, "cache", dtype, "the `dtype` of the options")?;
            cache.check_own(&check, "cache")?;
        }
        if check.sees_values() { self.validate_values() } else { Ok(()) }
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = Check::new(OP, "kv_gates", &self.kv_gates)?;
        check.float("kv_gates", &self.kv_gates)?;
        check.float_as("position_bias", &self.position_bias, DType::F32, "always")?;
        for (name, float) in [("state", &self.state), ("cos", &self.cos), ("sin", &self.sin)] {
            check.float_as(name, float, DType::F32, "always")?;
        }
        check.float_as("norm_weight", &self.norm_weight, DType::F32, "always")?;
        let (rows, slots) = (&self.state_rows, &self.state_slots);
        for (name, int) in
            [("state_rows", rows), ("state_slots", slots), ("cu_seqlens", &self.cu_seqlens), ("starts", &self.starts)]
        {
            check.int(name, int)?;
        }
        self.check_windows(&check)?;
        self.check_batch(&check)?;
        Ok(check)
    }

    /// Sizes of windows, rows and state.
    fn check_windows(&self, check: &Check) -> Result<(), MlaError> {
        let ([window, channels], [width]) = (self.position_bias.dims(), self.norm_weight.dims());
        check.value("norm_weight", width > 0, format!("{width} channels"), || "at least 1".into())?;
        check.value("position_bias", window > 0, format!("{window} tokens"), || "at least 1".into())?;
        let words = || format!("[m, C] with C = {width}, the channels of `norm_weight`, or {} with overlap", 2 * width);
        let known = channels == width || channels == 2 * width;
        check.dims("position_bias", [window, channels], [None, Some(if known { channels } else { width })], words)?;
        let (carried, row) = (window * (channels / width), 2 * channels);
        let words = || format!("[N, 2 C] with 2 C = {row}: keys and gates, each as wide as `position_bias`");
        check.dims("kv_gates", self.kv_gates.dims(), [None, Some(row)], words)?;
        let words = || format!("[R, L, 2 C] with L = {carried}, the tokens of an entry's windows, and 2 C = {row}");
        check.dims("state", self.state.dims(), [None, Some(carried), Some(row)], words)?;
        let [tokens, _] = self.kv_gates.dims();
        check.index_range("kv_gates", tokens)?;
        check.index_range("position_bias", window)?;
        check.index_range("state", self.state.dims()[0].saturating_mul(carried))
    }

    /// Numbers of sequences, tokens and entries.
    fn check_batch(&self, check: &Check) -> Result<(), MlaError> {
        let ([tokens, _], [batch]) = (self.kv_gates.dims(), self.state_rows.dims());
        check.dims("state_slots", self.state_slots.dims(), [Some(tokens)], || format!("[N] = [{tokens}]"))?;
        let words = || format!("[B + 1] = [{}]: `state_rows` names {batch} sequences", batch + 1);
        check.dims("cu_seqlens", self.cu_seqlens.dims(), [Some(batch + 1)], words)?;
        check.dims("starts", self.starts.dims(), [Some(batch)], || format!("[B] = [{batch}]"))?;
        let ([_, entries, pairs], [width]) = (self.cos.dims(), self.norm_weight.dims());
        let words = || format!("[B, n, dr / 2] with B = {batch} and dr at most {width}, the channels of an entry");
        check.dims("cos", self.cos.dims(), [Some(batch), None, Some(pairs.min(width / 2))], words)?;
        check.index_range("cos", entries)?;
        let words = || format!("[B, n, dr / 2] = [{batch}, {entries}, {pairs}], as `cos`");
        check.dims("sin", self.sin.dims(), [Some(batch), Some(entries), Some(pairs)], words)?;
        let Some(EntryCache { cache, slots }) = &self.cache else { return Ok(()) };
        cache.check_stored(check, "cache")?;
        check.int("cache_slots", slots)?;
        check.dims("cache", cache.dims(), [None, None, Some(width)], || format!("[P, S, d] with d = {width}"))?;
        let count = batch.saturating_mul(entries);
        check.dims("cache_slots", slots.dims(), [Some(count)], || format!("[B n] = [{count}]"))
    }

    fn check_options(&self, check: &Check, options: &CompressKvOptions) -> Result<(), MlaError> {
        let &CompressKvOptions { overlap, norm_eps, dtype } = options;
        let ([_, channels], [width]) = (self.position_bias.dims(), self.norm_weight.dims());
        let channels_of_entry = channels / width;
        check.value("overlap", overlap == (channels_of_entry == 2), overlap, || {
            format!("{}: a token has {channels} keys, and an entry {width} channels", !overlap)
        })?;
        check.value("norm_eps", norm_eps.is_finite() && norm_eps >= 0.0, norm_eps, || {
            "a finite number, at least 0".into()
        })?;
        let known = matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16);
        let supported = known && check.device().supports_dtype(DType::from(dtype));
        check.value("dtype", supported, format!("{dtype:?}"), || {
            "F32, F16 or BF16, and one that this device can compute with".into()
        })
    }

    /// Reads blocks, slots, lengths and positions back and checks them.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first block outside `0 .. R`, slot that is neither -1 nor one of the state or occurs
    /// twice, entry of `cu_seqlens` that is not 0 at first, below the one before it, or not N at last, or negative position.
    /// Before that, wrong shapes and dtypes as in [`compress_kv`](crate::compress_kv()).
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let ([blocks, carried, _], [tokens, _]) = (self.state.dims(), self.kv_gates.dims());
        let refused = |argument, at: usize, actual, expected| {
            Err(MlaError::DeviceValue { op: OP, argument, index: vec![at], actual, expected })
        };
        let rows = read_i32(OP, "state_rows", &self.state_rows)?;
        if let Some(at) = rows.iter().position(|&row| usize::try_from(row).map_or(true, |row| row >= blocks)) {
            return refused("state_rows", at, rows[at], format!("a block of `state`, 0 to {}", blocks as i64 - 1));
        }
        check_slots(OP, "state_slots", &self.state_slots, blocks * carried)?;
        if let Some(EntryCache { cache, slots }) = &self.cache {
            let [pages, page_size, _] = cache.dims();
            check_slots(OP, "cache_slots", slots, pages * page_size)?;
        }
        let ends = check_cu_seqlens(OP, "cu_seqlens", &self.cu_seqlens, tokens)?;
        if let Some((&last, before)) = ends.split_last().filter(|(last, _)| **last as usize != tokens) {
            return refused("cu_seqlens", before.len(), last, format!("{tokens}, the rows of `kv_gates`"));
        }
        let starts = read_i32(OP, "starts", &self.starts)?;
        if let Some(at) = starts.iter().position(|&start| start < 0) {
            return refused("starts", at, starts[at], "at least 0".into());
        }
        Ok(())
    }
}
