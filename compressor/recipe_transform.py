"""The section of a recipe about exact changes of the model before it is rounded."""

from typing import Literal, Self

from pydantic import Field, model_validator

from compressor.recipe_base import Section, refuse


class TransformOptions(Section):
    """Re-parametrisations that leave the model the same function but easier to round; checked before anything is."""

    rotation: Literal["none", "r1", "r2", "r1+r2"] = Field(
        default="none",
        description="Hadamard rotations fused into the weights: r1 of the residual stream (unties a tied head), r2 of "
        "the value heads.",
    )
    smoothing: Literal["none", "awq", "smoothquant"] = Field(
        default="none",
        description="Scales of each linear's input channels, folded into what precedes it, found on the calibration "
        "rows.",
    )
    alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Exponent of the scales; null = searched for every group of linears by the error that rounding "
        "its weights leaves.",
    )

    @model_validator(mode="after")
    def _alpha_has_a_use(self) -> Self:
        if self.alpha is not None and self.smoothing == "none":
            raise refuse("alpha", self.alpha, "smoothing none has no exponent; remove it")
        return self

    @property
    def rotates_stream(self) -> bool:
        """Whether R1 is asked for."""
        return "r1" in self.rotation

    @property
    def rotates_heads(self) -> bool:
        """Whether R2 is asked for."""
        return "r2" in self.rotation
