#!/usr/bin/env python3
"""Time torch's products (cuBLAS) of the shapes of `bench --only linear`, on one GPU.

    python3 bench_products.py --out FILE.json [--iters 15] [--limit SECONDS]

Each row is {"op": "linear", "model", "m", "n", "k", "us", "tflops"}: `x [m, k] @ w [n, k]^T` in bf16, numbers of deviation 1 and
0.02 as ours are, a CUDA graph of one call, L2 flushed before it by writing 256 MiB, median of --iters runs after a warm-up.
"""
import argparse
import json
import statistics
import time

import torch

WEIGHTS = [
    ("v2-lite", 2048, 2048), ("v2-lite", 3072, 2048), ("v2-lite", 576, 2048), ("v2-lite", 21888, 2048),
    ("v2-lite", 2048, 10944), ("v2-lite", 102400, 2048),
    ("v3", 1536, 7168), ("v3", 24576, 1536), ("v3", 576, 7168), ("v3", 7168, 16384), ("v3", 18432, 7168),
    ("v3", 7168, 18432),
    ("v4-flash", 1024, 4096), ("v4-flash", 32768, 1024), ("v4-flash", 4096, 8192),
]
ROWS = [16, 64, 256, 1024, 4096, 16384]


def microseconds(call, iters, flush):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for run in range(iters + 2):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if run >= 2:
            times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--limit", type=float, default=300)
    args = parser.parse_args()
    began, rows = time.monotonic(), []
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.manual_seed(1)
    for model, n, k in WEIGHTS:
        w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        for m in ROWS:
            if (n > 100_000 and m > 64) or time.monotonic() - began > args.limit:
                continue
            x = torch.randn(m, k, device="cuda").bfloat16()
            us = microseconds(lambda: torch.nn.functional.linear(x, w), args.iters, flush)
            rows.append({"op": "linear", "model": model, "m": m, "n": n, "k": k, "us": round(us, 2),
                         "tflops": round(2e-6 * m * n * k / us, 1)})
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
