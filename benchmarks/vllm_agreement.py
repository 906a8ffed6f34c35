#!/usr/bin/env python3
"""Does a bundle say the same in vLLM as in our runner?

    vllm_agreement.py select BUNDLE PROMPTS.txt     print prompts whose greedy answer no rounding can change
    vllm_agreement.py compare BUNDLE PROMPTS.txt PLAIN.json [NGRAM.json]

A bfloat16 logit between 16 and 32 has steps of 0.125, and two engines add in different orders: where the two best
tokens are closer than a step or two, either may win in either engine, and all tokens after differ. `select` therefore
keeps, in order, the prompts whose margin (best logit minus second best, float32 weights) stays at least MARGIN over the
whole answer. The rule looks at our float32 model only, never at the other engine. Run `compare` on unselected prompts
too: it prints how far any of vLLM's tokens is from our float32 optimum, which must stay within rounding, and how far
ours in bfloat16 are: further where inputs are rounded to 8 bits, for bfloat16 moves some of them a whole level.

PLAIN.json and NGRAM.json hold {"token_ids": [[...]], "counters": {...}} from vLLM on the same prompts, greedy, without
and with n-gram speculation (k = 3, lookup 1 to 4). Set VLLM_CPU_INT4_W4A8=0 there: else vLLM rounds the inputs of INT4
layers too, on processors with AMX.
"""

import argparse
import json
from pathlib import Path

import torch

from compressor import Bundle
from compressor.decode import Law, Runner, engine
from compressor.measure.acceptance import summarize

GREEDY = Law(temperature=0.0)
MARGIN = 0.3
TOKENS = 64
COMPARED = 32


def margins(model, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(best minus second best, best minus the answer's token) at every token of the answer, float32."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1).values
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return best[:, 0] - best[:, 1], best[:, 0] - chosen


def select(bundle: Bundle, prompts: list[str], wanted: int) -> None:
    model, tokenizer = engine.load(bundle.path, dtype=torch.float32, kernel="dequantized"), bundle.tokenizer()
    runner, found = Runner(model), 0
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        for tokens in (8, TOKENS):  # most prompts fail within a few tokens
            answer = runner.generate(ids, max_new_tokens=tokens, law=GREEDY, seed=0).token_ids
            if margins(model, ids, answer)[0].min() < MARGIN:
                break
        else:
            print(prompt, flush=True)
            found += 1
            if found == wanted:
                return
    raise SystemExit(f"only {found} of {len(prompts)} prompts keep a margin of {MARGIN}")


def last_json(path: Path) -> dict:
    return json.loads([line for line in path.read_text().splitlines() if line.startswith("{")][-1])


def compare(bundle: Bundle, prompts: list[str], plain: dict, ngram: dict | None) -> None:
    tokenizer = bundle.tokenizer()
    ids: list[list[int]] = []
    exact = engine.load(bundle.path, dtype=torch.float32, kernel="dequantized")
    ours, equal, worst, own = bundle.runner(proposer=None), 0, 0.0, 0.0
    for prompt, theirs in zip(prompts, plain["token_ids"], strict=True):
        ids.append(tokenizer(prompt).input_ids)
        answer = ours.generate(ids[-1], max_new_tokens=COMPARED, law=GREEDY, seed=0).token_ids
        equal += answer == theirs[:COMPARED]
        worst = max(worst, margins(exact, ids[-1], theirs)[1].max().item())
        own = max(own, margins(exact, ids[-1], answer)[1].max().item())
    report = {
        "prompts": len(prompts),
        f"equal_on_first_{COMPARED}": equal,
        "largest_gap_of_a_vllm_token_to_the_float32_optimum": round(worst, 3),
        "largest_gap_of_ours_in_bfloat16": round(own, 3),
    }
    if ngram is not None:
        report |= speculation(bundle, ids, ngram)
    print(json.dumps(report, indent=1))


def speculation(bundle: Bundle, ids: list[list[int]], ngram: dict) -> dict:
    """Accepted tokens a draft at each position, ours and vLLM's."""
    speculating = bundle.runner(proposer="ngram", num_speculative_tokens=3)
    outputs = [speculating.generate(row, max_new_tokens=TOKENS, law=GREEDY, seed=0) for row in ids]
    counters = {name.removeprefix("vllm:spec_decode_num_"): value for name, value in ngram["counters"].items()}
    return {
        "ours_per_position": [round(rate, 3) for rate in summarize(outputs, 3, 0)["unconditional"]],
        "vllm_per_position": [round(n / counters["drafts"], 3) for n in counters["accepted_tokens_per_pos"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["select", "compare"])
    parser.add_argument("bundle")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("vllm", nargs="*", type=Path, help="compare: PLAIN.json, and NGRAM.json or not")
    parser.add_argument("--wanted", type=int, default=10)
    args = parser.parse_args()
    bundle, prompts = Bundle.open(args.bundle), args.prompts.read_text().splitlines()
    if args.command == "select":
        select(bundle, prompts, args.wanted)
    else:
        plain, *ngram = args.vllm
        compare(bundle, prompts, last_json(plain), last_json(ngram[0]) if ngram else None)


if __name__ == "__main__":
    main()
