"""From what the stages recorded to the files that describe a bundle: config.json and the passport."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compressor import bundle, propose, transform_stage
from compressor.allocate import stage as allocation
from compressor.blocks import QuantizedLayer
from compressor.bundle import environment as machine
from compressor.bundle import ledger
from compressor.bundle.api import Bundle
from compressor.bundle.passport import Passport
from compressor.bundle.record_base import MEASURED
from compressor.checkpoint.config import CONFIG, GENERATION_CONFIG, read_config
from compressor.checkpoint.source import tokenizer_files
from compressor.distill import stage
from compressor.errors import naming
from compressor.formats import Scheme
from compressor.formats.config import quantization_config
from compressor.proposers.load import HEAD_FOLDER
from compressor.train.passport import files as head_files

if TYPE_CHECKING:
    from compressor.pipeline import Run


RULES = {
    "exact": "accept each candidate with min(1, p/q), correct from norm((p - q)+), bonus token; siblings of a tree "
    "without replacement",
    "typical": "LOSSY: Medusa's typical acceptance, p(x) > min(0.09, 0.3 exp(-H(p))), the deepest accepted path",
}
"""Acceptance rules (compressor.decode.rejection), in words."""


def environment() -> dict:
    """What the bytes of a run depend on besides its recipe and source; a resumed run must have the same."""
    captured = machine.capture()
    return {"python": captured.python, "threads": captured.threads, "cpu": captured.cpu, **captured.packages}


def layer(entry: QuantizedLayer, original_bytes: int) -> dict:
    """The passport's row for one quantized linear whose weight had `original_bytes` in the source."""
    tensors, shape = entry.result.tensors, entry.shape
    return {
        "name": entry.name,
        "shape": list(shape),
        "format": entry.scheme.fmt.name,
        "activations": entry.scheme.activations,
        "error": entry.result.error,
        "diagonal_error": entry.result.diagonal_error,
        "sqnr_db": entry.result.sqnr_db if math.isfinite(entry.result.sqnr_db) else None,
        "packed_bytes": sum(t.nbytes for t in tensors.values()),
        "original_bytes": original_bytes,
        "stats": entry.result.stats,
    }


def ignored(state: Run) -> list[str]:
    """Every linear the bundle leaves unquantized, by checkpoint name and by the name engines fuse it into."""
    names = [state.family.head]
    for index, chosen in enumerate(state.block_groups):
        kept = {name for group in chosen for name in group.names}
        for group in state.family.linear_groups(state.config, index):
            left_out = [state.family.block(index) + name for name in group.names if name not in kept]
            names += left_out
            if left_out and group.fused_as:
                names.append(state.family.block(index) + group.fused_as)
    return names + state.inventory.mtp_linears()


