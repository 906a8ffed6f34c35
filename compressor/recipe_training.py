"""The sections of a recipe about training a proposer: documents, optimization, healing."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from compressor.recipe_base import Section, refuse

Precision = Literal["bf16", "fp8", "int8", "int4-g32", "int4-g64", "int4-g128"]
"""Of a head's linears: as trained, or rounded to nearest afterwards."""
LOWER: tuple[str, ...] = get_args(Precision)[1:]
USUAL_LOSS = 0.05
"""Of the drafted tokens that are accepted, the share that 8 bits may cost where nothing else is said."""

STATE_LOSS = "a head in 4 bits can lose much; state which share of the accepted tokens it may lose"


def allowed_loss(precision: str, stated: float | None) -> float | None:
    """The share of accepted tokens that a `precision` may cost; None for 4 bits where none was `stated`: they can cost
    such a small network more than their bytes are worth, so nobody takes them unawares."""
    return USUAL_LOSS if stated is None and not precision.startswith("int4") else stated


Steps = Annotated[int, Field(ge=1, description="Steps of the optimizer.")]
Rate = Annotated[float, Field(gt=0, le=1, description="Largest learning rate; it warms up, then falls along a cosine.")]
Warmup = Annotated[int, Field(ge=0, description="Steps of warm-up.")]
Count = Annotated[int, Field(ge=2, le=40_000, description="Prompts, from the front of the list.")]


class Optimization(Section):
    """How a proposer's weights are fitted."""

    steps: Steps = 1500
    rate: Rate = 1e-3
    warmup: Warmup = 50
    batch_tokens: int = Field(default=4096, ge=16, description="Tokens of a batch, padding included.")
    accumulation: int = Field(default=1, ge=1, description="Batches a step.")
    evaluate_every: int = Field(default=200, ge=1, description="Steps between two looks at the held-out documents.")
    patience: int | None = Field(
        default=None, ge=1, description="Looks without better held-out acceptance before it stops; null = never."
    )
    save_every: int = Field(default=200, ge=1, description="Steps between checkpoints.")


class Answers(Section):
    """The documents that a proposer learns from: prompts, and what the target answers."""

    prompts: str | None = Field(
        default=None,
        min_length=1,
        description="JSON Lines file of text or messages; null = prompts written for this project.",
    )
    count: Count = 12_000
    self_written: float = Field(
        default=0.0, ge=0, le=1, description="Share of the prompts that the target, a chat model, writes itself."
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Longest answer.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of the answers; 0 = greedy.")
    held_out: int = Field(
        default_factory=lambda known: max(1, min(128, known["count"] // 8)),
        ge=1,
        description="Documents that only judge; without the key an eighth of count, at most 128.",
    )
    cache: Literal["disk", "none"] = Field(
        default="disk", description="disk keeps the target's states in the work folder; none makes them every time."
    )
    cache_format: Literal["bf16", "fp8"] = Field(
        default="bf16",
        description="disk: fp8 keeps the states that a head reads in E4M3, a scale each, and the last one in bf16.",
    )
    cache_bytes: int = Field(default=20_000_000_000, ge=0, description="disk: refuse to start beyond this size.")

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.cache == "none" and self.cache_format != "bf16":
            raise refuse("cache_format", self.cache_format, "cache none keeps nothing; remove one of the two")
        if self.held_out >= self.count:
            raise refuse("held_out", self.held_out, f"must be smaller than count ({self.count})")
        return self


Unroll = Annotated[int, Field(ge=1, le=8, description="eagle3: steps of the training-time test.")]
Decay = Annotated[float, Field(gt=0, le=1, description="Weight of a position's loss relative to the one before.")]


class Training(Section):
    """How a proposer is trained on what the target itself writes."""

    answers: Answers = Field(default_factory=Answers)
    optimization: Optimization = Field(default_factory=Optimization)
    draft_vocab_size: int = Field(default=8192, ge=2, description="eagle3, medusa: ids that the head can propose.")
    aux: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="eagle3: states that the head reads, k = after k layers; null = 2, half and all but 3 of them.",
    )
    heads: int = Field(default=3, ge=1, le=16, description="medusa: heads, one a drafted token.")
    layout: Literal["vllm", "speculators"] = Field(
        default="vllm", description="eagle3: files as vLLM and SGLang load a head, or of the speculators library."
    )
    layers: int = Field(default=4, ge=1, description="draft: layers of the target that the draft model begins with.")
    unroll: Unroll = Field(
        default=3, description="eagle3: steps of the training-time test; draft: tokens a draft when it is judged."
    )
    decay: Decay = Field(
        default=0.8, description="eagle3, medusa: weight of a position's loss relative to the one before."
    )

    def unused(self, kind: str) -> str | None:
        """The first key that is not at its default and that a proposer of `kind` does not read."""
        for key, kinds in READ_BY.items():
            if kind not in kinds and getattr(self, key) != type(self).model_fields[key].default:
                return key
        return None


READ_BY = {
    "draft_vocab_size": ("eagle3", "medusa"),
    "aux": ("eagle3",),
    "heads": ("medusa",),
    "layers": ("draft",),
    "layout": ("eagle3",),
    "unroll": ("eagle3", "draft"),
    "decay": ("eagle3", "medusa"),
}
"""The keys of a training that only some kinds of proposer read. They are held against their defaults, not asked whether
they were written: the recipe beside a trained head holds every key, and must load again."""


class HealOptimization(Optimization):
    """How a head that drafts already is fitted again."""

    steps: Steps = 200
    rate: Rate = 2e-4
    warmup: Warmup = 20


class HealAnswers(Answers):
    """What the quantized target answers."""

    count: Count = 2000


class Heal(Section):
    """The fine-tune of a head on the states and the distribution of the quantized target."""

    unroll: Unroll = 3
    decay: Decay = 0.8
    answers: HealAnswers = Field(default_factory=HealAnswers)
    optimization: HealOptimization = Field(default_factory=HealOptimization)
