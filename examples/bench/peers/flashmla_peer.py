"""Call FlashMLA's and vLLM's compiled ops without importing vLLM.

The shared libraries come out of the vllm wheel (prepare.sh puts them under lib/).  They use
torch's stable ABI and register their ops when they are loaded:
  _flashmla_C            dense_decode_fwd, sparse_decode_fwd, sparse_prefill_fwd
  _flashmla_extension_C  fwd_kvcache_mla_fp8, get_mla_decoding_metadata_dense_fp8
  _C                     merge_attn_states (vllm_merge.so.xz: the same library with every GPU
                         image but that kernel's blanked; no other op of it can be run)
"""
import lzma
import pathlib
import tempfile

import torch

FLASHMLA = ("_flashmla_C.abi3.so", "_flashmla_extension_C.abi3.so")


def load_flashmla(libdir):
    """Loads both FlashMLA libraries; returns the op schemas, as text."""
    for name in FLASHMLA:
        torch.ops.load_library(str(pathlib.Path(libdir) / name))
    ops, ext = torch.ops._flashmla_C, torch.ops._flashmla_extension_C
    return [str(o.default._schema) for o in (
        ops.dense_decode_fwd, ops.sparse_decode_fwd, ops.sparse_prefill_fwd,
        ext.fwd_kvcache_mla_fp8, ext.get_mla_decoding_metadata_dense_fp8)]


def load_vllm_merge(libdir):
    """Loads vLLM's merge_attn_states; returns its schema, as text."""
    src = pathlib.Path(libdir) / "vllm_merge.so.xz"
    dst = pathlib.Path(tempfile.mkdtemp(prefix="peer-")) / "vllm_merge.abi3.so"
    dst.write_bytes(lzma.decompress(src.read_bytes()))
    torch.ops.load_library(str(dst))
    return str(torch.ops._C.merge_attn_states.default._schema)


class DenseDecode:
    """FlashMLA's dense decode (SM90, bf16): the schedule is made at the first call, then reused.

    q (b, s_q, h_q, 576), kcache (pages, 64, 1, 576), block_table (b, n) i32, seqlens (b) i32.
    A call returns out (b, s_q, h_q, 512) and the natural-log lse (b, h_q, s_q).
    """

    def __init__(self, q, kcache, block_table, seqlens, scale, causal, dv=512):
        self.a = (q, kcache, dv, seqlens, block_table, scale, causal)
        self.meta = self.splits = None

    def __call__(self):
        out, lse, self.meta, self.splits = torch.ops._flashmla_C.dense_decode_fwd(
            *self.a, self.meta, self.splits, None)
        return out, lse

    def with_schedule(self):
        """The same, making the schedule anew."""
        self.meta = self.splits = None
        return self()


def metadata(seqlens, rows):
    """The FP8 variant's schedule, for `rows` = s_q * h_q query rows of each sequence."""
    return torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(seqlens, rows, 1)


class DenseDecodeFP8:
    """vLLM's FP8 variant of the dense decode (SM90): q and kcache are float8_e4m3fn."""

    def __init__(self, q, kcache, block_table, seqlens, scale, causal, descale_q, descale_k, dv=512):
        s_q, h_q = q.shape[1:3]
        meta, splits = metadata(seqlens, s_q * h_q)
        self.a = (q, kcache, dv, seqlens, block_table, scale, causal, meta, splits,
                  descale_q, descale_k)

    def __call__(self):
        out, lse = torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(*self.a)
        return out, lse


class SparseDecode:
    """FlashMLA's sparse decode over an FP8 cache (see pack_v32 and pack_model1).

    q (b, s_q, h_q, 576 | 512) bf16, indices (b, s_q, topk) i32, -1 = none.
    A call returns out (b, s_q, h_q, 512) and the natural-log lse (b, h_q, s_q).
    """

    def __init__(self, q, kv, indices, scale, extra_kv=None, extra_indices=None,
                 topk_length=None, extra_topk_length=None, sink=None, dv=512):
        self.head = (q, kv, indices, topk_length, sink)
        self.tail = (extra_kv, extra_indices, extra_topk_length, dv, scale, None)
        self.meta = self.splits = None

    def __call__(self):
        out, lse, self.meta, self.splits = torch.ops._flashmla_C.sparse_decode_fwd(
            *self.head, self.meta, self.splits, *self.tail)
        return out, lse


