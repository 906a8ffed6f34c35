"""Rows that the target writes itself: it answers prompts, and prompt and answer together are the document.

Such rows need no dataset and follow the distribution that the model itself writes; as calibration for quantization they
compete with real text (Williams, Chrysostomou and Aletras, "Self-calibration for Language Model Quantization and
Pruning", NAACL 2025, arXiv 2410.17170, which starts from the BOS token where we start from prompts).
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from compressor.calibration.packing import check_vocabulary, pack, shuffled
from compressor.calibration.prompts import Prompt, encode, interleaved, prompts_digest
from compressor.decode.law import Law
from compressor.decode.sampling import draw
from compressor.errors import CompressError
from compressor.ui import UI, Progress

BATCH = 64  # answers written at a time; larger batches pad more and need more cache, and were no faster
MAX_NEW_TOKENS = 192  # long enough for most answers; longer ones would trade prompts, hence diversity, for length
USUAL_NEW_TOKENS = 120  # expected answer when planning how many prompts a set needs ...
USUAL_PROMPTS = 32  # ... but a small set takes about this many with shorter answers: a step costs much, a row little
MIN_NEW_TOKENS = 16  # the last answers are cut when the rows are full, but not shorter than this
LEAST_MEAN_ANSWER = 4  # tokens; below it the rows would be our prompts, not the model's text


def generate_rows(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    *,
    rows: int,
    length: int,
    temperature: float,
    top_p: float,
    seed: int,
    ui: UI,
    task: str,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Let `model` answer `prompts` until rows × length tokens exist; int64 [rows, length] and a description.

    Sampling is the given law alone (temperature 0 is greedy): what the checkpoint's generation config sets besides is
    put aside. Randomness comes from a generator of its own, so the global one is untouched. When the prompts run out
    they are answered again with other random numbers. `ui` shows the tokens as progress of `task`.

    Raises CompressError when the model writes almost nothing, when greedy answers do not fill the rows, when no prompt
    fits the model's context, or when the tokenizer has ids that the model lacks.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or float("inf")
    encoded = _encoded(prompts, tokenizer, config.vocab_size, context)
    usable = [prompt for prompt in prompts if prompt["id"] in encoded]
    passes, rng = 0, random.Random(seed)
    law = LogitsProcessorList([_Draw(Law(temperature, None, top_p), seed)])
    with ui.progress(task, rows * length) as bar:
        writer = _Writer(model, _end_ids(model, tokenizer), law, context, rows * length, bar)
        while writer.missing > 0:
            if passes and temperature == 0:
                raise CompressError(
                    f"self-generation: greedy answers to all {len(usable)} prompts give {writer.have // length} of "
                    f"{rows} rows of {length}; set a temperature above 0, or fewer rows"
                )
            passes += 1
            writer.answer_all([encoded[prompt["id"]] for prompt in interleaved(usable, rng)], rng)
    ids = pack(
        shuffled(writer.documents, seed),
        rows=rows,
        length=length,
        separator=tokenizer.eos_token_id,
        ends=writer.ends,
        source="self-generation",
    )
    return ids, {
        "sources": [{"name": "prompts of the package", "sha256": prompts_digest(prompts)}],
        "documents": len(writer.documents),
        "prompts_beyond_context": len(prompts) - len(usable),
        "passes": passes,
        "generated_tokens": writer.answered,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": MAX_NEW_TOKENS,
    }


def _encoded(prompts: list[Prompt], tokenizer: Any, vocab_size: int, context: float) -> dict[str, list[int]]:
    """Token ids by prompt id, of the prompts that leave room for an answer in the model's context."""
    encoded = {prompt["id"]: encode(prompt, tokenizer) for prompt in prompts}
    for ids in encoded.values():
        check_vocabulary(torch.tensor(ids), vocab_size, "tokenizer")
    fitting = {key: ids for key, ids in encoded.items() if len(ids) + MIN_NEW_TOKENS <= context}
    if not fitting:
        raise CompressError(
            f"self-generation: no prompt fits the model's context of {context} tokens; calibrate on a corpus"
        )
    return fitting


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the checkpoint's (one or several) and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return sorted(ids - {None})


