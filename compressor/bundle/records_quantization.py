"""The passport's rows on quantization: what was rounded, how formats were chosen, with what error."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from compressor.bundle.record_base import Activations, Evidence, Record, Settings, Sha256


class Calibration(Record):
    """The rows that calibrated the quantizer."""

    digest: Sha256
    """sha256 of the token ids and their shape."""
    kind: str
    rows: PositiveInt
    length: PositiveInt
    """Tokens a row."""
    details: Settings = Field({})


class Layer(Record):
    """One quantized linear."""

    name: str
    shape: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    """[out_features, in_features]"""
    format: str
    activations: Activations | None = None
    """Of its inputs; null: `quantization.activations`."""
    error: NonNegativeFloat | None = None
    """Relative squared output error tr(E H Eᵀ)/tr(W H Wᵀ) over the calibration inputs; without calibration, of the
    weight itself (H = 1). With `guided` each token has its weight in H; with `asymmetric` W is still the original, not
    what GPTQ aimed at. Before distillation, as `sqnr_db`. Null where calibration gathered no H but its diagonal."""
    diagonal_error: NonNegativeFloat | None = None
    """Σ h E²/Σ h W² with h the diagonal of H, the mean square of each input: instead of `error` where the method needs
    no more of H. It leaves out that inputs move together, so that the two cannot be compared. Before distillation."""
    sqnr_db: float | None = None
    """Signal to quantization noise of the weights in decibels; null for an exact copy, where it is infinite."""
    packed_bytes: PositiveInt
    """Bytes of this layer's tensors in the bundle, scales included, bias not."""
    original_bytes: PositiveInt
    stats: Settings = Field({})

    @property
    def stated_error(self) -> float | None:
        """Whichever of the two errors there is."""
        return self.diagonal_error if self.error is None else self.error

    @field_validator("sqnr_db", mode="before")
    @classmethod
    def _no_infinity_in_json(cls, value: Any) -> Any:
        return None if value == math.inf else value


class Distillation(Record):
    """Training of the quantized model against the original's logits, on calibration rows."""

    before: NonNegativeFloat
    """KL(original ‖ quantized) in nats a token, on rows that were set aside."""
    after: NonNegativeFloat
    kept: bool
    """False where it did not help: the bundle then holds what there was before."""
    seconds: NonNegativeFloat
    losses: list[float]
    """Estimates of the KL on the rows of each step."""


class AllocationOption(Record):
    """One way to store a group of linears."""

    format: str
    """`none`: not quantized."""
    activations: Activations | None
    bytes: PositiveInt
    """Of the group's weights, scales included."""
    kl: NonNegativeFloat
    """KL(original ‖ original with only this group rounded to nearest so), nats a token."""
    known: Literal["measured", "predicted", "exact"]
    """predicted: by `allocation.prediction`; exact: nothing is rounded."""
    output_error: NonNegativeFloat
    """Squared error of the group's outputs, tr(E H Eᵀ), that rounding its weights leaves."""


class AllocationGroup(Record):
    """Linears that share an input, and so a format."""

    linears: list[str]
    fused_as: str | None
    """What engines call the one matrix that they make of them."""
    weights: PositiveInt
    options: list[AllocationOption]
    chosen: NonNegativeInt
    """Which of `options`."""

    @model_validator(mode="after")
    def _chosen_is_an_option(self) -> Self:
        if self.chosen >= len(self.options):
            raise ValueError(f"chosen is {self.chosen}, there are {len(self.options)} options")
        return self


class Allocation(Record):
    """How formats were chosen: the least sum of the groups' KLs under a budget."""

    budget_bits_per_weight: PositiveFloat
    budget_bytes: PositiveInt
    bytes: PositiveInt
    """Of the chosen options together."""
    bits_per_weight: PositiveFloat
    """8 · `bytes` by the weights of all groups, those left unquantized too."""
    rows: PositiveInt
    """Calibration rows that KL was measured on."""
    length: PositiveInt
    kl_sum: NonNegativeFloat
    """Of the chosen options."""
    kl_sum_bound: NonNegativeFloat
    """No choice within the budget has a smaller sum."""
    kl_per_byte: NonNegativeFloat
    """What one more byte would take off the sum, to first order."""
    seconds: NonNegativeFloat
    prediction: Evidence | None
    """How the predicted KLs are known; null where there are none."""
    groups: list[AllocationGroup]


class Quantization(Record):
    """What was rounded, how, and with what error."""

    format: str
    """Name that `compressor.formats.get` knows; of layers without one of their own."""
    compression_format: str
    """`format` of config.json's quantization_config (compressed-tensors)."""
    bits: PositiveInt
    """Of `format`."""
    group_size: PositiveInt | None
    """Of `format`; null: one scale an output channel."""
    bits_per_weight: PositiveFloat
    """Bits a quantized weight, the mean over `layers`; scales and zero points included, but for a single one a row."""
    activations: Activations
    method: str
    settings: Settings = Field({})
    calibration: Calibration | None = None
    layers: list[Layer]
    allocation: Allocation | None = None
    distillation: Distillation | None = None
    ignored: list[str]
    """Entries of config.json's `ignore`: linears left in `target.dtype`."""

    @property
    def formats(self) -> str:
        """The formats of the layers, for a reader."""
        return " + ".join(dict.fromkeys([self.format, *(layer.format for layer in self.layers)]))

    @property
    def has_diagonal_errors(self) -> bool:
        """Whether the layers' errors are `diagonal_error`; they are of one kind in all layers."""
        return any(layer.diagonal_error is not None for layer in self.layers)

    @property
    def error_name(self) -> str:
        """What the layers' errors are called, for a reader."""
        return "relative weighted error" if self.has_diagonal_errors else "relative output error"
