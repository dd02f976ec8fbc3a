#!/usr/bin/env python3
"""Time FlashAttention-3 with the rows of `bench --only ragged`, on one Hopper GPU.

    python3 bench_ragged.py --out FILE.json [--quick]
    python3 bench_ragged.py --check-import
    python3 bench_ragged.py --same FOLDER

Times are taken and named as in bench_peers.py; inputs are normal with deviation 1.  A causal row counts
half of its square as flops, and moves q, k, v and out.  `shared` channels of the keys are the same for all
heads, as in MLA.  Peers:
  fa3           the whole call as in vLLM's MLA prefill: a kernel that reads the lengths, and the attention
  fa3+metadata  the lengths were read before (get_scheduler_metadata); of the calls below 2 ms
  fa3+concat    shared > 0: the same as fa3, and before it k is put together of its two parts, as vLLM does
                in every layer; v stays a view.  128 heads: by a Triton kernel, as vLLM there calls one of
                FlashInfer; other heads: by two copies of torch, as in vLLM
`rel_rms` is the difference from float64 of the last token of the last sequence, in the first and the last
head; a wrong result is an error and no row.  --same only compares, on the inputs that
`bench --only ragged --save FOLDER` has written: the difference from float64 of all of its results, and of FA3's.
"""
import argparse
import itertools
import json
import math
import pathlib
import sys
import time

import torch

import bench_peers as bp
import fa3_peer

DEV, BF16 = bp.DEV, bp.BF16
# heads of queries and keys, dqk, dv, shared: as in ../ragged.rs
MODELS = [
    (128, 128, 192, 128, 64),
    (128, 128, 192, 128, 0),
    (128, 128, 128, 128, 0),
    (16, 16, 192, 128, 64),
    (16, 16, 192, 128, 0),
    (16, 16, 128, 128, 0),
    (32, 8, 128, 128, 0),
]
VARIED = "128..1024"
BATCHES = [("fixed", [4096]), ("fixed", [16384]), ("fixed", [32768]), ("fixed", [2048] * 16),
           (VARIED, [128 + i * 397 % 897 for i in range(64)])]
LONG = ("fixed", [16384])
ROWS = [(m, b, True) for m in MODELS for b in BATCHES] + [
    (MODELS[0], ("fixed", [1024]), True),
    (MODELS[0], ("fixed", [1024] * 16), True),
    ((16, 16, 64, 64, 0), LONG, True),
    (MODELS[4], LONG, False),
    (MODELS[5], LONG, False),
]
SHORT_US = 2000


