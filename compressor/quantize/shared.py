"""Quantizing the linears that read the same input (q/k/v, gate/up): one Hessian, one factorization, one sweep."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError
from compressor.formats import Format
from compressor.quantize.gptq import gptq_together
from compressor.quantize.metrics import relative_diagonal_error, relative_output_error, sqnr_db
from compressor.quantize.rtn import rtn

METHODS = ("gptq", "rtn")


@dataclass(frozen=True)
class LayerResult:
    """One quantized linear.

    tensors: on disk by suffix. error: tr(E H Eᵀ) / tr(W H Wᵀ), relative to the layer's output over the calibration
    inputs (the identity for H where nothing was given); None where only the diagonal of H was given, and
    diagonal_error, see `relative_diagonal_error`, None everywhere else. sqnr_db: of the weight itself. stats: method,
    and for GPTQ the damping that held, the precision of the factorization, the number of dead inputs, what
    `gptq_together` adds for a cross term and for refitted scales, and seconds for all the layers solved together.
    """

    tensors: dict[str, Tensor]
    error: float | None
    diagonal_error: float | None
    sqnr_db: float
    stats: dict = field(default_factory=dict)


@torch.no_grad()
def quantize_shared(
    weights: list[Tensor],
    fmt: Format,
    *,
    method: str,
    names: list[str],
    hessian: Tensor | None = None,
    diagonal: Tensor | None = None,
    search: str = "mse",
    damping: float = 0.01,
    order: str = "static",
    block_size: int = 128,
    fused: bool = True,
    cross: Tensor | None = None,
    refit: bool = False,
) -> list[LayerResult]:
    """Quantize weights (float [out_i, in], one dtype) that read the same input whose Hessian is `hessian` [in, in].

    method "gptq" needs the Hessian; "rtn" weighs its scale search by the diagonal, if it has one: that of `hessian`, or
    `diagonal`, float [in], where there is no more of it. fused: engines concatenate these weights, so a format's global
    scale is common to all. cross and refit are for "gptq" alone. Other options as `gptq`.
    Raises CompressError naming the layer for NaN or Inf, a group that does not divide, or a singular Hessian.
    """
    if method not in METHODS:
        raise UsageError(f"method: {method!r} is not one of {', '.join(METHODS)}")
    if method == "gptq" and hessian is None:
        raise CompressError(f"{names[0]}: GPTQ needs the Hessian of the layer's input")
    importance = diagonal if hessian is None else hessian.diagonal()
    for weight, name in zip(weights, names, strict=True):
        fmt.check(weight.shape[1], name)
        if not bool(weight.isfinite().all()):
            raise CompressError(f"{name}: the weight holds NaN or Inf")
        if importance is not None and len(importance) != weight.shape[1]:
            raise CompressError(f"{name}: {weight.shape[1]} inputs, but a Hessian of {len(importance)}")
    if fused:
        fmt.check_fused([len(weight) for weight in weights], names[0])
    started = time.perf_counter()
    if method == "gptq" and hessian is not None:
        encoded, stats = gptq_together(
            weights,
            hessian,
            fmt,
            damping=damping,
            order=order,
            block_size=block_size,
            search=search,
            fused=fused,
            cross=cross,
            refit=refit,
            name=names[0],
        )
    else:
        common = fmt.global_scale(weights, search=search) if fused else None
        encoded = [rtn(w, fmt, search=search, importance=importance, global_scale=common) for w in weights]
        stats = {}
    stats = {"method": method, **stats, "seconds": round(time.perf_counter() - started, 4)}
    return [
        _result(weight, fmt, name, tensors, hessian, diagonal, stats)
        for weight, name, tensors in zip(weights, names, encoded, strict=True)
    ]


def _result(
    weight: Tensor,
    fmt: Format,
    name: str,
    tensors: dict[str, Tensor],
    hessian: Tensor | None,
    diagonal: Tensor | None,
    stats: dict,
) -> LayerResult:
    decoded = fmt.decode(tensors)
    if not bool(decoded.to(weight.dtype).isfinite().all()):  # rounding up may pass the dtype's largest number
        largest = weight.abs().amax().item()
        raise CompressError(
            f"{name}: {fmt.name} rounds its largest weight, {largest:g}, to infinity; add it to quantization.ignore"
        )
    error = diagonal_error = None
    if hessian is None and diagonal is not None:
        diagonal_error = relative_diagonal_error(weight, decoded, diagonal)
    else:
        error = relative_output_error(weight, decoded, hessian)
    return LayerResult(tensors, error, diagonal_error, sqnr_db(weight, decoded), dict(stats))
