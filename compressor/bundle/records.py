"""The passport's rows: one class a kind of fact, each field with what it means and in which unit."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from compressor.errors import CompressError

if TYPE_CHECKING:
    import torch

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


class Source(Record):
    """The checkpoint that was compressed, pinned."""

    uri: str
    kind: Literal["folder", "hub", "gguf", "pypi"]
    revision: str | None = None
    files: dict[str, Sha256]
    """sha256 of every original file that was used, by relative name."""
    parameters: PositiveInt
    """Stored parameters; a tied table counts once."""
    total_bytes: PositiveInt
    """Bytes of the original tensors."""
    mtp_modules: list[str] = []
    """Multi-token-prediction modules found by name in the original."""
    tied: bool
    """Whether the embedding table is also the output head."""


class Target(Record):
    """The quantized model as its config.json describes it."""

    architecture: str
    model_type: str
    hidden_size: PositiveInt
    layers: PositiveInt
    """Decoder blocks."""
    vocab_size: PositiveInt
    tokenizer_sha256: Sha256 | None = None
    """sha256 of tokenizer.json; null where the model has none."""
    dtype: str
    """dtype of what was not quantized and of the activations, as torch spells it (`bfloat16`)."""

    def torch_dtype(self) -> "torch.dtype":
        """`dtype` itself. Raises CompressError for one that this package does not run models in."""
        import torch

        known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if self.dtype not in known:
            raise CompressError(f"target.dtype: {self.dtype} is not a torch dtype of weights ({', '.join(known)})")
        return known[self.dtype]


class Calibration(Record):
    """The rows that calibrated the quantizer."""

    digest: Sha256
    """sha256 of the token ids and their shape."""
    kind: str
    rows: PositiveInt
    length: PositiveInt
    """Tokens a row."""
    details: Settings = {}


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
    stats: Settings = {}

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
    settings: Settings = {}
    calibration: Calibration | None = None
    layers: list[Layer]
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


class Law(Record):
    """Sampling law of target and proposer."""

    temperature: NonNegativeFloat
    top_k: PositiveInt | None = None
    top_p: Fraction = 1.0


class Proposer(Record):
    kind: str
    """`ngram`, `none` …"""
    num_speculative_tokens: NonNegativeInt = 0
    settings: Settings = {}
    files: dict[str, Sha256] = {}


class Verifier(Record):
    rule: str
    """The acceptance rule, in words."""
    lossy: bool = False
    """Whether the rule changes the law of the output: acceptance measured with it is not exact speculation's."""
    law: Law


class Workload(Record):
    """What acceptance was measured on."""

    prompts: NonNegativeInt
    max_new_tokens: PositiveInt
    seed: int = 0
    digest: Sha256 | None = None
    """sha256 of the prompts."""
    tasks: dict[str, PositiveInt] = {}
    """Prompts a task."""
    details: Settings = {}


class Quality(Record):
    """One comparison of the quantized model with the original on the same tokens."""

    name: str
    metric: str = "perplexity"
    """What `baseline` and `quantized` are."""
    dataset: str
    tokens: PositiveInt
    """Predicted tokens."""
    baseline: float
    quantized: float
    kl_nats: float | None = None
    """Mean KL(original ‖ quantized) of the next-token laws, in nats."""
    tv: Fraction | None = None
    """Mean total variation distance of the next-token laws."""
    top1_agreement: Fraction | None = None
    evidence: Evidence


class Acceptance(Record):
    """Acceptance of proposals by one target on one task."""

    task: str
    target: Literal["baseline", "quantized"]
    head: Literal["healed"] | None = None
    """`healed`: the proposer's head as fine-tuned on the quantized target; null: as it was before, or no head."""
    precision: str | None = None
    """Format of the head's linears; null: as it was before, or no head."""
    k: PositiveInt
    """Proposed tokens a cycle."""
    conditional: list[Fraction | None]
    """Acceptance at each position, given that a token was proposed there and all before it were accepted; null where
    no cycle got there."""
    unconditional: list[Fraction | None] | None = None
    """Accepted at each position over cycles with a proposal: the rates of vLLM's counters."""
    tau: Annotated[float, Field(ge=1.0)]
    """Mean tokens a cycle, the bonus or corrected token included."""
    cycles: PositiveInt
    drafts: NonNegativeInt | None = None
    """Cycles with a proposal."""
    proposed: NonNegativeInt | None = None
    """Tokens proposed in all cycles."""
    accepted: NonNegativeInt | None = None
    """Of these, accepted."""
    ci95: Interval | None = None
    """95% confidence interval of tau."""
    evidence: Evidence

    @model_validator(mode="after")
    def _one_rate_a_position(self) -> Self:
        for name in ("conditional", "unconditional"):
            rates = getattr(self, name)
            if rates is not None and len(rates) != self.k:
                raise ValueError(f"{name} has {len(rates)} positions, k is {self.k}")
        return self


class Configuration(Record):
    """Speed and memory of one of the four ways to run the model."""

    name: Literal["baseline", "quantized", "speculative", "combined"]
    tok_s: PositiveFloat | None = None
    ttft_ms: PositiveFloat | None = None
    itl_ms: PositiveFloat | None = None
    peak_memory_bytes: PositiveInt | None = None
    b_token_bytes: PositiveFloat | None = None
    """Weight bytes read for one generated token."""
    tau: PositiveFloat | None = None
    k_best: NonNegativeInt | None = None
    evidence: Evidence


class Tax(Record):
    """How much of the speed gained by quantization was lost to lower acceptance."""

    potential_gain: float
    realized_gain: float
    tax: float | None
    """Share of the potential gain that was lost; null where there was none to lose."""
    verdict: str
    evidence: Evidence


class Outcomes(Record):
    quality: list[Quality] = []
    acceptance: list[Acceptance] = []
    configurations: list[Configuration] | None = None
    tax: Tax | None = None


class Ledger(Record):
    """Where the bytes are. `compressor.bundle.ledger.measure` makes one from a folder."""

    original_bytes: PositiveInt
    """Bytes of the original tensors."""
    bundle_bytes: PositiveInt
    """Bytes of the bundle's tensors: `quantized_bytes` + `unquantized_bytes`, and total_size of the shard index."""
    quantized_bytes: NonNegativeInt
    """Tensors of quantized linears: codes, scales, zero points, shapes."""
    scales_bytes: NonNegativeInt
    """The part of `quantized_bytes` that is not codes."""
    unquantized_bytes: NonNegativeInt
    parameters: PositiveInt
    """Weights that the bundle stands for: out · in of each quantized linear, and the elements of every other tensor."""
    bits_per_weight_model: PositiveFloat
    """8 · `bundle_bytes` / `parameters`."""
    files: dict[str, Sha256]
    """sha256 of every safetensors file in the bundle, by relative name."""


class Kernel(Record):
    """What ran a class of linears when the numbers were measured."""

    layer_pattern: str
    kernel: str
    path: Literal["native-fp4", "bf16-mma", "cpu-int4", "cpu-int8", "dequantized"]
    proof: str


class Environment(Record):
    """Software and machine that made the bundle. `compressor.bundle.environment.capture` fills one."""

    python: str
    packages: dict[str, str]
    """Version of each package that decides a result."""
    platform: str
    cpu: str
    cores: PositiveInt
    threads: PositiveInt | None = None
    """Compute threads of torch."""
    accelerator: str | None = None


class Decision(Record):
    """Something that was chosen on the way, and would otherwise be silent."""

    what: str
    why: str
