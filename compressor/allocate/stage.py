"""The stage `allocation` of a job: what each format costs each group, and from that the formats that are used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from compressor.allocate import budget
from compressor.allocate.choose import choose
from compressor.allocate.measure import FORMULA, PREDICTED, Cost, Probe, measure
from compressor.formats import UNROUNDED
from compressor.job_tensors import calibration_ids
from compressor.models.stream import BlockStream
from compressor.recipe import Quantization
from compressor.recipe_quantization import UNQUANTIZED

if TYPE_CHECKING:
    from compressor.pipeline import Run

STAGE = "allocation"
TOLD = 8
"""Groups that the passport's decisions name; all of them are in its `quantization.allocation`."""


def allocate(state: Run) -> None:
    """Choose the formats, once, where the recipe asks for it; quantization then works as if `overrides` named them."""
    if state.recipe.quantization.allocation is None:
        return
    record = state.job.stage(STAGE)
    if record is None:
        state.ui.stage(STAGE)
        record = state.job.finish(STAGE, _choose(state, _measure(state)))
        state.ui.note(f"{record['bits_per_weight']:.4g} bits a weight: {_counts(record['groups'])}")
    state.settle(settings(state.recipe.quantization, record["groups"]))


def settings(asked: Quantization, groups: Sequence[dict]) -> Quantization:
    """`asked` with the formats that were chosen for `groups` (rows of the record) by name: what most weights have as
    `format`, the rest as `overrides`."""
    weights: dict[tuple[str, str | None], int] = {}
    names: dict[tuple[str, str | None], list[str]] = {}
    for group in groups:
        option = group["options"][group["chosen"]]
        key = option["format"], option["activations"]
        weights[key] = weights.get(key, 0) + group["weights"]
        names.setdefault(key, []).extend(group["linears"])
    most = max((key for key in weights if key[0] != UNQUANTIZED), key=weights.__getitem__)
    overrides = [
        {"targets": linears, "format": key[0], "activations": key[1]} for key, linears in names.items() if key != most
    ]
    chosen = {"format": most[0], "activations": most[1], "overrides": overrides, "allocation": None}
    return Quantization.model_validate(asked.model_dump() | chosen)


def _measure(state: Run) -> list[list[list[dict]]]:
    """By block and group, a row of `Cost` for each candidate; each block is recorded when it is done."""
    asked, total = state.recipe.quantization, state.config.num_hidden_layers
    spec = asked.allocation
    assert spec is not None
    done = next((index for index in range(total) if state.job.stage(_part(index)) is None), total)
    if done < total:
        table = [budget.sizes(_shapes(state, names), asked, state.dtype) for names, _ in _groups(state)]
        probe = Probe(
            candidates=asked.candidates,
            cheapest=budget.cheapest(table),
            everything=spec.measure == "all",
            search=asked.scale_search,
            dtype=state.dtype,
            batch_size=state.recipe.calibration.batch_size,
        )
        since = time.monotonic()

        def finish(index: int, costs: list[list[Cost]]) -> None:
            nonlocal since
            rows, now = [[vars(cost) for cost in row] for row in costs], time.monotonic()
            state.job.finish(_part(index), {"costs": rows, "seconds": now - since})
            since = now

        stream = BlockStream(state.weights, state.weights.config, torch.float32)
        ids = calibration_ids(state.job)[: spec.rows]
        measure(stream, state.block_groups, ids, probe, done=done, finish=finish, ui=state.ui)
    return [state.job.result(_part(index))["costs"] for index in range(total)]


def _part(index: int) -> str:
    """The stage's part that measures block `index`."""
    return f"{STAGE}-{index:05d}"


def _groups(state: Run) -> list[tuple[list[str], str | None]]:
    """(full names of the linears, that of the matrix engines make of them) of every group, in order."""
    return [
        ([prefix + name for name in group.names], prefix + group.fused_as if group.fused_as else None)
        for index, groups in enumerate(state.block_groups)
        for prefix in [state.family.block(index)]
        for group in groups
    ]


def _shapes(state: Run, names: Sequence[str]) -> list[tuple[int, ...]]:
    return [state.inventory.tensors[f"{name}.weight"].shape for name in names]


