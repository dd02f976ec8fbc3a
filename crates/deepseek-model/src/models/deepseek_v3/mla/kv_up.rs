//! `kv_b_proj` in both forms of the attention.

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::{Device, Tensor};
use mla_ops::StackedWeight;

use crate::layers::{Linear, MlaConfig};
use crate::parallel::Cut;
use crate::weights::{WeightLoader, contiguous};

/// From latents to keys and values: as one projection for the naive form, and its halves for the absorbed one. These are made of the
/// projection, which is all that a record has: whatever changes it makes them anew.
#[derive(Debug, Clone)]
pub(super) struct KvUpProjection {
    /// Of all heads the keys, and then the values; not quantised.
    pub(super) projection: Linear,
    /// `[H, R, dn]`: the key half, absorbed into the query; a copy, for its transposed matrices.
    pub(super) w_uk: StackedWeight,
    /// `[H, dv, R]`: the value half, applied to the attention's output.
    pub(super) w_uv: StackedWeight,
}

impl KvUpProjection {
    /// Loads the weight `name`, where the keys and values of a head are side by side.
    pub(super) fn load(loader: &mut WeightLoader, name: &str, config: &MlaConfig) -> Self {
        let (heads, rank) = (config.num_attention_heads, config.kv_lora_rank);
        let (dn, dv) = (config.qk_nope_head_dim, config.v_head_dim);
        let kv_b = loader.tensor(name, [heads * (dn + dv), rank], Cut::Heads(heads));
        let local = loader.parallel().local(heads);
        let by_head: Tensor<3> = loader.reshape(kv_b, [local, dn + dv, rank]);
        let (keys, values) = (by_head.clone().narrow(1, 0, dn), by_head.narrow(1, dn, dv));
        let rows = |half: Tensor<3>, width| loader.reshape(loader.contiguous(half), [local * width, rank]);
        let kv_b: Tensor<2> = loader.cat(vec![rows(keys, dn), rows(values, dv)]);
        match loader.gives_placeholders() {
            false => Self::new(Linear::new(kv_b), [local, dn, dv]),
            true => Self {
                w_uk: loader.reshape(kv_b.clone(), [local, rank, dn]).into(),
                w_uv: loader.reshape(kv_b.clone(), [local, dv, rank]).into(),
                projection: Linear::new(kv_b),
            },
        }
    }

    /// With the halves of this projection.
    fn new(projection: Linear, [heads, dn, dv]: [usize; 3]) -> Self {
        let kv_b = projection.weight().dense();
        let [_, rank] = kv_b.dims();
        let keys = kv_b.clone().narrow(0, 0, heads * dn).reshape([heads, dn, rank]);
        Self {
            w_uk: contiguous(keys.swap_dims(1, 2)).into(),
            w_uv: kv_b.narrow(0, heads * dn, heads * dv).reshape([heads, dv, rank]).into(),
            projection,
        }
    }

    fn with(self, change: impl FnOnce(Linear) -> Linear) -> Self {
        let ([heads, _, dn], [_, dv, _]) = (self.w_uk.dims(), self.w_uv.dims());
        drop((self.w_uk, self.w_uv));
        Self::new(change(self.projection), [heads, dn, dv])
    }
}

impl Module for KvUpProjection {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.projection.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.with(|projection| projection.map(mapper))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.projection.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|projection| projection.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|projection| projection.fork(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|projection| projection.valid())
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }
}

impl ModuleDisplayDefault for KvUpProjection {
    fn content(&self, content: Content) -> Option<Content> {
        self.projection.content(content)
    }
}

impl ModuleDisplay for KvUpProjection {}
