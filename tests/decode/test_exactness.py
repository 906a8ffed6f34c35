"""The output law of speculation is the target's: chi-square of 20,000 samples against float64, and wrong samplers fail.

Each comparison is allowed to fail by chance with probability `LEVEL`; all of them together stay below 1e-6. A wrong
sampler must fail at that same level.
"""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2

from compressor.decode import Law, Runner
from compressor.decode.cache import KVCache
from compressor.decode.rejection import accept_or_correct_batch
from compressor.decode.sampling import draw
from compressor.proposers.base import Proposal
from compressor.proposers.ngram import NgramProposer

SAMPLES = 20_000
LEVEL = 1e-8  # times fewer than 100 comparisons
MIN_EXPECTED = 25  # rarer outcomes are counted together: below that the chi-square tail is no guide at this level


def deviates(counts: torch.Tensor, law: torch.Tensor) -> bool:
    """Whether `counts` [n] could come from `law` [n] only with probability below LEVEL."""
    if counts[law == 0].any():
        return True
    expected = law * counts.sum()
    common = expected >= MIN_EXPECTED
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = wanted > 0
    statistic = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum().item()
    return statistic > chi2.isf(LEVEL, int(keep.sum()) - 1)


def test_the_comparison_passes_the_law_itself_and_not_its_neighbour():
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert not deviates((law * SAMPLES).round(), law)
    assert deviates((torch.tensor([0.53, 0.28, 0.19]) * SAMPLES).round(), law)


def random_law(vocabulary: int, sharpness: float, seed: int) -> torch.Tensor:
    return (torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)).double() * sharpness).softmax(-1)


def filtered(logits: torch.Tensor) -> torch.Tensor:
    return Law(temperature=0.8, top_k=12, top_p=0.9).probs(logits)


LOGITS = torch.randn(2, 40, generator=torch.Generator().manual_seed(3)) * 2
PAIRS = {
    "lecture": (
        torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64),
        torch.tensor([0.25, 0.35, 0.20, 0.10, 0.10], dtype=torch.float64),
    ),
    "near": (random_law(30, 1.0, 1), random_law(30, 1.0, 1) * 0.9 + random_law(30, 1.0, 2) * 0.1),
    "far": (random_law(30, 2.0, 3), random_law(30, 2.0, 4)),
    "equal": (random_law(30, 1.0, 5), random_law(30, 1.0, 5)),
    "disjoint": (
        torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.7, 0.3], dtype=torch.float64),
    ),
    "partial support": (
        torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64),
        torch.tensor([0.0, 0.6, 0.1, 0.3], dtype=torch.float64),
    ),
    "filtered": (filtered(LOGITS[0]), filtered(LOGITS[1])),
}


def first_tokens(p: torch.Tensor, q: torch.Tensor, *, claimed_q=None, deterministic=False, seed=0) -> torch.Tensor:
    """The first token of SAMPLES cycles with one proposal drawn from q; verified with `claimed_q` where given."""
    generator = torch.Generator().manual_seed(seed)
    rows = q.expand(SAMPLES, -1)
    proposals = draw(rows, torch.rand(SAMPLES, generator=generator, dtype=torch.float64))
    if deterministic:
        proposals = torch.full_like(proposals, int(q.argmax()))
    believed = None if deterministic else (q if claimed_q is None else claimed_q).expand(SAMPLES, 1, -1)
    accepted, following = accept_or_correct_batch(p.expand(SAMPLES, 2, -1), believed, proposals[:, None], generator)
    return torch.where(accepted == 1, proposals, following).bincount(minlength=len(p))


@pytest.mark.parametrize("pair", PAIRS)
def test_one_position_has_the_target_law(pair):
    p, q = PAIRS[pair]
    assert not deviates(first_tokens(p, q), p)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_deterministic_proposal_leaves_the_law_too(pair):
    p, q = PAIRS[pair]
    assert not deviates(first_tokens(p, q, deterministic=True), p)


def wrong_samples(p: torch.Tensor, q: torch.Tensor, rule: str) -> torch.Tensor:
    """First tokens by samplers with the classic mistakes."""
    generator = torch.Generator().manual_seed(0)
    proposals = draw(q.expand(SAMPLES, -1), torch.rand(SAMPLES, generator=generator, dtype=torch.float64))
    accept = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) < (p / q)[proposals]
    correction = draw(p.expand(SAMPLES, -1), torch.rand(SAMPLES, generator=generator, dtype=torch.float64))
    if rule == "always accept":
        accept = torch.ones_like(accept)
    return torch.where(accept, proposals, correction).bincount(minlength=len(p))


@pytest.mark.parametrize("rule", ["always accept", "residual without subtracting q"])
@pytest.mark.parametrize("pair", ["lecture", "far"])
def test_a_wrong_sampler_is_caught(pair, rule):
    p, q = PAIRS[pair]
    assert deviates(wrong_samples(p, q, rule), p)


