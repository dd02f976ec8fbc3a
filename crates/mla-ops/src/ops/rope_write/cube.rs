use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::linear::{LatentRows, launch_with_rope, takes_rope};
use mla_kernels::rope_write::{IndexHeads, RopeWriteArgs, launch};

use super::backend::{BackendIndexHeads, BackendLatents, BackendRopeQuery, BackendRopeWritten, RopeWriteBackend};
use crate::Determinism;
use crate::cache::BackendPool;
use crate::ops::compress_kv::backend::BackendSteps;
use crate::ops::compress_kv::cube::step_args;
use crate::ops::linear_by_head::backend::{BackendHeadRows, LinearByHeadBackend};
use crate::ops::linear_by_head::cube::by_head_args;
use crate::ops::norm_rope::BackendNorm;
use crate::ops::write_latent::cube::write_fp8;
use crate::tensors::{buffers, contiguous, dims, elem, empty, launched, own};
use crate::weight::BackendWeight;

impl RopeWriteBackend for CubeBackend {
    fn rope_write(
        query: BackendRopeQuery<Self>,
        latents: BackendLatents<Self>,
        steps: BackendSteps<Self>,
    ) -> BackendRopeWritten<Self> {
        let latents = latents.in_memory();
        match query {
            BackendRopeQuery::Heads { q, norm, index } => {
                let q_eps = match norm {
                    BackendNorm::Plain(eps) => Some(eps),
                    BackendNorm::None | BackendNorm::Weighted(..) => None,
                };
                let index_q = match index {
                    BackendIndexHeads::Heads(q) => Some(contiguous(q)),
                    BackendIndexHeads::None => None,
                };
                write(contiguous(q), q_eps, index_q, latents, steps)
            }
            BackendRopeQuery::Absorbed(q, weight, determinism) => {
                let (q, cache) = write_absorbed(contiguous(q), latents, weight, determinism);
                BackendRopeWritten::Absorbed { q, cache }
            }
        }
    }
}

/// Heads as they are given here are not absorbed.
fn write(
    q: CubeTensor,
    q_eps: Option<f32>,
    index_q: Option<CubeTensor>,
    latents: BackendLatents<CubeBackend>,
    steps: BackendSteps<CubeBackend>,
) -> BackendRopeWritten<CubeBackend> {
    let norm_whole_row = latents.norms_whole_rows();
    let BackendLatents { latent, norm_weight: weight, cos, sin, cache, slots, norm_eps: eps } = latents;
    let ([tokens, heads, width], [_, pairs]) = (dims(&q), dims(&cos));
    let ([pages, page_size, cache_width], elem) = (cache.dims(), elem(&q));
    let q_out = empty(&q, [tokens, heads, width], q.dtype);
    let latent_out = empty(&q, [tokens, cache_width], q.dtype);
    let index_q_out = index_q.as_ref().map(|q| empty(q, dims::<3>(q), q.dtype));
    let index = index_q.zip(index_q_out.clone()).map(|(q, q_out)| {
        let [_, heads, width] = dims(&q);
        IndexHeads { q: q.into_buffer_arg(), q_out: q_out.into_buffer_arg(), heads, width }
    });
    let (stored, client) = (cache.stored(), &cache.stored().client);
    let mut compressors = Vec::new();
    let compressed = steps.map(|step| {
        let (args, compressed) = step_args(step);
        compressors.push(args);
        compressed
    });
    // What is quantised, the kernel does not write into the cache.
    let slot_count = if let BackendPool::Dense(_) = &cache { pages * page_size } else { 0 };
    let args = buffers!(q, latent, weight, cos, sin, slots, q_out, latent_out, stored => RopeWriteArgs {
        q, latent, weight, cos, sin, slots, q_out, latent_out, cache: stored,
        tokens, heads, width, cache_width, pairs, slot_count, eps, norm_whole_row, q_eps, index, compressors, elem,
    });
    launched(launch(client, args));
    if let &BackendPool::Fp8(ref words, format) = &cache {
        write_fp8(words, format, slots, latent_out.clone(), None);
    }
    let index = index_q_out.map_or(BackendIndexHeads::None, BackendIndexHeads::Heads);
    BackendRopeWritten::Heads { q: q_out, index, latent: latent_out, cache, compressed }
}

/// Absorbed queries, the cache.
fn write_absorbed(
    q: CubeTensor,
    latents: BackendLatents<CubeBackend>,
    weight: BackendWeight<CubeBackend>,
    determinism: Determinism,
) -> (CubeTensor, BackendPool<CubeBackend>) {
    let (sizes, [_, outputs, _], [_, pairs]) = (dims(&q), weight.dims(), dims(&latents.cos));
    let [tokens, heads, _] = sizes;
    let out = empty(&q, [tokens, heads, outputs + 2 * pairs], q.dtype);
    let args = by_head_args(&q, weight.clone(), &out, sizes, determinism);
    let (rows, quantised) = latents.rows();
    if !latents.norms_whole_rows() && takes_rope(&q.client, &rows, &args) {
        launch_with_rope(&q.client, rows, args);
        if let (Some(rows), &BackendPool::Fp8(ref words, format)) = (quantised, &latents.cache) {
            write_fp8(words, format, latents.slots, rows, None);
        }
        return (out, latents.cache);
    }
    let (BackendRopeWritten::Heads { q, cache, .. } | BackendRopeWritten::Absorbed { q, cache }) =
        write(q, None, None, latents, BackendSteps::None);
    let q = BackendHeadRows::InMemory(q);
    (CubeBackend::linear_by_head(q, weight, determinism), cache)
}

impl BackendLatents<CubeBackend> {
    /// Contiguous, with a cache that has no other handle.
    fn in_memory(self) -> Self {
        let Self { latent, norm_weight, cos, sin, cache, slots, norm_eps } = self;
        let [latent, norm_weight, cos, sin, slots] = [latent, norm_weight, cos, sin, slots].map(contiguous);
        Self { latent, norm_weight, cos, sin, cache: cache.map(|stored| own(contiguous(stored))), slots, norm_eps }
    }

    /// Whether the norm has the rotary keys in it.
    fn norms_whole_rows(&self) -> bool {
        let ([normed], [_, pairs], [_, _, cache_width]) = (dims(&self.norm_weight), dims(&self.cos), self.cache.dims());
        pairs > 0 && normed == cache_width
    }

    /// What [`launch_with_rope`] takes; and the rows that it writes where they are to be quantised.
    fn rows(&self) -> (LatentRows, Option<CubeTensor>) {
        let Self { latent, norm_weight: weight, cos, sin, cache, slots, norm_eps: eps } = self;
        let ([pages, page_size, cache_width], [tokens, pairs]) = (cache.dims(), dims(cos));
        let (to, slot_count, quantised) = match cache {
            BackendPool::Dense(rows) => (rows.clone(), pages * page_size, None),
            BackendPool::Fp8(..) => {
                let rows = empty(latent, [tokens, cache_width], latent.dtype);
                (rows.clone(), tokens, Some(rows))
            }
        };
        let (by_token, eps) = (quantised.is_some(), *eps);
        let rows = buffers!(latent, weight, cos, sin, slots, to => LatentRows {
            latent, weight, cos, sin, slots, cache: to, cache_width, pairs, slot_count, by_token, eps,
        });
        (rows, quantised)
    }
}
