"""What the sections of a recipe share."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


def refuse(key: str, value: Any, reason: str) -> PydanticCustomError:
    """An error of a combination of keys, reported at `key` of the section whose validator raises it."""
    return PydanticCustomError("combination", "{reason}", {"key": key, "value": value, "reason": reason})


class Section(BaseModel):
    """What all sections share: no unknown keys, no coercion ("128" is not 128), no NaN, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
