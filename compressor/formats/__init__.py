"""Number formats of quantized weights and their packed layouts on disk.

fmt = formats.get("nvfp4")
tensors = fmt.encode(weight)        # exactly the tensors written to disk, by suffix
weight_hat = fmt.decode(tensors)    # float32 [out, in]
"""

import difflib
from collections.abc import Callable
from functools import cache, partial

from compressor.errors import UsageError
from compressor.formats import config
from compressor.formats.base import CODES, Format, Grid, quantized_layers
from compressor.formats.eight_bit import Fp8, Fp8Block, Int8
from compressor.formats.int4 import Int4
from compressor.formats.mxfp4 import Mxfp4
from compressor.formats.nvfp4 import Nvfp4
from compressor.formats.scheme import UNROUNDED, Scheme, rounded_activations

__all__ = [
    "CODES",
    "UNROUNDED",
    "Format",
    "Grid",
    "Scheme",
    "config",
    "get",
    "names",
    "quantized_layers",
    "rounded_activations",
    "scheme",
]

_FORMATS: dict[str, Callable[..., Format]] = {
    **{f"int4-g{g}": partial(Int4, g) for g in Int4.GROUP_SIZES},
    **{f"int4-g{g}-asym": partial(Int4, g, symmetric=False) for g in Int4.GROUP_SIZES},
    "nvfp4": Nvfp4,
    "mxfp4": Mxfp4,
    "int8": Int8,
    "fp8": Fp8,
    "fp8-block128": Fp8Block,
}
_OPTIONS = {"nvfp4": ("underflow",), "mxfp4": ("exponent_rule",)}


def names() -> list[str]:
    """Names that `get` accepts."""
    return list(_FORMATS)


def get(name: str, **options) -> Format:
    """The format called `name`. Options: mxfp4 takes exponent_rule, nvfp4 takes underflow (see their classes).

    Raises UsageError for an unknown name or option, with the nearest valid one.
    """
    if name not in _FORMATS:
        nearest = difflib.get_close_matches(name, _FORMATS, 1, 0.0)[0]
        raise UsageError(f"format: {name!r} is unknown; did you mean {nearest!r}? Formats: {', '.join(_FORMATS)}")
    allowed = _OPTIONS.get(name, ())
    for option in options:
        if option not in allowed:
            raise UsageError(f"format {name}: option {option!r} is unknown; it takes {', '.join(allowed) or 'none'}")
    return _FORMATS[name](**options)


@cache
def scheme(name: str, activations: str) -> Scheme:
    """The scheme of the format `name` beside inputs of "16bit", "8bit" or "4bit"; the same object for the same words.

    Raises UsageError as `get`, and for inputs that no engine rounds so beside weights of this format.
    """
    fmt = get(name)
    found = Scheme.make(fmt, activations != UNROUNDED)
    if found.activations != activations:
        raise UsageError(
            f"format {name} has no {activations.replace('bit', '-bit')} activations; use {UNROUNDED} or "
            f"{found.activations}"
        )
    return found
