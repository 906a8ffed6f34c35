"""What a recipe would do: tensors, bytes, memory, disk and time. Downloads nothing and changes nothing."""

import struct
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from compressor import blocks, formats, models, plan_costs
from compressor.allocate import budget
from compressor.bundle import ledger
from compressor.bundle.contents import layout_bytes
from compressor.checkpoint import source
from compressor.checkpoint.inventory import Inventory, TensorInfo
from compressor.checkpoint.reader import INDEX_NAME
from compressor.errors import CompressError
from compressor.models import skeleton
from compressor.plan_base import Group, Job, Stage
from compressor.preflight import check_patterns, check_shapes
from compressor.recipe import Quantization, Recipe
from compressor.transform_stage import refuse_unfit


@dataclass(frozen=True)
class LinearClass:
    """Linears of one name, format and shape across the blocks. Bytes are of all `count` of them, bias not counted;
    with an allocation their share of its budget."""

    name: str
    format: str
    count: int
    out_features: int
    in_features: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """What would happen. Where the source is not on this machine, what depends on its tensors is None or empty.

    source: uri, kind, local (whether anything must be downloaded), basis ("headers": read from the shards; "config":
    derived from the model's config; None: unknown). memory: peak of the stage that needs most, in bytes, estimated.
    disk_bytes: free space needed beside the source. seconds: estimated, within about a factor of two.
    """

    name: str
    recipe_digest: str
    source: dict[str, Any]
    format: str
    bits_per_weight: float
    activations: str
    method: str
    calibration_tokens: int
    linears: list[LinearClass] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    tensors: int | None = None
    parameters: int | None = None
    source_bytes: int | None = None
    bundle_bytes: int | None = None
    stages: list[Stage] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    peak_memory_stage: str | None = None
    disk_bytes: int | None = None
    seconds: float | None = None
    machine: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return asdict(self)


def make(recipe: Recipe) -> Plan:
    """The plan of `recipe`.

    Reads headers and config only. Raises the error the run itself would end with for a source that cannot be
    compressed: CompressError for an unsupported or already quantized model, a missing tensor, or a layer whose
    in_features the format's group does not divide (named); UsageError for a source that is nothing.
    """
    settings, spec = recipe.quantization, recipe.source
    fmt = formats.get(settings.format)
    kind, local = source.describe(spec.uri, revision=spec.revision)
    found = _look(recipe) if local else None
    known: dict[str, Any] = {
        "name": recipe.name,
        "recipe_digest": recipe.digest(),
        "source": {"uri": spec.uri, "kind": kind, "local": local, "basis": found[2] if found else None},
        "format": _format_name(settings),
        "bits_per_weight": settings.allocation.bits_per_weight if settings.allocation else fmt.bits_per_weight,
        "activations": settings.activations,
        "method": settings.method,
        "calibration_tokens": recipe.calibration.rows * recipe.calibration.length
        if recipe.quantization.needs_data
        else 0,
    }
    if found is None:
        why = "the download is not unpacked yet" if local else "the source is not on this machine"
        return Plan(
            **known, notes=[f"{why}, so its tensors, bytes, memory and time are not known; nothing was fetched"]
        )
    config, inventory, basis = found
    if basis == "headers":  # a config alone does not tell the names of MTP modules
        check_patterns(settings, models.get(config.model_type), config, inventory)
    refuse_unfit(recipe, models.get(config.model_type), config, inventory)
    groups, ignored = _groups(recipe, config, inventory)
    classes = _classes(groups, inventory, recipe)
    quantized = sum(item.bytes_after for item in classes)
    if settings.allocation is not None:
        quantized = budget.check(settings, [group.shapes for group in groups], getattr(torch, spec.dtype))
    job = _job(recipe, config, inventory, groups, quantized)
    machine = plan_costs.measure_machine(fmt, settings.scale_search, recipe.run.threads)
    stages = plan_costs.stages(job, machine)
    peak = max(stages, key=lambda stage: stage.memory_bytes)
    shapes = [(group.scheme.fmt.name, shape) for group in groups for shape in group.shapes]
    if shapes and settings.allocation is None:
        known["bits_per_weight"] = ledger.bits_per_weight(shapes)
    return Plan(
        **known,
        linears=classes,
        ignored=ignored,
        tensors=len(inventory.tensors),
        parameters=inventory.parameters,
        source_bytes=inventory.total_bytes,
        bundle_bytes=job.bundle_bytes,
        stages=stages,
        peak_memory_bytes=peak.memory_bytes,
        peak_memory_stage=peak.name,
        disk_bytes=plan_costs.disk_bytes(job),
        seconds=sum(stage.seconds for stage in stages),
        machine=asdict(machine),
        notes=_notes(basis, inventory, kind, job),
    )


