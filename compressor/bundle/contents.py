"""The passport against the files: does it describe the tensors that are really there?

A signature proves who signed, not that what they signed is consistent. Everything here is recomputed from the files;
expected layouts are written down from the format's specification rather than taken from the encoder.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch

from compressor import formats, models
from compressor.bundle import ledger
from compressor.bundle.passport import Passport
from compressor.bundle.records_quantization import Layer
from compressor.checkpoint.config import CONFIG, read_json_object
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.reader import INDEX_NAME, ShardReader, check_finite
from compressor.errors import CompressError
from compressor.formats import Scheme
from compressor.formats.config import Schemes, find_target, schemes_from_config
from compressor.models import skeleton

TOKENIZER = "tokenizer.json"
GLOBAL_SCALES = ("weight_global_scale", "input_global_scale")
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def differences(folder: Path, passport: Passport, digests: dict[str, str]) -> list[str]:
    """Everything in which the passport and the files of `folder` disagree, one short line each; empty when nothing.

    Args:
        folder: the bundle.
        passport: what it claims.
        digests: sha256 (hex) of every file in the folder, by relative name.

    Raises CompressError for shards or a config that cannot be read at all.
    """
    inventory = Inventory.read(folder)
    config = inventory.config
    schemes, unreadable = _schemes(config)
    with ShardReader(folder) as reader:
        return [
            *_config(config, passport),
            *(_quantization(schemes, passport) if schemes else unreadable),
            *_layers(reader, passport, schemes),
            *_allocation(passport),
            *_fused(folder, reader, passport),
            *_unquantized(reader, passport, schemes),
            *_numbers(reader, passport),
            *_index(folder, reader),
            *_ledger(inventory, passport, digests),
            *_tokenizer(passport, digests),
        ]


def layout(fmt: formats.Format, shape: tuple[int, int], dtype: torch.dtype, activations: bool) -> Layout:
    """On-disk tensors of one quantized layer: {suffix: (dtype, shape)}.

    Args:
        fmt: its number format.
        shape: (out_features, in_features).
        dtype: of the model; scales of integers and of FP8 have it.
        activations: whether its inputs are rounded too.
    """
    rows, columns = shape
    groups = 1 if fmt.group_size is None else columns // fmt.group_size
    fmt = fmt.for_inputs(activations)
    if fmt.compression_format in ("int-quantized", "float-quantized"):
        scales = (_ceil(rows, fmt.weights_config().get("block_structure", [1])[0]), groups)
        codes = torch.int8 if fmt.compression_format == "int-quantized" else torch.float8_e4m3fn
        return {"weight": (codes, (rows, columns)), "weight_scale": (dtype, scales)}
    if fmt.compression_format == "pack-quantized":
        tensors: Layout = {
            "weight_packed": (torch.int32, (rows, _ceil(columns * fmt.bits, 32))),
            "weight_scale": (dtype, (rows, groups)),
            "weight_shape": (torch.int64, (2,)),
        }
        if not fmt.weights_config()["symmetric"]:
            tensors["weight_zero_point"] = (torch.int32, (_ceil(rows * fmt.bits, 32), groups))
        return tensors
    if fmt.compression_format == "nvfp4-pack-quantized":
        tensors = {
            "weight_packed": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (torch.float8_e4m3fn, (rows, groups)),
            "weight_global_scale": (torch.float32, (1,)),
        }
        return tensors | ({"input_global_scale": (torch.float32, (1,))} if activations else {})
    if fmt.compression_format == "mxfp4-pack-quantized":
        return {"weight_packed": (torch.uint8, (rows, columns // 2)), "weight_scale": (torch.uint8, (rows, groups))}
    raise CompressError(f"format {fmt.name}: this version does not know the layout of '{fmt.compression_format}'")


def layout_bytes(fmt: formats.Format, shape: tuple[int, int], dtype: torch.dtype, activations: bool) -> int:
    """Bytes of the tensors of `layout`."""
    return sum(math.prod(size) * of.itemsize for of, size in layout(fmt, shape, dtype, activations).values())


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _unequal(key: str, claimed: Any, found: Any, where: str) -> list[str]:
    return [] if claimed == found else [f"{key}: the passport says {claimed}, {where} {found}"]


def _config(config: dict[str, Any], passport: Passport) -> list[str]:
    """`target` against config.json."""
    target = passport.target
    architectures = config.get("architectures") or [None]
    found = {
        "architecture": architectures[0],
        "model_type": config.get("model_type"),
        "hidden_size": config.get("hidden_size"),
        "layers": config.get("num_hidden_layers"),
        "vocab_size": config.get("vocab_size"),
        "dtype": config.get("dtype", config.get("torch_dtype")),
    }
    problems = []
    for key, value in found.items():
        if value is not None:  # configs leave out what is their class's default
            problems += _unequal(f"target.{key}", getattr(target, key), value, CONFIG)
    return problems


def _schemes(config: dict[str, Any]) -> tuple[Schemes | None, list[str]]:
    """What engines read from config.json's quantization_config, or the problem that keeps them from it."""
    section = config.get("quantization_config")
    if section is None:
        return None, [f"{CONFIG}: no quantization_config, so engines would read the shards as unquantized"]
    try:
        return schemes_from_config(section), []
    except CompressError as error:
        return None, [f"{CONFIG}: {error}"]


