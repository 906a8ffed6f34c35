"""How proposers with logits of their own choose tokens: level by level, exact for every law."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from compressor.decode.sampling import draw
from compressor.errors import UsageError
from compressor.proposers.base import NOTHING, ROOT, Context, Draft


def check_branching(branching: Sequence[int] | None) -> tuple[int, ...] | None:
    """`branching` as a tuple. Raises UsageError unless it is None (a chain) or positive integers, one a level."""
    if branching is None:
        return None
    if not branching or any(type(count) is not int or count < 1 for count in branching):
        raise UsageError(f"branching: {list(branching)} is not a list of positive integers, one a level of the tree")
    return tuple(branching)


def grow(
    context: Context,
    branching: Sequence[int] | None,
    root: torch.Tensor,
    expand: Callable[[Draft, list[int]], torch.Tensor],
) -> Draft:
    """A draft of at most `context.k` levels.

    - `branching`: children of every node of a level, one entry a level; None drafts a chain of k tokens.
    - `root` [V]: the proposer's logits after the history.
    - `expand(draft, nodes)` → [len(nodes), V]: its logits after those nodes, all of the deepest level so far. Not
      called for the last level.

    A greedy law takes the largest logits (q is None); any other draws children without replacement from the filtered
    law, as many as its support holds. A node after which nothing can follow, or nothing that the proposer knows, stays
    without children.
    """
    levels = (1,) * context.k if branching is None else tuple(branching)[: context.k]
    chosen: list[int] = []
    parents: list[int] = []
    laws: list[torch.Tensor] = []  # one a node, none where the law is greedy
    draft, front, logits = NOTHING, [ROOT], root[None]
    for level, width in enumerate(levels):
        new: list[int] = []
        for node, row in zip(front, logits, strict=True):
            path = draft.path(node)
            if not context.law.possible(row, path):  # a proposer of few tokens under a grammar that allows others
                continue
            tokens, law = _children(context, row, path, width)
            new += range(len(chosen), len(chosen) + len(tokens))
            chosen += tokens
            parents += [node] * len(tokens)
            laws += [] if law is None else [law] * len(tokens)
        draft = Draft(tuple(chosen), tuple(parents))
        front = [node for node in new if not context.law.ends(draft.path(node))]
        if branching is None and new and context.confidence > 0:
            own = laws[-1] if laws else logits[0].float().softmax(-1)  # a greedy law says nothing about doubt
            if float(own[chosen[-1]]) < context.confidence:
                front = []  # the doubtful token itself stays: dropping it would change the law
        if not front or level == len(levels) - 1:
            break
        logits = expand(draft, front)
    q = torch.stack(laws) if laws else None
    return Draft(tuple(chosen), None if branching is None else tuple(parents), q)


def _children(
    context: Context, logits: torch.Tensor, path: list[int], width: int
) -> tuple[list[int], torch.Tensor | None]:
    """Up to `width` tokens after `path` and the law they were drawn from, None where the law is greedy."""
    if context.law.greedy:
        if width == 1:
            return [context.law.best(logits, path)], None
        law = context.law.law
        scores = law.scores(logits.cpu(), **context.law.masks(path))
        values, tokens = scores.topk(min(width, len(scores)))
        return [int(token) for token, value in zip(tokens, values, strict=True) if value > -torch.inf], None
    law_here = context.law.probs(logits, path)
    left, tokens_drawn = law_here.clone(), []
    for _ in range(min(width, int((law_here > 0).sum()))):
        token = int(draw(left, torch.rand((), generator=context.generator, dtype=torch.float64)))
        tokens_drawn.append(token)
        left[token] = 0.0
    return tokens_drawn, law_here
