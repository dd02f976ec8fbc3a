#!/usr/bin/env python3
"""Time the MLA kernels that ours are compared with, on one Hopper GPU.

    python3 bench_peers.py --out FILE.json [--only check,dense,flashinfer] [--quick]

Sections, in order: ceilings, check, dense, dense_fp8, sparse_decode, sparse_prefill, merge, kernels.
`--only` takes section names and peer names (flashmla, flashinfer, vllm, triton), comma-separated:
a section runs when it is named or no section is; a peer likewise.

Each row holds, in microseconds (medians of --iters runs after warm-up):
  us         a CUDA graph of one call, L2 flushed before it by writing 256 MiB
  us_clean   the same, the flush then reading another 256 MiB, so that no dirty line is left in L2
             for the timed kernel to write back
  us_stream  the plain call (with its allocations), L2 flushed as for us
and tflops, gbps computed from us the way FlashMLA's tests compute them:
  dense    flops = b*h_q*s_q*(2*d + 2*dv)*mean_len (a causal mask is not subtracted)
           bytes = b*(s_q*h_q*(d + dv)*2 + mean_len*d*2)
  sparse   flops = 2*h_q*(queries*topk)*(d + dv); see section_sparse_* for the bytes
Attention rows exclude planning, which the section dense times for the shapes of one length:
  dense+schedule  FlashMLA making its schedule within the call
  plan            FlashMLA's metadata kernel as for its FP8 variant: dense_decode_fwd makes its own
  plan_host       us is the host's time from the call on an idle device until the plan is there:
                  FlashInfer's plan(), and the call of the row plan
The section kernels adds, in "kernels", each kernel's own time out of the profiler for the batches
of 64 and more: FlashMLA's published dense numbers count the split kernel alone, without the combine
kernel.  It comes last, since a profiler that has run once may slow later launches.
If the GPU's context breaks, the remaining sections run in a fresh process.
"""
import argparse
import faulthandler
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback

os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402

import flashmla_peer as fm  # noqa: E402
import flashinfer_peer as fip  # noqa: E402

DEV = "cuda"
D, DV, PAGE = 576, 512, 64
PLANNED = 16384  # planning is timed for the shapes with this length
SECTIONS = ("ceilings", "check", "dense", "dense_fp8", "sparse_decode", "sparse_prefill", "merge",
            "kernels")
PEERS = ("flashmla", "flashinfer", "vllm", "triton")
BF16 = torch.bfloat16

R = {"rows": [], "kernels": [], "checks": [], "errors": [], "ceilings": {}, "meta": {},
     "varlen_lens": {}}
A = argparse.Namespace(iters=30, std=0.1, out=None, quick=False, prof=False)
T0 = time.time()
SAVED = [T0]


def say(*a):
    print(f"[{time.time() - T0:6.1f}]", *a, flush=True)


def save():
    if A.out:
        R["meta"]["seconds"] = round(time.time() - T0, 1)
        tmp = pathlib.Path(A.out + ".part")
        tmp.write_text(json.dumps(R, indent=1))
        tmp.replace(A.out)
    SAVED[0] = time.time()


def error(where, e):
    R["errors"].append({"where": where, "error": f"{type(e).__name__}: {e}"[:2000],
                        "trace": traceback.format_exc()[-3000:]})
    say("FAILED", where, f"{type(e).__name__}: {e}"[:600])
    alive()
    alive()  # a launch error that is still pending comes out of the first call


def alive():
    try:
        torch.zeros(1, device=DEV).item()
        return True
    except Exception:
        return False


# ---- timing ----

class Flush:
    """256 MiB written, and (clean) another 256 MiB read after that."""
    w = r = None

    @classmethod
    def run(cls, clean=False):
        if cls.w is None:
            cls.w = torch.zeros(64 << 20, dtype=torch.float32, device=DEV)
            cls.r = torch.ones(64 << 20, dtype=torch.float32, device=DEV)
        cls.w.zero_()
        if clean:
            cls.r.sum()


def median(x):
    x = sorted(x)
    n = len(x)
    return (x[(n - 1) // 2] + x[n // 2]) / 2


def series(call, iters, clean=False):
    ev = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
          for _ in range(iters)]
    for a, b in ev:
        Flush.run(clean)
        a.record()
        call()
        b.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in ev]


