"""The passport of a head: what it was trained on, for which target, how well it drafted, and what its files are."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from compressor.bundle import environment
from compressor.bundle.record_base import MEASURED, Record, Sha256
from compressor.bundle.records import Acceptance, Environment
from compressor.checkpoint.digest import sha256_file
from compressor.errors import CompressError, naming
from compressor.recipe_training import Precision

FILE_NAME = "passport.json"


class HeadTarget(Record):
    """The model that the head drafts for."""

    source: str
    model_type: str
    hidden_size: int
    layers: int
    vocab_size: int
    files: dict[str, Sha256]
    """sha256 of the target's files, by name: weights, config, tokenizer."""


class Lowering(Record):
    """How a head's linears came to fewer bits than it was trained in."""

    precision: Precision
    files: dict[str, Sha256]
    """Of the head before."""
    allowed_loss: float
    """Of the accepted tokens a cycle, the share that it was allowed to lose."""
    before: Acceptance
    """What the head before reached where `check` of the passport was measured."""


class HeadPassport(Record):
    """The whole of a head's passport.json."""

    schema_version: Literal["1.0"] = "1.0"
    created: AwareDatetime
    kind: Literal["eagle3", "medusa", "draft"]
    target: HeadTarget
    healed_from: dict[str, Sha256] = Field(default_factory=dict)
    """Files of the head that this one was fine-tuned from."""
    recipe: dict[str, JsonValue]
    training: dict[str, JsonValue]
    """Documents, vocabulary and history (compressor.train.head)."""
    check: Acceptance
    """What the export check measured."""
    expected_acceptance: float | None = None
    """Of an EAGLE-3 head's first token at temperature 1 (compressor.train.overlap)."""
    lowering: Lowering | None = None
    environment: Environment
    files: dict[str, Sha256] = Field(min_length=1)
    """sha256 of the head's own files."""

    @property
    def self_written(self) -> float:
        """Share of the prompts of its training that the target wrote; 0 where the recipe does not say."""
        recipe: Any = self.recipe
        section = recipe.get("heal") or (recipe.get("proposer") or {}).get("training") or {}
        return float((section.get("answers") or {}).get("self_written", 0.0))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The passport in `folder`, None where there is none. Raises CompressError for a damaged one."""
        path = folder / FILE_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise CompressError(f"{path}: {key}: {' '.join(first['msg'].split())}") from None


def write(
    folder: Path,
    *,
    kind: str,
    target: dict[str, Any],
    recipe: dict[str, Any],
    training: dict[str, Any],
    check: dict[str, Any],
    expected_acceptance: float | None,
    healed_from: dict[str, str] | None = None,
) -> HeadPassport:
    """Write passport.json beside the files that `folder` holds by now."""
    passport = HeadPassport.model_validate(
        {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "target": target,
            "healed_from": healed_from or {},
            "recipe": recipe,
            "training": training,
            "check": {**check, "evidence": MEASURED},
            "expected_acceptance": expected_acceptance,
            "environment": environment.capture(),
            "files": files(folder),
        }
    )
    _save(folder, passport)
    return passport


def write_lowered(
    folder: Path,
    old: HeadPassport,
    *,
    lowering: dict[str, Any],
    check: dict[str, Any],
    expected_acceptance: float | None,
) -> None:
    """Write the passport of the head in `folder`, made from the one of passport `old`. `lowering`, `check`: its
    fields."""
    changed = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "check": check,
        "expected_acceptance": expected_acceptance,
        "lowering": lowering,
        "environment": environment.capture(),
        "files": files(folder),
    }
    _save(folder, HeadPassport.model_validate(old.model_dump() | changed))


def _save(folder: Path, passport: HeadPassport) -> None:
    with naming(folder / FILE_NAME):
        text = json.dumps(passport.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def files(folder: Path) -> dict[str, str]:
    """sha256 of the files in `folder`, but its passport, by name."""
    return {
        path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != FILE_NAME
    }


def refuse_changed(folder: Path, passport: HeadPassport) -> None:
    """Raise CompressError for a file that is missing or no longer what the passport says."""
    found = files(folder)
    for name, digest in passport.files.items():
        if found.get(name) != digest:
            problem = "is missing" if name not in found else "is not the file that the passport describes"
            raise CompressError(f"{folder / name}: {problem}; fetch the head again")