def _choose(state: Run, costs: list[list[list[dict]]]) -> dict:
    """The record: what was measured, the choice, and how far from the least possible sum of KLs it may be."""
    asked = state.recipe.quantization
    spec = asked.allocation
    assert spec is not None
    rows: list[dict[str, Any]] = []
    for (names, fused), row in zip(_groups(state), [row for block in costs for row in block], strict=True):
        shapes = _shapes(state, names)
        options = []
        for candidate, size, cost in zip(asked.candidates, budget.sizes(shapes, asked, state.dtype), row, strict=True):
            name, activations = candidate or (UNQUANTIZED, None)
            known = {"kl": cost["kl"], "known": cost["known"], "output_error": cost["error"]}
            options.append({"format": name, "activations": activations, "bytes": size, **known})
        rows.append({"linears": names, "fused_as": fused, "weights": budget.weights(shapes), "options": options})
    allowed = budget.check(asked, [_shapes(state, row["linears"]) for row in rows], state.dtype)
    found = choose([[(option["bytes"], option["kl"]) for option in row["options"]] for row in rows], allowed)
    for made, index in zip(rows, found.indices, strict=True):
        made["chosen"] = index
    return {
        "budget_bits_per_weight": spec.bits_per_weight,
        "budget_bytes": allowed,
        "bytes": found.bytes,
        "bits_per_weight": 8 * found.bytes / sum(row["weights"] for row in rows),
        "rows": spec.rows,
        "length": state.recipe.calibration.length,
        "kl_sum": found.loss,
        "kl_sum_bound": found.bound,
        "kl_per_byte": found.price,
        "seconds": round(sum(state.job.result(_part(index))["seconds"] for index in range(len(costs))), 1),
        "groups": rows,
    }


def passport(record: dict) -> dict:
    """The record as the passport has it: with what its predictions are made of, where it holds any."""
    predicted = any(option["known"] == PREDICTED for group in record["groups"] for option in group["options"])
    inputs = [f"quantization.allocation.groups.options.{key}" for key in ("kl", "output_error")]
    return record | {"prediction": {"kind": "derived", "formula": FORMULA, "inputs": inputs} if predicted else None}


def decisions(record: dict) -> list[dict]:
    """What the passport says in words: the whole, and the groups kept larger whose KL in the smallest format is the
    largest."""
    groups = record["groups"]
    smallest = budget.cheapest([[option["bytes"] for option in group["options"]] for group in groups])
    why = (
        f"the sum of the groups' KLs is {record['kl_sum']:.3g}, and no choice in {record['budget_bytes']} bytes has "
        f"less than {record['kl_sum_bound']:.3g}; each is of one group rounded to nearest, before any channel scales, "
        "and together they may cost more or less"
    )
    made = [{"what": f"formats chosen by KL: {_counts(groups)}", "why": why}]
    kept = [g for g in groups if g["options"][g["chosen"]]["bytes"] > g["options"][smallest]["bytes"]]
    for group in sorted(kept, key=lambda group: -group["options"][smallest]["kl"])[:TOLD]:
        small, chosen = group["options"][smallest], group["options"][group["chosen"]]
        each = (small["kl"] - chosen["kl"]) / (chosen["bytes"] - small["bytes"])
        cost = f"its KL at {_named(small)} of {small['kl']:.3g} ({small['known']}) costs {each:.2g} a byte saved"
        price = record["kl_per_byte"]
        rest = f"the next byte would save {price:.2g} elsewhere" if each >= price else "it fits what the others left"
        what = f"keeps {group['fused_as'] or group['linears'][0]} at {_named(chosen)}"
        made.append({"what": what, "why": f"{cost}; {rest}"})
    return made


def _named(option: dict) -> str:
    if option["format"] == UNQUANTIZED:
        return "full precision"
    inputs = "" if option["activations"] == UNROUNDED else f" with {option['activations']} inputs"
    return option["format"] + inputs


def _counts(groups: Sequence[dict]) -> str:
    names = [_named(group["options"][group["chosen"]]) for group in groups]
    return ", ".join(f"{names.count(name)} groups at {name}" for name in dict.fromkeys(names))
