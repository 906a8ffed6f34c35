"""Exact speculative decoding: the sampling law, the rejection rules, the cache with rollback, and the runner."""

from compressor.decode.batch import Batch, Output, Request
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.length import Adaptive
from compressor.decode.runner import Runner

__all__ = ["Adaptive", "Batch", "Decoder", "Law", "Output", "Request", "Runner"]
