"""Targets and proposers small enough that every continuation can be enumerated, and the comparison with that law."""

import torch
from scipy.stats import chi2

from compressor.decode import Batch, Law, Request
from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import Feed, Pass
from compressor.decode.law import LawState
from compressor.decode.length import Fixed
from compressor.proposers.base import ROOT, Draft
from compressor.proposers.drafting import grow

LEVEL = 1e-8
"""How often a comparison may fail by chance. There are fewer than 100, so all together stay below 1e-6."""
MIN_EXPECTED = 25  # rarer outcomes are counted together: below that the chi-square tail is no guide at this level
SAMPLES = 3000
BESIDE = 200  # texts of a batch


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


def continuations(logits_after, prompt, law, length: int, vocabulary: int, stops=()) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `prompt` by `length` tokens, shorter where it ends with a stop or where the
    grammar is complete; the chain rule in float64. `logits_after(text)` [V] are the target's."""
    found: dict[tuple[int, ...], float] = {}
    front = [((), 1.0)]
    while front:
        tokens, probability = front.pop()
        state = LawState(law, vocabulary, stops)
        state.begin(prompt)
        if tokens:
            state.commit(tokens)
        if len(tokens) == length or (tokens and state.ends(tokens[-1:] if not law.grammar else ())):
            found[tokens] = probability
            continue
        p = state.probs(logits_after([*prompt, *tokens]))
        front += [((*tokens, t), probability * float(p[t])) for t in range(vocabulary) if p[t] > 0]
    return found


def sampled(batch_of, prompt, law, length: int, stops=(), samples=SAMPLES, beside=BESIDE) -> dict:
    """Counts of the continuations of `prompt` over `samples` seeds, `beside` texts at a time in `batch_of()`."""
    counts: dict[tuple[int, ...], int] = {}
    for first in range(0, samples, beside):
        batch = batch_of()
        texts = [
            batch.join(Request(prompt, length, law, seed, frozenset(stops)))
            for seed in range(first, min(first + beside, samples))
        ]
        while batch.texts:
            batch.step()
        for text in texts:
            if text.error is not None:
                raise text.error
            key = tuple(text.output.token_ids)
            counts[key] = counts.get(key, 0) + 1
    return counts


def off(counts: dict, law: dict) -> bool:
    """`deviates` for outcomes by name."""
    keys = sorted(set(counts) | set(law))
    return deviates(
        torch.tensor([counts.get(key, 0) for key in keys]),
        torch.tensor([law.get(key, 0.0) for key in keys], dtype=torch.float64),
    )


# Tables: the logits depend on the last two tokens.
VOCABULARY = 4
TARGET = (torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 1.5).double()
DRAFT = TARGET + 1.5 * torch.randn(TARGET.shape, generator=torch.Generator().manual_seed(9)).double()
PROMPT = [1, 2, 1, 1, 2]  # two of the tokens only, so that a repetition penalty tells histories apart


class TableDecoder:
    """Logits after ... a, b are TARGET[a, b]; the tokens of earlier passes are read back from the cache."""

    vocab_size, max_length, stops = VOCABULARY, None, frozenset()

    def cache(self, capacity: int) -> SequenceCache:
        return SequenceCache(1, 1, 1, capacity, dtype=torch.float64)

    def forward(self, feeds, features=()):
        passes = []
        for feed in feeds:
            new = torch.tensor(feed.tokens, dtype=torch.float64)[None, :, None]
            earlier = feed.cache.write(0, new, new)[0][0, :, 0].long().tolist()[: feed.cache.length]
            committed = len(feed.tokens) - len(feed.parents or ())
            logits = []
            for row in range(len(feed.tokens) - feed.rows, len(feed.tokens)):
                before = row - 1
                if feed.parents is not None and row >= committed:
                    parent = feed.parents[row - committed]
                    before = committed - 1 if parent == ROOT else committed + parent
                a = feed.tokens[before] if before >= 0 else earlier[-1]
                logits.append(TARGET[a, feed.tokens[row]])
            passes.append(Pass(torch.stack(logits), None))
        return passes


LENGTH = 3
LAWS = {
    "temperature": Law(temperature=0.8),
    "top-k": Law(temperature=1.3, top_k=3),
    "top-p": Law(temperature=1.3, top_p=0.85),
    "min-p": Law(temperature=1.2, min_p=0.15),
    "repetition penalty": Law(temperature=1.1, repetition_penalty=1.8),
    "all": Law(temperature=1.2, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.4),
}


def table_logits(text) -> torch.Tensor:
    return TARGET[text[-2], text[-1]]


def law_of(law, stops=()):
    return continuations(table_logits, PROMPT, law, LENGTH, VOCABULARY, stops)


class TableProposer:
    """Drafts from DRAFT: a chain, a tree of the given branching, or (`parallel`) every level from the root's logits."""

    features = ()

    def __init__(self, branching=None, parallel=False, table=DRAFT):
        self.branching, self.parallel, self.table = branching, parallel, table

    def session(self):
        return self

    def propose(self, context) -> Draft:
        last = context.history[-2:]

        def expand(draft, nodes):
            if self.parallel:
                level = draft.depths[nodes[0]]
                return self.table[last[0], last[1]].roll(level).expand(len(nodes), -1)
            texts = [[*last, *draft.path(node)][-2:] for node in nodes]
            return torch.stack([self.table[a, b] for a, b in texts])

        return grow(context, self.branching, self.table[last[0], last[1]], expand)


def table_batch(proposer, k=3, rule="exact", length=None):
    return lambda: Batch(TableDecoder(), proposer, length if length is not None else Fixed(k), rule)


def model_law(decoder, prompt, law, length: int) -> dict[tuple[int, ...], float]:
    """`continuations` by a real decoder, each text read afresh."""

    def logits_after(text):
        return decoder.forward([Feed(text, decoder.cache(len(text)))])[0].logits[0]

    return continuations(logits_after, prompt, law, length, decoder.vocab_size)


def keeps_the_law(decoder, proposer, prompt, k: int = 3) -> bool:
    """Whether three tokens under `proposer` have the target's law: sampled in a batch, out of four tokens a step. Also
    checks that the comparison tells the law from that of another temperature."""
    law, other = Law(temperature=0.8, top_k=4), Law(temperature=1.6, top_k=4)
    counts = sampled(lambda: Batch(decoder, proposer, Fixed(k)), prompt, law, 3, samples=2000)
    assert off(counts, model_law(decoder, prompt, other, 3))
    return not off(counts, model_law(decoder, prompt, law, 3))


class Reads(list):
    """A history that counts its tokens as they are read, and can only be read by position."""

    count = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.count += len(found) if isinstance(index, slice) else 1
        return found

    def _refuse(self, *_):
        raise AssertionError("the whole history is read")

    __iter__ = __eq__ = __contains__ = _refuse
