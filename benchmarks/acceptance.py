#!/usr/bin/env python3
"""Acceptance of a proposer on MT-bench, HumanEval and GSM8K: in our runner, in vLLM, and what it is worth in seconds.

    acceptance.py TARGET PROPOSER --data DIR [--prompts 20] [--tokens 64] [--k 3] [--dtype bfloat16] [--json FILE]
        [--check-equal N]          answers equal those of the target alone, on the first N prompts of a task
        [--baseline TARGET2]       the same proposer before another target: what a quantization did to acceptance
        [--vllm-python PYTHON]     the same prompts in vLLM, with the head and without
        [--seconds] [--rounds 5]   tokens a second, and the terms that explain them
        [--adaptive]               of drafts as deep as pays, too

    acceptance.py MODEL eagle3:HEAD --data DATA --dtype float32 --check-equal 20
    acceptance.py MODEL eagle3:HEAD --data DATA --vllm-python vllm-env/bin/python --json acceptance.json
    acceptance.py BUNDLE eagle3 --data DATA --baseline MODEL --seconds

TARGET is a checkpoint or a bundle, PROPOSER as `compress generate --proposer` spells it. DIR holds
mt_bench/question.jsonl, humaneval/HumanEval.jsonl.gz and gsm8k/test.jsonl. Of each, --prompts are spread evenly over
the file (from 8 on that is every category of MT-bench; its first turns), one user message through the chat template.
Greedy, a chain of k. tau is 1 + accepted/cycles and its cycles include the one that reads the prompt; the average is
the mean over tasks, its interval resamples prompts within tasks. Exits 1 where an answer of --check-equal differs: in
bfloat16 a near tie may do that, because a pass of k + 1 tokens adds in another order; float32 leaves next to none.

vLLM runs in bfloat16, uncompiled, one prompt at a time. Its rates are comparable to ours as far as the texts are equal.

--seconds: the engines take turns at every prompt; rates count the tokens and the time after the first token. The terms
of S = E/(1 + k·c + v + h), speed with the head by speed without, are those of `_turns.terms`, taken from the runs that
are timed: means over the cycles of a round, medians over rounds. With --baseline also the acceptance tax.
"""

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _turns import GREEDY, Engine, Run, take_turns, terms, watched

from compressor.calibration.prompts import encode
from compressor.checkpoint.config import read_config
from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.decode import Decoder, Output, Runner, engine
from compressor.decode.length import Adaptive, Fixed
from compressor.errors import CompressError
from compressor.measure import economics
from compressor.measure.acceptance import BOOTSTRAP_SAMPLES, measure, summarize
from compressor.proposers import load
from compressor.proposers.base import Proposer

FILES = {"mt_bench": "question.jsonl", "humaneval": "HumanEval.jsonl.gz", "gsm8k": "test.jsonl"}
RATES = ("conditional", "unconditional")
COUNTS = ("prompts", "tokens", "cycles", "drafts", "proposed", "accepted")
ROOM = 64
"""Positions that vLLM gets beyond the longest answer, so that no draft is cut."""

Prompts = dict[str, list[list[int]]]
"""Token ids by task."""
Answers = dict[str, list[Output]]
ADAPTIVE = ", adaptive"


