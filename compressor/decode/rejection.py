"""Speculative sampling's accept-or-correct step: the output law is the target's, whatever the proposer.

Chains: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023). Trees: recursive rejection
of candidates drawn without replacement, Jeon et al., "Recursive Speculative Decoding" (2024), and Yang et al.,
"Multi-Candidate Speculative Decoding" (2024). A chain is the tree with one candidate a level.
"""

from collections.abc import Callable, Sequence

import torch

from compressor.decode.sampling import ProbabilityError, check_probabilities, draw
from compressor.proposers.base import ROOT, Draft

__all__ = ["ProbabilityError", "accept_or_correct", "follow", "typical", "verify"]

EPSILON, DELTA = 0.09, 0.3
"""Medusa's own settings of its typical acceptance."""
LawAt = Callable[[int], torch.Tensor | None]
"""node → the target's law [V] float64 after it (`ROOT`: after the history); None where nothing can follow."""


def accept_or_correct(
    p: torch.Tensor,
    q: torch.Tensor | None,
    proposals: Sequence[int] | torch.Tensor,
    generator: torch.Generator,
) -> tuple[int, int]:
    """(number of proposals accepted, next token) for one chain of k proposals.

    - `p` [k+1, V]: the target's laws; row i is conditioned on the prefix and proposals[:i].
    - `q` [k, V]: the laws the proposals were drawn from, or None for a deterministic proposer, whose q is one-hot at
      its proposal: it is accepted with probability p(x), and the residual is p without x. See `follow`.
    - `proposals`: k token ids, drawn from the rows of q.

    Proposal i is accepted with probability min(1, p(x)/q(x)) if all before it were. The next token comes from the
    residual norm((p - q)₊) at the first rejection, or from the last row of p if every proposal survived. float64
    throughout. Raises ProbabilityError (a ValueError) for rows that are no distributions, shapes that do not fit, or
    a proposal that q cannot have produced.
    """
    p = torch.as_tensor(p)
    if p.ndim != 2:
        raise ProbabilityError(f"p: expected [k+1, V], got shape {list(p.shape)}")
    p = check_probabilities("p", p)
    chain = Draft(tuple(int(token) for token in proposals), q=None if q is None else torch.as_tensor(q))
    if len(p) != len(chain.tokens) + 1:
        raise ProbabilityError(
            f"p: {len(chain.tokens)} proposals need {len(chain.tokens) + 1} rows, one for each and one for the bonus "
            f"token; got shape {list(p.shape)}"
        )
    check(chain, p.shape[-1])
    path, token = verify(chain, lambda node: p[node + 1], generator)
    assert token is not None  # every row is there
    return len(path), token


def check(draft: Draft, vocabulary: int) -> None:
    """Refuse a draft that is no tree or cannot have come from its q: raises ProbabilityError naming what is wrong."""
    if any(not 0 <= token < vocabulary for token in draft.tokens):
        raise ProbabilityError(f"proposals: a token id is outside the vocabulary of {vocabulary}")
    if draft.parents is not None:
        _check_tree(draft.tokens, draft.parents)
    if draft.q is None:
        return
    q = check_probabilities("q", draft.q)
    if q.shape != (len(draft.tokens), vocabulary):
        raise ProbabilityError(f"q: expected shape {[len(draft.tokens), vocabulary]}, got {list(q.shape)}")
    if any(float(row[token]) <= 0 for row, token in zip(q, draft.tokens, strict=True)):
        raise ProbabilityError("proposals: a token has probability zero under q, so q did not propose it")


