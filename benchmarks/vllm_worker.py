#!/usr/bin/env python3
"""vLLM on the CPU as a process that answers prompts on request, for benchmarks/decode.py; needs an environment of vLLM.

Reads one JSON object a line, {"token_ids": [[...]], "max_new_tokens": n}, and writes one line a request: what
`decode.py` records of an engine. Prompts go one at a time. `--spec` is vLLM's speculative_config.
"""

import argparse
import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # else activations are rounded to 8 bits where weights have 4
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--spec", type=json.loads)
    parser.add_argument("--max-model-len", type=int, default=2048)
    args = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w")  # vLLM's own lines go elsewhere
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        max_model_len=args.max_model_len,
        dtype="bfloat16",
        speculative_config=args.spec,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=request["max_new_tokens"])
        runs = []
        for ids in request["token_ids"]:
            start = time.perf_counter()
            (answer,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            metrics = answer.metrics
            decode = metrics.last_token_ts - metrics.first_token_ts
            runs.append({"tokens": len(answer.outputs[0].token_ids), "seconds": seconds, "decode_seconds": decode})
        print(json.dumps(runs), file=channel, flush=True)


if __name__ == "__main__":
    main()
