"""A proposer from prompts to trained weights: answers, states, vocabulary, training; or a head healed from another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.decode import engine
from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError
from compressor.proposers.eagle3 import default_aux
from compressor.recipe_training import Answers, Heal, Training
from compressor.train import check, draft, export, medusa, processes, start, states
from compressor.train import documents as texts
from compressor.train.corpus import Document
from compressor.train.eagle3 import Eagle3Head, HeadShape
from compressor.train.eagle3_task import Eagle3Task
from compressor.train.loop import Schedule, train
from compressor.train.processes import first_goes_ahead
from compressor.ui import UI

INITIAL_STD = 0.02
LEAST_AGREEMENT = 0.9
"""Share of greedy answers' tokens that the target's states must give back. Rounding turns a few near ties; states
without the final norm, or of other documents, give back far fewer."""


@dataclass(frozen=True)
class Trained:
    """`export` writes the proposer with its best weights into a folder; `facts`, for the passport, are documents,
    vocabulary and history (see `loop.train`); `prompts` are those of held-out documents, for a check; `head` is what
    was trained, where it is an EAGLE-3 head."""

    export: Callable[[Path], None]
    facts: dict[str, Any]
    prompts: list[list[int]]
    head: Eagle3Head | None


def output_weight(decoder: Decoder, ids: Tensor) -> Tensor:
    """Rows [len(ids), H] of the matrix that makes the target's logits of its final states."""
    if decoder.head.packed is None and isinstance(decoder.head.modules[0], nn.Linear):
        return decoder.head.modules[0].weight[ids].detach()
    # Packed or quantized: the matrix is what it makes of the unit vectors.
    unit = torch.eye(decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
    return decoder.head(unit).T[ids].contiguous()


def aux_of(layers: int, spec: Training) -> tuple[int, ...]:
    """States that a head reads of a target with so many layers. Raises UsageError for ones that it lacks."""
    aux = tuple(spec.aux) if spec.aux is not None else default_aux(layers)
    if list(aux) != sorted(set(aux)) or aux[0] < 0 or aux[-1] > layers:
        which = "" if spec.aux is not None else ", the default,"
        raise UsageError(
            f"proposer.training.aux: {list(aux)}{which} must ascend and lie within 0 to {layers}, the target's layers"
        )
    return aux


def shape_of(decoder: Decoder, spec: Training) -> HeadShape:
    """Sizes of a head for the target. Errors as `aux_of`."""
    config, aux = decoder.config, aux_of(len(decoder.layers), spec)
    parameters = config.rope_parameters
    theta = parameters.get("rope_theta") or next(
        (entry["rope_theta"] for entry in parameters.values() if isinstance(entry, dict)), 10_000.0
    )
    return HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=decoder.layers[0].head_dim,
        vocab_size=decoder.vocab_size,
        draft_vocab_size=min(spec.draft_vocab_size, decoder.vocab_size),
        aux=aux,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(theta),
        max_position_embeddings=config.max_position_embeddings,
    )


@dataclass(frozen=True)
class Workplace:
    """Where a proposer is trained: `decoder` is the target in the folder `target`; `folder` keeps everything that a
    killed run need not do again. `name` of the target and `k`, tokens a draft, are for exported configs."""

    decoder: Decoder
    target: Path
    tokenizer: Any
    folder: Path
    seed: int
    ui: UI
    resume: bool = False
    name: str = ""
    k: int = 3

    def documents(self, spec: Answers) -> tuple[list[Document], dict[str, Any]]:
        self.ui.stage("prompts and answers")
        with first_goes_ahead():
            prompts, source = texts.prompts(
                self.decoder, self.tokenizer, spec, self.folder / "prompts", seed=self.seed, ui=self.ui
            )
            written = texts.write(self.decoder, prompts, spec, self.folder / "answers", seed=self.seed, ui=self.ui)
        return written, source