def _check_tree(tokens: Sequence[int], parents: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise ProbabilityError(f"proposals: {len(tokens)} tokens and {len(parents)} parents; each token has one")
    seen = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < node:
            raise ProbabilityError(f"proposals: node {node} does not come after its parent {parent}")
        if (token, parent) in seen:
            raise ProbabilityError(f"proposals: token {token} is proposed twice after the same text")
        seen.add((token, parent))


def verify(draft: Draft, law_at: LawAt, generator: torch.Generator) -> tuple[list[int], int | None]:
    """(accepted nodes from the first level down, next token) for a draft of any shape that `check` has passed.

    At every node the candidates below it are tried in the order they were drawn. The first has the law q and is
    accepted with probability min(1, p(x)/q(x)); if it is rejected, p becomes norm((p - q)₊) and q loses x and is
    normalised, which is the law the second was drawn from, and so on; when all are rejected the next token is drawn
    from what is left of p. Each step keeps the mass balance of a single proposal with p the residual so far, so the
    token that is emitted has the target's law whatever the number of candidates.

    The next token is None where nothing can follow the last accepted node. Laws are asked for only along the accepted
    path. Raises ProbabilityError for a law that is no distribution.
    """
    if draft.q is None:
        return follow(draft, lambda node: _drawn(law_at(node), generator))
    path: list[int] = []
    node = ROOT
    while True:
        p = law_at(node)
        if p is None:
            return path, None
        p = check_probabilities("p", p)
        candidates = draft.children.get(node, [])
        q = draft.q[candidates[0]].to(torch.float64) if candidates else None
        for candidate in candidates:
            token = draft.tokens[candidate]
            assert q is not None
            # A uniform in [0, 1) is below min(1, p/q) exactly when it is below p/q, and never when p is 0.
            if _uniform(generator) < p[token] / q[token]:
                path.append(candidate)
                node = candidate
                break
            p = _normalised((p - q).clamp_min(0.0))
            if candidate != candidates[-1]:
                q = q.clone()
                q[token] = 0.0
                q = _normalised(q)
        else:
            return path, int(draw(p, _uniform(generator)))


def follow(draft: Draft, choose: Callable[[int], int | None]) -> tuple[list[int], int | None]:
    """(accepted nodes, next token): `choose(node)` is the target's own token after a node, and while the draft holds
    it below that node, it is accepted.

    With `choose` a draw from p this is exact for deterministic drafts: what is emitted is the draw itself. With
    `choose` the largest logit it is greedy verification.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = choose(node)
        match = next((child for child in draft.children.get(node, ()) if draft.tokens[child] == token), None)
        if match is None:
            return path, token
        path.append(match)
        node = match


def typical(draft: Draft, law_at: LawAt, generator: torch.Generator) -> tuple[list[int], int | None]:
    """Medusa's typical acceptance: LOSSY, the output does not have the target's law.

    A node is accepted if its parent is and p(x) > min(EPSILON, DELTA·exp(-H(p))), with H the entropy of p in nats; the
    deepest accepted node wins (the first one of several), and the next token is drawn from p after it. (Cai et al.,
    "Medusa", 2024, section 3.3.) Where nothing is accepted this is plain sampling.
    """
    best: list[int] = []
    laws: dict[int, torch.Tensor | None] = {}

    def law(node: int) -> torch.Tensor | None:
        if node not in laws:
            found = law_at(node)
            laws[node] = None if found is None else check_probabilities("p", found)
        return laws[node]

    paths: dict[int, list[int]] = {ROOT: []}
    for node, token in enumerate(draft.tokens):
        above = paths.get(draft.parent(node))
        p = law(draft.parent(node)) if above is not None else None
        if above is None or p is None:
            continue
        threshold = min(EPSILON, DELTA * float(torch.exp(torch.special.entr(p).sum().neg())))
        if p[token] > threshold:
            paths[node] = [*above, node]
            if len(paths[node]) > len(best):
                best = paths[node]
    return best, _drawn(law(best[-1] if best else ROOT), generator)


def _uniform(generator: torch.Generator) -> torch.Tensor:
    return torch.rand((), generator=generator, dtype=torch.float64)


def _drawn(p: torch.Tensor | None, generator: torch.Generator) -> int | None:
    return None if p is None else int(draw(check_probabilities("p", p), _uniform(generator)))


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Weights that the algorithm itself left over, as a law; `draw` would not need it, the ratio p/q does."""
    total = weights.sum()
    if not total > 0:
        raise ProbabilityError("nothing to sample from: every remaining token has probability zero")
    return weights / total
