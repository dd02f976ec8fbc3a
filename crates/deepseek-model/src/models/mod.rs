//! The models, each in a folder of its own, and the registry that knows them all.

mod architecture;
pub(crate) mod deepseek_v3;
pub(crate) mod deepseek_v4;

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use mla_ops::cache::RowFormat;

pub(crate) use self::architecture::{Architecture, BufferedStep, Capture, Model, Observer};
pub use self::architecture::{Hidden, PrefixSupport};
use crate::cache::{CacheSize, KvCacheFormat};
use crate::config::{CONFIG_HINT, Fields, LayerSummary, Quantization};
use crate::decode_graph::memory::captured_bytes;
use crate::weights::{LoadAs, Published, WeightLoader};
use crate::{ModelError, Result, files};

/// Models whose `config.json` is read alike.
struct Family {
    /// Their `model_type`s.
    model_types: &'static [&'static str],
    /// Reads a configuration file.
    read: fn(&Path) -> Result<Arc<dyn Architecture>>,
}

/// Every model there is: a new one is a folder beside this file, with the traits of `architecture.rs`, and an entry here.
const FAMILIES: [Family; 2] = [
    Family {
        model_types: &deepseek_v3::MODEL_TYPES,
        read: |path| Ok(Arc::new(deepseek_v3::DeepseekV3Config::read(path)?)),
    },
    Family {
        model_types: &deepseek_v4::MODEL_TYPES,
        read: |path| Ok(Arc::new(deepseek_v4::DeepseekV4Config::read(path)?)),
    },
];

/// The configuration of any of the models.
#[derive(Debug, Clone)]
pub struct ModelConfig(Arc<dyn Architecture>);

impl ModelConfig {
    /// Reads `config.json` of the checkpoint folder `dir`, by its `model_type`.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`], [`ModelError::WrongKind`], [`ModelError::Json`], [`ModelError::UnknownModelType`], and those of
    /// [`DeepseekV3Config::read`](crate::DeepseekV3Config::read).
    pub fn read(dir: &Path) -> Result<Self> {
        let hint = "pass the folder of a downloaded checkpoint (config.json, tokenizer.json, *.safetensors)";
        files::check_folder(dir, hint)?;
        Self::read_file(&dir.join("config.json"))
    }

    /// Reads a configuration file, by its `model_type`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_file(path: &Path) -> Result<Self> {
        let fields = Fields::read(path, CONFIG_HINT)?;
        let found: String = fields.required("model_type", "the name of a model family")?;
        match FAMILIES.iter().find(|family| family.model_types.contains(&found.as_str())) {
            Some(family) => Ok(Self((family.read)(path)?)),
            None => Err(ModelError::UnknownModelType { path: path.into(), found, known: known_types() }),
        }
    }

    /// The same model with its first `layers` layers only.
    ///
    /// # Errors
    /// [`ModelError::Request`] if there are not as many, or none is left.
    pub fn with_layers(&self, layers: usize) -> Result<Self> {
        let all = self.num_layers();
        if layers == 0 || layers > all {
            return Err(ModelError::request("layers", layers, format!("1 to {all}, the layers of the configuration")));
        }
        Ok(Self(self.0.with_layers(layers)))
    }

    /// The configuration as its model knows it: `T` is [`DeepseekV3Config`](crate::DeepseekV3Config) or
    /// [`DeepseekV4Config`](crate::DeepseekV4Config).
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        let config: &dyn Any = &*self.0;
        config.downcast_ref()
    }

    /// The layers, first to last, with such caches; a dtype says that rows are stored in it.
    pub fn layers(&self, load_as: impl Into<LoadAs>) -> Vec<LayerSummary> {
        self.0.layers(load_as.into())
    }

    /// How rows of latents are stored in a cache of this format.
    ///
    /// # Errors
    /// A format that the model's caches do not have.
    pub fn row_format(&self, kv_cache: KvCacheFormat) -> Result<RowFormat> {
        self.0.row_format(kv_cache)
    }

    /// Bytes of a cache of this size and format, as [`DeepseekModel::new_cache`](crate::DeepseekModel::new_cache) would make it.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, or a format that the model's caches do not have.
    pub fn cache_bytes(&self, size: CacheSize, load_as: impl Into<LoadAs>) -> Result<u128> {
        self.0.cache_bytes(size, load_as.into())
    }

    /// Bytes beside such a cache that a step of many tokens takes on a Hopper GPU at most, where a layer's index keys are dequantised from
    /// FP8: 0 without such keys, and if they are too many.
    ///
    /// # Errors
    /// As [`Self::cache_bytes`].
    pub fn index_scratch_bytes(&self, size: CacheSize, load_as: impl Into<LoadAs>) -> Result<u128> {
        self.0.index_scratch_bytes(size, load_as.into())
    }

    /// Device memory that the captured decode steps of an engine with a cache of this size take at most, in bytes, as far as
    /// sizes tell: see [`EngineOptions::graphs`](crate::EngineOptions::graphs). Nothing on devices that capture none.
    pub fn captured_bytes(&self, size: CacheSize) -> u128 {
        captured_bytes(self.vocab_size(), size)
    }

    /// Numbers that a layer computes for a token, all of them together: more than are there at once.
    pub(crate) fn activations_per_token(&self) -> usize {
        self.0.activations_per_token()
    }

    /// What requests that begin alike can share, with caches of `dtype`.
    pub fn prefix_support(&self, dtype: FloatDType) -> PrefixSupport {
        self.0.prefix_support(dtype)
    }

    /// Layers, without the multi-token-prediction ones.
    pub fn num_layers(&self) -> usize {
        self.0.sizes().num_hidden_layers
    }

    /// As many of the first layers as have one of each kind.
    pub(crate) fn layers_of_every_kind(&self, dtype: FloatDType) -> usize {
        let layers = self.layers(dtype);
        let is_new = |&number: &usize| !layers[..number].contains(&layers[number]);
        (0..layers.len()).rfind(is_new).map_or(0, |last| last + 1)
    }

    /// How the files store weights in 8 bits or fewer, if they do.
    pub fn quantization(&self) -> Option<Quantization> {
        self.0.sizes().quantization
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.0.sizes().vocab_size
    }

    /// Longest context in tokens.
    pub fn max_position_embeddings(&self) -> usize {
        self.0.sizes().max_position_embeddings
    }

    /// Routed experts of a layer.
    pub fn n_routed_experts(&self) -> usize {
        self.0.sizes().n_routed_experts
    }

    /// Routed experts that a token goes to.
    pub fn num_experts_per_tok(&self) -> usize {
        self.0.sizes().num_experts_per_tok
    }

    /// Tokens that end a text; empty if the file names none.
    pub fn eos_token_ids(&self) -> &[u32] {
        self.0.sizes().eos_token_ids
    }

    /// How the weights are published.
    pub(crate) fn published(&self) -> Published {
        self.0.published()
    }

    /// The model, its weights taken out of a loader; what is missing or wrong shows when the loader is finished.
    pub(crate) fn load(&self, loader: &mut WeightLoader, device: &Device) -> Box<dyn Model> {
        self.0.load(loader, device)
    }
}

/// All `model_type`s, in words.
fn known_types() -> String {
    let names: Vec<String> =
        FAMILIES.iter().flat_map(|family| family.model_types).map(|name| format!("\"{name}\"")).collect();
    match names.split_last() {
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
        None => String::new(),
    }
}