def write_config(state: Run, folder: Path) -> None:
    """config.json with the quantization entry, and the tokenizer and generation files of the source."""
    source = state.source.folder
    config = read_config(source)
    config.pop("torch_dtype", None)  # the older spelling of dtype
    config["dtype"] = str(state.dtype).removeprefix("torch.")
    if state.weights.untied:
        config["tie_word_embeddings"] = False
    scheme = state.scheme
    config["quantization_config"] = quantization_config(
        scheme.fmt, activations=scheme.rounds_inputs, ignore=ignored(state), overrides=_overrides(state)
    )
    carried = [path for path in (*tokenizer_files(source), source / GENERATION_CONFIG) if path.exists()]
    files = {path.name: path.read_bytes() for path in carried}  # shutil would name the source on a full disk
    files[CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    for name, data in files.items():
        with naming(folder / name):
            (folder / name).write_bytes(data)


def _overrides(state: Run) -> list[tuple[Scheme, list[str]]]:
    """The schemes other than that of most linears, with patterns that match the linears' names and those of the
    matrices that engines fuse them into."""
    found: dict[Scheme, dict[tuple[str, ...], list[int]]] = {}
    for index, groups in enumerate(state.block_groups):
        for group in groups:
            if group.scheme != state.scheme:
                names = (*group.names, *([group.fused_as] if group.fused_as else []))
                found.setdefault(group.scheme, {}).setdefault(names, []).append(index)
    before, after = map(re.escape, state.family.block_prefix.split("{index}"))
    return [
        (
            scheme,
            [
                f"re:{before}({'|'.join(map(str, indices))}){after}({'|'.join(map(re.escape, names))})$"
                for names, indices in blocks_of.items()
            ],
        )
        for scheme, blocks_of in found.items()
    ]


def kernels(model: torch.nn.Module) -> list[dict]:
    """What ran each class of linears, from the modules the engine built: one row per (class, kernel, path)."""
    rows: dict[tuple[str, str, str], dict] = {}
    for name, module in model.named_modules():
        path = getattr(module, "path", None)
        if path is not None:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            key = (pattern, module.kernel, path)
            rows.setdefault(
                key, {"layer_pattern": pattern, "kernel": module.kernel, "path": path, "proof": module.proof}
            )
    return list(rows.values())


def passport(state: Run, folder: Path) -> Passport:
    """The passport of the bundle whose weights and config are in `folder`."""
    job, recipe, config = state.job, state.recipe, state.config
    baseline, measured = job.result("baseline"), job.result("measure")
    proposer = recipe.proposer
    law = {key: getattr(recipe.measure.acceptance, key) for key in ("temperature", "top_k", "top_p")}
    tokenizer = folder / "tokenizer.json"
    return Passport.make(
        created=job.created,
        recipe=recipe.to_dict(),
        source={
            "uri": state.source.uri,
            "kind": state.source.kind,
            "revision": state.source.revision,
            "files": state.source.files,
            "parameters": state.inventory.parameters,
            "total_bytes": state.inventory.total_bytes,
            "mtp_modules": state.inventory.mtp_modules,
            "tied": bool(config.tie_word_embeddings),
        },
        target={
            "architecture": (config.architectures or [type(config).__name__])[0],
            "model_type": config.model_type,
            "hidden_size": config.hidden_size,
            "layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "tokenizer_sha256": bundle.sha256(tokenizer) if tokenizer.exists() else None,
            "dtype": recipe.source.dtype,
        },
        quantization=_quantization(state, folder),
        proposer={
            "kind": proposer.kind,
            "num_speculative_tokens": proposer.num_speculative_tokens if proposer.kind != "none" else 0,
            "settings": proposer.model_dump(mode="json", exclude={"kind", "num_speculative_tokens"}),
            "files": head_files(folder / HEAD_FOLDER) if propose.in_bundle(proposer) else {},
        },
        verifier={"rule": RULES[proposer.rule], "lossy": proposer.rule != "exact", "law": law},
        workload={
            "prompts": recipe.measure.acceptance.prompts if proposer.kind != "none" else 0,
            "max_new_tokens": recipe.measure.acceptance.max_new_tokens,
            "seed": recipe.run.seed,
        },
        outcomes={
            "quality": _quality(baseline, measured),
            "acceptance": [
                {**row, "evidence": MEASURED}
                for row in (
                    *(baseline.get("acceptance"), measured.get("acceptance")),
                    *(measured.get(name) for name in ("before_lowering", "before_healing", "healed_in_vain")),
                )
                if row is not None
            ],
        },
        ledger=ledger.measure(folder, state.inventory),
        kernels=measured["kernels"],
        environment=machine.capture(),
        decisions=_decisions(state),
    )


def _quantization(state: Run, folder: Path) -> dict:
    settings, fmt = state.quantization, state.scheme.fmt
    calibration, distilled = state.job.stage("calibration"), state.job.stage(stage.STAGE)
    allocated = state.job.stage(allocation.STAGE)
    blocks = range(state.config.num_hidden_layers)
    layers = [row for index in blocks for row in state.job.finished_block(index)["layers"]]
    return {
        "format": fmt.name,
        "compression_format": read_config(folder)["quantization_config"]["format"],
        "bits": fmt.bits,
        "group_size": fmt.group_size,
        "bits_per_weight": ledger.bits_per_weight((row["format"], row["shape"]) for row in layers),
        "activations": settings.activations,
        "method": settings.method,
        "settings": settings.model_dump(mode="json", exclude={"format", "activations", "method"}),
        "calibration": _calibration(calibration) if calibration else None,
        "layers": layers,
        "allocation": allocation.passport(allocated) if allocated else None,
        "distillation": _distillation(distilled) if distilled else None,
        "ignored": ignored(state),
    }


def _distillation(record: dict) -> dict:
    return {key: record[key] for key in ("before", "after", "kept", "seconds", "losses")}


def _calibration(record: dict) -> dict:
    known = {key: record[key] for key in ("digest", "kind", "rows", "length")}
    return {**known, "details": {key: value for key, value in record.items() if key not in known}}


def _quality(baseline: dict, measured: dict) -> list[dict]:
    if "quality" not in measured:
        return []
    result = measured["quality"]
    return [
        {
            "name": baseline["quality"]["name"],
            "dataset": baseline["quality"]["digest"],
            "tokens": result["tokens"],
            "baseline": result["perplexity_reference"],
            "quantized": result["perplexity"],
            "kl_nats": result["kl_nats"],
            "tv": result["tv"],
            "top1_agreement": result["top1_agreement"],
            "evidence": MEASURED,
        }
    ]


def _decisions(state: Run) -> list[dict]:
    decisions = [
        {"what": "embeddings, norms and lm_head stored in " + state.recipe.source.dtype, "why": "engines read them so"}
    ]
    if state.job.stage("calibration") is None:
        decisions.append({"what": "no calibration", "why": "rounding to nearest without a scale search uses no data"})
    damping = state.recipe.quantization.damping
    for index in range(state.config.num_hidden_layers):
        for row in state.job.finished_block(index)["layers"]:
            used, dead = row["stats"].get("damping", damping), row["stats"].get("dead_inputs", 0)
            if used > damping:
                decisions.append(
                    {"what": f"{row['name']}: damping {used:g}", "why": "its Hessian was singular with less"}
                )
            if dead:
                decisions.append({"what": f"{row['name']}: {dead} inputs dropped", "why": "always zero in calibration"})
    decisions += transform_stage.decisions(state)
    allocated = state.job.stage(allocation.STAGE)
    if allocated is not None:
        decisions += allocation.decisions(allocated)
    distilled = state.job.stage(stage.STAGE)
    if distilled is not None:
        loss = f"KL on the rows set aside was {distilled['before']:.4f} before and {distilled['after']:.4f} after"
        decisions.append({"what": "distillation kept" if distilled["kept"] else "distillation not kept", "why": loss})
    decisions += [{"what": note, "why": "conversion of the source"} for note in state.source.notes]
    precision = state.recipe.proposer.precision
    if precision != "bf16":
        decisions.append({"what": f"proposer's linears in {precision}", "why": "the recipe asks for it"})
    fault = (state.job.stage("propose") or {}).get("fault")
    if fault is not None:
        decisions.append({"what": f"proposer {fault}", "why": "the recipe names this head; it is used as it is"})
    return decisions + state.job.result("outside")["decisions"]


def finish_bundle(state: Run, staging: Path, out: Path, private_key: Path, public_key: Path) -> Bundle:
    """Write passport, report, card and signature, verify the result as a stranger would, and put it at `out`."""
    bundle.finish(staging, passport(state, staging), private_key)
    Bundle.open(staging).verify(public_key)
    if out.exists():
        out.rmdir()  # empty: checked before the run began
    os.replace(staging, out)
    return Bundle.open(out)
