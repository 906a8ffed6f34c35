"""What this machine is and what would run natively on it, each kernel proved by running it."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from compressor import formats
from compressor.bundle import environment, signing
from compressor.checkpoint.source import default_cache
from compressor.kernels.linear import PackedLinear
from compressor.tables import size

FP4_CAPABILITY = (10, 0)
"""First CUDA compute capability with FP4 tensor cores (Blackwell)."""


def examine() -> dict[str, Any]:
    """Devices, memory, disk, versions, keys, and per number format the path its linears take; plain JSON values.

    Kernels: a linear [256, 256] of each format is packed and run once. Raises CompressError for a kernel that
    disagrees with its reference.
    """
    machine = environment.capture()
    return {
        "packages": machine.packages,
        "python": machine.python,
        "platform": machine.platform,
        "cpu": machine.cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": machine.cores,
        "threads": machine.threads,
        "memory_bytes": _memory_bytes(),
        "accelerators": [_accelerator(index) for index in range(torch.cuda.device_count())],
        "cache": {"path": str(default_cache()), "free_bytes": _free_bytes(default_cache())},
        "here": {"path": str(Path.cwd()), "free_bytes": _free_bytes(Path.cwd())},
        "signing_key": str(signing.keys_folder() / signing.PRIVATE_KEY),
        "signing_key_exists": (signing.keys_folder() / signing.PRIVATE_KEY).exists(),
        "kernels": [_kernel(name) for name in formats.names()],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a reader."""
    accelerators = [
        f"accelerator: {device['name']}, compute capability {device['capability']}, {size(device['memory_bytes'])}, "
        f"FP4 tensor cores: {'yes' if device['native_fp4'] else 'no'}"
        for device in found["accelerators"]
    ]
    key = "" if found["signing_key_exists"] else " (made by the first run)"
    return [
        f"cpu: {found['cpu']} ({found['cpu_capability']}), {found['cores']} cores, {found['threads']} threads",
        f"memory: {size(found['memory_bytes'])}",
        *(accelerators or ["accelerator: none"]),
        *(f"disk: {size(found[key]['free_bytes'])} free at {found[key]['path']}" for key in ("here", "cache")),
        f"signing key: {found['signing_key']}{key}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in found["packages"].items()),
        *(f"{kernel['format']}: {kernel['path']}; {kernel['proof']}" for kernel in found["kernels"]),
    ]


def _kernel(name: str) -> dict[str, str]:
    fmt = formats.get(name)
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = PackedLinear(fmt, fmt.encode(weight))
    return {"format": name, "path": linear.path, "kernel": linear.kernel, "proof": linear.proof}


def _accelerator(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "native_fp4": capability >= FP4_CAPABILITY,
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_bytes(path: Path) -> int:
    """Free bytes where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
