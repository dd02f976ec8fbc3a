//! From mapped bytes to tensors on a device, one at a time.

mod blocks;
mod failures;
mod stacks;
mod tables;
mod views;

use std::collections::HashSet;

use burn::tensor::{DType, Device, FloatDType, Tensor, s};
use mla_ops::Weight;

pub(crate) use self::views::contiguous;
use super::asked::{Asked, MatrixRows, Own};
use super::packed::WeightStorage;
use super::published::{Published, Renaming};
use super::random::{self, RandomInit};
use super::read::{Filling, Matrices};
use super::spec::Listed;
use super::stored::Stored;
use super::{Checkpoint, WeightRole, WeightSpec};
use crate::config::Quantization;
use crate::parallel::{Cut, Parallel, Part};
use crate::{ModelError, Result, WeightReport, WrongCut};

/// How far loading has come, after each tensor of the files.
#[derive(Debug, Clone, Copy)]
pub struct LoadProgress<'n> {
    /// Bytes of the files that the device was given.
    pub loaded_bytes: u64,
    /// Bytes of the files that will be, when all is done.
    pub total_bytes: u64,
    /// The tensor just loaded.
    pub tensor: &'n str,
}

/// What was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadSummary {
    /// Tensors that the model took.
    pub tensors: usize,
    /// Their bytes in the files; of a rank those that it has.
    pub bytes: u64,
    /// Tensors that were left out on purpose.
    pub skipped: usize,
}

/// Where tensors come from.
enum Source<'a> {
    Files(&'a Checkpoint),
    /// Nowhere: they are drawn on the device.
    Random(RandomInit),
    /// Nowhere: they are memory that nobody has written.
    Unwritten,
    /// Nowhere, and none is made.
    Nothing,
}

/// Hands out the tensors of a checkpoint by name.
///
/// A tensor that is missing, or of the wrong shape or dtype, does not stop the loading: it is recorded, zeros take its place,
/// and [`WeightLoader::finish`] reports all of them together. Plain numbers are converted to the wanted dtype on the host,
/// blocks of 8 or 4 bits on the device, so that it holds each tensor once. A GPU's server reads the files itself, 16 MiB at a time into
/// memory that it uses again; beside that there are the scales of one tensor in FP8, or numbers of the part that is dequantised.
pub struct WeightLoader<'a> {
    source: Source<'a>,
    device: Device,
    dtype: FloatDType,
    quantization: Option<Quantization>,
    storage: WeightStorage,
    /// What is in blocks where no files say it.
    published: Option<Published>,
    parallel: Parallel,
    progress: Option<&'a mut dyn FnMut(LoadProgress<'_>)>,
    /// From the names that are asked for to those in the files, where they differ.
    rename: Option<fn(&str) -> String>,
    asked_for: HashSet<&'a str>,
    skipped: HashSet<&'a str>,
    loaded_bytes: u64,
    total_bytes: u64,
    report: WeightReport,
    /// What the device had no memory for first.
    failed: Option<ModelError>,
    /// What was asked for; then nothing is loaded.
    listing: Option<Vec<Listed<'a>>>,
}

