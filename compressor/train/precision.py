"""A head's linears in 8 or 4 bits, and whether it still drafts as well."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor import formats
from compressor.bundle.record_base import MEASURED
from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG, read_json_object
from compressor.checkpoint.reader import SINGLE_NAME, ShardReader, check_finite
from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError, naming
from compressor.formats import Format
from compressor.formats.config import HEAD_LINEARS, quantization_config
from compressor.proposers.eagle3 import read_settings
from compressor.recipe_training import LOWER
from compressor.train import check, passport
from compressor.train.passport import HeadPassport
from compressor.ui import UI

KEPT = (".yaml", ".svg")
"""Of a head's files, beside weights and config, those that go with it: its recipe and its curve."""


def lower(head: Path, out: Path, to: str) -> None:
    """Write the EAGLE-3 head in folder `head`, of either layout, into `out` with its linears rounded to nearest.

    Raises UsageError for an unknown precision and as `refuse_unfit`, CompressError for a NaN.
    """
    fmt, config = refuse_unfit(head, to), read_json_object(head / CONFIG)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    with ShardReader(head) as reader:
        for name in reader.keys():  # noqa: SIM118 - no mapping
            tensor = reader.get(name)
            if not _is_linear(name, tensor):
                tensors[name] = tensor
                continue
            check_finite(name, tensor, head / reader.file_of(name))
            found = fmt.encode(tensor, search="mse" if fmt.bits == 4 else "none")
            tensors |= {name.removesuffix("weight") + suffix: value for suffix, value in found.items()}
    section = quantization_config(fmt, activations=fmt.bits == 8, ignore=[], targets=HEAD_LINEARS)
    writer.save_atomic(out / SINGLE_NAME, tensors, {"format": "pt"})
    with naming(out / CONFIG):
        (out / CONFIG).write_text(json.dumps({**config, "quantization_config": section}, indent=2) + "\n")
    for file in sorted(path for path in head.iterdir() if path.suffix in KEPT):
        with naming(out / file.name):
            shutil.copyfile(file, out / file.name)


def refuse_unfit(head: Path, to: str) -> Format:
    """The format `to`. Raises UsageError for an unknown one, for a head that is quantized already, and where the
    format's groups do not divide a linear's inputs."""
    if read_settings(head).fmt is not None:
        raise UsageError(f"{head / CONFIG}: quantization_config: is there already; take the head in bf16")
    with ShardReader(head) as reader:
        found = {name: reader.get(name) for name in reader.keys()}  # noqa: SIM118 - no mapping
    widths = {name: tensor.shape[1] for name, tensor in found.items() if _is_linear(name, tensor)}
    return fitting(to, widths, str(head))


def fitting(to: str, widths: Mapping[str, int], head: str) -> Format:
    """The format `to` for linears with so many inputs, by name. Errors as `refuse_unfit`."""
    if to not in LOWER:
        raise UsageError(f"precision: {to!r} is not one of {', '.join(LOWER)}")
    fmt = formats.get(to)
    for name, width in widths.items():
        if fmt.group_size is not None and width % fmt.group_size:
            raise UsageError(f"{head}: {name} has {width} inputs, which groups of {to} do not divide; take another")
    return fmt


def _is_linear(name: str, tensor: Tensor) -> bool:
    """Every matrix but an embedding."""
    matrix = tensor.ndim == 2 and tensor.is_floating_point() and name.endswith(".weight")
    return matrix and not name.endswith("embed_tokens.weight")


def lower_and_check(
    head: Path, out: Path, to: str, loss: float, *, decoder: Decoder, target: Path, tokenizer: Any, ui: UI
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`lower`, then the usual check of both heads on the target in folder `target`; what it measured of each. The
    passport of `head`, where it has one, becomes that of the new head.

    Raises CompressError for a head that is not its passport's and for one that loses more than the share `loss` of the
    tokens it had accepted a cycle.
    """
    described = HeadPassport.load(head)
    if described is not None:
        passport.refuse_changed(head, described)
    lower(head, out, to)
    prompts = check.usual_prompts(tokenizer)
    texts = [] if described is None else check.texts_of(decoder, tokenizer, ui)
    before = check.check("eagle3", head, decoder, target, prompts, least_first=0, ui=ui).measured
    found = check.check("eagle3", out, decoder, target, prompts, least_first=0, texts=texts, ui=ui)
    after = found.measured
    refuse_loss(head, to, before, after, loss)
    after = {**after, "precision": to}
    if described is not None:
        lowering = {"precision": to, "files": described.files, "allowed_loss": loss}
        passport.write_lowered(
            out,
            described,
            lowering={**lowering, "before": {**before, "evidence": MEASURED}},
            check={**after, "evidence": MEASURED},
            expected_acceptance=None if found.examined is None else found.examined.own.rate,
        )
    return before, after


def refuse_loss(head: Path, to: str, before: Mapping[str, Any], after: Mapping[str, Any], loss: float) -> None:
    """Raise CompressError where a head lost more than the share `loss` of the tokens that it had accepted a cycle.
    `before` and `after`: see `acceptance.measure`."""
    if after["tau"] - 1 < (1 - loss) * (before["tau"] - 1):
        raise CompressError(
            f"{head}: in {to} the check finds {after['tau']:.3f} tokens a cycle, {before['tau']:.3f} before: a loss "
            f"of {1 - (after['tau'] - 1) / (before['tau'] - 1):.1%} of the accepted ones, {loss:.1%} is allowed; take "
            "a higher precision or allow more"
        )