def _general(schemes: Schemes) -> Scheme:
    """Of all linears without a target of their own, or of the first group where there is none."""
    return find_target("", schemes.targets) or next(iter(schemes.targets.values()))


def _quantization(schemes: Schemes, passport: Passport) -> list[str]:
    """`quantization` against config.json."""
    quantization, ignore = passport.quantization, schemes.ignore
    scheme = _general(schemes)
    problems = _unequal("quantization.compression_format", quantization.compression_format, schemes.format, CONFIG)
    for key in ("bits", "group_size"):
        problems += _unequal(f"quantization.{key}", getattr(quantization, key), getattr(scheme.fmt, key), CONFIG)
    if all(layer.format in formats.names() for layer in quantization.layers):  # others are reported by layer
        mean = ledger.bits_per_weight((layer.format, layer.shape) for layer in quantization.layers)
        problems += _unequal("quantization.bits_per_weight", quantization.bits_per_weight, mean, "its layers")
    problems += _unequal("quantization.format", quantization.format, scheme.fmt.name, CONFIG)
    problems += _unequal("quantization.activations", quantization.activations, scheme.activations, CONFIG)
    listed, ignored = set(ignore), set(quantization.ignored)
    problems += [f"quantization.ignored: {name} is not in {CONFIG}'s ignore" for name in sorted(ignored - listed)]
    problems += [f"{CONFIG} ignore: {name} is not in quantization.ignored" for name in sorted(listed - ignored)]
    return problems


def _layers(reader: ShardReader, passport: Passport, schemes: Schemes | None) -> list[str]:
    """Each layer of the passport has exactly the tensors of its format, which engines expect too, and no layer has them
    unlisted."""
    try:
        dtype = passport.target.torch_dtype()
    except CompressError as error:
        return [str(error)]
    stored: dict[str, list[str]] = {}
    names = reader.keys()
    for name in names:
        layer, _, suffix = name.rpartition(".")
        stored.setdefault(layer, []).append(suffix)
    problems: list[str] = []
    seen: set[str] = set()
    for entry in passport.quantization.layers:
        if entry.name in seen:
            problems.append(f"{entry.name}: listed twice in quantization.layers")
        seen.add(entry.name)
        if entry.format not in formats.names():
            problems.append(f"{entry.name}: format {entry.format} is unknown")
            continue
        activations = entry.activations or passport.quantization.activations
        if schemes is not None:
            problems += _scheme(schemes, entry.name, (entry.format, activations), passport)
        problems += _layer(reader, entry, stored.get(entry.name, []), activations != formats.UNROUNDED, dtype)
    unlisted = sorted(formats.quantized_layers(names).keys() - seen)
    return problems + [f"{name}: quantized, but not in quantization.layers" for name in unlisted]


def _allocation(passport: Passport) -> list[str]:
    """The formats that the passport says were chosen are those of its layers, and take the bytes it says."""
    allocation = passport.quantization.allocation
    if allocation is None:
        return []
    layers, problems = {layer.name: layer for layer in passport.quantization.layers}, []
    for group in allocation.groups:
        option, found = group.options[group.chosen], [layers[name] for name in group.linears if name in layers]
        for name in group.linears:
            stored = layers[name].format if name in layers else "none"
            problems += _unequal(f"quantization.allocation of {name}", option.format, stored, "its layers")
        if option.format != "none":
            packed = sum(layer.packed_bytes for layer in found)
            problems += _unequal(
                f"quantization.allocation bytes of {group.linears[0]}", option.bytes, packed, "its layers"
            )
    chosen = sum(group.options[group.chosen].bytes for group in allocation.groups)
    return problems + _unequal("quantization.allocation.bytes", allocation.bytes, chosen, "its groups")