impl<'a> WeightLoader<'a> {
    /// A loader of tensors of `dtype` (f32, f16 or bf16) onto `device`.
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &Device,
        dtype: FloatDType,
        progress: Option<&'a mut dyn FnMut(LoadProgress<'_>)>,
    ) -> Self {
        let report = WeightReport { checkpoint: checkpoint.dir.clone(), ..WeightReport::default() };
        let total_bytes = checkpoint.total_bytes();
        Self { progress, report, total_bytes, ..Self::of(Source::Files(checkpoint), device, dtype) }
    }

    /// A loader that draws tensors on `device`, by the seed and their names; `total_bytes` is what all will take there.
    pub(crate) fn random(
        init: RandomInit,
        device: &Device,
        dtype: FloatDType,
        total_bytes: u64,
        progress: Option<&'a mut dyn FnMut(LoadProgress<'_>)>,
    ) -> Self {
        Self { progress, total_bytes, ..Self::of(Source::Random(init), device, dtype) }
    }

    /// A loader that allocates tensors on `device`, and writes nothing into them.
    pub(crate) fn unwritten(device: &Device, dtype: FloatDType) -> Self {
        Self::of(Source::Unwritten, device, dtype)
    }

    /// A loader that notes what is asked for, and gives out zeros, one number each on `device`; with `checkpoint` it looks up what the files have, too.
    pub(crate) fn listing(checkpoint: Option<&'a Checkpoint>, device: &Device) -> Self {
        let source = checkpoint.map_or(Source::Nothing, Source::Files);
        let dir = checkpoint.map(|checkpoint| checkpoint.dir.clone()).unwrap_or_default();
        let report = WeightReport { checkpoint: dir, ..WeightReport::default() };
        let total_bytes = checkpoint.map_or(0, Checkpoint::total_bytes);
        Self { report, total_bytes, listing: Some(Vec::new()), ..Self::of(source, device, FloatDType::F32) }
    }

    fn of(source: Source<'a>, device: &Device, dtype: FloatDType) -> Self {
        Self {
            source,
            device: device.clone(),
            dtype,
            quantization: None,
            storage: WeightStorage::default(),
            published: None,
            parallel: Parallel::single(),
            progress: None,
            rename: None,
            asked_for: HashSet::new(),
            skipped: HashSet::new(),
            loaded_bytes: 0,
            total_bytes: 0,
            report: WeightReport::default(),
            failed: None,
            listing: None,
        }
    }

    /// Reads weights of 8 bits or fewer as `quantization` says; without it they are reported as wrong.
    pub fn with_quantization(mut self, quantization: Option<Quantization>) -> Self {
        self.quantization = quantization;
        self
    }

    /// Without files, what is published in blocks is so, if there is a `quantization`.
    pub(crate) fn with_published(mut self, published: Published) -> Self {
        self.published = Some(published);
        self
    }

    /// Whether weights in blocks stay so.
    pub fn with_storage(mut self, storage: WeightStorage) -> Self {
        self.storage = storage;
        self
    }

    /// Loads what one rank has.
    pub fn with_parallel(mut self, parallel: Parallel) -> Self {
        self.parallel = parallel;
        self
    }

    /// The rank that it loads for.
    pub(crate) fn parallel(&self) -> &Parallel {
        &self.parallel
    }

    /// What this rank has, by `cut`, of the matrix `name` `[out, in]`: as it is stored, or in the loader's dtype.
    pub fn weight(&mut self, name: &str, shape: [usize; 2], cut: Cut) -> Weight {
        let matrices = Some(MatrixRows::All);
        let asked = Asked { names: &[name], each: &shape, stack: None, role: WeightRole::Weight, cut, matrices };
        match self.load_blocks(&asked) {
            Some((blocks, [_, rows, columns])) => self.of_blocks(name, Weight::from_blocks(blocks, [rows, columns])),
            None => None,
        }
        .unwrap_or_else(|| self.load::<2>(&asked).into())
    }

    /// The same in f32 whatever the loader's dtype is (routers).
    pub fn weight_f32(&mut self, name: &str, shape: [usize; 2], cut: Cut) -> Weight {
        self.tensor_f32::<2>(name, shape, cut).into()
    }

    /// What this rank has, by `cut`, of the tensor `name`, which must have `shape`, in the loader's dtype.
    pub fn tensor<const D: usize>(&mut self, name: &str, shape: [usize; D], cut: Cut) -> Tensor<D> {
        let (stack, role, matrices) = (None, WeightRole::Weight, None);
        self.load(&Asked { names: &[name], each: &shape, stack, role, cut, matrices })
    }

    /// The same in f32 whatever the loader's dtype is (norm weights, `e_score_correction_bias`).
    pub fn tensor_f32<const D: usize>(&mut self, name: &str, shape: [usize; D], cut: Cut) -> Tensor<D> {
        let (stack, role, matrices) = (None, WeightRole::F32, None);
        self.load(&Asked { names: &[name], each: &shape, stack, role, cut, matrices })
    }

    /// Whether the files have a tensor `name`.
    pub(crate) fn has(&self, name: &str) -> bool {
        match self.source {
            Source::Files(checkpoint) => checkpoint.tensors.contains_key(&self.in_files(name)),
            Source::Random(_) | Source::Unwritten | Source::Nothing => false,
        }
    }

    /// Takes the other names where the files have them; tensors are asked for by their published names.
    pub(crate) fn rename(&mut self, renaming: Option<Renaming>) {
        let Source::Files(checkpoint) = self.source else { return };
        self.rename = renaming.filter(|names| names.is_of(checkpoint)).map(|names| names.rename);
    }

    /// The name that a tensor has in the files.
    fn in_files(&self, name: &str) -> String {
        self.rename.map_or_else(|| name.to_string(), |rename| rename(name))
    }

    /// Leaves out the tensors that `is_unused` picks, so that they are not reported as unexpected; `why` goes to the log.
    pub(crate) fn skip(&mut self, why: &str, is_unused: impl Fn(&str) -> bool) {
        let Source::Files(checkpoint) = self.source else { return };
        let mut count = 0;
        for (name, entry) in &checkpoint.tensors {
            if is_unused(name) && self.skipped.insert(name) {
                self.total_bytes -= entry.len();
                count += 1;
            }
        }
        if count > 0 {
            tracing::info!(count, "tensors not loaded: {why}");
        }
    }

    /// Ends the loading.
    ///
    /// # Errors
    /// [`ModelError::Weights`] listing every tensor that was missing or wrong, and every one that nobody asked for;
    /// [`ModelError::OutOfMemory`] if the device had no memory for one.
    pub fn finish(mut self) -> Result<LoadSummary> {
        self.failed.take().map_or(Ok(()), Err)?;
        self.report.unexpected = self.unexpected();
        match self.report.is_empty() {
            true => {
                Ok(LoadSummary { tensors: self.asked_for.len(), bytes: self.loaded_bytes, skipped: self.skipped.len() })
            }
            false => Err(ModelError::Weights(Box::new(self.report))),
        }
    }

    /// Ends a listing: what was asked for, and all that is wrong with the files.
    pub(crate) fn finish_listing(mut self) -> (Vec<Listed<'a>>, WeightReport) {
        self.report.unexpected = self.unexpected();
        (self.listing.unwrap_or_default(), self.report)
    }

    fn unexpected(&self) -> Vec<String> {
        let Source::Files(checkpoint) = self.source else { return Vec::new() };
        let unknown = |name: &&str| !self.asked_for.contains(name) && !self.skipped.contains(name);
        checkpoint.tensor_names().filter(unknown).map(str::to_string).collect()
    }

    fn load<const D: usize>(&mut self, asked: &Asked<'_>) -> Tensor<D> {
        let dtype = if asked.role == WeightRole::Weight { self.dtype } else { FloatDType::F32 };
        let own = self.own(asked);
        let shape: [usize; D] = asked.shape(&own);
        if matches!(self.source, Source::Unwritten) {
            return Tensor::empty(shape, (&self.device, DType::from(dtype)));
        }
        let zeros = placeholder(shape, &self.device, dtype.into());
        let checkpoint = match self.source {
            Source::Files(checkpoint) => Some(checkpoint),
            Source::Random(init) => {
                let drawn = self.draw(init, asked, &own, dtype);
                return self.checked(drawn);
            }
            Source::Unwritten | Source::Nothing => None,
        };
        // Every name is looked up, so that one bad expert does not hide the next.
        let found: Vec<Option<Stored<'a>>> =
            asked.names.iter().map(|name| self.find(name, asked.each, &own.part)).collect();
        if self.listing.is_some() {
            let format = blocks::one_format(asked, &found).or_else(|| self.format_without_files(asked));
            for (name, stored) in asked.names.iter().zip(found) {
                let Asked { each, role, cut, .. } = *asked;
                let spec = WeightSpec { name: (*name).into(), shape: each.to_vec(), role, cut };
                self.note(Listed { spec, stored, format }, ());
            }
            return zeros;
        }
        let (Some(stored), Some(checkpoint)) = (found.into_iter().collect::<Option<Vec<_>>>(), checkpoint) else {
            return zeros;
        };
        let all: u64 = stored.iter().map(Stored::len).sum();
        let matrices = Matrices { checkpoint, stored: &stored[own.names.clone()], each: asked.each, part: &own.part };
        self.total_bytes = self.total_bytes.saturating_sub(all - matrices.bytes());
        let tensor = self.read(&matrices, dtype);
        let tensor = tensor.map_or(zeros, |tensor| tensor.reshape(shape));
        self.checked(tensor)
    }

    /// What this rank has of the tensors that are asked for; parts that are not equal are recorded.
    fn own(&mut self, asked: &Asked<'_>) -> Own {
        let (own, wrong) = asked.own(&self.parallel);
        if let Some(actual) = wrong {
            let name = asked.names.first().copied().unwrap_or_default().to_string();
            self.report.wrong_cut.push(WrongCut { name, actual, expected: "equal parts".into() });
        }
        own
    }

    /// Random numbers. All of a tensor is drawn, so that the parts of the ranks are those of one tensor.
    fn draw<const D: usize>(&mut self, init: RandomInit, asked: &Asked<'_>, own: &Own, dtype: FloatDType) -> Tensor<D> {
        let first = asked.names.first().copied().unwrap_or_default();
        let whole: [usize; D] = asked.shape(&asked.all());
        let tensor = random::tensor(init, first, asked.each, whole, &self.device, dtype);
        self.advance((whole.iter().product::<usize>() * DType::from(dtype).size()) as u64, first);
        if asked.shape::<D>(own) == whole {
            return tensor;
        }
        let (axis, range) = (own.part.axis + usize::from(asked.stack.is_some()), own.part.range.clone());
        let part = match asked.stack {
            Some(_) => tensor.narrow(0, own.names.start, own.names.len()),
            None => tensor,
        };
        // A copy, for a view would keep the memory of the whole; and of one axis, for GPUs pad the rows of matrices, which kernels would
        // copy in every step.
        let part = part.narrow(axis, range.start, range.len());
        let (shape, len) = (part.dims(), part.shape().num_elements());
        let copy = Tensor::<1>::empty([len], (&self.device, DType::from(dtype)));
        copy.slice_assign(s![..], part.reshape([len])).reshape(shape)
    }

    /// The matrices one after the other; `None` after recording what they hold wrongly.
    fn read(&mut self, matrices: &Matrices<'_, '_>, dtype: FloatDType) -> Option<Tensor<1>> {
        // Of a checkpoint that will be refused, the numbers are only looked at.
        let mut sound = self.report.is_empty();
        let len = matrices.stored.len() * matrices.part.shape(matrices.each).iter().product::<usize>();
        let mut filling = Filling::new(&self.device, dtype, len);
        for stored in matrices.stored {
            match stored.check(matrices.checkpoint, matrices.columns(), dtype) {
                Ok(()) if sound => {
                    filling.take(matrices, stored, dtype);
                    self.advance(matrices.share(stored), stored.name);
                }
                Ok(()) => {}
                Err(wrong) => {
                    // It may have been looked at before.
                    if !self.report.wrong_quantization.contains(&wrong) {
                        self.report.wrong_quantization.push(wrong);
                    }
                    sound = false;
                }
            }
        }
        if sound { filling.finish() } else { None }
    }

    /// Where the weight `name` lies, or `None` after recording what is wrong with it, or with the part that is taken of it.
    fn find(&mut self, name: &str, shape: &[usize], part: &Part) -> Option<Stored<'a>> {
        let Source::Files(checkpoint) = self.source else { return None };
        let wanted = self.in_files(name);
        let stored = Stored::find(checkpoint, &wanted, shape, self.quantization, &mut self.report)?;
        self.asked_for.extend(stored.names());
        self.report.wrong_cut.extend(stored.cuts_blocks(shape, part));
        stored.is_sound.then_some(stored)
    }

    fn note<T>(&mut self, listed: Listed<'a>, result: T) -> T {
        self.listing.get_or_insert_default().push(listed);
        result
    }

    fn advance(&mut self, bytes: u64, tensor: &str) {
        self.loaded_bytes += bytes;
        if let Some(progress) = &mut self.progress {
            progress(LoadProgress { loaded_bytes: self.loaded_bytes, total_bytes: self.total_bytes, tensor });
        }
    }
}

/// One zero seen from everywhere: a wrong checkpoint must not fill the memory with placeholders.
fn placeholder<const D: usize>(shape: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    match shape.contains(&0) {
        true => Tensor::empty(shape, (device, dtype)),
        false => Tensor::<D>::zeros([1; D], (device, dtype)).expand(shape),
    }
}