def make(place: Workplace, kind: str, spec: Training) -> Trained:
    """Train a proposer of `kind` (eagle3, medusa, draft) for the target from nothing. Raises, before any work,
    CompressError for a target that cannot be learnt from and UsageError for a proposer that it has no room for."""
    _check_target(place)
    if kind == "eagle3":
        shape_of(place.decoder, spec)
    if kind == "draft":
        draft.evenly(len(place.decoder.layers), spec.layers)
    documents, source = place.documents(spec.answers)
    torch.manual_seed(place.seed)
    begin = {"eagle3": _eagle3, "medusa": _medusa, "draft": _draft}[kind]
    task, aux, write = begin(place, spec, documents)
    return _fit(place, task, documents, source, spec, aux, write)


def heal(place: Workplace, head: Eagle3Head, spec: Heal, layout: export.Layout) -> Trained:
    """Fine-tune `head`, of another form of the target, on what this one answers; it is written in `layout`."""
    _check_target(place)
    documents, source = place.documents(spec.answers)
    task = Eagle3Task(head, output_weight(place.decoder, head.target_ids), steps=spec.unroll, decay=spec.decay)
    return _fit(place, task, documents, source, spec, head.shape.aux, _exporting(place, head, layout))


def _check_target(place: Workplace) -> None:
    config = place.decoder.config
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise CompressError(f"model_type '{config.model_type}': capped logits cannot be distilled")
    check.fitting(check.usual_prompts(place.tokenizer), place.decoder)


Begun = tuple[nn.Module, Sequence[int], Callable[[Path], None]]
"""What is trained, the states of the target that it reads, and how it is written."""


def _eagle3(place: Workplace, spec: Training, documents: Sequence[Document]) -> Begun:
    decoder, shape = place.decoder, shape_of(place.decoder, spec)
    ids = start.draft_vocabulary(documents, shape.draft_vocab_size, shape.vocab_size)
    head = Eagle3Head(shape, decoder.embedding.weight.detach(), ids)
    for value in head.parameters():
        if value.ndim == 2:
            nn.init.normal_(value, std=INITIAL_STD)
    output = output_weight(decoder, ids)
    start.take_over(head, output.float(), decoder.norm.weight.float())
    task = Eagle3Task(head, output, steps=spec.unroll, decay=spec.decay)
    return task, shape.aux, _exporting(place, head, spec.layout)


def _exporting(place: Workplace, head: Eagle3Head, layout: export.Layout) -> Callable[[Path], None]:
    architectures = place.decoder.config.architectures
    return partial(
        export.write,
        head,
        layout=layout,
        verifier=place.name,
        architectures=architectures,
        num_speculative_tokens=place.k,
    )


def _medusa(place: Workplace, spec: Training, documents: Sequence[Document]) -> Begun:
    vocabulary = place.decoder.vocab_size
    output = output_weight(place.decoder, torch.arange(vocabulary))
    reduced = spec.draft_vocab_size < vocabulary
    ids = start.draft_vocabulary(documents, spec.draft_vocab_size, vocabulary) if reduced else None
    heads = medusa.MedusaHeads(output.float(), spec.heads, shared=reduced, target_ids=ids)
    task = medusa.MedusaTask(heads, output[heads.target_ids], decay=spec.decay)
    return task, (), partial(medusa.export_medusa, heads)


def _draft(place: Workplace, spec: Training, documents: Sequence[Document]) -> Begun:
    decoder = place.decoder
    model = draft.draft_of(engine.load(place.target, dtype=decoder.dtype), spec.layers)
    task = draft.DraftTask(model, output_weight(decoder, torch.arange(decoder.vocab_size)), steps=spec.unroll)
    return task, (), partial(draft.export_draft, model, place.target)


