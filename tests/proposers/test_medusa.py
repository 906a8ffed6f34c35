"""Medusa heads of random weights against the heads written again, and what `load` refuses."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import slow_speculation as slow
import tiny_models as tiny
import torch
from safetensors.torch import save_file
from toys import keeps_the_law

from compressor.decode import Decoder, Law, Runner
from compressor.decode.law import LawState
from compressor.errors import CompressError, UsageError
from compressor.proposers import medusa
from compressor.proposers.base import Context
from compressor.proposers.medusa import MedusaProposer

PROMPT = [5, 9, 3, 5, 11]
VOCABULARY, KEPT, HIDDEN, COUNT, LAYERS = 24, 15, 32, 3, 2
SIZE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48}
SIZE |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
TREE = (3, 2, 2)
KEPT_IDS = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:KEPT]


@pytest.fixture(scope="module")
def target():
    return tiny.random_model("llama", seed=1, **SIZE)


def tensors(bias=False, rows=VOCABULARY):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return 0.2 * torch.randn(shape, generator=generator)

    found = {}
    for head in range(COUNT):
        for layer in range(LAYERS):
            found[f"blocks.{head}.layers.{layer}.weight"] = normal(HIDDEN, HIDDEN)
            if bias:
                found[f"blocks.{head}.layers.{layer}.bias"] = normal(HIDDEN)
        found[f"lm_heads.{head}.weight"] = normal(rows, HIDDEN)
    return found


def config(**changes):
    found = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": COUNT}
    found |= {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    return found | changes


def write(folder: Path, stored, settings) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def reference(model, stored, *, scale=1.0, ids=None, one_head=False, shift=0):
    """A head's logits from the final state before the last token; `shift` reads another head than that of the level."""
    target = slow.Model(model)

    def logits(history, path):
        head = len(path) + shift
        x = target.states(history)[-1][-2]
        for layer in range(LAYERS):
            y = stored[f"blocks.{head}.layers.{layer}.weight"] @ x
            y = y + stored.get(f"blocks.{head}.layers.{layer}.bias", torch.zeros(HIDDEN))
            x = x + y * torch.sigmoid(y)
        found = scale * stored[f"lm_heads.{0 if one_head else head}.weight"] @ x
        if ids is None:
            return found
        full = torch.full((VOCABULARY,), -torch.inf)
        full[ids] = found[ids] if len(found) == VOCABULARY else found
        return full

    return target.logits, logits


def old_names(stored, prefix=""):
    """The first release's: blocks and output matrix of a head in one list."""
    renamed = {}
    for name, tensor in stored.items():
        kind, head, *rest = name.split(".")
        renamed[
            prefix + (f"{head}.{LAYERS}.weight" if kind == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}")
        ] = tensor
    return renamed


PLAIN, BIASED, SHORT = tensors(), tensors(bias=True), tensors(rows=KEPT)
MAP = {"token_map": KEPT_IDS}
ONE = {name: tensor for name, tensor in PLAIN.items() if name[:10] not in ("lm_heads.1", "lm_heads.2")}
STORED = {  # config, tensors, what the reference is told
    "plain": (config(), PLAIN, {}),
    "bias": (config(medusa_fc_bias=True), BIASED, {}),
    "scale": (config(logit_scale=0.5), PLAIN, {"scale": 0.5}),
    "truncated": (config(truncated_vocab_size=KEPT), SHORT | MAP, {"ids": KEPT_IDS}),
    "truncated, whole matrices": (config(truncated_vocab_size=KEPT), PLAIN | MAP, {"ids": KEPT_IDS}),
    "a map that is not used": (config(), PLAIN | MAP, {}),
    "one output matrix": (config(original_lm_head=True), ONE, {"one_head": True}),
}
SPELLED = {  # config, tensors: the same heads as PLAIN
    "prefixed": (config(), {f"medusa_heads.{name}": tensor for name, tensor in PLAIN.items()}),
    "first release": ({"medusa_num_heads": COUNT, "medusa_num_layers": LAYERS}, old_names(PLAIN)),
    "first release, prefixed": (
        {"medusa_num_heads": COUNT, "medusa_num_layers": LAYERS},
        old_names(PLAIN, "medusa_heads."),
    ),
}


RUNS = [("plain", None, 3.0), ("plain", TREE, 0.0), *((kind, None, 0.0) for kind in STORED)]


