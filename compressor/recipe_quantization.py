"""Recipe sections `quantization` and `distillation`."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from compressor.recipe_base import Section, refuse

Activations = Literal["16bit", "8bit", "4bit"]
Glob = Annotated[str, Field(min_length=1)]
ROW_BLOCKS = "fp8-block128"
UNQUANTIZED = "none"
"""Format of an override that keeps its linears as they are."""


def matches(pattern: str, module: str) -> bool:
    """Whether a glob of `quantization.ignore` or `quantization.overrides` names a module, by its full name."""
    return fnmatchcase(module, pattern)


def format_names() -> list[str]:
    """Every number format."""
    from compressor import formats  # brings in torch: only when a recipe is checked

    return formats.names()


def known_format(name: str, *others: str) -> str:
    """`name`. Refused unless it is a format or one of `others`."""
    names = [*format_names(), *others]
    if name not in names:
        raise PydanticCustomError("not_one_of", "", {"allowed": names})
    return name


def check_activations(key: str, name: str, activations: str) -> None:
    """Refuse, at `key`, inputs that no engine rounds so beside weights of the format `name`."""
    from compressor import formats

    if activations not in (formats.UNROUNDED, formats.rounded_activations(formats.get(name))):
        able = [other for other in formats.names() if formats.rounded_activations(formats.get(other)) == activations]
        reason = f"format {name} has no {activations.replace('bit', '-bit')} activations; use 16bit, or format "
        raise refuse(key, activations, reason + " or ".join(able))


def check_together(names: list[str], first: str, others: str) -> None:
    """Refuse formats that one bundle cannot hold: transformers loads asymmetric ones only by decoding every linear as
    the first group of the configuration says. `first`, `others`: keys that name the first and the others."""
    from compressor import formats

    asymmetric = [name for name in names if not formats.get(name).weights_config()["symmetric"]]
    if asymmetric and len(set(names)) > 1:
        reason = "transformers cannot load it beside another format; take a symmetric one"
        raise refuse(others if asymmetric[0] != names[0] else first, asymmetric[0], reason)


class Override(Section):
    """Linears whose format, or whose inputs, are not those of the others."""

    targets: list[Glob] = Field(min_length=1, description="Glob patterns of full module names.")
    format: str = Field(
        description="Number format of their weights; none keeps them unquantized.",
        json_schema_extra=lambda schema: schema.update(enum=[*format_names(), UNQUANTIZED]),
    )
    activations: Activations | None = Field(default=None, description="Of their inputs; null = as the others.")

    @field_validator("format")
    @classmethod
    def _format_exists(cls, name: str) -> str:
        return known_format(name, UNQUANTIZED)

    @model_validator(mode="after")
    def _activations_have_a_format(self) -> Self:
        if self.format == UNQUANTIZED and self.activations is not None:
            raise refuse("activations", self.activations, "format none rounds nothing; remove it")
        return self

    def names(self, module: str) -> bool:
        """Whether a linear is among the targets, by its full name."""
        return any(matches(pattern, module) for pattern in self.targets)


Candidate = Annotated[
    str,
    AfterValidator(lambda name: known_format(name, UNQUANTIZED)),
    Field(json_schema_extra=lambda schema: schema.update(enum=[*format_names(), UNQUANTIZED])),
]
"""A format, or none."""


class Allocation(Section):
    """A format for every group of linears that share an input, chosen by what each costs in KL, under a budget."""

    bits_per_weight: float = Field(
        gt=0,
        description="Mean bits that a weight may take, scales counted: of all linears that a format is chosen for, "
        "those left unquantized too.",
    )
    formats: list[Candidate] = Field(
        min_length=2,
        description="Formats to choose from; none leaves a group unquantized. Inputs are as quantization.activations "
        "says where the format allows it, else in 16 bits.",
    )
    rows: int = Field(default=4, ge=1, description="Calibration rows that KL is measured on.")
    measure: Literal["cheapest", "all"] = Field(
        default="cheapest",
        description="all: the KL of every format; cheapest: that of the smallest and of those that round inputs, "
        "and predicts the others' from the error they leave in the linears' outputs.",
    )

    @model_validator(mode="after")
    def _formats_differ(self) -> Self:
        twice = [name for index, name in enumerate(self.formats) if name in self.formats[:index]]
        if twice:
            raise refuse("formats", twice[0], "it is listed twice; remove one")
        check_together([name for name in self.formats if name != UNQUANTIZED], "formats", "formats")
        return self


class Quantization(Section):
    """How the linear layers inside the decoder blocks are stored. Embeddings and lm_head always keep their dtype."""

    format: str = Field(
        default="int4-g64",
        description="Number format of the weights.",
        json_schema_extra=lambda schema: schema.update(enum=[*format_names()]),
    )
    activations: Activations = Field(
        default="16bit",
        description="4bit (W4A4) and 8bit (W8A8) also round each linear's input; only for formats engines run so.",
    )
    method: Literal["gptq", "rtn"] = Field(default="gptq", description="gptq (calibrated) or rtn (round to nearest).")
    scale_search: Literal["mse", "none"] = Field(
        default="mse",
        description="mse searches each group's scale for the least weighted squared error, among those whose weights "
        "are exact in bfloat16 (asymmetric int4, int8, and int4 and fp8 of a source in another dtype: any); none = "
        "standard rule.",
    )
    damping: float = Field(
        default=0.01, gt=0, le=1, description="GPTQ: share of the Hessian's mean diagonal added to it."
    )
    order: Literal["static", "none"] = Field(
        default="static", description="GPTQ: static quantizes columns by falling Hessian diagonal; none = as they come."
    )
    block_size: int = Field(default=128, ge=1, description="GPTQ: columns updated together.")
    asymmetric: bool = Field(
        default=False,
        description="GPTQ: aim at the full-precision model's outputs from the quantized model's inputs; calibration "
        "carries both, in twice the space.",
    )
    guided: bool = Field(
        default=False,
        description="Weigh each calibration token by how much the original's answer would feel an error there: one "
        "backward pass of the whole original. A damping of 0.05 goes well with it.",
    )
    refit: bool = Field(default=False, description="GPTQ: fit the scales once more to the chosen codes.")
    ignore: list[Glob] = Field(
        default_factory=list, description="Glob patterns of full module names that stay unquantized."
    )
    overrides: list[Override] = Field(
        default_factory=list,
        description="Linears in another format; the last entry that names one counts, and ignore before them all.",
    )
    allocation: Allocation | None = Field(
        default=None, description="Choose formats under a budget of bits, in place of overrides; null = not."
    )

    @field_validator("format")
    @classmethod
    def _format_exists(cls, name: str) -> str:
        return known_format(name)

    @model_validator(mode="after")
    def _activations_fit_the_formats(self) -> Self:
        check_activations("activations", self.format, self.activations)
        for index, entry in enumerate(self.overrides):
            if entry.format != UNQUANTIZED:
                check_activations(
                    f"overrides[{index}].activations", entry.format, entry.activations or self.activations
                )
        named = [entry.format for entry in self.overrides if entry.format != UNQUANTIZED]
        check_together([self.format, *named], "format", "overrides")
        return self

    @model_validator(mode="after")
    def _allocation_alone_names_formats(self) -> Self:
        if self.allocation is None:
            return self
        if self.overrides:
            raise refuse("overrides", "…", "allocation chooses every linear's format; remove one of the two")
        if self.format not in self.allocation.formats:
            reason = f"allocation.formats ({', '.join(self.allocation.formats)}) does not hold it; take one of those"
            raise refuse("format", self.format, reason)
        return self

    @model_validator(mode="after")
    def _gptq_alone_solves(self) -> Self:
        for key in ("asymmetric", "refit"):
            if getattr(self, key) and self.method != "gptq":
                raise refuse(key, True, f"method {self.method} does not use it; remove it, or set method: gptq")
        if self.refit and self.shares_scales:
            raise refuse("refit", True, f"{ROW_BLOCKS} shares its scales between rows; remove it, or take fp8")
        return self

    @model_validator(mode="after")
    def _guided_has_hessians(self) -> Self:
        if self.guided and not self.weighs_inputs:
            reason = "there is no Hessian to weigh; set scale_search: mse or method: gptq"
            raise refuse("guided", True, reason)
        return self

    @property
    def shares_scales(self) -> bool:
        """Whether some rows have no scales of their own, so that none can be fitted row by row."""
        allocated = self.allocation.formats if self.allocation is not None else []
        return ROW_BLOCKS in (self.format, *allocated, *(entry.format for entry in self.overrides))

    @property
    def weighs_inputs(self) -> bool:
        """Whether errors are weighed by the inputs: GPTQ does so by whole Hessians, the scale search by diagonals."""
        return self.method == "gptq" or self.scale_search == "mse"

    @property
    def needs_data(self) -> bool:
        """Whether there is a calibration at all; 4-bit activations need the largest input of every linear, and
        allocation rows to measure on."""
        inputs = [self.activations, *(entry.activations for entry in self.overrides)]
        return self.weighs_inputs or "4bit" in inputs or self.allocation is not None

    @property
    def candidates(self) -> list[tuple[str, str] | None]:
        """(format, activations) of each of `allocation.formats`; None for none. Without an allocation: of `format`."""
        from compressor import formats

        if self.allocation is None:
            return [(self.format, self.activations)]
        found: list[tuple[str, str] | None] = []
        for name in self.allocation.formats:
            if name == UNQUANTIZED:
                found.append(None)
                continue
            able = formats.rounded_activations(formats.get(name)) == self.activations
            found.append((name, self.activations if able else formats.UNROUNDED))
        return found

    def ignores(self, module: str) -> bool:
        """Whether a linear (full name, ``model.layers.0.mlp.down_proj``) matches one of the `ignore` patterns."""
        return any(matches(pattern, module) for pattern in self.ignore)

    def choice(self, module: str) -> tuple[str, str] | None:
        """(format, activations) of a linear by its full name; None where it stays unquantized."""
        if self.ignores(module):
            return None
        index = self.overriding(module)
        if index is None:
            return self.format, self.activations
        entry = self.overrides[index]
        return None if entry.format == UNQUANTIZED else (entry.format, entry.activations or self.activations)

    def overriding(self, module: str) -> int | None:
        """Which of `overrides` decides about a linear: the last that names it; None where none does."""
        found = [index for index, entry in enumerate(self.overrides) if entry.names(module)]
        return found[-1] if found and not self.ignores(module) else None


class Distillation(Section):
    """Training of the quantized model's scales, norms and biases on the calibration rows, so that its logits come
    closer to the original's. Holds the whole quantized model in memory, in `source.dtype`."""

    steps: int = Field(default=100, ge=1, description="Steps of the optimizer.")
    rows: int = Field(default=4, ge=1, description="Calibration rows a step.")
    scale_rate: float = Field(default=2e-3, ge=0, description="Share of itself that a scale moves a step, about.")
    other_rate: float = Field(
        default=1e-3,
        ge=0,
        description="Share of its tensor's root mean square that an element of a norm or bias moves a step, about.",
    )
    held_out: int = Field(
        default=4, ge=1, description="Calibration rows set aside, which decide whether the result is kept."
    )
    save_every: int = Field(default=25, ge=1, description="Steps between two checkpoints.")
