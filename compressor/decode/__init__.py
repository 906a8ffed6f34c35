"""Exact speculative decoding: the sampling law, the rejection kernel, the KV cache with rollback, and the runner."""

from compressor.decode.law import Law
from compressor.decode.runner import Output, Runner

__all__ = ["Law", "Output", "Runner"]
