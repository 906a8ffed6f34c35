"""What the passport's rows are made of: the base of their classes, shared types, and how a number is known."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Settings = dict[str, JsonValue]
Activations = Literal["16bit", "8bit", "4bit"]
"""Bits of a linear's inputs; 16 stands for `target.dtype`."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Evidence(Record):
    """How a number is known."""

    kind: Literal["measured", "derived", "published"]
    formula: str | None = None
    """Derived numbers only: the formula, over the names in `inputs`."""
    inputs: list[str] = []
    """Derived numbers only: where each input stands, as a dotted passport key or a value with its unit."""
    reference: str | None = None
    """Published numbers only: where it was published."""

    @model_validator(mode="after")
    def _says_enough(self) -> Self:
        if self.kind == "derived" and not (self.formula and self.inputs):
            raise ValueError("derived evidence must name its formula and inputs")
        if self.kind == "published" and not self.reference:
            raise ValueError("published evidence must name its reference")
        return self


MEASURED = Evidence(kind="measured")