def questions(data: Path, wanted: int) -> dict[str, list[str]]:
    """`wanted` questions of every task, spread evenly over its file."""
    found = {}
    for task, name in FILES.items():
        path = data / task / name
        if not path.is_file():
            wants = ", ".join(f"{folder}/{file}" for folder, file in FILES.items())
            raise SystemExit(f"{path}: missing; --data names a folder with {wants}")
        text = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
        rows = [json.loads(line) for line in text.split(b"\n") if line]
        if not 1 <= wanted <= len(rows):
            raise SystemExit(f"--prompts {wanted}: {path} has 1 to {len(rows)} of them")
        picked = [rows[i * len(rows) // wanted] for i in range(wanted)]
        read = {"mt_bench": lambda row: row["turns"][0], "humaneval": lambda row: row["prompt"]}
        found[task] = [read.get(task, lambda row: row["question"])(row) for row in picked]
    return found


def encoded(texts: dict[str, list[str]], target: Path) -> Prompts:
    tokenizer = load_tokenizer(target)
    messages = {task: [[{"role": "user", "content": text}] for text in rows] for task, rows in texts.items()}
    return {task: [encode({"messages": message}, tokenizer) for message in rows] for task, rows in messages.items()}


class Recording(Runner):
    """Keeps what it generated."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outputs: list[Output] = []

    def generate(self, *args: Any, **options: Any) -> Output:
        self.outputs.append(super().generate(*args, **options))
        return self.outputs[-1]


def accepted(
    decoder: Decoder, proposer: Proposer | None, prompts: Prompts, target: str, args: argparse.Namespace
) -> tuple[dict[str, Any], Answers]:
    """The entries of `measure` by task, with those of the average, and all answers."""
    tasks, answers = {}, {}
    for task, rows in prompts.items():
        runner = Recording(decoder, proposer, args.k)
        entry = measure(
            runner, rows, task=task, target=target, k=args.k, max_new_tokens=args.tokens, law=GREEDY, seed=0
        )
        answers[task] = runner.outputs
        entry |= {"prompts": len(rows), "tokens": sum(len(output.token_ids) for output in runner.outputs)}
        tasks[task] = entry
        print(line(task, entry), flush=True)
    tasks["average"] = average(list(tasks.values()))
    tasks["average"]["ci95"] = interval(mean_taus([counts(answers)])[0], args.prompts)
    print(line("average", tasks["average"]), flush=True)
    return tasks, answers


def average(entries: list[dict]) -> dict[str, Any]:
    """Means of rates and tau over tasks (a rate that a task does not have is left out), sums of the counts."""
    found: dict[str, Any] = {key: sum(entry[key] for entry in entries) for key in COUNTS if key in entries[0]}
    for key in RATES:
        if key in entries[0]:
            columns = zip(*(entry[key] for entry in entries), strict=True)
            known = [[rate for rate in column if rate is not None] for column in columns]
            found[key] = [sum(rates) / len(rates) if rates else None for rates in known]
    return found | {"tau": sum(entry["tau"] for entry in entries) / len(entries)}


def counts(answers: Answers) -> list[np.ndarray]:
    """(accepted, cycles) of every answer [n, 2], task by task."""
    return [np.array([(output.accepted, output.cycles) for output in rows], float) for rows in answers.values()]


def mean_taus(sets: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """The average tau of each set in bootstrap samples that resample prompts within tasks: the same of every set."""
    generator = np.random.default_rng(0)
    totals: list[list[np.ndarray]] = [[] for _ in sets]
    for tasks in zip(*sets, strict=True):
        picks = generator.integers(len(tasks[0]), size=(BOOTSTRAP_SAMPLES, len(tasks[0])))
        for total, rows in zip(totals, tasks, strict=True):
            sums = rows[picks].sum(1)
            total.append(1 + sums[:, 0] / sums[:, 1])
    return [np.mean(total, axis=0) for total in totals]


def interval(samples: np.ndarray, prompts: int) -> list[float] | None:
    """95 % of the samples; None where a task has one prompt, which cannot be resampled."""
    return [float(value) for value in np.quantile(samples, [0.025, 0.975])] if prompts > 1 else None


def equal(decoder: Decoder, prompts: Prompts, answers: Answers, args: argparse.Namespace) -> dict[str, Any]:
    """The first prompts of each task by the target alone: how many answers are the same, where the others part."""
    found: dict[str, Any] = {}
    for task, rows in prompts.items():
        pairs = [
            (Runner(decoder).generate(ids, args.tokens, GREEDY, 0).token_ids, output.token_ids)
            for ids, output in zip(rows[: args.check_equal], answers[task], strict=False)
        ]
        parted = {index: parting(*pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]}
        found[task] = {"prompts": len(pairs), "equal": len(pairs) - len(parted), "first_difference": parted}
        print(f"{task}: {len(pairs) - len(parted)} of {len(pairs)} answers equal the target's alone", flush=True)
    return found


def parting(one: list[int], other: list[int]) -> int:
    """The first position at which two texts differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def ask_vllm(prompts: Prompts, spec: dict | None, args: argparse.Namespace) -> dict[str, list[dict]]:
    """vLLM's answers by task, each with its `token_ids` and `counts`: drafts, then accepted tokens a position."""
    longest = max(len(ids) for rows in prompts.values() for ids in rows)
    command = [args.vllm_python, str(Path(__file__).with_name("vllm_worker.py")), str(args.target), "--eager"]
    command += ["--max-model-len", str(longest + args.tokens + ROOM)] + (["--spec", json.dumps(spec)] if spec else [])
    requests = [{"token_ids": rows, "max_new_tokens": args.tokens, "details": True} for rows in prompts.values()]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    answers = done.stdout.splitlines()[1:]  # the first says that it is ready
    if done.returncode or len(answers) != len(prompts):
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return {task: json.loads(line) for task, line in zip(prompts, answers, strict=True)}


def vllm(prompts: Prompts, ours: dict[str, Any], answers: Answers, spec: dict, args: argparse.Namespace) -> dict:
    """Does vLLM say the same with and without the head, and accept as often as we do?"""
    plain, fast = ask_vllm(prompts, None, args), ask_vllm(prompts, spec, args)
    tasks = {task: vllm_task(fast[task], plain[task], answers[task], args.k) for task in prompts}
    tasks["average"] = average(list(tasks.values()))
    for task, entry in tasks.items():
        entry["ours_minus_vllm"] = differences(ours[task]["unconditional"], entry["unconditional"])
        print(line(f"vLLM {task}", entry) + f", ours - vLLM {shown(entry['ours_minus_vllm'])}")
        if task != "average":
            texts = f"vLLM's answers equal those without the head: {sum(entry['equals_target_only'])}"
            same = f"ours: {sum(entry['equals_ours'])}, there ours - vLLM {shown(entry['ours_minus_vllm_where_equal'])}"
            print(f"  of {entry['prompts']}, {texts}, {same}", flush=True)
    return tasks


def vllm_task(runs: list[dict], plain: list[dict], answers: list[Output], k: int) -> dict[str, Any]:
    """Counts and rates of vLLM's answers, beside its answers without the head and ours."""

    def unconditional(runs: list[dict]) -> list[float | None]:
        none = [0] * (k + 1)
        drafts, *hits = (sum(column) for column in zip(none, *(run["counts"] for run in runs), strict=True))
        return [hit / drafts if drafts else None for hit in hits]

    pairs = [(run["token_ids"], output.token_ids) for run, output in zip(runs, answers, strict=True)]
    alike = [index for index, (theirs, own) in enumerate(pairs) if theirs == own]
    where_equal = summarize([answers[i] for i in alike], k, 0)["unconditional"] if alike else [None] * k
    drafts, accepted = sum(run["counts"][0] for run in runs), sum(sum(run["counts"][1:]) for run in runs)
    return {
        "prompts": len(runs),
        "tokens": sum(run["tokens"] for run in runs),
        "drafts": drafts,
        "accepted": accepted,
        "tau": 1 + accepted / (drafts + len(runs)),  # the pass that reads a prompt has no draft
        "unconditional": unconditional(runs),
        "equals_target_only": [run["token_ids"] == one["token_ids"] for run, one in zip(runs, plain, strict=True)],
        "equals_ours": [theirs == own for theirs, own in pairs],
        "parts_from_ours_at": [None if theirs == own else parting(theirs, own) for theirs, own in pairs],
        "ours_minus_vllm_where_equal": differences(where_equal, unconditional([runs[i] for i in alike])),
    }


def differences(one: list[float | None], other: list[float | None]) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(one, other, strict=True)]


def seconds(
    targets: dict[str, tuple[Decoder, Proposer | None]],
    prompts: Prompts,
    answers: dict[str, Answers],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """By target, then by task and over all: medians of `terms` over the rounds, and S were all free but drafting."""
    engines: dict[str, Engine] = {}
    lengths = {"": lambda: Fixed(args.k)} | ({ADAPTIVE: lambda: Adaptive(args.k)} if args.adaptive else {})
    for name, (decoder, proposer) in targets.items():
        engines[f"{name} alone"] = watched(decoder, None, Fixed(0))
        engines |= {name + suffix: watched(decoder, proposer, length()) for suffix, length in lengths.items()}
    rounds: list[dict[str, dict[str, list[Run]]]] = [{} for _ in range(args.rounds)]
    for number, task, runs in take_turns(engines, prompts, args.tokens, args.rounds):
        if number >= 0:
            rounds[number][task] = runs
            print(f"round {number}, {task}: timed", flush=True)
    for tasks in rounds:
        tasks["all"] = {key: [run for runs in tasks.values() for run in runs[key]] for key in engines}
    found: dict[str, Any] = {}
    for name, suffix in product(targets, lengths):
        found[name + suffix] = {}
        for task in (*prompts, "all"):
            seen = [terms(tasks[task][f"{name} alone"], tasks[task][name + suffix]) for tasks in rounds]
            entry = {key: median(each[key] for each in seen) for key in seen[0]}
            if not suffix:
                outputs = answers[name].get(task) or [output for rows in answers[name].values() for output in rows]
                entry["S_if_verifying_costs_a_step"] = economics.speedup(alpha(outputs, args.k), args.k, entry["c"])
            found[name + suffix][task] = entry | {"S_of_rounds": [each["S"] for each in seen]}
            shown_terms = ", ".join(f"{key} {value:.3f}" for key, value in entry.items())
            print(f"{name}{suffix} {task}: {shown_terms}", flush=True)
    return found


def alpha(outputs: list[Output], k: int) -> list[float]:
    """Conditional acceptance per position over all cycles after the first, so that one without a draft accepts none:
    `economics.expected_tokens` of it is E."""
    survivors = [float(sum(output.cycles - 1 for output in outputs))]
    cycles = [entry for output in outputs for entry in output.accepted_per_position]
    survivors += [sum(sum(entry[i : i + 1]) for entry in cycles) for i in range(k)]
    return [after / before if before else 0.0 for before, after in pairwise(survivors)]


def against(entries: dict[str, dict[str, Any]], answers: dict[str, Answers], prompts: int) -> dict[str, Any]:
    """Acceptance by TARGET beside that by the baseline, on the same prompts."""
    ours, theirs = mean_taus([counts(answers[name]) for name in ("target", "baseline")])
    new, base = (entries[name]["average"] for name in ("target", "baseline"))
    found: dict[str, Any] = {"tau_ratio": new["tau"] / base["tau"], "ci95": interval(ours / theirs, prompts)}
    for key in RATES:
        found[f"{key}_difference"] = differences(new[key], base[key])
    print(f"tau by that of the baseline: {found['tau_ratio']:.3f} {shown(found['ci95'])}", flush=True)
    return found


def tax(timed: dict[str, Any]) -> dict[str, Any]:
    """What the loss of acceptance took from the gain in speed."""
    before, after = timed["baseline"]["all"], timed["target"]["all"]
    rate = "tokens_per_second"
    found = economics.acceptance_tax(before[rate], after[rate], before["E"], after["E"])
    print("acceptance tax:", found, flush=True)
    return found


def shown(values: Sequence[float | None] | None) -> str:
    return "–" if values is None else " ".join("   –" if value is None else f"{value:.3f}" for value in values)


def line(name: str, entry: dict[str, Any]) -> str:
    parts = [f"{name}: tau {entry['tau']:.3f}"] + ([f"({shown(entry['ci95'])})"] if entry.get("ci95") else [])
    parts += [f"{key} {shown(entry[key])}" for key in RATES if key in entry]
    return ", ".join([*parts, *(f"{entry[key]} {key}" for key in COUNTS if key in entry)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("proposer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float64"], default="bfloat16")
    parser.add_argument("--check-equal", type=int, default=0, metavar="N")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--adaptive", action="store_true", help="--seconds: also drafts as deep as pays, up to k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in ("k", "rounds", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: {getattr(args, name)} is not a positive number")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All that the arguments ask for; saved after every part, because the later ones take long."""
    choice, texts = load.parse(args.proposer, args.target), questions(args.data, args.prompts)
    load.check_size(args.k)
    if args.vllm_python and choice.kind != "eagle3":
        raise SystemExit(f"--vllm-python: runs eagle3 heads only, not {choice.kind}")
    prompts = encoded(texts, args.target)
    if args.baseline and encoded(texts, args.baseline) != prompts:
        raise SystemExit(f"{args.baseline}: its tokenizer or chat template makes other prompts than {args.target}'s")
    result: dict[str, Any] = {"target": str(args.target), "proposer": args.proposer, "k": args.k, "dtype": args.dtype}
    result |= {"baseline": str(args.baseline) if args.baseline else None, "max_new_tokens": args.tokens}
    result |= {"threads": torch.get_num_threads()}

    def save(key: str, value: Any) -> None:
        result[key] = value
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    targets: dict[str, tuple[Decoder, Proposer | None]] = {}
    entries: dict[str, dict[str, Any]] = {}
    answers: dict[str, Answers] = {}
    for name, folder in {"target": args.target, "baseline": args.baseline}.items():
        if folder:
            print(f"{name} {folder}", flush=True)
            decoder = engine.decoder(folder, dtype=getattr(torch, args.dtype))
            targets[name] = decoder, load.build(choice, decoder, folder)
            kind = "quantized" if "quantization_config" in read_config(folder) else "baseline"
            entries[name], answers[name] = accepted(*targets[name], prompts, kind, args)
            save("acceptance", entries)
    if args.baseline:
        save("against_baseline", against(entries, answers, args.prompts))
    if args.check_equal:
        save("equal_to_target_alone", equal(targets["target"][0], prompts, answers["target"], args))
    if args.vllm_python:
        spec = {"method": "eagle3", "model": str(choice.folder), "num_speculative_tokens": args.k}
        save("vllm", vllm(prompts, entries["target"], answers["target"], spec, args))
    if args.seconds:
        timed = seconds(targets, prompts, answers, args)
        save("seconds", timed)
        if args.baseline:
            save("acceptance_tax", tax(timed))
    return result


def main() -> None:
    try:
        result = run(arguments())
    except CompressError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(any(entry["first_difference"] for entry in result.get("equal_to_target_alone", {}).values()))


if __name__ == "__main__":
    main()
