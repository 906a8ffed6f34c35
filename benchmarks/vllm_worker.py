#!/usr/bin/env python3
"""vLLM on the CPU as a process that answers prompts on request, for benchmarks/decode.py and acceptance.py; needs an
environment of vLLM.

Reads one JSON object a line, {"token_ids": [[...]], "max_new_tokens": n}, and writes one line a request: what
`decode.py` records of an engine. Prompts go one at a time. `--spec` is vLLM's speculative_config. With "details": true
each answer also has its token ids and, by vLLM's counters, its drafts and the accepted tokens of each position.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # else activations are rounded to 8 bits where weights have 4
os.environ.setdefault("HF_HUB_OFFLINE", "1")

COUNTERS = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counted(llm: Any) -> list[int]:
    """Drafts so far, then accepted tokens at each position; empty without speculation."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name in COUNTERS}
    return [found[COUNTERS[0]].value, *found[COUNTERS[1]].values] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--spec", type=json.loads)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="start sooner, run slower: nothing is compiled")
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
        enforce_eager=args.eager,
    )
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=request["max_new_tokens"])
        runs = []
        details = request.get("details", False)
        for ids in request["token_ids"]:
            before = counted(llm) if details else []
            start = time.perf_counter()
            (answer,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            metrics = answer.metrics
            decode = metrics.last_token_ts - metrics.first_token_ts
            runs.append({"tokens": len(answer.outputs[0].token_ids), "seconds": seconds, "decode_seconds": decode})
            if details:
                runs[-1]["token_ids"] = list(answer.outputs[0].token_ids)
                runs[-1]["counts"] = [new - old for new, old in zip(counted(llm), before, strict=True)]
        print(json.dumps(runs), file=channel, flush=True)


if __name__ == "__main__":
    main()
