"""A linear layer from the tensors of any quantized format."""

from torch import Tensor, nn

from compressor.errors import CompressError
from compressor.formats import Format
from compressor.kernels import int8_cpu
from compressor.kernels.linear import PackedLinear


def linear(
    fmt: Format, tensors: dict[str, Tensor], bias: Tensor | None, *, dtype, device
) -> tuple[nn.Module, tuple[int, int]]:
    """The layer and its [out, in]. Packed where the machine has a kernel for it, decoded into `dtype` elsewhere. Raises
    CompressError for tensors that are not the format's."""
    if fmt.bits < 8:
        packed = PackedLinear(fmt, tensors, bias=bias, dtype=dtype).to(device)
        return packed, (packed.out_features, packed.in_features)
    codes, grid = fmt.unpack(tensors)
    if fmt.name == "int8" and int8_cpu.fits(codes.shape[1], dtype, device):
        return int8_cpu.pack(codes, grid.step, bias), tuple(codes.shape)
    plain = nn.Linear(codes.shape[1], codes.shape[0], bias=bias is not None, device="meta")
    weight = fmt.decode(tensors).to(device, dtype)
    if not bool(weight.isfinite().all()):
        raise CompressError(f"decoded from {fmt.name} it holds values that {dtype} cannot")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain, tuple(codes.shape)
