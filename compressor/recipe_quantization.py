"""Recipe keys of `quantization` that name formats, inputs and linears."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from compressor.recipe_base import Section, refuse

Activations = Literal["16bit", "8bit", "4bit"]
Glob = Annotated[str, Field(min_length=1)]
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


def check_together(names: list[str]) -> None:
    """Refuse formats that one bundle cannot hold: transformers loads asymmetric ones only by decoding every linear as
    the first group of the configuration says."""
    from compressor import formats

    asymmetric = [name for name in names if not formats.get(name).weights_config()["symmetric"]]
    if asymmetric and len(set(names)) > 1:
        reason = "transformers cannot load it beside another format; take a symmetric one"
        raise refuse("overrides" if asymmetric[0] != names[0] else "format", asymmetric[0], reason)


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
