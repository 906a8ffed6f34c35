"""What NVFP4 and MXFP4 share: E2M1 elements, two to a byte."""

import torch
from torch import Tensor

from compressor.formats.base import Format
from compressor.formats.grids import E2M1, encode_e2m1_, round_e2m1_


class Fp4(Format):
    """E2M1 codes: bit 3 is the sign, the others index 0, 0.5, 1, 1.5, 2, 3, 4, 6. No zero points."""

    bits = 4

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.round`."""
        return encode_e2m1_(torch.div(x, step).float())

    def value(self, codes: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.value`."""
        return E2M1.decode(codes).mul_(step)

    def fake_quantize(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize`."""
        return round_e2m1_(torch.div(x, step).float()).mul_(step)
