"""Algorithms that choose codes and scales: (weight, Hessian, format) → tensors on disk. No file or model knowledge."""

from compressor.quantize.gptq import gptq
from compressor.quantize.rtn import rtn
from compressor.quantize.shared import LayerResult, quantize_shared

__all__ = ["LayerResult", "gptq", "quantize_shared", "rtn"]
