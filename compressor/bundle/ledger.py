"""The byte ledger: what each byte of a bundle's tensors is for."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from compressor import formats
from compressor.bundle.records import Ledger
from compressor.checkpoint.digest import sha256_file
from compressor.checkpoint.inventory import Inventory
from compressor.formats import CODES, quantized_layers


def count(bundle: Inventory) -> dict[str, int | float]:
    """The fields of `Ledger` that the bundle's tensors alone decide."""
    quantized = quantized_layers(bundle.tensors)
    codes = scales = 0
    for name, tensor in bundle.tensors.items():
        layer, _, suffix = name.rpartition(".")
        if layer in quantized and suffix != "bias":
            if suffix in CODES:
                codes += tensor.nbytes
            else:
                scales += tensor.nbytes
    return {
        "bundle_bytes": bundle.total_bytes,
        "quantized_bytes": codes + scales,
        "scales_bytes": scales,
        "unquantized_bytes": bundle.total_bytes - codes - scales,
        "parameters": bundle.parameters,
        "bits_per_weight_model": 8 * bundle.total_bytes / bundle.parameters,
    }


def bits_per_weight(layers: Iterable[tuple[str, Sequence[int]]]) -> float:
    """Mean over the weights of quantized linears, (format, [out, in]) each; see `Format.bits_per_weight`."""
    weights: dict[str, int] = {}
    for name, shape in layers:
        weights[name] = weights.get(name, 0) + math.prod(shape)
    bits = {name: formats.get(name).bits_per_weight for name in weights}
    if len(set(bits.values())) == 1:
        return next(iter(bits.values()))
    return sum(bits[name] * count for name, count in weights.items()) / max(sum(weights.values()), 1)


def measure(folder: str | os.PathLike, source: Inventory) -> Ledger:
    """The ledger of the shards in `folder`, made from the checkpoint whose inventory is `source`."""
    folder = Path(folder)
    files = {path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    return Ledger.model_validate(
        {"original_bytes": source.total_bytes, "files": files, **count(Inventory.read(folder))}
    )