def sparse_prefill(q, kv, indices, scale, sink=None, topk_length=None, dv=512):
    """q (s_q, h_q, d), kv (s_kv, 1, d), indices (s_q, 1, topk) -> out, max_logits, lse."""
    return torch.ops._flashmla_C.sparse_prefill_fwd(
        q, kv, indices, scale, dv, sink, topk_length, None)


def vllm_merge(out, out_lse, a, a_lse, b, b_lse):
    """out, a, b (n, heads, dim); the natural-log lse tensors (heads, n)."""
    torch.ops._C.merge_attn_states(out, out_lse, a, a_lse, b, b_lse, None, None)


# ---- the two FP8 cache layouts that the sparse decode reads ----

def _pow2_scale(tiles):
    """Power-of-two scale for each tile (last axis) so that its largest value fits e4m3."""
    amax = tiles.abs().amax(-1).float().clamp_min(448e-4)
    return torch.exp2(torch.ceil(torch.log2(amax / 448.0)))


def pack_v32(kv):
    """(pages, page, 576) bf16 -> uint8 (pages, page, 1, 656).

    A token: 512 e4m3 values, four f32 scales (one for each 128 values), 64 bf16 values.
    """
    pages, page, d = kv.shape
    assert d == 576
    out = torch.empty(pages, page, 656, dtype=torch.uint8, device=kv.device)
    nope = kv[..., :512].float().view(pages, page, 4, 128)
    scale = _pow2_scale(nope)
    f8 = (nope / scale[..., None]).to(torch.float8_e4m3fn)
    out[..., :512] = f8.view(torch.uint8).view(pages, page, 512)
    out[..., 512:528] = scale.contiguous().view(torch.uint8)
    out[..., 528:] = kv[..., 512:].contiguous().view(torch.uint8)
    return out.view(pages, page, 1, 656)


def unpack_v32(c):
    """The values that pack_v32's bytes stand for, f32 (pages, page, 576)."""
    c = c.view(c.shape[0], c.shape[1], 656)
    f8 = c[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scale = c[..., 512:528].contiguous().view(torch.float32)
    nope = f8.view(*f8.shape[:2], 4, 128) * scale[..., None]
    rope = c[..., 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.flatten(2), rope], -1)


def pack_model1(kv):
    """(pages, page, 512) bf16 -> uint8 (pages, page, 1, 584), a strided view.

    A page: for each token 448 e4m3 and 64 bf16 values (576 bytes), then for each token seven
    power-of-two exponent bytes (one for each 64 values) and a pad byte; the page's stride is
    rounded up to a multiple of 576.
    """
    pages, page, d = kv.shape
    assert d == 512
    stride = -(-page * 584 // 576) * 576
    raw = torch.zeros(pages, stride, dtype=torch.uint8, device=kv.device)
    nope = kv[..., :448].float().view(pages, page, 7, 64)
    scale = _pow2_scale(nope)
    tok = raw[:, :page * 576].view(pages, page, 576)
    f8 = (nope / scale[..., None]).to(torch.float8_e4m3fn)
    tok[..., :448] = f8.view(torch.uint8).view(pages, page, 448)
    tok[..., 448:] = kv[..., 448:].contiguous().view(torch.uint8)
    exp = (torch.log2(scale) + 127).round().to(torch.uint8)
    raw[:, page * 576:page * 584].view(pages, page, 8)[..., :7] = exp
    return raw.as_strided((pages, page, 1, 584), (stride, 584, 584, 1))


def unpack_model1(c):
    """The values that pack_model1's bytes stand for, f32 (pages, page, 512)."""
    pages, page = c.shape[:2]
    raw = c.as_strided((pages, page * 584), (c.stride(0), 1))
    tok = raw[:, :page * 576].reshape(pages, page, 576)
    exp = raw[:, page * 576:].reshape(pages, page, 8)[..., :7].float()
    f8 = tok[..., :448].contiguous().view(torch.float8_e4m3fn).float().view(pages, page, 7, 64)
    nope = f8 * torch.exp2(exp - 127)[..., None]
    rope = tok[..., 448:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.flatten(2), rope], -1)