class _Writer:
    """Answers prompts in batches and keeps count of the tokens made so far.

    documents: prompt + answer each, ids. have: their tokens. answered: tokens of answers alone, end tokens excluded.
    """

    def __init__(
        self, model: Any, ends: list[int], law: LogitsProcessorList, context: float, needed: int, bar: Progress
    ):
        self.model, self.ends, self.law, self.context, self.needed, self.bar = model, ends, law, context, needed, bar
        self.documents: list[list[int]] = []
        self.have = self.answered = 0

    @property
    def missing(self) -> int:
        return self.needed - self.have

    def add(self, tokens: int) -> None:
        self.bar.advance(max(0, min(tokens, self.missing)))
        self.have += tokens

    def answer_all(self, prompts: list[list[int]], rng: random.Random) -> None:
        """Answer as many of the prompts, from the front, as the missing tokens take."""
        while prompts and self.missing > 0:
            mean = sum(map(len, prompts)) / len(prompts)
            usual = min(USUAL_NEW_TOKENS, max(2 * MIN_NEW_TOKENS, self.missing / USUAL_PROMPTS - mean))
            chunk = math.ceil(self.missing / (mean + usual))
            for batch in _batches(prompts[:chunk], rng):
                if self.missing > 0:
                    self.answer(batch)
            prompts = prompts[chunk:]
            wrote = self.answered / len(self.documents)
            if wrote < LEAST_MEAN_ANSWER:
                raise CompressError(
                    f"self-generation: {len(self.documents)} answers of the model have {wrote:.1f} tokens on average "
                    "before they end; check the checkpoint and its chat template, or calibrate on a corpus"
                )

    def answer(self, batch: list[list[int]]) -> None:
        """Answer one batch, padded on the left."""
        model = self.model
        pad = self.ends[0] if self.ends else 0  # any id does: it is masked before the prompt and cut off after the end
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
        options = GenerationConfig(
            max_new_tokens=int(min(MAX_NEW_TOKENS, self.context - width)),
            do_sample=False,  # `law` has drawn already and leaves one token to choose
            eos_token_id=self.ends or None,
            pad_token_id=pad,
        )
        self.add(sum(map(len, batch)))
        own, model.generation_config = model.generation_config, GenerationConfig()  # its penalties would be merged in
        # the last positions of the prompts are a strided slice, for which torch copies the head's weight once a row
        compact = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
        try:
            output = model.generate(
                ids,
                attention_mask=mask,
                generation_config=options,
                logits_processor=self.law,
                stopping_criteria=StoppingCriteriaList([_Full(self, len(batch), ids.device)]),
            )
        finally:
            model.generation_config = own
            compact.remove()
        for prompt, answer in zip(batch, output[:, width:].tolist(), strict=True):
            stop = next((i for i, token in enumerate(answer) if token in self.ends), None)
            self.answered += len(answer) if stop is None else stop
            self.documents.append(prompt + (answer if stop is None else answer[: stop + 1]))


class _Draw(LogitsProcessor):
    """A draw from the law; every logit but the drawn token's becomes -inf. Greedy logits pass unchanged.

    The random numbers come from a generator of its own, one a row: this takes a fifth of the time of the library's
    multinomial, which draws one for every token of the vocabulary. Raises CompressError for logits that are no
    distribution.
    """

    def __init__(self, law: Law, seed: int):
        self.law = law
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.amax(-1).isfinite().all():  # amax passes NaN on
            raise CompressError("self-generation: the model's logits hold NaN or infinity; check the checkpoint")
        if self.law.greedy:
            return scores
        probs = self.law.probs(scores).cpu()
        tokens = draw(probs, torch.rand(len(probs), generator=self.generator, dtype=torch.float64))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None].to(scores.device), 0.0)


class _Full(StoppingCriteria):
    """Counts the tokens of unfinished answers step by step; stops the batch once the rows can be filled."""

    def __init__(self, writer: _Writer, batch: int, device: torch.device):
        self.writer, self.steps = writer, 0
        self.ends = torch.tensor(writer.ends, dtype=torch.long, device=device)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        self.writer.add(int(self.unfinished.sum()))  # an end token belongs to its answer
        self.unfinished &= ~torch.isin(input_ids[:, -1], self.ends)
        full = self.writer.missing <= 0 and self.steps >= MIN_NEW_TOKENS
        return torch.full_like(self.unfinished, full)


def _batches(prompts: list[list[int]], rng: random.Random) -> list[list[list[int]]]:
    """Equal batches of prompts of similar length (less padding), in random order: the last one may be cut short."""
    ordered = sorted(prompts, key=len)
    count = -(-len(ordered) // BATCH)
    size = -(-len(ordered) // count)
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    rng.shuffle(batches)
    return batches
