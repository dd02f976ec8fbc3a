#!/usr/bin/env python3
"""vLLM's offline engine on one GPU: V2-Lite, or some layers of V3, in bf16 with random weights.

    bench_vllm.py v2-lite|v3 --config ../models/deepseek-v2-lite.json --out FILE.json [--layers N] [--batches 1,8,64]

The rows are those of `bench --only e2e` and `--only prefill`.  Decode: prompts of 264 tokens; the seconds of 136 new
tokens less those of 8 are 128 steps of the whole batch.  Prefill: seconds of a run with one new token.  Medians of 5,
after a warm-up.  The file is written after every row.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

T0 = time.time()
PROMPT, SHORT, LONG, REPEATS = 264, 8, 136, 5


def draw_weights(torch):
    """Weights as models are trained from: with vLLM's dummy ones tokens choose few experts, which a batch reads faster.  The
    engine's process is forked, and inherits this."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @torch.no_grad()
    def load_weights(self, model, model_config):
        generator = torch.Generator(device="cuda").manual_seed(1)
        for name, weight in model.state_dict().items():
            if not torch.is_floating_point(weight):
                continue
            if "norm" in name:
                weight.fill_(1)
            elif "e_score_correction_bias" in name:
                weight.zero_()
            else:
                weight.normal_(0, 0.02, generator=generator)

    DummyModelLoader.load_weights = load_weights


def smi():
    # By a process of its own: CUDA may not be started here before vLLM forks.
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model", choices=["v2-lite", "v3"])
    ap.add_argument("--config", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--layers", type=int)
    ap.add_argument("--limit", type=float, default=240, help="start nothing after so many seconds")
    ap.add_argument("--batches", default="1,8,64")
    a = ap.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
                      # Not needed, and not on the path of greedy bf16:
                      VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0")
    config = json.load(open(a.config))
    config["architectures"] = ["DeepseekV2ForCausalLM" if a.model == "v2-lite" else "DeepseekV3ForCausalLM"]
    config["torch_dtype"] = "bfloat16"
    config["num_hidden_layers"] = layers = a.layers or config["num_hidden_layers"]
    folder = tempfile.mkdtemp()
    json.dump(config, open(f"{folder}/config.json", "w"))

    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    draw_weights(torch)
    meta = {"smi_start": smi(), "argv": sys.argv, "date": time.strftime("%Y-%m-%d %H:%M:%S"), "vllm": vllm.__version__,
            "torch": torch.__version__}
    rows = []

    def row(op, batch, context, seconds, all_seconds, **more):
        """`seconds` of a step of decode, of all prompts of prefill."""
        tokens = batch * (1 if op == "e2e_decode" else context)
        rows.append({"peer": "vllm", "op": op, "model": a.model, "layers": layers, "b": batch, "context": context,
                     "ms": round(1e3 * seconds, 4), "tokens_per_s": round(tokens / seconds, 1),
                     "ms_all": [round(1e3 * s, 4) for s in all_seconds], **more})
        meta["seconds"] = round(time.time() - T0, 1)
        json.dump({"meta": meta, "ceilings": {}, "rows": rows, "errors": []}, open(a.out, "w"), indent=1)
        print("BENCH", rows[-1], flush=True)

    llm = LLM(model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=8448,
              enable_prefix_caching=False, max_num_batched_tokens=64 * PROMPT, max_num_seqs=64, seed=1)
    rng = random.Random(1)

    def run(batch, length, new):
        prompts = [TokensPrompt(prompt_token_ids=[rng.randrange(1000, 100000) for _ in range(length)])
                   for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        out = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(o.outputs[0].token_ids) for o in out]
        assert len(tokens) == batch and all(len(t) == new for t in tokens)
        return seconds, tokens

    for batch in map(int, a.batches.split(",")):
        if time.time() - T0 > a.limit:
            break
        for new in (SHORT, LONG, SHORT):
            run(batch, PROMPT, new)
        steps = []
        for _ in range(REPEATS):
            short = run(batch, PROMPT, SHORT)[0]
            seconds, tokens = run(batch, PROMPT, LONG)
            steps.append((seconds - short) / (LONG - SHORT))
        # Requests that draw one token go to the same experts: fewer weights would be read.
        distinct = statistics.mean(len(set(column)) for column in list(zip(*tokens))[SHORT:])
        row("e2e_decode", batch, PROMPT, statistics.median(steps), steps, distinct_tokens_per_step=round(distinct, 2))
    for batch, length in ((1, 2048), (1, 8192), (8, 2048)):
        if time.time() - T0 > a.limit:
            break
        run(batch, length, 1)
        run(batch, length, 1)
        seconds = [run(batch, length, 1)[0] for _ in range(REPEATS)]
        row("e2e_prefill", batch, length, statistics.median(seconds), seconds)
    print("BENCH done", flush=True)
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