def timeit(fn, iters=None, warm=3):
    iters = iters or A.iters
    for _ in range(warm):
        fn()
    torch.cuda.synchronize()
    ts = series(fn, iters)
    t = {"us_stream": median(ts)}
    try:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            fn()
        for _ in range(warm):
            g.replay()
        torch.cuda.synchronize()
        ts = series(g.replay, iters)
        t["us_clean"] = median(series(g.replay, iters, True))
        t["how"] = "graph"
        del g
    except Exception as e:
        torch.cuda.synchronize()
        t["how"] = "stream"
        t["graph_error"] = f"{type(e).__name__}: {e}"[:300]
    ts.sort()
    t["us"] = median(ts)
    t["us_min"], t["us_p90"], t["n"] = ts[0], ts[int(0.9 * (len(ts) - 1))], len(ts)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in t.items()}


def host_time(fn, warm=3):
    """Host time of a call on an idle device until its results are there."""
    for _ in range(warm):
        fn()
    torch.cuda.synchronize()
    ts = []
    for _ in range(A.iters):
        t = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        ts.append((time.perf_counter() - t) * 1e6)
    ts.sort()
    t = {"us": median(ts), "us_min": ts[0], "us_p90": ts[int(0.9 * (len(ts) - 1))]}
    return {**{k: round(v, 3) for k, v in t.items()}, "n": len(ts), "how": "host"}


def kernels(fn, n=6):
    """Each kernel's mean time per call, from the profiler; {} where it does not work."""
    try:
        from torch.profiler import ProfilerActivity, profile
        fn()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(n):
                Flush.run()
                fn()
            torch.cuda.synchronize()
        res = {}
        for e in p.key_averages():
            us = getattr(e, "self_device_time_total", 0)
            low = e.key.lower()
            if us and not any(w in low for w in ("memset", "memcpy", "fillfunctor")):
                res[e.key[:120]] = res.get(e.key[:120], 0) + us / n
        return {k: round(v, 2) for k, v in res.items()}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:200]}


def row(peer, op, t, flops=None, nbytes=None, **kw):
    r = {"peer": peer, "op": op, **kw, **t}
    if flops:
        r["tflops"] = round(flops / t["us"] / 1e6, 1)
    if nbytes:
        r["gbps"] = round(nbytes / t["us"] / 1e3, 1)
    R["rows"].append(r)
    shape = " ".join(f"{k}={v}" for k, v in kw.items())
    say(f"{peer:14s} {op:15s} {shape:58s} {t['us']:9.1f} us (clean {t.get('us_clean', 0):9.1f}, "
        f"stream {t.get('us_stream', 0):9.1f}) {r.get('tflops', 0):6.1f} TF/s {r.get('gbps', 0):7.1f} GB/s"
        + {"graph": "", "host": "  [host]"}.get(t["how"], "  [no graph]"))
    if time.time() - SAVED[0] > 5:
        save()


def note_kernels(peer, op, fn, **kw):
    fn()
    k = kernels(fn)
    R["kernels"].append({"peer": peer, "op": op, **kw, "us": k})
    say(f"{peer:14s} {op:15s}", kw, k)


# ---- data ----

def normal_bf16(*shape, std=0.1):
    x = torch.empty(*shape, dtype=BF16, device=DEV)
    flat = x.view(-1)
    for i in range(0, flat.numel(), 1 << 28):
        flat[i:i + (1 << 28)].normal_(0, std)
    return x


def lens_fixed(b, s_k):
    return [s_k] * b


def lens_var(b, s_k, s_q):
    """The lengths that FlashMLA's own test draws (seed 0)."""
    rng = random.Random(0)
    return [int(max(rng.normalvariate(s_k, s_k / 2), s_q)) for _ in range(b)]