@pytest.mark.parametrize(("kind", "branching", "temperature"), [*RUNS, *((kind, TREE, 3.0) for kind in STORED)])
def test_a_run_equals_the_slow_reference(kind, branching, temperature, target, tmp_path):
    settings, stored, told = STORED[kind]
    proposer = MedusaProposer.load(write(tmp_path / "heads", stored, settings), Decoder(target), branching)
    run = {"new": 20, "k": 3, "temperature": temperature, "seed": 3}
    found = slow.run(Decoder(target), proposer, PROMPT, **run)
    assert found == slow.speculate(*reference(target, stored, **told), PROMPT, branching=branching, **run)
    if temperature:
        assert sum(map(sum, found.accepted_per_position)) > 2
    else:
        assert found.token_ids == Runner(Decoder(target)).generate(PROMPT, 20, Law(0.0), 0, ()).token_ids


@pytest.mark.parametrize("spelling", SPELLED)
def test_every_spelling_is_the_same_heads(spelling, target, tmp_path):
    settings, stored = SPELLED[spelling]
    proposer = MedusaProposer.load(write(tmp_path / "heads", stored, settings), Decoder(target))
    found = slow.run(Decoder(target), proposer, PROMPT, new=15, k=3)
    assert found == slow.speculate(*reference(target, PLAIN), PROMPT, new=15, k=3)


def test_the_reference_notices_heads_that_are_one_level_off(target, tmp_path):
    proposer = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target))
    found = slow.run(Decoder(target), proposer, PROMPT, new=15, k=2)
    assert found.proposals != slow.speculate(*reference(target, PLAIN, shift=1), PROMPT, new=15, k=2).proposals


def test_a_head_trained_on_the_text_two_places_ahead_is_right(target, tmp_path):
    """The alignment itself: heads that know what follows a state are accepted, wherever in the text."""
    tokens = Runner(Decoder(target)).generate(PROMPT, 24, Law(0.0), 0, ()).token_ids
    text = PROMPT + tokens
    states = slow.Model(target).states(text)[-1]
    stored = {}
    for head in range(COUNT):
        rows = range(len(text) - 2 - head)
        wanted = torch.nn.functional.one_hot(torch.tensor([text[p + 2 + head] for p in rows]), VOCABULARY).float()
        inverse = torch.linalg.pinv(states[: len(rows)].double())
        stored[f"lm_heads.{head}.weight"] = (inverse @ wanted.double()).T.float()
        for layer in range(LAYERS):
            stored[f"blocks.{head}.layers.{layer}.weight"] = torch.zeros(HIDDEN, HIDDEN)
    proposer = MedusaProposer.load(write(tmp_path / "heads", stored, config()), Decoder(target))
    found = Runner(Decoder(target), proposer, 3).generate(PROMPT, 24, Law(0.0), 0, ())
    assert found.token_ids == tokens
    whole = [entry for entry in found.accepted_per_position[1:-1] if entry]
    assert sum(map(sum, whole)) > 0.8 * sum(map(len, whole))


def test_no_more_levels_are_drafted_than_there_are_heads(target, tmp_path):
    proposer = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target))
    found = Runner(Decoder(target), proposer, 6).generate(PROMPT, 20, Law(0.0), 0, ())
    assert {len(tokens) for tokens in found.proposals[1:]} == {proposer.levels} == {3}


@pytest.mark.parametrize("branching", [None, TREE])
def test_a_session_that_went_through_rejections_equals_a_new_one(branching, target, tmp_path, monkeypatch):
    proposer = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target), branching)
    twins = slow.Twins(proposer, medusa, monkeypatch)
    Runner(Decoder(target), twins, 3).generate(PROMPT, 20, Law(3.0), 0, ())
    assert twins.worst < 1e-5 and twins.calls > 5


class Stale:
    """Hands its session the oldest of the new states instead of all."""

    def __init__(self, proposer):
        self.proposer = proposer

    def session(self):
        session = self.proposer.session()

        def propose(context):
            return session.propose(replace(context, features=context.features[:1]))

        return SimpleNamespace(propose=propose)


def test_a_session_that_reads_an_old_state_is_caught(target, tmp_path, monkeypatch):
    proposer = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target))
    twins = slow.Twins(proposer, medusa, monkeypatch, tried=Stale(proposer))
    Runner(Decoder(target), twins, 3).generate(PROMPT, 20, Law(3.0), 0, ())
    assert twins.worst > 1e-2


