"""What the estimates of a job are made of: its sizes, the machine's throughputs, its stages."""

from dataclasses import dataclass

from compressor.formats import Scheme
from compressor.recipe import Recipe

PROCESS_BYTES = 450_000_000
"""Resident set of Python with torch and transformers loaded and a tokenizer open, before any weight."""
MEMORY_SLACK = 1.25
"""What the C allocator keeps beyond what is in use: observed resident sets over the sums below."""


@dataclass(frozen=True)
class Group:
    """Linears of one block that read the same input; shapes are [out, in] each."""

    block: int
    prefix: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    scheme: Scheme

    @property
    def in_features(self) -> int:
        return self.shapes[0][1]

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def out_features(self) -> int:
        return sum(out for out, _ in self.shapes)


@dataclass(frozen=True)
class Job:
    """The sizes memory and time follow from. Parameters are counts; itemsize is the bytes of an unquantized one."""

    recipe: Recipe
    groups: list[Group]
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    parameters: int
    block_parameters: int
    blocks_parameters: int
    source_bytes: int
    bundle_bytes: int
    itemsize: int
    calibration_tokens: int

    @property
    def activation_bytes(self) -> int:
        streams = 2 if self.recipe.quantization.asymmetric else 1
        return streams * self.calibration_tokens * self.hidden * self.itemsize

    @property
    def dense_bytes(self) -> int:
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class Machine:
    """Measured throughputs: FLOP/s of bf16 and float32 matrix products, bytes/s of reading memory, seconds of one GPTQ
    column (fixed part and part per output), seconds of the scale search per weight."""

    bf16_flops: float
    float32_flops: float
    memory_bytes_per_second: float
    column_seconds: float
    column_seconds_per_output: float
    search_seconds_per_weight: float


@dataclass(frozen=True)
class Stage:
    """One stage of the job. memory: what is in use at its peak, bytes; memory_bytes: their sum with `MEMORY_SLACK`.

    A mapped model counts where a step reads all of it. Pages that a block-by-block stage has passed also show in the
    resident set, but the system takes them back when it needs them.
    """

    name: str
    seconds: float
    memory: dict[str, int]
    memory_bytes: int


def make_stage(name: str, seconds: float, memory: dict[str, int]) -> Stage:
    """A stage whose memory is `memory` and the process itself, bytes."""
    memory = {"process": PROCESS_BYTES, **memory}
    return Stage(name, seconds, memory, int(MEMORY_SLACK * sum(memory.values())))
