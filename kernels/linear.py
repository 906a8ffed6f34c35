"""A linear layer that runs from its packed tensors, and can say which kernel ran it and how that is known."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.errors import CompressError, UsageError
from compressor.formats import Format
from compressor.kernels import int4_cpu, int8_cpu

KERNELS = ("auto", "cpu-int4", "dequantized")
PROOF_ROWS = 4
TOLERANCE = 1e-2
"""Largest accepted deviation from the float32 reference, as a share of the largest output: rounding the outputs to
bfloat16 alone gives up to 2⁻⁸ of it."""


def check_kernel(name: str) -> None:
    """Raises UsageError for a name that is not among `KERNELS`."""
    if name not in KERNELS:
        raise UsageError(f"kernel: {name!r} is not one of {', '.join(KERNELS)}")


class PackedLinear(nn.Module):
    """y = x·Wᵀ + bias with W stored in a quantized format.

    Args:
        fmt: the format of `tensors`.
        tensors: the layer's on-disk tensors by suffix, including `input_global_scale` where there is one.
        bias: [out] or None.
        dtype: of activations and outputs.
        kernel: "auto" takes a packed kernel where one can run this layer and otherwise dequantizes, saying why in
            `proof`; "cpu-int4" raises CompressError where it cannot run; "dequantized" always decodes.
        activations: round the inputs as a W4A4 or W8A8 engine does (emulated).

    `path` is "cpu-int4", "cpu-int8" or "dequantized", `kernel` the operator, `proof` one line of evidence: which
    operators one call of this very layer dispatched, and how far its result is from the float32 reference. A kernel
    that disagrees by more than `TOLERANCE` raises CompressError instead of running.
    """

    bias: Tensor | None
    input_global_scale: Tensor | None
    weight: Tensor  # [out, in], path "dequantized" only
    words: Tensor  # path "cpu-int4" only, as the next three
    scales_and_offsets: Tensor
    halves: Tensor
    zeros: Tensor | None
    int8: int8_cpu.Int8Linear  # path "cpu-int8" only

    def __init__(
        self,
        fmt: Format,
        tensors: dict[str, Tensor],
        *,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kernel: str = "auto",
        activations: bool = False,
    ) -> None:
        super().__init__()
        check_kernel(kernel)
        self.fmt = fmt
        codes, grid = fmt.unpack(tensors)
        self.out_features, self.in_features = codes.shape
        self.register_buffer("bias", None if bias is None else bias.to(dtype), persistent=False)
        self.register_buffer(
            "input_global_scale", tensors.get("input_global_scale") if activations else None, persistent=False
        )
        self.activations = activations
        dense = fmt.decode(tensors)
        reason = "asked for" if kernel == "dequantized" else self._obstacle(grid.step, dtype)
        if fmt.name == "int8" and reason is None and kernel == "cpu-int4":
            reason = "its weights are int8"
        if reason is None and fmt.name == "int8":
            self.int8 = int8_cpu.pack(codes, grid.step, self.bias)
            self.path, self.kernel = "cpu-int8", int8_cpu.OP
        elif reason is None:
            packed = int4_cpu.pack(codes, grid.step, grid.zero, fmt.group_size)
            for name in ("words", "scales_and_offsets", "halves", "zeros"):
                self.register_buffer(name, getattr(packed, name), persistent=False)
            self.path, self.kernel = "cpu-int4", int4_cpu.OP
        elif kernel == "cpu-int4":
            raise CompressError(f"kernel cpu-int4 cannot run this layer: {reason}")
        else:
            self.register_buffer("weight", dense.to(dtype), persistent=False)
            self.path, self.kernel = "dequantized", "aten::linear"
        self.proof = self._prove(dense, dtype, reason)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        if self.activations:
            x = self.fmt.fake_quantize_activation(x, self.input_global_scale)
        if self.path == "dequantized":
            return F.linear(x, self.weight, self.bias)
        if self.path == "cpu-int8":
            return self.int8(x)
        return int4_cpu.linear(x, self._packed(), self.bias)

    def _packed(self) -> int4_cpu.PackedInt4:
        return int4_cpu.PackedInt4(self.words, self.scales_and_offsets, self.halves, self.zeros, self.fmt.group_size)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.fmt.name}, path={self.path}"

    def _obstacle(self, step: Tensor, dtype: torch.dtype) -> str | None:
        if self.fmt.name == "int8":
            return int8_cpu.obstacle(self.in_features, dtype, step)
        if self.fmt.compression_format != "pack-quantized":
            return f"torch has no packed {self.fmt.name} kernel for this device"
        return int4_cpu.obstacle(self.out_features, self.fmt.group_size, step, dtype)

    @torch.inference_mode()
    def _prove(self, dense: Tensor, dtype: torch.dtype, reason: str | None) -> str:
        """Run the layer on random rows and compare with `dense`, the float32 decode of its tensors; int8 also on as
        many as run densely."""
        x = torch.randn(PROOF_ROWS, self.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
        with _Dispatched() as ran:
            y = self(x)
        if self.path == "cpu-int8":
            times = -(-int8_cpu.DENSE_ROWS // PROOF_ROWS)
            x, y = x.repeat(1 + times, 1), torch.cat([y, self(x.repeat(times, 1))])
        seen = self.fmt.fake_quantize_activation(x, self.input_global_scale) if self.activations else x
        expected = F.linear(seen.float(), dense, None if self.bias is None else self.bias.float())
        scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        deviation = ((y.float() - expected).abs().max() / scale).item()
        if not deviation <= TOLERANCE:
            raise CompressError(f"{self.kernel} is off by {deviation:.2g} of the largest output, above {TOLERANCE}")
        error = f"{deviation:.1e} of the largest output off the float32 reference"
        inputs = f", {self.fmt.bits}-bit inputs emulated" if self.activations else ""
        if self.path == "dequantized":
            return f"decoded to {str(dtype).removeprefix('torch.')}{inputs}: {reason}; {error}"
        if self.kernel not in ran.operators:
            raise CompressError(f"{self.kernel} did not run; dispatched were {', '.join(sorted(ran.operators))}")
        if self.path == "cpu-int8":
            return f"{self.kernel} was dispatched{inputs}; {error}; {int8_cpu.DENSE_ROWS} rows and more run densely"
        if not torch.equal(int4_cpu.decode(self._packed()), dense.to(dtype)):
            raise CompressError(f"{self.kernel}: its codes do not decode to this layer's weight")
        return f"{self.kernel} was dispatched; {error}; {int4_cpu.DECODE_ROWS} rows and more are decoded, equal weights"


class _Dispatched(TorchDispatchMode):
    """Notes the name of every operator that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))