def _look(recipe: Recipe) -> tuple[Any, Inventory, str] | None:
    """(transformers config, inventory, basis) of a source on this machine; None where a download is not unpacked."""
    spec = recipe.source
    kind = source.kind_of(spec.uri)
    folder = source.local_folder(spec.uri, revision=spec.revision, dtype=spec.dtype)
    if folder is None:
        if kind != "gguf":
            return None
        config = _gguf_config(Path(spec.uri).expanduser())
        return config, _from_config(config, spec.dtype), "config"
    config, quantization = skeleton.model_config(folder)
    if quantization is not None:
        method = quantization.get("quant_method", "unknown")
        raise CompressError(f"{folder}/config.json: already quantized ({method}); start from full precision")
    if kind == "hub" and not _is_whole(folder):
        return config, _from_config(config, spec.dtype), "config"
    return config, Inventory.read(folder), "headers"


def _gguf_config(path: Path) -> Any:
    """The transformers config that a GGUF file (or the one in a folder) will be converted with."""
    if path.is_dir():
        path = next(path.glob("*.gguf"))
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split())[:160]
        raise CompressError(f"{path}: not a GGUF file that transformers can read ({reason})") from None


def _is_whole(folder: Path) -> bool:
    """Whether a hub snapshot holds its weights: an interrupted or config-only download does not."""
    return (folder / INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))


