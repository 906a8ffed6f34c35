"""The byte ledger: what each byte of a bundle's tensors is for."""

import os
from pathlib import Path

from compressor.bundle.records import Ledger
from compressor.checkpoint.digest import sha256_file
from compressor.checkpoint.inventory import Inventory

CODES = "weight_packed"


def count(bundle: Inventory) -> dict[str, int | float]:
    """The fields of `Ledger` that the bundle's tensors alone decide. A layer is quantized if it has a weight_packed."""
    quantized = {name.removesuffix(f".{CODES}") for name in bundle.tensors if name.endswith(f".{CODES}")}
    codes = scales = 0
    for name, tensor in bundle.tensors.items():
        layer, _, suffix = name.rpartition(".")
        if layer in quantized and suffix != "bias":
            if suffix == CODES:
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


def measure(folder: str | os.PathLike, source: Inventory) -> Ledger:
    """The ledger of the shards in `folder`, made from the checkpoint whose inventory is `source`."""
    folder = Path(folder)
    files = {path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    return Ledger.model_validate(
        {"original_bytes": source.total_bytes, "files": files, **count(Inventory.read(folder))}
    )