def reference(q, k, v, scale, causal):
    """float64, one sequence: q (m, h, d), its last m of n tokens; k (n, h_kv, d), v (n, h_kv, dv)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    if causal:
        m, n = q.shape[0], k.shape[0]
        last = torch.arange(m, device=q.device) + n - m
        hidden = torch.arange(n, device=q.device)[None, None] > last[:, None, None]
        s.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.einsum("qhk,khd->qhd", torch.exp(s - lse[..., None]), v), lse


def ends(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEV)


def copies(k_nope, k_pe):
    """The keys of all heads out of their two parts, as vLLM makes them where FlashInfer does not."""
    k = torch.empty(*k_nope.shape[:2], k_nope.shape[2] + k_pe.shape[1], dtype=BF16, device=DEV)
    k[..., :k_nope.shape[2]] = k_nope
    k[..., k_nope.shape[2]:] = k_pe[:, None]
    return k


def concat_of(heads):
    """How k is put together for so many heads."""
    if heads != 128:
        return copies
    try:
        import triton_kernels
        kv, k_pe = bp.normal_bf16(5, heads, 256), bp.normal_bf16(5, 64)
        if not torch.equal(triton_kernels.concat_k(kv[..., :128], k_pe), copies(kv[..., :128], k_pe)):
            raise RuntimeError("wrong result")
        return triton_kernels.concat_k
    except Exception as e:
        bp.error("concat by Triton; two copies instead", e)
        return copies


def judged(name, out, lse, ref, ref_lse):
    """The relative difference; an error where the result is wrong."""
    bp.compare(name, out, ref, lse, ref_lse, lse_tol=2e-3)
    check = bp.R["checks"][-1]
    if not check["ok"]:
        raise RuntimeError(f"wrong result: {check}")
    return round(check["rel_rms"], 8)


def section_check(fa3):
    """All rows of small batches, splits of the keys among them."""
    lens = [1, 2, 63, 64, 65, 200, 333, 1000]
    cu, n = ends(lens), sum(lens)
    for (h, h_kv, d, dv), causal in itertools.product(
            ((4, 4, 192, 128), (4, 4, 128, 128), (8, 2, 128, 128), (4, 4, 64, 64)), (True, False)):
        name = f"fa3 heads={h}/{h_kv} {d}/{dv} causal={causal}"
        try:
            q, k, v = (bp.normal_bf16(n, *s, std=1.0) for s in ((h, d), (h_kv, d), (h_kv, dv)))
            refs = [reference(*(x[at - m:at] for x in (q, k, v)), d ** -0.5, causal)
                    for at, m in zip(cu[1:].tolist(), lens)]
            ref, ref_lse = (torch.cat(x) for x in zip(*refs))
            for more in ("", "+metadata"):
                metadata = fa3.metadata(q, k, v, cu, max(lens), causal) if more else None
                out, lse = fa3.fwd(q, k, v, cu, max(lens), d ** -0.5, causal, metadata)
                bp.compare(name + more, out, ref, lse.t(), ref_lse, lse_tol=2e-3)
        except Exception as e:
            bp.error("check " + name, e)


def rms(out, ref):
    return ((out.double() - ref).square().sum() / ref.square().sum()).sqrt().item()


def same_inputs(fa3, folder):
    """Both differences from float64 for each shape that is there."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    for name in names:
        about = json.loads((folder / f"{name}.json").read_text())
        if about["dtype"] != "BF16":
            raise RuntimeError(f"{name}: {about['dtype']}, FA3 is called with bf16")
        read = lambda part: torch.frombuffer(bytearray((folder / f"{name}.{part}").read_bytes()),
                                             dtype=BF16).reshape(about[part]).to(DEV)
        q, k, v, ours = (read(part) for part in ("q", "k", "v", "out"))
        lens, causal, scale = about["lens"], about["causal"], q.shape[2] ** -0.5
        cu, group = ends(lens), q.shape[1] // k.shape[1]
        out, _ = fa3.fwd(q, k, v, cu, max(lens), scale, causal)
        # A head at a time: the scores are large.
        refs = [torch.cat([reference(*(x[at - m:at, h:h + 1] for x, h in ((q, i), (k, i // group), (v, i // group))), scale,
                                     causal)[0] for at, m in zip(cu[1:].tolist(), lens)]) for i in range(q.shape[1])]
        ref = torch.cat(refs, 1)
        print(f"{name}: ours {rms(ours, ref):.4e}, fa3 {rms(out, ref):.4e}")
    return 0 if names else 1


def time_row(fa3, model, batch, causal, concat):
    (h, h_kv, d, dv, shared), (kind, lens) = model, batch
    n, longest, scale, cu = sum(lens), max(lens), d ** -0.5, ends(lens)
    torch.manual_seed(0)
    q = bp.normal_bf16(n, h, d, std=1.0)
    if shared:
        kv, k_pe = bp.normal_bf16(n, h_kv, d - shared + dv, std=1.0), bp.normal_bf16(n, shared, std=1.0)
        k_nope, v = kv.split([d - shared, dv], -1)
        keys = lambda: concat(k_nope, k_pe)
    else:
        k, v = (bp.normal_bf16(n, h_kv, w, std=1.0) for w in (d, dv))
        keys = lambda: k
    shape = dict(b=len(lens), s_q=longest, lens=kind, mean_len=round(n / len(lens), 2), h_q=h, h_kv=h_kv,
                 dqk=d, dv=dv, shared=shared, causal=causal)
    flops = 2.0 * h * sum(m * m for m in lens) * (0.5 if causal else 1.0) * (d + dv)
    nbytes = 2 * n * (h * (d + dv) + h_kv * (d - shared + dv) + shared)

    def timed(peer, call):
        out, lse = call()
        last, heads, heads_kv = slice(n - lens[-1], n), [0, h - 1], [0, h_kv - 1]
        ref, ref_lse = reference(q[-1:, heads], keys()[last][:, heads_kv], v[last][:, heads_kv], scale, causal)
        rel = judged(f"{peer} {shape}", out[-1:, heads], lse[heads, -1:].t(), ref, ref_lse)
        del out, lse
        t = bp.timeit(call)
        bp.row(peer, "ragged", t, flops, nbytes, **shape, rel_rms=rel)
        return t["us"]

    us = timed("fa3+concat" if shared else "fa3", lambda: fa3.fwd(q, keys(), v, cu, longest, scale, causal))
    if not shared and us < SHORT_US:
        metadata = fa3.metadata(q, k, v, cu, longest, causal)
        timed("fa3+metadata", lambda: fa3.fwd(q, k, v, cu, longest, scale, causal, metadata))


def section_ragged(fa3):
    concats = {}
    for i, (model, batch, causal) in enumerate(ROWS[::4] if bp.A.quick else ROWS):
        name = f"ragged {len(batch[1])} x {max(batch[1])}, {model}, causal={causal}"
        if time.time() - bp.T0 > bp.A.limit - 15:
            bp.R["skipped"].append(name)
            continue
        try:
            heads = model[0]
            if model[4] and heads not in concats:
                concats[heads] = concat_of(heads)
                bp.R["meta"][f"concat_{heads}"] = concats[heads].__module__ + "." + concats[heads].__name__
            time_row(fa3, model, batch, causal, concats.get(heads))
        except Exception as e:
            bp.error(name, e)
            if not bp.alive():
                bp.R["skipped"].append(f"ragged: all after row {i}, as the GPU's context is broken")
                return
        torch.cuda.empty_cache()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--iters", type=int, default=30)
    ap.add_argument("--quick", action="store_true", help="every fourth row")
    ap.add_argument("--limit", type=int, default=200, help="seconds after which to give up")
    ap.add_argument("--lens", action="store_true", help="print the variable lengths and stop")
    ap.add_argument("--check-import", action="store_true",
                    help="load the library, compare its signature and, on a GPU, its results; no times")
    ap.add_argument("--same", type=pathlib.Path, metavar="FOLDER", help="compare the results of the same inputs; no times")
    ap.parse_args(namespace=bp.A)
    if bp.A.same:
        return same_inputs(fa3_peer.FA3(bp.HERE / "lib"), bp.A.same)
    if bp.A.lens:
        print(json.dumps(BATCHES[-1][1]))
        return 0
    bp.R["skipped"] = []
    bp.R["varlen_lens"][VARIED] = BATCHES[-1][1]
    bp.begin(peers=["fa3"])
    fa3 = None
    try:
        fa3 = fa3_peer.FA3(bp.HERE / "lib")
        bp.R["meta"]["fa3_ops"] = fa3.schemas
        bp.say("loaded:", *fa3.schemas)
    except Exception as e:
        bp.error("load fa3", e)
    if fa3 and torch.cuda.is_available():
        section_check(fa3)
        if not bp.A.check_import:
            bp.section_ceilings(None)
            section_ragged(fa3)
            if bp.alive() and not bp.R["skipped"]:
                bp.section_ceilings(None, "end")
    bp.finish()
    failed = bp.R["errors"] or not all(c["ok"] for c in bp.R["checks"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
