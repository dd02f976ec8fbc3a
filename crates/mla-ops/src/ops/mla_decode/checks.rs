//! What the arguments must fulfil.

use burn::tensor::{DType, Int, Tensor};

use super::{MlaDecodeArgs, MlaDecodeOptions, MlaDecodeProblem, MlaQuery, OP};
use crate::check::{Check, read_i32};
use crate::ops::mla_plan::{MadeFor, MlaPlan, check_lengths};
use crate::path::problem::Sizes;
use crate::{MlaError, Path, available_paths};

const PLANNED: &str = "what `mla_plan` made";

impl MlaQuery {
    /// Dimensions of the whole rows.
    pub(super) fn dims(&self) -> [usize; 4] {
        match self {
            MlaQuery::Whole(q) => q.dims(),
            MlaQuery::Parts { nope, pe } => {
                let [batch, query_len, heads, latent] = nope.dims();
                [batch, query_len, heads, latent + pe.dims()[3]]
            }
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            MlaQuery::Whole(q) | MlaQuery::Parts { nope: q, .. } => q.dtype(),
        }
    }

    /// Dtypes, devices, and that the two parts belong together.
    pub(super) fn check(&self) -> Result<Check, MlaError> {
        match self {
            MlaQuery::Whole(q) => {
                let check = Check::new(OP, "q", q)?;
                check.float("q", q)?;
                Ok(check)
            }
            MlaQuery::Parts { nope, pe } => {
                let check = Check::new(OP, "q.nope", nope)?;
                check.float("q.nope", nope)?;
                check.float_as("q.pe", pe, nope.dtype(), "the dtype of `q.nope`")?;
                let [batch, query_len, heads, _] = nope.dims();
                let words = || format!("[B, Sq, H, D - Dv] with B = {batch}, Sq = {query_len}, H = {heads}");
                check.dims("q.pe", pe.dims(), [Some(batch), Some(query_len), Some(heads), None], words)?;
                Ok(check)
            }
        }
    }
}

impl MlaDecodeArgs {
    /// Dtypes, devices, and that the tensors fit together.
    pub(super) fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = self.q.check()?;
        let [batch, _, heads, key_width] = self.q.dims();
        check.value(
            "q",
            heads > 0 && key_width > 0,
            format!("a query of {heads} heads of width {key_width}"),
            || "at least 1 head, and 1 channel".into(),
        )?;
        self.kv_cache.check(&check, "kv_cache", self.q.dtype(), "the dtype of `q`")?;
        let words =
            || format!("[P, S, D] with D = {key_width}, the width of `q` (absorbed: latent and rotary channels)");
        check.dims("kv_cache", self.kv_cache.dims(), [None, None, Some(key_width)], words)?;
        check.page_size("kv_cache page size (dimension 1)", self.kv_cache.dims()[1])?;
        check.int("page_table", &self.page_table)?;
        let words = || format!("[B, maxP] with B = {batch}");
        check.dims("page_table", self.page_table.dims(), [Some(batch), None], words)?;
        check.int("seq_lens", &self.seq_lens)?;
        check.dims("seq_lens", self.seq_lens.dims(), [Some(batch)], || format!("[B] with B = {batch}"))?;
        Ok(check)
    }

    pub(super) fn check_options(
        &self,
        check: &Check,
        options: &MlaDecodeOptions,
    ) -> Result<MlaDecodeProblem, MlaError> {
        let [batch, query_len, heads, key_width] = self.q.dims();
        #[cfg(feature = "_gpu")]
        if !crate::independent::is_flex(check.device()) {
            let bytes = key_width * self.q.dtype().size();
            let most = mla_kernels::mla_decode::MAX_KEY_BYTES;
            check.value("kv_cache", bytes <= most, format!("a cache with rows of {bytes} bytes"), || {
                format!("rows of at most {most} bytes, of which two fit into the shared memory of a GPU")
            })?;
        }
        let value_width = options.value_width;
        check.value("value_width", (1..=key_width).contains(&value_width), value_width, || {
            format!("1 to {key_width}, the width of a cache row")
        })?;
        if let MlaQuery::Parts { nope, .. } = &self.q {
            let latent = nope.dims()[3];
            check.value("value_width", latent == value_width, value_width, || {
                format!("{latent}, the width of `q.nope`")
            })?;
        }
        let scale = options.softmax_scale;
        check.value("softmax_scale", scale.is_finite(), scale, || "a finite number".into())?;
        options.splits.check(check)?;
        let (page_size, dtype, rows) = (self.kv_cache.dims()[1], self.q.dtype(), self.kv_cache.format());
        let problem = MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype, rows };
        if let Some(path) = options.path {
            let available = available_paths(&problem, check.device());
            check.value("path", available.contains(&path), path, || {
                let names: Vec<String> = available.iter().map(Path::to_string).collect();
                format!("one that {:?} has for {}: {}", check.device(), problem.words(), names.join(", "))
            })?;
        }
        Ok(problem)
    }

    /// The device can do this, with a plan of these sizes.
    pub(super) fn check_limits(
        &self,
        check: &Check,
        problem: &MlaDecodeProblem,
        options: &MlaDecodeOptions,
        cubes: usize,
        capacity: usize,
    ) -> Result<(), MlaError> {
        #[cfg(feature = "_gpu")]
        {
            let tables = [self.kv_cache.dims()[0], self.page_table.dims()[1]];
            super::cube::check_limits(check, problem, tables, [cubes, capacity], options)?;
        }
        let _ = (check, problem, options, cubes, capacity);
        Ok(())
    }

    /// Reads lengths and page table back and checks every entry that the call would use.
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Int, Tensor};
    /// use mla_ops::batch::index_tensor;
    /// use mla_ops::MlaDecodeArgs;
    ///
    /// let device = Device::flex();
    /// let (q, kv_cache) = (Tensor::<4>::ones([1, 1, 4, 12], &device), Tensor::<3>::ones([3, 2, 12], &device));
    /// let page_table = Tensor::<2, Int>::from_data([[2, 7]], (&device, DType::I32)); // there are 3 pages
    /// let args = MlaDecodeArgs::new(q, kv_cache, page_table, index_tensor(vec![3], &device));
    /// let error = args.validate_device_inputs().unwrap_err();
    /// assert_eq!(error.to_string(), "mla_decode: `page_table`[0, 1] is 7, expected a page of the cache, 0 to 2");
    /// ```
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first length outside `0 ..= maxP * S` or page id outside `0 .. P`. Before that,
    /// wrong shapes and dtypes as in [`mla_decode`](crate::mla_decode()).
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values().map(drop)
    }

    /// The lengths, if they and the page table are in order.
    pub(super) fn validate_values(&self) -> Result<Vec<i32>, MlaError> {
        let [pages, page_size, _] = self.kv_cache.dims();
        let [_, max_pages] = self.page_table.dims();
        let lens = read_i32(OP, "seq_lens", &self.seq_lens)?;
        check_lengths(OP, &lens, max_pages * page_size, "the capacity of `page_table`")?;
        let table = read_i32(OP, "page_table", &self.page_table)?;
        for (b, &len) in lens.iter().enumerate() {
            for p in 0..(len as usize).div_ceil(page_size) {
                let page = table[b * max_pages + p];
                if usize::try_from(page).map_or(true, |page| page >= pages) {
                    return Err(MlaError::DeviceValue {
                        op: OP,
                        argument: "page_table",
                        index: vec![b, p],
                        actual: page,
                        expected: format!("a page of the cache, 0 to {}", pages.saturating_sub(1)),
                    });
                }
            }
        }
        Ok(lens)
    }
}