def _fit(
    place: Workplace,
    task: nn.Module,
    documents: Sequence[Document],
    source: dict[str, Any],
    spec: Training | Heal,
    aux: Sequence[int],
    write: Callable[[Path], None],
) -> Trained:
    """Fit what `task` trains to the target's distribution on documents that it wrote itself."""
    decoder, answers = place.decoder, spec.answers
    place.ui.stage("hidden states")
    with first_goes_ahead():
        lookup = states_of(decoder, documents, aux, answers, place.folder, place.ui)
    held_out = range(0, len(documents), max(1, len(documents) // answers.held_out))[: answers.held_out]
    agreement = check_teacher(decoder, documents, lookup, held_out, greedy=answers.temperature == 0)
    place.ui.stage("training")
    schedule = Schedule(**spec.optimization.model_dump(), seed=place.seed)
    history = train(
        task, documents, lookup, held_out, schedule, place.folder / "training", place.ui, resume=place.resume
    )
    known = getattr(task, "draft_ids", None)
    facts = {
        "source": source,
        "documents": len(documents),
        "tokens": sum(len(document.tokens) for document in documents),
        "answer_tokens": sum(len(document.tokens) - document.start for document in documents),
        "held_out": len(held_out),
        "digest": texts.digest(documents),
        "teacher_agreement": agreement,
        "draft_vocabulary_coverage": 1.0 if known is None else start.coverage(documents, (known >= 0).nonzero()[:, 0]),
        "processes": processes.count(),
        "history": history,
    }
    judged = [documents[index] for index in held_out[: check.PROMPTS]]
    head = task.head if isinstance(task, Eagle3Task) else None
    return Trained(write, facts, [document.tokens[: document.start] for document in judged], head)


def states_of(
    decoder: Decoder,
    documents: Sequence[Document],
    aux: Sequence[int],
    spec: Answers,
    folder: Path,
    ui: UI,
) -> Callable[[Sequence[int]], list[Tensor]]:
    """Documents by index → the target's states on them, from the disk or made every time. Raises UsageError for a
    cache beyond the recipe's budget, CompressError where the disk has no room for it."""

    def read(indices: Sequence[int]) -> list[Tensor]:
        return states.read(decoder, [documents[index].tokens for index in indices], aux)

    if spec.cache == "none":
        return read
    lengths = [len(document.tokens) for document in documents]
    fp8 = spec.cache_format == "fp8"
    cache = states.StateCache(folder / "states", lengths, decoder.config.hidden_size, len(aux) + 1, fp8=fp8)
    if cache.nbytes > spec.cache_bytes:
        smaller = "set cache_format: fp8 or cache: none" if aux and not fp8 else "set cache: none"
        raise UsageError(
            f"answers.cache_bytes: the states of {sum(lengths)} tokens take {cache.nbytes} bytes, the budget is "
            f"{spec.cache_bytes}; raise it, {smaller}, or ask for fewer answers"
        )
    ui.note(f"hidden states: {cache.nbytes / 1e9:.2f} GB in {cache.folder}")
    cache.fill(read, ui)
    return cache


def check_teacher(
    decoder: Decoder,
    documents: Sequence[Document],
    lookup: Callable[[Sequence[int]], list[Tensor]],
    indices: Sequence[int],
    *,
    greedy: bool,
) -> float:
    """The share of the answers' tokens that are the most probable ones by the states to be learnt from.

    Raises CompressError where greedy answers are not given back: the states lack the final norm, or are others'.
    """
    right = count = 0
    for index in indices:
        document = documents[index]
        (found,) = lookup([index])
        final = found[document.start - 1 : -1, -decoder.config.hidden_size :].to(decoder.dtype)
        best = decoder.logits(final).max(-1).indices
        right += int((best == torch.tensor(document.tokens[document.start :])).sum())
        count += len(final)
    share = right / max(1, count)
    if greedy and share < LEAST_AGREEMENT:
        raise CompressError(
            f"training: the target's states give back {share:.0%} of its own greedy answers, {LEAST_AGREEMENT:.0%} is "
            "the least that rounding explains; they lack its final norm, or belong to other documents"
        )
    return share
