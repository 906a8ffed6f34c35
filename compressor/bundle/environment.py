"""Versions and machine, for the passport."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from compressor.bundle.records import Environment

# The packages whose version can change a byte of the weights or a measured number.
PACKAGES = ("compressor", "torch", "transformers", "tokenizers", "safetensors", "compressed-tensors", "gguf", "numpy")


def capture() -> Environment:
    """What is running now."""
    return Environment(
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty or just the architecture on Linux
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
