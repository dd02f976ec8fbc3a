//! Tensors for a model without a checkpoint: random, but of sizes that keep activations finite.

use std::sync::Mutex;

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, s};

/// How the weights of a model without a checkpoint are drawn. The same seed gives the same weights; `From<u64>` takes a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomInit {
    pub(super) seed: u64,
    /// Of the numbers of matrices, if that is not by their width.
    std: Option<f32>,
}

/// Matrices have a variance of `1 / in`, so that a product is as large as what goes into it, however few layers a model has.
impl From<u64> for RandomInit {
    fn from(seed: u64) -> Self {
        Self { seed, std: None }
    }
}

impl RandomInit {
    /// Matrices are normally distributed around 0 with this standard deviation, as DeepSeek initialises its models with 0.006
    /// (arXiv 2412.19437, section 4.2), and others with 0.02.
    pub fn normal(seed: u64, std: f32) -> Self {
        Self { seed, std: Some(std) }
    }

    /// Of a matrix that would be uniformly distributed within this bound.
    fn distribution(self, bound: f32) -> Distribution {
        let uniform = Distribution::Uniform(f64::from(-bound), f64::from(bound));
        self.std.map_or(uniform, |std| Distribution::Normal(0.0, f64::from(std)))
    }
}

/// What a tensor of a model without a checkpoint holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Initial {
    /// The same number everywhere.
    Constant(f32),
    /// Numbers between `-bound` and `bound`.
    Uniform {
        /// The largest of them.
        bound: f32,
    },
}

impl Initial {
    /// Matrices have a variance of `1 / in`, so that a product is as large as what goes into it; norms and scales are 1, and
    /// what is added is 0.
    pub(super) fn of(name: &str, shape: &[usize]) -> Self {
        match shape {
            [_] | [] if name.ends_with("norm.weight") || name.ends_with("_scale") => Self::Constant(1.0),
            [_] | [] => Self::Constant(0.0),
            [.., columns] => Self::Uniform { bound: (3.0 / *columns as f32).sqrt() },
        }
    }
}

/// The seed of a tensor: that of the model and the name, so that a layer is the same whichever others there are.
pub(super) fn seed_of(seed: u64, name: &str) -> u64 {
    // FNV-1a.
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Random numbers per call.
const CHUNK: usize = 1 << 28;

/// A device has one generator for all threads.
static GENERATOR: Mutex<()> = Mutex::new(());

/// A tensor of matrices or vectors `each` below one another, initialised at random on the device.
pub(super) fn tensor<const D: usize>(
    init: RandomInit,
    name: &str,
    each: &[usize],
    shape: [usize; D],
    device: &Device,
    dtype: FloatDType,
) -> Tensor<D> {
    let options = (device, DType::from(dtype));
    match Initial::of(name, each) {
        Initial::Constant(value) => Tensor::full(shape, value, options),
        Initial::Uniform { bound } => {
            let _generator = GENERATOR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            device.seed(seed_of(init.seed, name));
            let distribution = init.distribution(bound);
            flat(shape.iter().product(), |len| Tensor::random([len], distribution, options)).reshape(shape)
        }
    }
}

/// So many numbers one after the other: GPUs pad the rows of matrices, and do not generate billions of numbers per call.
fn flat(len: usize, random: impl Fn(usize) -> Tensor<1>) -> Tensor<1> {
    if len <= CHUNK {
        return random(len);
    }
    let first = random(CHUNK);
    let mut all = Tensor::empty([len], (&first.device(), first.dtype())).slice_assign(s![..CHUNK], first);
    for start in (CHUNK..len).step_by(CHUNK) {
        let end = len.min(start + CHUNK);
        all = all.slice_assign(s![start..end], random(end - start));
    }
    all
}

/// Choices `[rows, k]` of numbers below `below`, all different in a row where that is possible, all equally often.
pub(super) fn table([rows, k]: [usize; 2], below: usize) -> Vec<i32> {
    (0..rows * k).map(|place| (place % below) as i32).collect()
}
