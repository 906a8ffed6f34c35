"""Whether a draft model speaks the target's token ids."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from tokenizers import models

from compressor.errors import CompressError

ROLES = ("eos", "bos", "pad", "unk")


def vocabulary(
    target_tokenizer: Any,
    draft_tokenizer: Any,
    target_vocab_size: int,
    draft_vocab_size: int,
    names: tuple[str, str] = ("target", "draft"),
) -> int:
    """How many ids the two models share: the draft never proposes an id from there on.

    Every id of the target's tokenizer must be the same token in the draft's, special in both or in neither; eos, bos,
    pad and unk must be the same ids, ids must become text in the same way, and the same tokens must be put in front of
    a text. How text becomes ids may differ: the draft never does that. The draft's tokenizer may know further ids
    behind all of the target's, and either model may have rows that no tokenizer knows.

    Args:
        target_tokenizer, draft_tokenizer: transformers tokenizers.
        target_vocab_size, draft_vocab_size: rows of the models' logits.
        names: what messages call the two, e.g. their folders.

    Raises CompressError naming both models, the first id that differs and its two tokens, or what else differs; and for
    a token that the target can commit and the draft has no embedding for.
    """
    ours, theirs = _tokens(target_tokenizer), _tokens(draft_tokenizer)
    found = _difference(target_tokenizer, draft_tokenizer, ours, theirs)
    target, draft = names
    if found is not None:
        what, one, other = found
        raise _refusal(names, f"{what} is {one} in {target} and {other} in {draft}")
    for index in range(draft_vocab_size, min(len(ours), target_vocab_size)):
        if ours[index] is not None:
            missing = f"it has {draft_vocab_size} embeddings, none for id {index} ({_shown(ours[index])})"
            raise _refusal(names, f"{missing}, which {target} may write")
    shared = min(target_vocab_size, draft_vocab_size)
    return min(shared, len(ours)) if len(theirs) > len(ours) else shared


def _refusal(names: tuple[str, str], what: str) -> CompressError:
    target, draft = names
    return CompressError(
        f"{draft} cannot draft for {target}: {what}; choose a draft that was made with the target's tokenizer"
    )


def _difference(
    target: Any, draft: Any, ours: list[str | None], theirs: list[str | None]
) -> tuple[str, str, str] | None:
    """The first thing in which the two tokenizers differ, and how it is in each; None where there is none."""
    for index, token in enumerate(ours):
        other = theirs[index] if index < len(theirs) else None
        if token != other:
            return f"id {index}", _shown(token), _shown(other)
    special, draft_special = _special(target), _special(draft)
    unequal = [index for index in special ^ draft_special if index < len(ours)]
    if unequal:
        first = min(unequal)
        kinds = ("special", "ordinary") if first in special else ("ordinary", "special")
        return f"id {first} ({_shown(ours[first])})", *kinds
    for role in ROLES:
        ids = [getattr(tokenizer, f"{role}_token_id") for tokenizer in (target, draft)]
        if ids[0] != ids[1]:
            return f"the {role} token", _named(ours, ids[0]), _named(theirs, ids[1])
    decoding, draft_decoding = _decoding(target), _decoding(draft)
    if decoding is not None and draft_decoding is not None:
        for key, value in decoding.items():
            if value != draft_decoding[key]:
                return f"the tokenizer's {key}", json.dumps(value), json.dumps(draft_decoding[key])
    fronts = [_front(tokenizer) for tokenizer in (target, draft)]
    if fronts[0] != fronts[1]:
        shown = [", ".join(_named(theirs, index) for index in ids) or "nothing" for ids in fronts]
        return "what the tokenizer puts in front of a text", shown[0], shown[1]
    return None


def _tokens(tokenizer: Any) -> list[str | None]:
    """Every id's token, added ones included; None for an id without."""
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    return tokenizer.convert_ids_to_tokens(list(range(size)))


def _special(tokenizer: Any) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _decoding(tokenizer: Any) -> dict[str, Any] | None:
    """How ids become text; None where the tokenizer does not say: one without a `tokenizers` backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder, model = backend.decoder, backend.model
    if isinstance(model, models.Unigram):  # has it in its state only
        fallback = json.loads(model.__getstate__())["byte_fallback"]
    else:
        fallback = getattr(model, "byte_fallback", False)
    return {
        "decoder": None if decoder is None else _without_encoding(json.loads(decoder.__getstate__())),
        "byte_fallback": fallback,
    }


def _without_encoding(decoder: dict[str, Any]) -> dict[str, Any]:
    """A decoder without the options of ByteLevel, which only its pre-tokenizer reads."""
    if decoder["type"] == "ByteLevel":
        return {"type": "ByteLevel"}
    if decoder["type"] == "Sequence":
        return {**decoder, "decoders": [_without_encoding(part) for part in decoder["decoders"]]}
    return decoder


def _front(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer's template puts before a text."""
    encoded = tokenizer("x", return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [index for index, _ in takewhile(lambda pair: pair[1] == 1, pairs)]


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _named(tokens: list[str | None], index: int | None) -> str:
    if index is None:
        return "none"
    return f"{index} ({_shown(tokens[index] if index < len(tokens) else None)})"
