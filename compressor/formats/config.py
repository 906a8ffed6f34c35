"""The `quantization_config` of config.json: what transformers and vLLM read to load a compressed-tensors checkpoint."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from compressor.errors import CompressError, brief
from compressor.formats.base import Format
from compressor.formats.eight_bit import Fp8, Fp8Block, Int8
from compressor.formats.int4 import Int4
from compressor.formats.mxfp4 import Mxfp4
from compressor.formats.nvfp4 import Nvfp4
from compressor.formats.scheme import Scheme

SCHEMA_VERSION = "0.20.1"  # of compressed-tensors, whose schemas these fields follow
LINEARS = ("Linear",)
HEAD_LINEARS = ("Linear", "re:.*lm_head$")
"""All linears of a proposer head: engines do not count an lm_head among them."""
MIXED = "mixed-precision"
"""`format` of a section whose groups do not share one."""
# Fields that say how a scale was found, not how a tensor is read: any value is fine when loading.
_NOT_LAYOUT = ("observer", "observer_kwargs", "actorder", "zp_dtype")
_KEY = "quantization_config"

T = TypeVar("T")
Groups = Sequence[tuple[Scheme, Sequence[str]]]
"""Schemes and the modules, as engines match them, that have each."""


@dataclass(frozen=True)
class Schemes:
    """What a section says: the scheme of every target, the modules that stay unquantized, and the section's `format`.
    All names as engines match them."""

    targets: dict[str, Scheme]
    ignore: list[str]
    format: str

    def of(self, module: str) -> Scheme | None:
        """The scheme of a linear by its full name; None where no target names it."""
        return find_target(module, self.targets)


def find_target(module: str, targets: Mapping[str, T]) -> T | None:
    """What belongs to the target that names a linear: its full name before `re:` and a pattern that its beginning
    matches, before its class (compressed-tensors 0.20, `match_targets`; vLLM 0.32, `find_matched_target`).

    Raises CompressError where patterns disagree: which of them wins differs between engines.
    """
    if module in targets:
        return targets[module]
    found = [value for target, value in targets.items() if target.startswith("re:") and re.match(target[3:], module)]
    if any(value != found[0] for value in found):
        raise CompressError(f"{_KEY}.config_groups: '{module}' matches the targets of several groups")
    return found[0] if found else targets.get(LINEARS[0])


def quantization_config(
    fmt: Format,
    *,
    activations: bool,
    ignore: list[str],
    targets: Sequence[str] = LINEARS,
    overrides: Groups = (),
) -> dict:
    """The whole section. activations: rounded inputs too (W4A4, W8A8). targets, ignore: modules as engines match them;
    overrides: those with a scheme of their own.

    Raises UsageError where `activations` is asked of a format without such a scheme.
    """
    groups = [_group(scheme, names) for scheme, names in [(Scheme.make(fmt, activations), targets), *overrides]]
    return {
        "version": SCHEMA_VERSION,
        "quant_method": "compressed-tensors",
        "format": _common_format([group["format"] for group in groups]),
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    return {
        "targets": [*targets],
        "weights": scheme.fmt.weights_config(),
        "input_activations": scheme.fmt.activations_config() if scheme.rounds_inputs else None,
        "output_activations": None,
        "format": scheme.fmt.compression_format,
    }


def _common_format(formats: Sequence[str]) -> str:
    return formats[0] if len(set(formats)) == 1 else MIXED


def schemes_from_config(quantization_config: dict) -> Schemes:
    """Inverse of `quantization_config`. Raises CompressError naming the key for a scheme that this version cannot
    read."""
    targets: dict[str, Scheme] = {}
    groups = _read(quantization_config)
    for names, scheme in groups:
        for name in names:
            if targets.setdefault(name, scheme) != scheme:
                raise CompressError(f"{_KEY}.config_groups: {brief(name)} is a target of two groups")
    ignore = _names(quantization_config.get("ignore"), f"{_KEY}.ignore")
    return Schemes(targets, ignore, _common_format([scheme.fmt.compression_format for _, scheme in groups]))


def head_format_from_config(quantization_config: Any) -> Format:
    """The format of a proposer head's quantized linears. Raises CompressError as `schemes_from_config`, for targets
    other than all linears, and for 4-bit inputs."""
    groups = _read(_object(quantization_config, _KEY))
    allowed = [[*LINEARS], [*HEAD_LINEARS]]
    if len(groups) != 1 or groups[0][0] not in allowed:
        raise CompressError(
            f"{_KEY}.config_groups: of a head only targets {' or '.join(map(str, allowed))} can be read"
        )
    scheme = groups[0][1]
    if scheme.activations == "4bit":
        raise CompressError(f"{_KEY}: a head with 4-bit inputs cannot be read by this version")
    return scheme.fmt


def _read(section: dict) -> list[tuple[list[str], Scheme]]:
    """Targets and scheme of each group."""
    _require(section, "quant_method", "compressed-tensors")
    _require(section, "quantization_status", "compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section.get(key):
            raise CompressError(f"{_KEY}.{key}: {brief(section[key])} cannot be read by this version")
    groups = config_groups(section)
    if not groups:
        raise CompressError(f"{_KEY}.config_groups: is empty, so no linear is quantized")
    found = []
    for name, group in groups.items():
        where = f"{_KEY}.config_groups.{name}"
        names = _names(group.get("targets"), f"{where}.targets")
        classes = [name for name in names if name[:1].isupper() and name not in LINEARS]
        if not names or classes or group.get("output_activations"):
            raise CompressError(
                f"{where}: only targets that are linears, without output_activations, can be read"
                + (f", not {', '.join(classes)}" if classes else "")
            )
        found.append((names, _scheme(group, group.get("format") or section.get("format"), where)))
    _require(section, "format", _common_format([scheme.fmt.compression_format for _, scheme in found]))
    return found


def _scheme(group: dict[str, Any], stored_as: Any, where: str) -> Scheme:
    """The scheme of a group whose tensors are in the compression format `stored_as`."""
    weights, inputs = group["weights"], group["input_activations"]
    alike = [fmt for fmt in _formats() if _layout(weights) == _layout(fmt.weights_config())]
    if not alike:
        names = dict.fromkeys(fmt.name for fmt in _formats())
        raise CompressError(f"{where}.weights: {brief(weights)} is none of {', '.join(names)}")
    fmt = next((fmt for fmt in alike if fmt.compression_format == stored_as), None)
    if fmt is None:
        expected = " or ".join(repr(fmt.compression_format) for fmt in alike)
        raise CompressError(f"{where}.format: {expected} expected, found {brief(stored_as)}")
    if inputs and _layout(inputs) != _layout(fmt.activations_config() or {}):
        raise CompressError(f"{where}.input_activations: {brief(inputs)} is not {fmt.name}'s scheme")
    return Scheme(fmt, bool(inputs))


def config_groups(quantization_config: dict) -> dict[str, dict[str, Any]]:
    """Its `config_groups` by name, of any compressed-tensors scheme: `weights` and `input_activations` are there, and
    empty where the config leaves them out. Raises CompressError naming the key for anything that is not an object.
    """
    key = f"{_KEY}.config_groups"
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


def _names(entries: Any, key: str) -> list[str]:
    """Entries of `ignore` or of a group's `targets`: module names, or `re:` and a pattern."""
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


def target_names(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Every target of `config_groups` and its group, of any compressed-tensors scheme."""
    key = f"{_KEY}.config_groups"
    return {name: group for where, group in groups.items() for name in _names(group.get("targets"), f"{key}.{where}")}


def _require(config: dict, key: str, value: str) -> None:
    if config.get(key) != value:
        raise CompressError(f"{_KEY}.{key}: {value!r} expected, found {brief(config.get(key))}")


def _layout(args: dict) -> dict:
    return {k: v for k, v in args.items() if k not in _NOT_LAYOUT and v is not None}


@cache  # so that equal schemes are the same
def _formats() -> list[Format]:
    eight_bit = [Int8(), Int8(packed=True), Fp8(), Fp8Block()]
    int4 = [Int4(size, symmetric) for size in Int4.GROUP_SIZES for symmetric in (True, False)]
    return [Nvfp4(), Mxfp4(), *int4, *eight_bit]