def test_accepting_by_the_raw_law_while_proposing_from_the_filtered_one_is_caught():
    p, q = PAIRS["filtered"]
    p = Law(temperature=0.8).probs(LOGITS[0])
    raw = Law(temperature=0.8).probs(LOGITS[1])
    assert not deviates(first_tokens(p, q), p)
    assert deviates(first_tokens(p, q, claimed_q=raw), p)


# Two steps: the laws depend on the tokens before, for target and proposer alike.
VOCABULARY = 4
TARGET = (torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 1.5).double()
DRAFT = TARGET + torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(9)).double()
CONTEXT = (1, 2)  # the two tokens before; TARGET[a, b] are the logits after ... a, b
LAWS = [Law(), Law(temperature=0.7, top_k=3), Law(temperature=1.3, top_p=0.8)]


def joint(law: Law) -> torch.Tensor:
    """float64 law of the next two tokens [V * V], by the chain rule."""
    first = law.probs(TARGET[CONTEXT])
    second = law.probs(TARGET[CONTEXT[1]])
    return (first[:, None] * second).flatten()


def two_tokens(law: Law, *, stale: bool = False) -> torch.Tensor:
    """Counts of the next two tokens over SAMPLES histories, by cycles of two proposals each. `stale` verifies the
    second proposal as if the first had not been made."""
    generator = torch.Generator().manual_seed(1)
    q, chain, before = [], [], torch.full((SAMPLES,), CONTEXT[1])
    older = torch.full((SAMPLES,), CONTEXT[0])
    p = [law.probs(TARGET[older, before])]
    for _ in range(2):
        q.append(law.probs(DRAFT[older, before]))
        chain.append(law.sample(q[-1], generator))
        older, before = before, chain[-1]
        p.append(p[0] if stale else law.probs(TARGET[older, before]))
    proposals = torch.stack(chain, 1)
    accepted, following = accept_or_correct_batch(torch.stack(p, 1), torch.stack(q, 1), proposals, generator)
    first = torch.where(accepted > 0, proposals[:, 0], following)
    second = torch.where(accepted > 1, proposals[:, 1], following)
    # A cycle that stopped at its first token goes on with a plain step from the history it reached.
    plain = law.sample(law.probs(TARGET[CONTEXT[1], first]), generator)
    second = torch.where(accepted == 0, plain, second)
    return (first * VOCABULARY + second).bincount(minlength=VOCABULARY**2)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_two_steps_have_the_joint_target_law(law):
    assert not deviates(two_tokens(law), joint(law))


def test_verifying_a_history_that_was_not_proposed_is_caught():
    assert deviates(two_tokens(Law(), stale=True), joint(Law()))


# The runner: the same tables behind a model with a cache, in one long generation.
class TableModel(torch.nn.Module):
    """Logits after ... a, b are TARGET[a, b]; a and b are read back from the KV cache, so a stale entry shows."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY, model_type="table", eos_token_id=None)
        self.anchor = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, cache, use_cache, logits_to_keep):
        new = input_ids[:, None, :, None].float()
        seen = cache.update(new, new, 0)[0].flatten()[-input_ids.shape[1] - 1 :].long()
        before = torch.cat([seen.new_tensor([CONTEXT[0]]), seen]) if len(seen) == input_ids.shape[1] else seen
        logits = TARGET[before[:-1], before[1:]]
        return SimpleNamespace(logits=logits[None, -logits_to_keep:])


class TableProposer:
    def propose(self, history, k, law, generator):
        tokens, q = list(history[-2:]), []
        for _ in range(k):
            q.append(law.probs(DRAFT[tokens[-2], tokens[-1]]))
            tokens.append(int(law.sample(q[-1], generator)))
        return Proposal(tuple(tokens[2:]), torch.stack(q))


def worst_transition(tokens: list[int], law: Law) -> int:
    """In how many of the V² states the next token deviates from its law. The chain is Markov in its last two tokens,
    so the transitions out of one state are independent draws."""
    chain = torch.tensor(tokens)
    state = chain[:-2] * VOCABULARY + chain[1:-1]
    table = law.probs(TARGET).reshape(VOCABULARY**2, VOCABULARY)
    return sum(
        deviates(chain[2:][state == s].bincount(minlength=VOCABULARY), table[s])
        for s in range(VOCABULARY**2)
        if (state == s).sum() > 100
    )


@pytest.mark.parametrize("proposer", [None, NgramProposer(1, 3), TableProposer()], ids=["none", "ngram", "table"])
def test_a_long_generation_follows_the_target(proposer):
    law = Law(temperature=1.2, top_k=3)
    out = Runner(TableModel(), proposer, num_speculative_tokens=2).generate(CONTEXT, 3000, law, seed=0)
    assert len(out.token_ids) == 3000
    assert (out.cycles < 2500) == (proposer is not None)
    assert worst_transition(out.token_ids, law) == 0


def test_a_cache_that_keeps_rejected_tokens_is_caught(monkeypatch):
    monkeypatch.setattr(KVCache, "rollback", lambda self, length: None)
    law = Law(temperature=1.2, top_k=3)
    out = Runner(TableModel(), TableProposer(), num_speculative_tokens=2).generate(CONTEXT, 1500, law, seed=0)
    assert worst_transition(out.token_ids, law) > 0