def _scheme(schemes: Schemes, name: str, said: tuple[str, str], passport: Passport) -> list[str]:
    """(format, activations) of a layer in the passport against config.json."""
    try:
        scheme = schemes.of(name)
    except CompressError as error:
        return [f"{CONFIG}: {error}"]
    if scheme is None:
        return [f"{name}: quantized, but no target of {CONFIG}'s config_groups names it"]
    if said == (passport.quantization.format, passport.quantization.activations) and scheme == _general(schemes):
        return []  # `_quantization` has compared them
    found = (scheme.fmt.name, scheme.activations)
    says = "format {} and {} inputs".format
    return [] if said == found else [f"{name}: {says(*said)}, but {CONFIG} says {says(*found)}"]


def _layer(reader: ShardReader, layer: Layer, suffixes: list[str], activations: bool, dtype: torch.dtype) -> list[str]:
    fmt = formats.get(layer.format)
    stored = {suffix: f"{layer.name}.{suffix}" for suffix in suffixes if suffix != "bias"}
    expected = layout(fmt, (layer.shape[0], layer.shape[1]), dtype, activations)
    problems = []
    if fmt.group_size is not None and layer.shape[1] % fmt.group_size:
        problems.append(f"{layer.name}: in_features {layer.shape[1]} is not a multiple of {fmt.name}'s group")
    for suffix, (wanted, shape) in expected.items():
        if suffix not in stored:
            problems.append(f"{layer.name}.{suffix}: missing, {fmt.name} needs it")
            continue
        found = reader.dtype(stored[suffix]), reader.shape(stored[suffix])
        if found != (wanted, shape):
            problems.append(
                f"{layer.name}.{suffix}: {_typed(*found)} in the file, {fmt.name} of the passport's shape needs "
                f"{_typed(wanted, shape)}"
            )
        elif suffix == "weight_shape" and reader.get(stored[suffix]).tolist() != layer.shape:
            problems.append(f"{layer.name}.weight_shape: {reader.get(stored[suffix]).tolist()}, passport {layer.shape}")
    problems += [f"{layer.name}.{s}: not a tensor of {fmt.name}" for s in sorted(stored.keys() - expected.keys())]
    packed = sum(map(reader.nbytes, stored.values()))
    return problems + _unequal(f"{layer.name} packed_bytes", layer.packed_bytes, packed, "the file")


