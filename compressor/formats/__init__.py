"""Number formats of quantized weights and their packed layouts on disk.

fmt = formats.get("nvfp4")
tensors = fmt.encode(weight)        # exactly the tensors written to disk, by suffix
weight_hat = fmt.decode(tensors)    # float32 [out, in]
"""

import difflib
from collections.abc import Callable
from functools import partial

from compressor.errors import UsageError
from compressor.formats import config
from compressor.formats.base import Format, Grid
from compressor.formats.int4 import Int4
from compressor.formats.mxfp4 import Mxfp4
from compressor.formats.nvfp4 import Nvfp4

__all__ = ["Format", "Grid", "config", "get", "names"]

_FORMATS: dict[str, Callable[..., Format]] = {
    **{f"int4-g{g}": partial(Int4, g) for g in Int4.GROUP_SIZES},
    **{f"int4-g{g}-asym": partial(Int4, g, symmetric=False) for g in Int4.GROUP_SIZES},
    "nvfp4": Nvfp4,
    "mxfp4": Mxfp4,
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
