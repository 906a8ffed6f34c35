"""The `quantization_config` of config.json: what transformers and vLLM read to load a compressed-tensors checkpoint."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from compressor.errors import CompressError, UsageError, brief
from compressor.formats.base import Format
from compressor.formats.channel import FORMATS as CHANNEL_FORMATS
from compressor.formats.channel import Channel
from compressor.formats.int4 import Int4
from compressor.formats.mxfp4 import Mxfp4
from compressor.formats.nvfp4 import Nvfp4

SCHEMA_VERSION = "0.20.1"  # of compressed-tensors, whose schemas these fields follow
LINEARS = ("Linear",)
HEAD_LINEARS = ("Linear", "re:.*lm_head$")
"""All linears of a proposer head: engines do not count an lm_head among them."""
# Fields that say how a scale was found, not how a tensor is read: any value is fine when loading.
_NOT_LAYOUT = ("observer", "observer_kwargs", "actorder", "zp_dtype", "block_structure")


def quantization_config(
    fmt: Format | Channel, *, activations: bool, ignore: list[str], targets: Sequence[str] = LINEARS
) -> dict:
    """The whole section. activations: rounded inputs too (W4A4, W8A8). targets, ignore: modules as engines match them.

    Raises UsageError where `activations` is asked of a format without such a scheme.
    """
    inputs = fmt.activations_config() if activations else None
    if activations and inputs is None:
        raise UsageError(f"{fmt.name} has no 4-bit activations; set quantization.activations to 16bit")
    group = {
        "targets": [*targets],
        "weights": fmt.weights_config(),
        "input_activations": inputs,
        "output_activations": None,
        "format": fmt.compression_format,
    }
    return {
        "version": SCHEMA_VERSION,
        "quant_method": "compressed-tensors",
        "format": fmt.compression_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def format_from_config(quantization_config: dict) -> tuple[Format, bool, list[str]]:
    """Inverse of `quantization_config`: format, whether inputs are 4-bit, ignored modules.

    Raises CompressError naming the key for a scheme that this version cannot read.
    """
    fmt, rounds_inputs = _read(quantization_config, _formats(), [LINEARS])
    return fmt, rounds_inputs, _ignore(quantization_config.get("ignore"))


def head_format_from_config(quantization_config: Any) -> Format | Channel:
    """The format of a proposer head's quantized linears. Raises CompressError as `format_from_config`, and for 4-bit
    inputs."""
    section = _object(quantization_config, "quantization_config")
    known: list[Format | Channel] = [*_formats(), *CHANNEL_FORMATS.values()]
    fmt, rounds_inputs = _read(section, known, [LINEARS, HEAD_LINEARS])
    if rounds_inputs and fmt.name not in CHANNEL_FORMATS:
        raise CompressError("quantization_config: a head with 4-bit inputs cannot be read by this version")
    return fmt


Known = TypeVar("Known", Format, Format | Channel)


def _read(quantization_config: dict, formats: Sequence[Known], targets: Sequence[Sequence[str]]) -> tuple[Known, bool]:
    """The one of `formats` whose linears are `targets`, and whether inputs are rounded too."""
    _require(quantization_config, "quant_method", "compressed-tensors")
    _require(quantization_config, "quantization_status", "compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if quantization_config.get(key):
            raise CompressError(
                f"quantization_config.{key}: {brief(quantization_config[key])} cannot be read by this version"
            )
    groups = config_groups(quantization_config)
    if len(groups) != 1:
        raise CompressError(f"quantization_config.config_groups: one group can be read, found {len(groups)}")
    name, group = next(iter(groups.items()))
    where = f"quantization_config.config_groups.{name}"
    allowed: list[list[str]] = list(map(list, targets))
    if group.get("targets") not in allowed or group.get("output_activations"):
        shown = " or ".join(map(str, allowed))
        raise CompressError(f"{where}: only targets {shown} without output_activations can be read")
    weights, inputs = group["weights"], group["input_activations"]
    fmt = _matching_format(weights, formats, f"{where}.weights")
    _require(quantization_config, "format", fmt.compression_format)
    if inputs and _layout(inputs) != _layout(fmt.activations_config() or {}):
        raise CompressError(f"{where}.input_activations: {brief(inputs)} is not {fmt.name}'s scheme")
    return fmt, bool(inputs)


def config_groups(quantization_config: dict) -> dict[str, dict[str, Any]]:
    """Its `config_groups` by name, of any compressed-tensors scheme: `weights` and `input_activations` are there, and
    empty where the config leaves them out. Raises CompressError naming the key for anything that is not an object.
    """
    key = "quantization_config.config_groups"
    groups = {}
    for name, value in _object(quantization_config.get("config_groups"), key).items():
        group = _object(value, f"{key}.{name}")
        parts = ("weights", "input_activations")
        groups[name] = group | {part: _object(group.get(part), f"{key}.{name}.{part}") for part in parts}
    return groups


def _object(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise CompressError(f"{key}: {brief(value)} is not an object")
    return value or {}


def _ignore(entries: Any) -> list[str]:
    """Entries of `ignore`: module names, or `re:` and a pattern."""
    key = "quantization_config.ignore"
    if entries is not None and not isinstance(entries, list):
        raise CompressError(f"{key}: {brief(entries)} is not a list of module names")
    for entry in entries or []:
        if not isinstance(entry, str):
            raise CompressError(f"{key}: {brief(entry)} is not a module name")
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise CompressError(f"{key}: {brief(entry)} is not a regular expression ({error})") from None
    return list(entries or [])


def _require(config: dict, key: str, value: str) -> None:
    if config.get(key) != value:
        raise CompressError(f"quantization_config.{key}: {value!r} expected, found {brief(config.get(key))}")


def _layout(args: dict) -> dict:
    return {k: v for k, v in args.items() if k not in _NOT_LAYOUT and v is not None}


def _formats() -> list[Format]:
    return [Nvfp4(), Mxfp4(), *(Int4(g, symmetric) for g in Int4.GROUP_SIZES for symmetric in (True, False))]


def _matching_format(weights: dict, candidates: Sequence[Known], where: str) -> Known:
    for fmt in candidates:
        if _layout(weights) == _layout(fmt.weights_config()):
            return fmt
    raise CompressError(f"{where}: {brief(weights)} is none of {', '.join(f.name for f in candidates)}")
