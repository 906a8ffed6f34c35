"""The documents of a training: prompts, answered by the target in parts that a killed run does not write again."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compressor.calibration.documents import encode_field
from compressor.calibration.local import parse, read_bytes
from compressor.calibration.packing import shuffled
from compressor.calibration.prompts import Prompt, encode, prompts_digest
from compressor.calibration.training_prompts import training_prompts
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.errors import CompressError
from compressor.recipe_training import Answers
from compressor.train import answers, corpus, self_prompts
from compressor.train.corpus import Document
from compressor.ui import UI

PART = 1152
"""Prompts answered between two saves: six times the rows written at a time, so that few of them idle at the end."""
LONGEST_PROMPT = 512
"""Longer prompts are left out: they would teach few answers for their time. So are those whose answers would leave the
target's context."""


def prompts(
    decoder: Decoder, tokenizer: Any, spec: Answers, folder: Path, *, seed: int, ui: UI
) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids of every prompt, and where they come from: the package's own, or the user's JSON Lines file of `text`
    or `messages`, and the target itself. Raises CompressError for a file that is not such, and where too few are left;
    for the target's as `self_prompts.write`."""
    others = round(spec.self_written * spec.count)
    ids, source = _given(spec, tokenizer, seed, spec.count - others)
    if others:
        turns = self_prompts.write(decoder, tokenizer, others, folder, seed=seed, ui=ui)
        written: list[Prompt] = [{"messages": [{"role": "user", "content": turn}]} for turn in turns]
        ids += [encode(prompt, tokenizer) for prompt in written]
        source["self_written"] = prompts_digest(written)
    longest = min(LONGEST_PROMPT, (decoder.max_length or LONGEST_PROMPT + spec.max_new_tokens) - spec.max_new_tokens)
    kept = shuffled([row for row in ids if 2 < len(row) <= longest], seed)
    if len(kept) <= spec.held_out:
        raise CompressError(
            f"{source['name']}: {len(kept)} prompts of 3 to {longest} tokens, of which {spec.held_out} would be "
            "held out; give more or shorter ones, or set held_out or max_new_tokens lower"
        )
    return kept, {"source": source, "prompts": len(kept), "prompts_left_out": len(ids) - len(kept)}


def _given(spec: Answers, tokenizer: Any, seed: int, count: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts that the target does not write."""
    if spec.prompts is None:
        own = training_prompts(count, seed) if count else []
        source = {"name": "training prompts of the package", "sha256": prompts_digest(own)}
        return [encode(prompt, tokenizer) for prompt in own], source
    data = read_bytes(spec.prompts, "answers.prompts")
    ids = [
        encode_field(value, tokenizer, f"{spec.prompts} line {number}: {key}", answer=True)
        for number, key, value in parse(data, spec.prompts)[:count]
    ]
    return ids, {"name": Path(spec.prompts).name, "sha256": hashlib.sha256(data).hexdigest()}


def write(
    decoder: Decoder, texts: Sequence[list[int]], spec: Answers, folder: Path, *, seed: int, ui: UI
) -> list[Document]:
    """The documents: every prompt with its answer. Parts that `folder` holds already are read, not written."""
    folder.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    with ui.progress("answers", len(texts) * spec.max_new_tokens) as bar:
        for first in range(0, len(texts), PART):
            file = folder / f"answers-{first // PART:04}.safetensors"
            part = texts[first : first + PART]
            if not file.exists():
                written = answers.Writing(
                    decoder,
                    part,
                    max_new_tokens=spec.max_new_tokens,
                    law=Law(spec.temperature),
                    seed=f"{seed}/{first}",
                    stops=decoder.stops,
                    advance=bar.advance,
                ).run()
                bar.advance(sum(spec.max_new_tokens - len(answer) for answer in written))
                corpus.save(
                    file, [Document(prompt + answer, len(prompt)) for prompt, answer in zip(part, written, strict=True)]
                )
            else:
                bar.advance(len(part) * spec.max_new_tokens)
            found = corpus.load(file)
            if [document.tokens[: document.start] for document in found] != part:
                raise CompressError(f"{file}: answers other prompts than these; remove {folder} and start again")
            documents += found
    return documents


def digest(documents: Sequence[Document]) -> str:
    """sha256 (hex) over all tokens as little-endian int64, each document behind its length and its answer's start."""
    found = hashlib.sha256()
    for document in documents:
        row = torch.tensor([len(document.tokens), document.start, *document.tokens])
        found.update(row.numpy().astype("<i8", copy=False).tobytes())
    return found.hexdigest()
