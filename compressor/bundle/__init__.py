"""Bundles: passport, signature, verification, report and model card."""

from compressor.bundle.api import Bundle, finish
from compressor.bundle.passport import Passport
from compressor.checkpoint.digest import sha256_file as sha256

__all__ = ["Bundle", "Passport", "finish", "sha256"]
