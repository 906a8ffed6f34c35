"""The passport: what went in, what was done, what was measured, and how each number is known.

`passport.json` is read by tools, so its top-level keys are stable and unknown keys are refused. The JSON Schema beside
this file (`passport.schema.json`) is generated from these classes; `schema_text` rewrites it.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from compressor.bundle.record_base import Record
from compressor.bundle.records import (
    Decision,
    Environment,
    Kernel,
    Ledger,
    Outcomes,
    Proposer,
    Source,
    Target,
    Verifier,
    Workload,
)
from compressor.bundle.records_quantization import Quantization
from compressor.errors import CompressError

FILE_NAME = "passport.json"


class Passport(Record):
    """The whole of `passport.json`."""

    schema_version: Literal["1.0"] = "1.0"
    created: AwareDatetime
    recipe: dict[str, JsonValue]
    """The recipe as it ran, defaults included."""
    source: Source
    target: Target
    quantization: Quantization
    proposer: Proposer
    verifier: Verifier
    workload: Workload
    outcomes: Outcomes
    ledger: Ledger
    kernels: list[Kernel] = Field([])
    environment: Environment
    decisions: list[Decision] = Field([])

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a passport file, or the one of a bundle folder.

        Raises CompressError, in one line naming the file and the first bad key, for a file that is missing, not JSON,
        or not a passport.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise CompressError(f"{path}: not found; a bundle holds {FILE_NAME} beside its weights") from None
        except ValidationError as error:
            raise CompressError(f"{path}: {_first_problem(error)}") from None

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """A passport from plain values. Raises CompressError naming the first bad key."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise CompressError(f"passport: {_first_problem(error)}") from None

    def to_json(self) -> str:
        """The text of `passport.json`: the same passport always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def schema_text() -> str:
    """JSON Schema of `passport.json`, as shipped in passport.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Passport.model_json_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    message = " ".join(first["msg"].split())
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{key}: {message}{rest}" if key else f"not a readable passport ({message}){rest}"