def pages_of(lens):
    return [-(-n // PAGE) for n in lens]


def page_table(lens, pool):
    """A block table of randomly placed pages of the pool, its rows padded with page 0."""
    np_ = pages_of(lens)
    perm = torch.randperm(pool, device=DEV)[:sum(np_)].to(torch.int32)
    width = -(-max(np_) // 4) * 4
    bt = torch.zeros(len(lens), width, dtype=torch.int32, device=DEV)
    if len(set(np_)) == 1:
        bt[:, :np_[0]] = perm.view(len(lens), -1)
    else:
        at = 0
        for i, n in enumerate(np_):
            bt[i, :n] = perm[at:at + n]
            at += n
    return bt, perm


def attn_ref(q, kv, scale, causal, dv=DV):
    """float64: q (s_q, h, d), kv (n, d) -> out (s_q, h, dv), natural-log lse (s_q, h)."""
    q, kv = q.double(), kv.double()
    s = torch.einsum("qhd,kd->qhk", q, kv) * scale
    if causal:
        s_q, n = q.shape[0], kv.shape[0]
        last = torch.arange(s_q, device=q.device) + n - s_q
        s.masked_fill_(torch.arange(n, device=q.device)[None, None] > last[:, None, None],
                       -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse[..., None]) @ kv[:, :dv], lse


def compare(name, out, ref, lse=None, lse_ref=None, tol=1e-2, lse_tol=1e-3):
    o, r = out.double(), ref.double()
    c = {"name": name, "max_abs": (o - r).abs().max().item(),
         "rel_rms": ((o - r).norm() / r.norm()).item(),
         "cos_diff": 1 - (2 * (o * r).sum() / (o * o + r * r).sum()).item()}
    ok = c["rel_rms"] < tol and bool(torch.isfinite(o).all())
    if lse is not None:
        c["lse_max_abs"] = (lse.double() - lse_ref.double()).abs().max().item()
        ok = ok and c["lse_max_abs"] < lse_tol
    c["ok"] = bool(ok)
    R["checks"].append(c)
    say("check", "ok  " if ok else "WRONG", name, {k: f"{v:.2e}" for k, v in c.items()
                                                    if isinstance(v, float)})


# ---- sections ----

class Peers:
    def __init__(self, want, direct):
        self.flashmla = self.fi = None
        self.want, self.lib = want, HERE / "lib"
        lib, site = HERE / "lib", HERE / "site"
        arch = HERE / "site.tar.xz"
        if not site.is_dir() and arch.exists():
            site = pathlib.Path(tempfile.mkdtemp(prefix="peer-site-"))
            with tarfile.open(arch) as t:
                t.extractall(site, filter="data")
        sys.path.insert(0, str(site))
        if "flashmla" in want:
            try:
                R["meta"]["flashmla_ops"] = fm.load_flashmla(lib)
                self.flashmla = fm
            except Exception as e:
                error("load flashmla", e)
        if "flashinfer" in want:
            try:
                R["meta"]["flashinfer"], self.fi = fip.load(site, direct)
                say("flashinfer:", R["meta"]["flashinfer"])
            except Exception as e:
                error("load flashinfer", e)

    def merge_fn(self, name):
        """f(out, out_lse, a, a_lse, b, b_lse), and whether its lse is (n, heads) and base 2."""
        if name == "triton":
            import triton_kernels
            return triton_kernels.merge, False
        if name == "flashinfer":
            return (lambda o, ol, a, la, b, lb: self.fi.merge_state(a, la, b, lb, o, ol)), True
        # not before here: all but one of this library's GPU images are blanked
        R["meta"]["vllm_merge"] = fm.load_vllm_merge(self.lib)
        return fm.vllm_merge, False


def fi_setup(mla, q, pool, lens, perm, causal, scale):
    """Plans FlashInfer's decode over the same q, pages and page order.

    Returns call, out, lse, plan: plan() plans anew."""
    b, s_q, h, _ = q.shape
    np_ = torch.tensor([0] + pages_of(lens), dtype=torch.int32)
    i32 = dict(dtype=torch.int32, device=DEV)
    a = (torch.arange(b + 1, **i32) * s_q, np_.cumsum(0).to(**i32), perm,
         torch.tensor(lens, **i32), h, PAGE, causal, scale)
    mla.plan(*a)
    qf = q.view(b * s_q, h, D)
    kv = pool.view(-1, PAGE, D)
    qn, qp, ckv, kpe = qf[..., :DV], qf[..., DV:], kv[..., :DV], kv[..., DV:]
    out = torch.empty(b * s_q, h, DV, dtype=BF16, device=DEV)
    lse = torch.empty(b * s_q, h, dtype=torch.float32, device=DEV)
    return (lambda: mla.run(qn, qp, ckv, kpe, out, lse)), out, lse, (lambda: mla.plan(*a))


def section_ceilings(p, key="start"):
    c = R["ceilings"][key] = {}
    n = (4 << 30) if not A.quick else (1 << 30)
    a = torch.empty(n // 4, dtype=torch.float32, device=DEV).normal_()
    b = torch.empty_like(a)
    t = median(series(lambda: b.copy_(a), 15))
    c["copy_GBps"] = round(2 * n / t / 1e3, 1)
    t = median(series(lambda: a.sum(), 15))
    c["torch_sum_read_GBps"] = round(n / t / 1e3, 1)
    try:
        import triton_kernels
        tr = median(series(lambda: triton_kernels.read(a), 15))
        c["triton_read_GBps"] = round(n / tr / 1e3, 1)
    except Exception as e:
        error("ceilings: triton read", e)
    del a, b
    m = 8192
    x, y = (torch.randn(m, m, device=DEV).to(BF16) for _ in range(2))
    z = torch.empty(m, m, dtype=BF16, device=DEV)
    for _ in range(3):
        torch.matmul(x, y, out=z)
    t = median(series(lambda: torch.matmul(x, y, out=z), A.iters))
    c["bf16_matmul_8192_TFLOPs"] = round(2 * m**3 / t / 1e6, 1)
    tiny = torch.zeros(1, device=DEV)
    te = timeit(lambda: tiny.add_(1))
    c["empty_kernel_us"] = {k: te[k] for k in ("us", "us_clean", "us_stream") if k in te}
    say("ceilings", key, c)


def section_ceilings_again(p):
    section_ceilings(p, "end")


def section_check(p):
    g = torch.Generator(device=DEV).manual_seed(1)

    def rnd(*s, std=1.0):
        return (torch.randn(*s, generator=g, device=DEV) * std).to(BF16)

    scale = D ** -0.5
    pool_n = 256
    lens = [2, 64, 65, 1000, 3333, 129, 2048]
    b = len(lens)
    pool = rnd(pool_n, PAGE, 1, D)
    bt, perm = page_table(lens, pool_n)
    seq = torch.tensor(lens, dtype=torch.int32, device=DEV)
    flat = [pool[bt[i, :n].long()].view(-1, D)[:lens[i]] for i, n in enumerate(pages_of(lens))]
    for h in (16, 64, 128):
        for s_q, causal in ((1, False), (2, True), (2, False)):
            q = rnd(b, s_q, h, D)
            refs = [attn_ref(q[i], flat[i], scale, causal) for i in range(b)]
            ro = torch.stack([r[0] for r in refs])
            rl = torch.stack([r[1] for r in refs])
            tag = f"h={h} s_q={s_q} causal={causal}"
            if p.flashmla:
                try:
                    out, lse = fm.DenseDecode(q, pool, bt, seq, scale, causal)()
                    compare("flashmla dense " + tag, out, ro, lse.transpose(1, 2), rl)
                except Exception as e:
                    error("check flashmla dense " + tag, e)
            for be in ("fa3", "fa2") if p.fi else ():
                try:
                    call, out, lse, _ = fi_setup(p.fi.mla(be), q, pool, lens, perm, causal, scale)
                    call()
                    compare(f"flashinfer {be} " + tag, out.view(b, s_q, h, DV), ro,
                            lse.view(b, s_q, h), rl)
                except Exception as e:
                    error(f"check flashinfer {be} " + tag, e)
    if p.flashmla:
        try:
            q = rnd(b, 1, 128, D)
            q8, k8 = q.to(torch.float8_e4m3fn), pool.to(torch.float8_e4m3fn)
            one = torch.ones(1, device=DEV)
            out, lse = fm.DenseDecodeFP8(q8, k8, bt, seq, scale, False, one, one)()
            f8 = [k8[bt[i, :n].long()].view(-1, D)[:lens[i]].to(torch.float32)
                  for i, n in enumerate(pages_of(lens))]
            refs = [attn_ref(q8[i].float(), f8[i], scale, False) for i in range(b)]
            compare("flashmla dense_fp8 h=128 s_q=1 (P is FP8 inside)", out,
                    torch.stack([r[0] for r in refs]), lse.transpose(1, 2),
                    torch.stack([r[1] for r in refs]), tol=8e-2, lse_tol=2e-2)
        except Exception as e:
            error("check flashmla dense_fp8", e)
        for d, pack, unpack in ((576, fm.pack_v32, fm.unpack_v32),
                                (512, fm.pack_model1, fm.unpack_model1)):
            for h in (64, 128):
                tag = f"sparse d={d} h={h}"
                try:
                    bb, s_q, topk, npg = 3, 2, 192, 24
                    kv = rnd(npg, PAGE, d)
                    c = pack(kv)
                    val = unpack(c).view(-1, d)
                    idx = torch.randint(0, npg * PAGE, (bb, s_q, topk), generator=g, device=DEV,
                                        dtype=torch.int32)
                    idx[0, 0, 100:] = -1
                    q = rnd(bb, s_q, h, d)
                    sc = d ** -0.5
                    out, lse = fm.SparseDecode(q, c, idx, sc)()
                    ro = torch.empty(bb, s_q, h, DV, dtype=torch.float64, device=DEV)
                    rl = torch.empty(bb, s_q, h, dtype=torch.float64, device=DEV)
                    for i in range(bb):
                        for j in range(s_q):
                            sel = idx[i, j][idx[i, j] >= 0].long()
                            o, l = attn_ref(q[i, j][None], val[sel], sc, False)
                            ro[i, j], rl[i, j] = o[0], l[0]
                    compare("flashmla decode_fp8 " + tag, out, ro, lse.transpose(1, 2), rl)
                    n = 24
                    q, kvp = rnd(n, h, d), rnd(700, 1, d)
                    idx = torch.randint(0, 700, (n, 1, 256), generator=g, device=DEV,
                                        dtype=torch.int32)
                    idx[0, 0, 200:] = -1
                    out, mx, lse = fm.sparse_prefill(q, kvp, idx, sc)
                    rs = [attn_ref(q[i][None], kvp[idx[i, 0][idx[i, 0] >= 0].long(), 0], sc, False)
                          for i in range(n)]
                    compare("flashmla prefill " + tag, out, torch.cat([r[0] for r in rs]),
                            lse, torch.cat([r[1] for r in rs]))
                except Exception as e:
                    error("check " + tag, e)


def dense_shapes():
    """(b, s_q, h, s_k, lens kind)"""
    out = []
    for kind in ("fixed", "var"):
        for s_q in (1, 2):
            for s_k in (4096, 8192, 16384, 32768):
                out.append((128, s_q, 128, s_k, kind))
    for h in (128, 64, 16):
        for b in (1, 4, 8, 16, 32, 64):
            for s_k in (1024, 4096, 16384, 65536):
                out.append((b, 1, h, s_k, "fixed"))
    return out[::7] if A.quick else out


def dense_volume(b, s_q, h, mean, kv_elem=2, q_elem=2):
    flops = b * h * s_q * (2 * D + 2 * DV) * mean
    nbytes = b * (s_q * h * D * q_elem + mean * D * kv_elem + s_q * h * DV * 2)
    return flops, nbytes


def section_dense(p):
    shapes = [x for x in dense_shapes() if not A.prof or x[0] == 128]
    lens_of = {}
    for b, s_q, h, s_k, kind in shapes:
        lens_of[b, s_q, s_k, kind] = lens_var(b, s_k, s_q) if kind == "var" else lens_fixed(b, s_k)
        if kind == "var":
            R["varlen_lens"][f"b{b}_sq{s_q}_sk{s_k}"] = lens_of[b, s_q, s_k, kind]
    pool_n = max(sum(pages_of(v)) for v in lens_of.values()) + 64
    say(f"dense: a pool of {pool_n} pages, {pool_n * PAGE * D * 2 / 2**30:.2f} GiB")
    pool = normal_bf16(pool_n, PAGE, 1, D, std=A.std)
    scale = D ** -0.5
    for b, s_q, h, s_k, kind in shapes:
        lens = lens_of[b, s_q, s_k, kind]
        mean = sum(lens) / b
        causal = s_q > 1
        torch.manual_seed(0)
        bt, perm = page_table(lens, pool_n)
        seq = torch.tensor(lens, dtype=torch.int32, device=DEV)
        q = normal_bf16(b, s_q, h, D, std=A.std)
        flops, nbytes = dense_volume(b, s_q, h, mean)
        kw = dict(b=b, s_q=s_q, h_q=h, s_k=s_k, lens=kind, mean_len=round(mean, 2), causal=causal)
        if p.flashmla:
            try:
                f = fm.DenseDecode(q, pool, bt, seq, scale, causal)
                f()
                if A.prof:
                    note_kernels("flashmla", "dense", f, **kw)
                else:
                    row("flashmla", "dense", timeit(f), flops, nbytes, **kw)
                    if b == 128 and s_q == 1 and kind == "fixed":
                        row("flashmla", "dense+schedule", timeit(f.with_schedule), flops, nbytes,
                            **kw)
                    if s_k == PLANNED:
                        plan = lambda: fm.metadata(seq, s_q * h)
                        row("flashmla", "plan", timeit(plan), **kw)
                        row("flashmla", "plan_host", host_time(plan), **kw)
            except Exception as e:
                error(f"flashmla dense {kw}", e)
        for be in ("fa3", "fa2") if p.fi else ():
            if be == "fa2" and (b != 128 or kind == "var" or A.prof):
                continue
            try:
                call, *_, plan = fi_setup(p.fi.mla(be), q, pool, lens, perm, causal, scale)
                if A.prof:
                    note_kernels(f"flashinfer-{be}", "dense", call, **kw)
                else:
                    row(f"flashinfer-{be}", "dense", timeit(call), flops, nbytes, **kw)
                    if s_k == PLANNED:
                        row(f"flashinfer-{be}", "plan_host", host_time(plan), **kw)
            except Exception as e:
                error(f"flashinfer {be} dense {kw}", e)
    del pool


def section_dense_fp8(p):
    if not p.flashmla:
        return
    shapes = [(128, s_q, 128, s) for s_q in (1, 2) for s in (4096, 16384, 32768)]
    shapes += [(b, 1, 128, s) for b in (1, 16, 64) for s in (4096, 65536)]
    if A.quick:
        shapes = shapes[::5]
    pool_n = max(b * s // PAGE for b, _, _, s in shapes) + 64
    pool = torch.empty(pool_n, PAGE, 1, D, dtype=torch.float8_e4m3fn, device=DEV)
    for i in range(0, pool_n, 8192):
        n = min(8192, pool_n - i)
        pool[i:i + n] = normal_bf16(n, PAGE, 1, D, std=1.0).to(torch.float8_e4m3fn)
    one = torch.full((1,), 0.1, device=DEV)
    for b, s_q, h, s_k in shapes:
        kw = dict(b=b, s_q=s_q, h_q=h, s_k=s_k, lens="fixed", mean_len=s_k, causal=s_q > 1)
        try:
            torch.manual_seed(0)
            lens = lens_fixed(b, s_k)
            bt, _ = page_table(lens, pool_n)
            seq = torch.tensor(lens, dtype=torch.int32, device=DEV)
            q = normal_bf16(b, s_q, h, D, std=1.0).to(torch.float8_e4m3fn)
            f = fm.DenseDecodeFP8(q, pool, bt, seq, D ** -0.5, s_q > 1, one, one)
            flops, nbytes = dense_volume(b, s_q, h, s_k, 1, 1)
            row("flashmla", "dense_fp8", timeit(f), flops, nbytes, **kw)
        except Exception as e:
            error(f"dense_fp8 {kw}", e)


def sparse_indices(b, s_q, s_k, topk, page):
    """Distinct random tokens of each sequence, at randomly placed pages: (b, s_q, topk) i32."""
    per = s_k // page
    table = torch.randperm(b * per, device=DEV).view(b, per)
    idx = torch.empty(b, s_q, topk, dtype=torch.int32, device=DEV)
    for i in range(b):
        tok = torch.rand(s_q, s_k, device=DEV).topk(topk, dim=-1, sorted=False).indices
        idx[i] = (table[i][tok // page] * page + tok % page).to(torch.int32)
    return idx


def packed_pool(pack, pages, page, d):
    first = pack(normal_bf16(1, page, d))
    out = torch.empty((pages, first.stride(0)), dtype=torch.uint8, device=DEV)
    step = max(1, (8192 * 64) // page)
    for i in range(0, pages, step):
        n = min(step, pages - i)
        c = pack(normal_bf16(n, page, d))
        out[i:i + n] = c.as_strided((n, first.stride(0)), (first.stride(0), 1))
    return out.as_strided((pages, page, 1, first.shape[-1]),
                          (first.stride(0), first.shape[-1], first.shape[-1], 1))


def section_sparse_decode(p):
    """bytes = q + (distinct tokens)*656 (d 576) or *576 (d 512) + out, as FlashMLA's test."""
    if not p.flashmla:
        return
    # (format, d, h, s_q, s_k, page, topk, extra (s_k, page, topk) or None, batches)
    v32, m1 = (fm.pack_v32, 576), (fm.pack_model1, 512)
    groups = [
        ("v32", v32, 32768, 64, None,
         [(b, s_q, h, topk) for h in (128, 64) for s_q in (1, 2)
          for topk, batches in ((2048, (1, 8, 16, 32, 64, 128)), (512, (1, 16, 64, 128)), (1024, (1, 16, 64, 128)))
          for b in batches]),
        ("model1", m1, 32768, 64, None,
         [(b, s_q, 128, 2048) for s_q in (1, 2) for b in (1, 8, 64, 128)]),
        ("model1+extra", m1, 16384, 256, (16384, 64),
         [(b, s_q, h, (128, x)) for h, x in ((64, 512), (128, 1024)) for s_q in (1, 2) for b in (1, 2, 16, 64, 128)]),
    ]
    for name, (pack, d), s_k, page, extra, cases in groups:
        if A.quick:
            cases = cases[::4]
        if A.prof:
            cases = [c for c in cases if c[0] >= 64]
        if not cases:
            continue
        pool = xpool = None
        try:
            bmax = max(c[0] for c in cases)
            pool = packed_pool(pack, bmax * s_k // page, page, d)
            if extra:
                xpool = packed_pool(pack, bmax * extra[0] // extra[1], extra[1], d)
        except Exception as e:
            error(f"sparse_decode {name} pool", e)
            continue
        for b, s_q, h, tk in cases:
            topk, xtopk = tk if extra else (tk, 0)
            kw = dict(format=name, b=b, s_q=s_q, h_q=h, d=d, s_k=s_k, topk=topk)
            if extra:
                kw["extra_topk"] = xtopk
            try:
                torch.manual_seed(0)
                idx = sparse_indices(b, s_q, s_k, topk, page)
                distinct = idx.unique().numel()
                xidx = None
                if extra:
                    xidx = sparse_indices(b, s_q, extra[0], xtopk, extra[1])
                    distinct += xidx.unique().numel()
                q = normal_bf16(b, s_q, h, d, std=1.0)
                f = fm.SparseDecode(q, pool, idx, d ** -0.5, xpool, xidx)
                f()
                flops = 2 * h * b * s_q * (topk + xtopk) * (d + DV)
                nbytes = 2 * b * s_q * h * (d + DV) + distinct * (656 if d == 576 else 576)
                if A.prof:
                    note_kernels("flashmla", "sparse_decode", f, **kw)
                else:
                    row("flashmla", "sparse_decode", timeit(f), flops, nbytes, **kw)
            except Exception as e:
                error(f"sparse_decode {kw}", e)
        del pool, xpool


def section_sparse_prefill(p):
    """bytes = (queries*topk)*d*2 + q + out, as FlashMLA's test (gathered rows counted each time)."""
    if not p.flashmla:
        return
    cases = [(576, 128, 2048, 4096, s) for s in (8192, 16384, 32768)]
    cases += [(512, 128, 2048, 4096, s) for s in (8192, 32768)]
    cases += [(512, 64, 512, 4096, s) for s in (8192, 32768)]
    cases += [(512, 128, 1024, 4096, s) for s in (8192, 32768)]
    cases += [(576, 128, 2048, n, 32768) for n in (1, 64, 128, 256)]
    if A.quick:
        cases = cases[::5]
    for d, h, topk, s_q, s_kv in cases:
        kw = dict(s_q=s_q, h_q=h, d=d, s_k=s_kv, topk=topk)
        try:
            torch.manual_seed(0)
            q, kv = normal_bf16(s_q, h, d, std=A.std), normal_bf16(s_kv, 1, d, std=A.std)
            idx = torch.empty(s_q, 1, topk, dtype=torch.int32, device=DEV)
            for i in range(0, s_q, 1024):
                n = min(1024, s_q - i)
                idx[i:i + n, 0] = torch.rand(n, s_kv, device=DEV).topk(
                    topk, dim=-1, sorted=False).indices.to(torch.int32)
            flops = 2 * s_q * topk * h * (d + DV)
            nbytes = s_q * topk * d * 2 + s_q * h * (d + DV) * 2
            row("flashmla", "sparse_prefill",
                timeit(lambda: fm.sparse_prefill(q, kv, idx, d ** -0.5)), flops, nbytes, **kw)
        except Exception as e:
            error(f"sparse_prefill {kw}", e)


def section_merge(p):
    """bytes: two states read and one written, with their lse."""
    h = 128
    for name in ("triton", "flashinfer", "vllm"):
        if name not in p.want or (name == "flashinfer" and not p.fi):
            continue
        try:
            f, nh2 = p.merge_fn(name)

            def lse(n):
                x = torch.randn(n, h, device=DEV) * 3
                return x, (x / math.log(2) if nh2 else x.t().contiguous())

            n = 37
            a, b = (normal_bf16(n, h, DV, std=1.0) for _ in range(2))
            (la, ka), (lb, kb) = lse(n), lse(n)
            out, ol = torch.empty_like(a), torch.empty_like(ka)
            f(out, ol, a, ka, b, kb)
            w = torch.softmax(torch.stack([la, lb]).double(), 0)
            compare(f"merge {name}", out, w[0, ..., None] * a.double() + w[1, ..., None] * b.double(),
                    ol * math.log(2) if nh2 else ol.t(), torch.logaddexp(la.double(), lb.double()))
        except Exception as e:
            error(f"merge {name} check", e)
            continue
        for n in (256, 4096, 16384):
            kw = dict(tokens=n, h_q=h, dv=DV, dtype="bf16")
            try:
                a, b = (normal_bf16(n, h, DV, std=1.0) for _ in range(2))
                out, (_, ka), (_, kb) = torch.empty_like(a), lse(n), lse(n)
                ol = torch.empty_like(ka)
                nbytes = 3 * n * h * DV * 2 + 3 * n * h * 4
                row(name, "merge", timeit(lambda: f(out, ol, a, ka, b, kb)), None, nbytes, **kw)
            except Exception as e:
                error(f"merge {name} {kw}", e)


def section_kernels(p):
    A.prof = True
    section_dense(p)
    torch.cuda.empty_cache()
    section_sparse_decode(p)
    A.prof = False


def smi():
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,"
             "temperature.gpu", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20).stdout.strip()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def begin(**meta):
    """The settings of a run, and what is known of the machine."""
    faulthandler.dump_traceback_later(A.limit, exit=True)  # JSON saved so far stays
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    R["meta"].update(args=vars(A).copy(), torch=torch.__version__, python=sys.version.split()[0],
                     smi_start=smi(), argv=sys.argv, date=time.strftime("%Y-%m-%d %H:%M:%S"), **meta)
    if torch.cuda.is_available():
        pr = torch.cuda.get_device_properties(0)
        R["meta"]["gpu"] = dict(name=pr.name, sms=pr.multi_processor_count,
                                memory=pr.total_memory, l2=getattr(pr, "L2_cache_size", None))
    say(R["meta"].get("gpu"), R["meta"]["smi_start"])


def finish():
    """Writes the file, and says what was wrong."""
    R["meta"]["smi_end"] = smi()
    save()
    wrong = [c["name"] for c in R["checks"] if not c["ok"]]
    say(f"{len(R['rows'])} rows, {len(R['checks'])} checks ({len(wrong)} wrong), "
        f"{len(R['errors'])} errors")
    for w in wrong:
        say("WRONG", w)
    for e in R["errors"]:
        say("ERROR", e["where"], e["error"][:200])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--only", default="")
    ap.add_argument("--iters", type=int, default=30)
    ap.add_argument("--std", type=float, default=0.1,
                    help="deviation of the dense section's q and keys (0.1: as in FlashMLA's tests)")
    ap.add_argument("--quick", action="store_true", help="a few shapes of each section")
    ap.add_argument("--direct", action="store_true",
                    help="call FlashInfer's modules without importing its package")
    ap.add_argument("--lens", action="store_true", help="print the variable lengths and stop")
    ap.add_argument("--limit", type=int, default=280, help="seconds after which to give up")
    ap.add_argument("--append", action="store_true", help="add to what --out holds")
    ap.parse_args(namespace=A)
    if A.append:
        R.update(json.loads(pathlib.Path(A.out).read_text()))
    if A.lens:
        for s_q in (1, 2):
            for s_k in (4096, 8192, 16384, 32768):
                print(json.dumps({"b": 128, "s_q": s_q, "s_k": s_k,
                                  "lens": lens_var(128, s_k, s_q)}))
        return
    only = [w for w in A.only.split(",") if w]
    bad = [w for w in only if w not in SECTIONS + PEERS]
    if bad:
        sys.exit(f"--only: unknown {bad}; sections {SECTIONS}, peers {PEERS}")
    sections = [s for s in SECTIONS if s in only or not set(only) & set(SECTIONS)]
    peers = [s for s in PEERS if s in only or not set(only) & set(PEERS)]
    begin(sections=sections, peers=peers)
    p = Peers(peers, A.direct)
    save()
    if "ceilings" in sections and len(sections) > 1:
        at = [i for i, x in enumerate(sections) if x in ("merge", "kernels")]
        sections.insert(at[0] if at else len(sections), "ceilings_again")
    for i, s in enumerate(sections):
        try:
            globals()["section_" + s](p)
        except Exception as e:
            error("section " + s, e)
        if not alive():
            rest = [x for x in sections[i + 1:] if x != "ceilings_again"]
            say("the GPU's context is broken; the rest in a fresh process:", rest)
            save()
            left = int(A.limit - (time.time() - T0))
            if rest and A.out and left > 20:
                sys.stdout.flush()
                os.execv(sys.executable, [
                    sys.executable, __file__, "--out", A.out, "--append", "--limit", str(left),
                    "--iters", str(A.iters), "--std", str(A.std), "--only", ",".join(rest + peers),
                    *(["--quick"] if A.quick else []), *(["--direct"] if A.direct else [])])
            break
        torch.cuda.empty_cache()
        save()
    finish()


if __name__ == "__main__":
    main()