def _from_config(config: Any, dtype: str) -> Inventory:
    """The tensors a model of this config has, when its weights cannot be looked at. MTP modules are not known then."""
    torch_dtype = getattr(torch, dtype)
    model = skeleton.build(config, torch_dtype)
    tied = bool(config.tie_word_embeddings)
    tensors = {
        name: TensorInfo(torch_dtype, tuple(tensor.shape), tensor.numel() * torch_dtype.itemsize)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    return Inventory(
        config=config.to_dict(),
        tensors=tensors,
        files={},
        parameters=sum(info.nbytes for info in tensors.values()) // torch_dtype.itemsize,
        total_bytes=sum(info.nbytes for info in tensors.values()),
        mtp_modules=[],
        tied=tied,
    )


def _groups(recipe: Recipe, config: Any, inventory: Inventory) -> tuple[list[Group], list[str]]:
    """Linears that would be quantized, by common input, and the names of those that the recipe leaves out."""
    family = models.get(config.model_type)
    groups, ignored = [], []
    for index in range(config.num_hidden_layers):
        prefix = family.block(index)
        candidates = family.linear_groups(config, index)
        chosen = blocks.selected(candidates, prefix, recipe.quantization)
        kept = {name for group in chosen for name in group.names}
        ignored += [prefix + name for group in candidates for name in group.names if name not in kept]
        for group in chosen:
            shapes = []
            for name in group.names:
                info = inventory.tensors.get(f"{prefix}{name}.weight")
                if info is None:
                    raise CompressError(f"{recipe.source.uri}: tensor '{prefix}{name}.weight' is missing")
                shapes.append((info.shape[0], info.shape[1]))
            for variant in budget.variants(group, recipe.quantization):
                check_shapes(variant, prefix, [*shapes])
            groups.append(Group(index, prefix, group.names, tuple(shapes), group.scheme))
    return groups, ignored


def _classes(groups: list[Group], inventory: Inventory, recipe: Recipe) -> list[LinearClass]:
    counts: Counter = Counter()
    before: Counter = Counter()
    for group in groups:
        for name, shape in zip(group.names, group.shapes, strict=True):
            counts[name, shape, group.scheme] += 1
            before[name, shape, group.scheme] += inventory.tensors[f"{group.prefix}{name}.weight"].nbytes
    dtype, settings = getattr(torch, recipe.source.dtype), recipe.quantization

    def bytes_after(shape: tuple[int, int], scheme: formats.Scheme, count: int) -> int:
        if settings.allocation is not None:
            return int(settings.allocation.bits_per_weight * count * shape[0] * shape[1] / 8)
        return count * layout_bytes(scheme.fmt, shape, dtype, scheme.rounds_inputs)

    return [
        LinearClass(
            name=name,
            format=scheme.fmt.name if settings.allocation is None else _format_name(settings),
            count=count,
            out_features=shape[0],
            in_features=shape[1],
            bytes_before=before[name, shape, scheme],
            bytes_after=bytes_after(shape, scheme, count),
        )
        for (name, shape, scheme), count in counts.items()
    ]


def _format_name(settings: Quantization) -> str:
    """Of most linears, or those that an allocation chooses from."""
    return settings.format if settings.allocation is None else " or ".join(settings.allocation.formats)


def _job(recipe: Recipe, config: Any, inventory: Inventory, groups: list[Group], packed_bytes: int) -> Job:
    """The sizes that memory and time follow from. packed_bytes: of the quantized linears in the bundle."""
    itemsize = getattr(torch, recipe.source.dtype).itemsize
    quantized = {f"{group.prefix}{name}.weight" for group in groups for name in group.names}
    kept = sum(info.nbytes // info.dtype.itemsize for name, info in inventory.tensors.items() if name not in quantized)
    if recipe.transform.rotates_stream and inventory.tied:
        kept += config.vocab_size * config.hidden_size  # the head, which no longer equals the embedding
    family = models.get(config.model_type)
    block: Counter[int] = Counter()
    for name, info in inventory.tensors.items():
        for index in range(config.num_hidden_layers):
            if name.startswith(family.block(index)):
                block[index] += info.nbytes // info.dtype.itemsize
                break
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Job(
        recipe=recipe,
        groups=groups,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        kv_width=2 * heads * head_dim,
        parameters=inventory.parameters,
        block_parameters=max(block.values(), default=0),
        blocks_parameters=sum(block.values()),
        source_bytes=inventory.total_bytes,
        bundle_bytes=packed_bytes + kept * itemsize,
        itemsize=itemsize,
        calibration_tokens=recipe.calibration.rows * recipe.calibration.length if recipe.quantization.needs_data else 0,
    )


def _notes(basis: str, inventory: Inventory, kind: str, job: Job) -> list[str]:
    notes, recipe = [], job.recipe
    if basis == "config":
        notes.append("the weights were not looked at: sizes follow from the model's config")
    if inventory.mtp_modules:
        notes.append(f"MTP modules kept as they are: {', '.join(inventory.mtp_modules)}")
    if kind in ("gguf", "pypi") and basis == "config":
        notes.append(
            "the GGUF file is converted to safetensors in the cache first, which takes the whole model's memory"
        )
    if recipe.quantization.allocation is not None:
        notes.append("which linears get which format is found when it runs; bytes are what the budget allows")
    if recipe.transform.smoothing != "none" and recipe.transform.alpha is None:
        notes.append("the search of transform.smoothing is not in the time")
    if job.calibration_tokens and job.activation_bytes > recipe.run.activation_budget_bytes:
        notes.append("calibration activations exceed run.activation_budget_bytes and go to disk")
    return notes
