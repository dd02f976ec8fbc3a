"""Call FlashAttention-3 as vLLM compiled it, without importing vLLM.

prepare.sh puts vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so of the vllm wheel under lib/, every GPU image
blanked but those that unpaged bf16 attention with heads of 192/128, 128/128 and 64/64 may choose:
no other call of it can be run.  The library registers its ops when it is loaded:
  _vllm_fa3_C  fwd, get_scheduler_metadata
"""
import lzma
import pathlib
import tempfile

import torch

LIB = "vllm_fa3.so.xz"
# What fwd takes beside its inputs: what vLLM's flash_attn_varlen_func passes.
UNUSED = dict.fromkeys((
    "k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table",
    "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale",
    "k_descale", "v_descale", "pack_gqa", "s_aux", "cp_tot_seqused_k"))
CONSTANT = dict(window_size_left=-1, window_size_right=-1, softcap=0.0, is_rotary_interleaved=True,
                num_splits=0, sm_margin=0, cp_world_size=1, cp_rank=0)
INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
          "softmax_scale", "is_causal", "scheduler_metadata")
METADATA = (
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim",
    "headdim_v", "qkv_dtype", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new",
    "seqused_q", "leftpad_k", "page_size", "max_seqlen_k_new", "is_causal", "window_size_left",
    "window_size_right", "has_softcap", "num_splits", "pack_gqa", "sm_margin")


def names(op, expected):
    """The op's arguments in their order; an error where they are others than expected."""
    schema = op.default._schema
    found = [a.name for a in schema.arguments]
    if set(found) != set(expected):
        raise RuntimeError(f"{schema.name} has other arguments than in vllm 0.26.0: new "
                           f"{sorted(set(found) - set(expected))}, gone "
                           f"{sorted(set(expected) - set(found))}; schema: {schema}")
    return found


class FA3:
    def __init__(self, libdir):
        src = pathlib.Path(libdir) / LIB
        if not src.exists():
            raise FileNotFoundError(f"{src}: prepare.sh makes it")
        # kept on disk while the process runs; the loader maps it
        self.dir = tempfile.TemporaryDirectory(prefix="peer-")
        dst = pathlib.Path(self.dir.name) / "_vllm_fa3_C.abi3.so"
        dst.write_bytes(lzma.decompress(src.read_bytes()))
        torch.ops.load_library(str(dst))
        ops = torch.ops._vllm_fa3_C
        self.op, self.plan = ops.fwd, ops.get_scheduler_metadata
        self.order = names(self.op, (*UNUSED, *CONSTANT, *INPUTS))
        self.plan_order = names(self.plan, METADATA)
        self.schemas = [str(o.default._schema) for o in (self.op, self.plan)]

    def fwd(self, q, k, v, cu, longest, scale, causal, metadata=None):
        """q (n, h, d), k (n, h_kv, d), v (n, h_kv, dv) bf16, cu (b + 1) i32; keys as queries.

        Returns out (n, h, dv) and the natural-log lse (h, n).  Without metadata it launches the
        kernel that makes it, as within vLLM's MLA prefill.
        """
        given = {**UNUSED, **CONSTANT, "q": q, "k": k, "v": v, "cu_seqlens_q": cu,
                 "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest,
                 "softmax_scale": scale, "is_causal": causal, "scheduler_metadata": metadata}
        return self.op(*[given[name] for name in self.order])[:2]

    def metadata(self, q, k, v, cu, longest, causal):
        """What fwd makes of the lengths, to be given to it."""
        given = {**dict.fromkeys(METADATA), "batch_size": cu.numel() - 1, "max_seqlen_q": longest,
                 "max_seqlen_k": longest, "num_heads": q.shape[1], "num_heads_k": k.shape[1],
                 "headdim": q.shape[2], "headdim_v": v.shape[2], "qkv_dtype": q.dtype,
                 "seqused_k": (cu[1:] - cu[:-1]).contiguous(), "cu_seqlens_q": cu,
                 "max_seqlen_k_new": 0, "is_causal": causal, "window_size_left": -1,
                 "window_size_right": -1, "has_softcap": False, "num_splits": 0, "sm_margin": 0}
        return self.plan(*[given[name] for name in self.plan_order])