def test_a_session_without_a_state_says_so(target, tmp_path):
    session = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target)).session()
    with pytest.raises(CompressError, match="no state of the target"):
        session.propose(Context(PROMPT, 3, LawState(Law(0.0), VOCABULARY), torch.Generator()))


NAN = torch.full((HIDDEN, HIDDEN), torch.nan)
REFUSED = [  # config, tensors in the place of PLAIN's (None: taken away), message
    (config(), {"blocks.1.layers.1.weight": None}, r"tensor 'blocks.1.layers.1.weight' is missing"),
    (config(), {"lm_heads.2.weight": None}, r"tensor 'lm_heads.2.weight' is missing"),
    (config(num_heads=4), {}, r"tensor 'blocks.3.layers.0.weight' is missing"),
    (config(num_heads=2), {}, r"tensor 'blocks.2.layers.0.weight' is not part of"),
    (config(medusa_fc_bias=True), {}, r"tensor 'blocks.0.layers.0.bias' is missing"),
    (config(), {"blocks.0.layers.0.bias": torch.zeros(HIDDEN)}, r"tensor 'blocks.0.layers.0.bias' is not part of"),
    (config(), {"model.blocks.0.layers.0.weight": NAN}, r"tensor 'model.blocks.0.layers.0.weight' is not part of"),
    (config(), {"medusa_heads.lm_heads.0.weight": NAN}, r"are both 'lm_heads.0.weight'; remove one"),
    (config(), {"blocks.0.layers.0.weight": NAN}, r"tensor 'blocks.0.layers.0.weight' holds 1024 NaN"),
    (config(), {"blocks.0.layers.0.weight": torch.zeros(32, 31)}, r"has shape \[32, 31\], \[32, 32\] is what fits"),
    (config(), {"lm_heads.0.weight": torch.zeros(23, 32)}, r"'lm_heads.0.weight' has shape \[23, 32\], \[24, 32\]"),
    (config(truncated_vocab_size=KEPT), {}, r"tensor 'token_map' is missing"),
    (config(truncated_vocab_size=KEPT), {"token_map": KEPT_IDS[:9]}, r"'token_map' has shape \[9\], \[15\]"),
    (config(truncated_vocab_size=KEPT), {"token_map": KEPT_IDS + 9}, r"'token_map' holds id \d+, outside the 24"),
    (config(truncated_vocab_size=KEPT), {"token_map": KEPT_IDS - 9}, r"'token_map' holds id -\d+, outside the 24"),
    (config(truncated_vocab_size=KEPT), {"token_map": KEPT_IDS * 0}, r"'token_map' holds an id twice"),
    (config(truncated_vocab_size=KEPT), {"token_map": KEPT_IDS / 2}, r"'token_map' is torch.float32; ids are integers"),
    (config(truncated_vocab_size=25), {}, r"truncated_vocab_size: 25 exceeds vocab_size 24"),
    (config(hidden_size=64), {}, r"hidden_size: 64; the target has 32"),
    (config(vocab_size=32), {}, r"vocab_size: 32; the target has 24"),
    (config(num_heads=0), {}, r"num_heads: 0 is not a positive integer"),
    (config(original_lm_head="no"), {}, r"original_lm_head: 'no' is neither true nor false"),
    (config(logit_scale=None), {}, r"logit_scale: None is not a finite number"),
]


@pytest.mark.parametrize(("settings", "change", "message"), REFUSED, ids=[entry[2][:50] for entry in REFUSED])
def test_heads_that_would_be_silently_wrong_are_refused(settings, change, message, target, tmp_path):
    stored = {name: tensor for name, tensor in (PLAIN | change).items() if tensor is not None}
    with pytest.raises(CompressError, match=message) as caught:
        MedusaProposer.load(write(tmp_path / "heads", stored, settings), Decoder(target))
    assert str(tmp_path / "heads") in str(caught.value) and "\n" not in str(caught.value)


def test_a_branching_of_zero_is_refused(target, tmp_path):
    with pytest.raises(UsageError, match="branching"):
        MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), Decoder(target), (0,))


@pytest.mark.parametrize("branching", [None, TREE])
def test_its_output_has_the_targets_law(branching, target, tmp_path):
    decoder = Decoder(target)
    heads = MedusaProposer.load(write(tmp_path / "heads", PLAIN, config()), decoder, branching=branching)
    assert keeps_the_law(decoder, heads, PROMPT)
