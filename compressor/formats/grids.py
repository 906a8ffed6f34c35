"""Number grids of the low-bit floats: which values a code stands for, and which code a value rounds to.

`Minifloat` is any sign/exponent/mantissa format of at most 8 bits (OCP "Microscaling Formats (MX) v1.0", section 5.3;
E4M3/E5M2 as in "FP8 Formats for Deep Learning", Micikevicius et al. 2022). E8M0 is the scale of the MX formats: the
exponent of a power of two, biased by 127, 255 = NaN. Rounding is always to nearest, ties to the even code, saturating.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError

EXPONENT_RULES = ("floor", "round", "ceil")
_EXPONENT_MASK = 0x7F800000
# Adding 1.5 · 2^23 ulps to a float32 leaves no room for anything finer than one ulp, so the addition itself
# rounds to nearest even; subtracting it again gives the rounded number. Holds for |x| < 2^22 ulps.
_ROUNDING_SHIFT = 1.5 * 2.0**23


@dataclass(frozen=True)
class Minifloat:
    """One binary format: `1 + exponent_bits + mantissa_bits` bits, subnormals included.

    `max` is the largest finite value and `nan` the positive NaN code (None where every code is a number).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan: int | None = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """floor(log2(max)): the offset the MX "floor" rule subtracts from a block's exponent."""
        return math.floor(math.log2(self.max))

    @cached_property
    def values(self) -> Tensor:
        """Value of every code: float32 [2 ** bits]."""
        codes = torch.arange(1 << (self.bits - 1))
        exponent, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        normal = exponent > 0
        fraction = mantissa.double() / (1 << self.mantissa_bits) + normal.double()
        positive = torch.ldexp(fraction, torch.where(normal, exponent, 1) - self.bias)
        beyond = positive > self.max
        # E5M2 is IEEE-like: the first code past the largest number is infinity, the rest are NaN. E4M3FN has NaN only.
        if self.nan is not None:
            positive = torch.where(beyond, torch.nan, positive)
            if self.name == "float8_e5m2":
                positive[int(beyond.nonzero()[0])] = torch.inf
        return torch.cat([positive, -positive]).float()

    def decode(self, codes: Tensor) -> Tensor:
        """codes uint8 of any shape → float32 values."""
        return self.values.to(codes.device)[codes.int()]

    def encode(self, x: Tensor) -> Tensor:
        """Float tensor → uint8 codes of the nearest values; ties to the even code, saturating, sign of zero kept.

        Raises CompressError for a NaN where the format has no code for it.
        """
        x = x.float()
        smallest = 2.0 ** (1 - self.bias)
        power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp(smallest, 2.0**self.emax)
        shift = power * (2.0**-self.mantissa_bits * _ROUNDING_SHIFT)
        value = ((x.abs() + shift) - shift).clamp(max=self.max)
        rebias = (127 - self.bias) << self.mantissa_bits
        normal = (value.view(torch.int32) >> (23 - self.mantissa_bits)) - rebias
        subnormal = (value * (2.0**self.mantissa_bits / smallest)).nan_to_num(0.0).int()
        codes = torch.where(value < smallest, subnormal, normal)
        invalid = x.isnan()
        if bool(invalid.any()):
            if self.nan is None:
                raise CompressError(f"{self.name} has no code for NaN: the tensor to encode holds {int(invalid.sum())}")
            codes = torch.where(invalid, self.nan, codes)
        return (codes | (x.signbit().int() << (self.bits - 1))).to(torch.uint8)


E2M1 = Minifloat("float4_e2m1fn", 2, 1, bias=1, max=6.0)
E2M3 = Minifloat("float6_e2m3fn", 2, 3, bias=1, max=7.5)
E3M2 = Minifloat("float6_e3m2fn", 3, 2, bias=3, max=28.0)
E4M3 = Minifloat("float8_e4m3fn", 4, 3, bias=7, max=448.0, nan=0x7F)
E5M2 = Minifloat("float8_e5m2", 5, 2, bias=15, max=57344.0, nan=0x7E)


def round_e2m1_(x: Tensor) -> Tensor:
    """Round float32 `x` to the nearest E2M1 value in place (ties to even, saturating at ±6; −0 may become 0).

    Four arithmetic operations instead of a search among thresholds: the hot path of every FP4 format.
    """
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp_(1.0, 4.0)
    shift = power.mul_(0.5 * _ROUNDING_SHIFT)
    return x.add_(shift).sub_(shift).clamp_(-E2M1.max, E2M1.max)


def encode_e2m1_(x: Tensor) -> Tensor:
    """uint8 codes of float32 `x` (overwritten). A zero of either sign is code 0, as compressed-tensors has it."""
    sign = (x < 0).to(torch.uint8) << 3
    magnitude = round_e2m1_(x).abs_()
    # the code of 0, .5, 1, 1.5, 2, 3, 4, 6 is concave in the value: the lowest of its three straight pieces
    code = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
    return code.to(torch.uint8) | sign


def significant(x: Tensor, bits: int) -> Tensor:
    """Float `x` rounded to `bits` significant bits, ties to even."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ldexp(mantissa, torch.tensor(bits)).round_(), exponent - bits)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [out, in] (in even) → uint8 [out, in / 2], the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def decode_e8m0(codes: Tensor) -> Tensor:
    """uint8 E8M0 codes → float32 powers of two 2^(code − 127); 255 is NaN."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, bits)  # 2^-127 is a subnormal float32
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32))


def mx_exponent(amax: Tensor, rule: str, element: Minifloat = E2M1) -> Tensor:
    """E8M0 codes (uint8) of the block scales for the largest magnitudes `amax` (float, ≥ 0) of blocks of `element`.

    "floor": OCP MX v1.0 section 6.3, floor(log2 amax) − emax: the largest values of a block may saturate.
    "round": compressed-tensors, one more where amax would round past the element's top binade (mantissa ≥ 1.75 for
    E2M1). "ceil": NVIDIA/AITER/torchao RCEIL, ceil(log2(amax / max)): nothing saturates. A zero block gets code 0.
    """
    if rule not in EXPONENT_RULES:
        raise UsageError(f"exponent_rule: {rule!r} is not one of {', '.join(EXPONENT_RULES)}")
    if rule == "ceil":
        bits = (amax.float() / element.max).view(torch.int32)
        exponent, fraction = bits >> 23, bits & 0x7FFFFF
        # code 0 stands for 2^-127, half way up the subnormals
        code = exponent + (fraction > torch.where(exponent == 0, 0x400000, 0)).int()
    else:
        bits = amax.float().view(torch.int32)
        if rule == "round":
            bits = bits + (1 << (22 - element.mantissa_bits))
        code = (bits >> 23) - element.emax
    return code.clamp(0, 254).to(torch.uint8)
