#!/usr/bin/env python3
"""Tokens a second at batch 1: our runner beside transformers' generate and vLLM on the CPU, in alternating runs.

    decode.py MODEL QUESTIONS.jsonl [--vllm-python PYTHON] [--rounds 5] [--out benchmarks/decode.json] [--name NAME]

QUESTIONS.jsonl is Spec-Bench's (question_id, category, turns). Two sets of its prompts, through the chat template,
greedy, to the end of the answer or --tokens: "short" for plain decoding, "copying" (summarization and extraction) for
n-gram speculation. Every engine answers a set once a round; the engines take turns at every prompt, so that what the
machine does besides meets all of them alike, and a ratio is the median over rounds of the ratio within a round. Rates
are tokens after the first by the time after the first; `total` includes the prompt. MODEL may be a checkpoint or a
bundle; transformers is left out of a quantized one.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from _turns import Engine, Run, rates, take_turns, timing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from compressor.decode import Law, Runner, engine
from compressor.proposers.ngram import NgramProposer

GREEDY = Law(temperature=0.0)
K = 5
LOOKUP_MAX = 4
LONGEST_PROMPT = 1024
SHORT = ("writing", "qa")
COPYING = ("summarization", "extraction")


def prompts(path: Path, tokenizer: Any, categories: tuple[str, ...], each: int) -> list[list[int]]:
    """The first `each` questions of every category that fit, as token ids."""
    found: dict[str, list[list[int]]] = {category: [] for category in categories}
    for line in path.read_text().splitlines():
        question = json.loads(line)
        if len(found.get(question["category"], range(each))) < each:
            messages = [{"role": "user", "content": question["turns"][0]}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            if len(ids) <= LONGEST_PROMPT:
                found[question["category"]].append(ids)
    return [ids for rows in found.values() for ids in rows]


def ours(runner: Runner) -> Engine:
    def run(rows: list[list[int]], tokens: int) -> list[Run]:
        runs = []
        for ids in rows:
            start, first = time.perf_counter(), None
            for step in runner.stream(ids, tokens, GREEDY, 0):
                first, output = first or time.perf_counter(), step[1]
            end = time.perf_counter()
            runs.append(timing(len(output.token_ids), start, first or end, end))
            runs[-1]["tokens_per_cycle"] = (output.cycles + output.accepted) / output.cycles
        return runs

    return run


class FirstToken(BaseStreamer):
    """Notes when the first new token came; the prompt is put first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(model: PreTrainedModel, **options: Any) -> Engine:
    def run(rows: list[list[int]], tokens: int) -> list[Run]:
        runs = []
        for ids in rows:
            streamer, start = FirstToken(), time.perf_counter()
            output = model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, streamer=streamer, **options
            )
            end = time.perf_counter()
            runs.append(timing(output.shape[1] - len(ids), start, streamer.times[1], end))
        return runs

    return run


def vllm(python: str, model: str, spec: dict | None) -> Engine:
    command = [python, str(Path(__file__).with_name("vllm_worker.py")), model]
    command += ["--spec", json.dumps(spec)] if spec else []
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert worker.stdout is not None and worker.stdin is not None
    if not worker.stdout.readline():
        raise SystemExit(f"{' '.join(command)}: did not start")
    parent = psutil.Process(worker.pid)
    family = [parent, *parent.children(recursive=True)]

    def run(rows: list[list[int]], tokens: int) -> list[Run]:
        for process in family:
            process.resume()
        print(json.dumps({"token_ids": rows, "max_new_tokens": tokens}), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()  # type: ignore[union-attr]
        for process in family:  # its processes poll while they wait, at the expense of the others
            process.suspend()
        return json.loads(answer)

    for process in family:
        process.suspend()
    return run


def engines(args: argparse.Namespace) -> dict[str, Engine]:
    decoder = engine.decoder(args.model, dtype=torch.bfloat16)
    found = {
        "ours": ours(Runner(decoder, None)),
        "ours n-gram": ours(Runner(decoder, NgramProposer(1, LOOKUP_MAX), K)),
    }
    if "quantization_config" not in json.loads((Path(args.model) / "config.json").read_text()):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
        found["transformers"] = theirs(model)
        found["transformers prompt lookup"] = theirs(model, prompt_lookup_num_tokens=K)
    if args.vllm_python:
        spec = {
            "method": "ngram",
            "num_speculative_tokens": K,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": LOOKUP_MAX,
        }
        found["vllm"] = vllm(args.vllm_python, args.model, None)
        found["vllm n-gram"] = vllm(args.vllm_python, args.model, spec)
    return found


PAIRS = (
    ("ours", "transformers"),
    ("ours n-gram", "ours"),
    ("ours n-gram", "transformers prompt lookup"),
    ("ours", "vllm"),
    ("ours n-gram", "vllm n-gram"),
)


def ratios(by_engine: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Median over the rounds of one engine's decode rate by another's."""
    found = {}
    for one, other in PAIRS:
        if one in by_engine and other in by_engine:
            pairs = zip(by_engine[one], by_engine[other], strict=True)
            found[f"{one} / {other}"] = round(median(a["decode"] / b["decode"] for a, b in pairs), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--name", default="model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/decode.json"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sets = {
        "short": prompts(args.questions, tokenizer, SHORT, 3),
        "copying": prompts(args.questions, tokenizer, COPYING, 3),
    }
    running = engines(args)
    seen: dict[str, dict[str, list[dict[str, float]]]] = {name: {key: [] for key in running} for name in sets}
    cycles: dict[str, dict[str, float]] = {name: {} for name in sets}
    for round_number, name, runs in take_turns(running, sets, args.tokens, args.rounds):
        for key, entries in runs.items():
            if "tokens_per_cycle" in entries[0]:
                cycles[name][key] = sum(entry["tokens_per_cycle"] for entry in entries) / len(entries)
            if round_number >= 0:
                seen[name][key].append(rates(entries))
                print(round_number, name, key, {k: round(v, 1) for k, v in rates(entries).items()}, flush=True)
    result = {
        "threads": 2,
        "k": K,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "prompts": {name: [len(ids) for ids in rows] for name, rows in sets.items()},
        "tokens_per_cycle": {name: {k: round(v, 3) for k, v in rows.items()} for name, rows in cycles.items()},
        "tokens_per_second": {
            name: {
                key: {kind: round(median(entry[kind] for entry in rows), 1) for kind in ("decode", "total")}
                for key, rows in by_engine.items()
            }
            for name, by_engine in seen.items()
        },
        "ratio_of_decode_rates": {name: ratios(by_engine) for name, by_engine in seen.items()},
        "all_decode_rates": {
            name: {key: [round(entry["decode"], 1) for entry in rows] for key, rows in by_engine.items()}
            for name, by_engine in seen.items()
        },
    }
    everything = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps({**everything, args.name: result}, indent=1) + "\n")
    for child in psutil.Process().children(recursive=True):
        child.kill()
    print(json.dumps({key: result[key] for key in ("tokens_per_second", "ratio_of_decode_rates")}, indent=1))


if __name__ == "__main__":
    main()