def _typed(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _fused(folder: Path, reader: ShardReader, passport: Passport) -> list[str]:
    """Parts that engines run as one matrix share each global scale: the matrix has room for one."""
    try:
        config, _ = skeleton.model_config(folder)
        fused = models.get(config.model_type).fused(config)
    except CompressError as error:
        return [f"{CONFIG}: {error}"]
    first: dict[tuple[str, str], tuple[str, float]] = {}
    problems = []
    for layer in passport.quantization.layers:
        for suffix in GLOBAL_SCALES:
            name = f"{layer.name}.{suffix}"
            if layer.name not in fused or name not in reader:
                continue
            scale = reader.get(name).float().flatten()
            if scale.numel() != 1:
                continue  # reported as a wrong layout
            module, value = first.setdefault((fused[layer.name], suffix), (layer.name, scale.item()))
            if scale.item() != value:
                problems.append(
                    f"{layer.name}.{suffix}: {scale.item():g}, but {value:g} in {module}; "
                    f"engines run both as {fused[layer.name]} with one scale"
                )
    return problems


def _unquantized(reader: ShardReader, passport: Passport, schemes: Schemes | None) -> list[str]:
    """No ignored module is quantized, and every matrix left unquantized is ignored.

    Engines expect packed weights in each Linear that `ignore` does not name. Embedding tables are no Linear.
    """
    quantized = {layer.name for layer in passport.quantization.layers}
    stored = formats.quantized_layers(reader.keys())
    problems = []
    for module in sorted(set(passport.quantization.ignored)):
        if module in quantized or module in stored:
            problems.append(f"{module}: in quantization.ignored, but its tensors are quantized")
    if schemes is None:  # reported already; without `ignore` every matrix would seem wrong
        return problems
    ignore, names = schemes.ignore, reader.keys()
    for name in names:
        module, _, suffix = name.rpartition(".")
        matrix = suffix == "weight" and len(reader.shape(name)) == 2 and module not in quantized
        if matrix and "embed" not in module.rpartition(".")[2] and not any(_matches(module, entry) for entry in ignore):
            problems.append(f"{module}: not quantized, and not in {CONFIG}'s ignore")
    return problems


def _matches(module: str, entry: str) -> bool:
    """compressed-tensors: an entry of `ignore` is a module name, or `re:` and a pattern that its beginning matches."""
    return bool(re.match(entry[3:], module)) if entry.startswith("re:") else entry == module


def _numbers(reader: ShardReader, passport: Passport) -> list[str]:
    """No scale that makes NaN, Inf or nothing of its group, and no NaN or Inf in what is not quantized."""
    problems, names = [], reader.keys()
    quantized = {layer.name: layer.format for layer in passport.quantization.layers}
    for name in names:
        layer, _, suffix = name.rpartition(".")
        if layer in quantized and suffix != "bias" and not suffix.endswith("scale"):
            if reader.dtype(name) == torch.float8_e4m3fn:
                problems += _nan(name, reader.get(name))
            continue  # integers otherwise
        tensor = reader.get(name)
        if layer in quantized and suffix != "bias":
            signed = quantized[layer] in formats.names() and formats.get(quantized[layer]).negative_scales
            bad = _unusable(tensor, signed)
            if bad:
                kinds = "NaN, infinite or zero" if signed else "NaN, infinite, zero or negative"
                problems.append(f"{name}: {bad} of {tensor.numel()} scales are {kinds}")
            continue
        try:
            check_finite(name, tensor, reader.file_of(name))
        except CompressError as error:
            problems.append(str(error))
    return problems


def _nan(name: str, codes: torch.Tensor) -> list[str]:
    bad = int(codes.float().isnan().sum())
    return [f"{name}: {bad} of {codes.numel()} weights are NaN"] if bad else []


def _unusable(scale: torch.Tensor, signed: bool) -> int:
    if scale.dtype == torch.uint8:  # E8M0: the one code that is no power of two is NaN (OCP MX v1.0, 5.4.1)
        return int((scale == 255).sum())
    values = scale.float()
    return int((~torch.isfinite(values) | (values == 0 if signed else values <= 0)).sum())


def _index(folder: Path, reader: ShardReader) -> list[str]:
    """The shard index is there and its total is right; the reader has already matched it tensor by tensor."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return [f"{INDEX_NAME}: missing"]
    metadata = read_json_object(path).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(map(reader.nbytes, reader.keys()))
    problems = [] if stated == found else [f"{INDEX_NAME}: total_size {stated}, the tensors have {found} bytes"]
    unlisted = sorted({path.name for path in folder.glob("*.safetensors")} - set(reader.files()))
    return problems + [f"{name}: not in {INDEX_NAME}" for name in unlisted]


def _ledger(inventory: Inventory, passport: Passport, digests: dict[str, str]) -> list[str]:
    claimed = passport.ledger
    problems = _unequal(
        "ledger.original_bytes", claimed.original_bytes, passport.source.total_bytes, "source.total_bytes"
    )
    for key, found in ledger.count(inventory).items():
        problems += _unequal(f"ledger.{key}", getattr(claimed, key), found, "the tensors")
    shards = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    for name in sorted(shards.keys() | claimed.files.keys()):
        if name not in shards:
            problems.append(f"{name}: in ledger.files, but missing")
        elif name not in claimed.files:
            problems.append(f"{name}: not in ledger.files")
        elif shards[name] != claimed.files[name]:
            problems.append(f"{name}: not the file of ledger.files (other sha256)")
    return problems


def _tokenizer(passport: Passport, digests: dict[str, str]) -> list[str]:
    claimed, found = passport.target.tokenizer_sha256, digests.get(TOKENIZER)
    return [] if claimed == found else [f"{TOKENIZER}: not the file of target.tokenizer_sha256"]