impl MlaPlan {
    /// The plan was made for a problem of these dimensions, and has the tensors that were made.
    pub(in crate::ops) fn check(&self, check: &Check, problem: &MlaDecodeProblem) -> Result<(), MlaError> {
        check.int("plan.items", &self.items)?;
        check.int("plan.cube_ptr", &self.cube_ptr)?;
        check.int("plan.split_ptr", &self.split_ptr)?;
        check.dims("plan.items", self.items.dims(), [Some(self.capacity), Some(4)], || PLANNED.into())?;
        check.dims("plan.cube_ptr", self.cube_ptr.dims(), [Some(self.cubes + 1)], || PLANNED.into())?;
        check.dims("plan.split_ptr", self.split_ptr.dims(), [Some(self.made_for.batch + 1)], || PLANNED.into())?;
        let &MlaDecodeProblem { batch, query_len, heads, page_size, .. } = problem;
        let (made_for, asked) = (self.made_for, MadeFor { batch, query_len, heads, page_size });
        let words = |MadeFor { batch, query_len, heads, page_size }| {
            format!("B = {batch}, Sq = {query_len}, H = {heads}, page size {page_size}")
        };
        let actual = format!("a plan for {}", words(made_for));
        check.value("plan", made_for == asked, actual, || format!("one for {}", words(asked)))
    }

    /// Reads lengths and plan back and checks that they belong together: the plan has each key of each sequence once.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first sequence for which the plan was made with another length. Before that, a
    /// `seq_lens` of another batch or dtype.
    pub fn validate_device_inputs(&self, seq_lens: &Tensor<1, Int>) -> Result<(), MlaError> {
        let check = Check::new(OP, "seq_lens", seq_lens)?;
        check.int("seq_lens", seq_lens)?;
        check.dims("seq_lens", seq_lens.dims(), [Some(self.made_for.batch)], || {
            format!("[B] with B = {}", self.made_for.batch)
        })?;
        self.validate_values(&read_i32(OP, "seq_lens", seq_lens)?)
    }

    /// The plan has each key of sequences of these lengths once.
    pub(in crate::ops) fn validate_values(&self, lens: &[i32]) -> Result<(), MlaError> {
        let items = read_i32(OP, "plan.items", &self.items)?;
        let mut items = items.chunks_exact(4).take_while(|item| item[0] >= 0).peekable();
        for (b, &len) in lens.iter().enumerate() {
            let mut planned = 0;
            let mut splits = 0;
            while let Some(item) =
                items.next_if(|item| item[0] as usize == b && item[1..] == [planned, item[2], splits])
            {
                (planned, splits) = (item[2], splits + 1);
            }
            if planned != len || splits == 0 {
                return Err(MlaError::DeviceValue {
                    op: OP,
                    argument: "plan",
                    index: vec![b],
                    actual: planned,
                    expected: format!("{len}, the length in `seq_lens`: plan again when lengths change"),
                });
            }
        }
        Ok(())
    }
}
