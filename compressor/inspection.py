"""What a path holds: tensors, bytes, MTP modules and number format, from headers alone."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.config import CONFIG
from compressor.errors import CompressError, UsageError

if TYPE_CHECKING:
    from compressor.checkpoint.inventory import Inventory

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def inspect(path: Path) -> dict[str, Any]:
    """Describe a checkpoint folder, a bundle or a GGUF file as plain JSON values.

    Keys: ``kind`` ("folder", "bundle" or "gguf"), ``path``, ``architecture``, ``layers``, ``hidden_size``,
    ``vocabulary``, ``parameters``, ``bytes``, ``bytes_by_dtype``, ``format``, ``mtp_modules``, ``tied`` and ``tensors``
    (name, dtype, shape and bytes each). What a GGUF header does not say is None.
    Raises UsageError for a path that is none of these, CompressError for one that is damaged.
    """
    path = Path(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _gguf(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise UsageError(f"{path}: neither a checkpoint folder nor a .gguf file")
    if not (path / CONFIG).is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0])
    return _folder(path)


def grouped(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors that differ only in the numbers of their names, as one row: pattern, dtype, shape, count, total bytes."""
    rows: dict[tuple, dict[str, Any]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("*", tensor["name"])
        key = (pattern, tensor["dtype"], tuple(tensor["shape"]))
        row = rows.setdefault(key, {"pattern": pattern, "dtype": key[1], "shape": key[2], "count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += tensor["bytes"]
    return list(rows.values())


def _folder(path: Path) -> dict[str, Any]:
    from compressor.checkpoint.inventory import Inventory

    inventory = Inventory.read(path)
    config = inventory.config
    text = config.get("text_config") or config
    return {
        "kind": "bundle" if (path / "passport.json").is_file() else "folder",
        "path": str(path),
        "architecture": (config.get("architectures") or [config["model_type"]])[0],
        "layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
        "vocabulary": text.get("vocab_size"),
        "parameters": inventory.parameters,
        "bytes": inventory.total_bytes,
        "bytes_by_dtype": inventory.bytes_by_dtype(),
        "format": _format(inventory),
        "mtp_modules": inventory.mtp_modules,
        "tied": inventory.tied,
        "tensors": [
            {
                "name": name,
                "dtype": str(info.dtype).removeprefix("torch."),
                "shape": list(info.shape),
                "bytes": info.nbytes,
            }
            for name, info in sorted(inventory.tensors.items())
        ],
    }


def _format(inventory: Inventory) -> dict[str, Any] | None:
    """Number formats of a quantized checkpoint; `name` is None where this version could not read the weights."""
    quantization = inventory.config.get("quantization_config")
    if quantization is None:
        return None
    from compressor.bundle import ledger
    from compressor.formats import CODES, quantized_layers
    from compressor.formats.config import schemes_from_config

    method = quantization.get("quant_method")
    try:
        schemes = schemes_from_config(quantization)
        layers = quantized_layers(inventory.tensors)
        found = {layer: scheme for layer in layers if (scheme := schemes.of(layer)) is not None}
    except CompressError as error:
        return {"name": None, "quant_method": method, "unreadable": str(error)}
    all_of_them = [*schemes.targets.values()]
    weights = [
        (scheme.fmt.name, [inventory.tensors[f"{layer}.{suffix}"].nbytes * 8 // scheme.fmt.bits])
        for layer, scheme in found.items()
        for suffix in layers[layer]
        if suffix in CODES
    ]
    return {
        "name": " + ".join(dict.fromkeys(scheme.fmt.name for scheme in all_of_them)),
        "quant_method": method,
        "bits_per_weight": ledger.bits_per_weight(weights) if weights else all_of_them[0].fmt.bits_per_weight,
        "activations": " + ".join(dict.fromkeys(scheme.activations for scheme in all_of_them)),
        "ignore": schemes.ignore,
    }


def _gguf(path: Path) -> dict[str, Any]:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = field.contents() if field else None
        sizes = {
            key: found.contents() if (found := reader.get_field(f"{architecture}.{name}")) else None
            for key, name in (
                ("layers", "block_count"),
                ("hidden_size", "embedding_length"),
                ("vocabulary", "vocab_size"),
            )
        }
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CompressError(f"{path}: not a readable GGUF file, or truncated ({reason})") from None
    tensors: list[dict[str, Any]] = [
        {
            "name": tensor.name,
            "dtype": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],  # GGUF writes the fastest dimension first
            "bytes": int(tensor.n_bytes),
        }
        for tensor in reader.tensors
    ]
    by_dtype: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        by_dtype[tensor["dtype"]] += tensor["bytes"]
    return {
        "kind": "gguf",
        "path": str(path),
        "architecture": architecture,
        **sizes,
        "parameters": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "bytes": sum(by_dtype.values()),
        "bytes_by_dtype": dict(sorted(by_dtype.items(), key=lambda item: -item[1])),
        "format": None,
        "mtp_modules": None,
        "tied": None,
        "tensors": tensors,
    }
