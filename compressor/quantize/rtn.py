"""Round to nearest: every weight on its own, on the grid its format chooses."""

from torch import Tensor

from compressor.formats import Format


def rtn(
    weight: Tensor,
    fmt: Format,
    *,
    search: str = "mse",
    importance: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """weight float [out, in] → tensors on disk by suffix.

    search and importance (float [in]) choose the scales, see `Format.grid`; global_scale: float32 [1] shared by parts
    that engines fuse. Raises CompressError for NaN or Inf and for an input size that does not divide into groups.
    """
    return fmt.encode(weight, search=search, importance=importance, global_scale=global_scale)
