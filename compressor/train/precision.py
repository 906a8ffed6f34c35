"""A head's linears in 8 or 4 bits, and whether it still drafts as well."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compressor import formats
from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG, read_json_object
from compressor.checkpoint.reader import SINGLE_NAME, ShardReader
from compressor.errors import CompressError, UsageError, naming
from compressor.formats import Format
from compressor.formats.channel import FORMATS, Channel
from compressor.formats.config import HEAD_LINEARS, quantization_config
from compressor.recipe_training import LOWER
from compressor.train.passport import FILE_NAME


def lower(head: Path, out: Path, precision: str) -> None:
    """Write the head in folder `head`, of either layout, into `out` with its linears rounded to nearest: every matrix
    but an embedding; what else lies there but a passport is copied.

    Raises UsageError for a head that is quantized already and for an unknown precision, CompressError for widths that
    the format's groups do not divide.
    """
    config = read_json_object(head / CONFIG)
    if config.get("quantization_config") is not None:
        raise UsageError(f"{head / CONFIG}: quantization_config: is there already; take the head in bf16")
    if precision not in LOWER:
        raise UsageError(f"precision: {precision!r} is not one of {', '.join(LOWER)}")
    fmt: Format | Channel = FORMATS[precision] if precision in FORMATS else formats.get(precision)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    with ShardReader(head) as reader:
        for name in reader.keys():  # noqa: SIM118 - no mapping
            tensor, layer = reader.get(name), name.removesuffix(".weight")
            if tensor.ndim != 2 or not tensor.is_floating_point() or layer.endswith("embed_tokens"):
                tensors[name] = tensor
                continue
            if isinstance(fmt, Format):
                fmt.check(tensor.shape[1], f"{head}: {layer}")
                found = fmt.encode(tensor, search="mse")
            else:
                found = fmt.encode(tensor)
            tensors |= {f"{layer}.{suffix}": value for suffix, value in found.items()}
    section = quantization_config(fmt, activations=isinstance(fmt, Channel), ignore=[], targets=HEAD_LINEARS)
    writer.save_atomic(out / SINGLE_NAME, tensors, {"format": "pt"})
    with naming(out / CONFIG):
        (out / CONFIG).write_text(json.dumps({**config, "quantization_config": section}, indent=2) + "\n")
    for file in sorted(head.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (CONFIG, FILE_NAME):
            with naming(out / file.name):
                shutil.copyfile(file, out / file.name)


def refuse_loss(head: Path, precision: str, before: Mapping[str, Any], after: Mapping[str, Any], loss: float) -> None:
    """Raise CompressError where a head lost more than the share `loss` of the tokens that it had accepted a cycle.
    `before` and `after`: see `acceptance.measure`."""
    least = (1 - loss) * (before["tau"] - 1)
    if after["tau"] - 1 < least:
        raise CompressError(
            f"{head}: in {precision} it drafts {after['tau']:.3f} tokens a cycle, {before['tau']:.3f} in bf16: a loss "
            f"of {1 - (after['tau'] - 1) / (before['tau'] - 1):.1%} of the accepted ones, {loss:.1%} is allowed; take "
            "a higher precision or allow more"
        )
