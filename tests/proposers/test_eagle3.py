"""EAGLE-3 heads of random weights against the head written again, and what `load` refuses."""

import json
from pathlib import Path

import pytest
import slow_speculation as slow
import tiny_models as tiny
import torch
from safetensors.torch import save_file
from toys import keeps_the_law

from compressor.decode import Decoder, Law, Request, Runner
from compressor.decode.law import LawState
from compressor.errors import CompressError, UsageError
from compressor.proposers import recurrent
from compressor.proposers.base import Context
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache

PROMPT = [5, 9, 3, 5, 11]
VOCABULARY, DRAFT, HIDDEN, HEADS, KV = 24, 17, 32, 4, 2
SIZE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4}
SIZE |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-6}
AUX = [1, 2, 4 - 1]
TREE = (3, 2, 2)
IDS = torch.tensor(sorted(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:DRAFT].tolist()))


@pytest.fixture(scope="module")
def target():
    return tiny.random_model("llama", seed=1, **SIZE)


def tensors(aux=3, draft=DRAFT, hidden=HIDDEN, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.25 * torch.randn(shape, generator=generator)

    def positive(size):
        return 0.6 + torch.rand(size, generator=generator)

    size = hidden // HEADS
    found = {
        "fc.weight": normal(hidden, aux * HIDDEN),
        "norm.weight": positive(hidden),
        "lm_head.weight": 2 * normal(draft, hidden),
        "midlayer.self_attn.q_proj.weight": normal(HEADS * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(KV * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(KV * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, hidden),
        "midlayer.mlp.gate_proj.weight": normal(40, hidden),
        "midlayer.mlp.up_proj.weight": normal(40, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, 40),
    }
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found |= {f"midlayer.{name}.weight": positive(hidden) for name in names}
    if draft != VOCABULARY:
        found["d2t"] = IDS - torch.arange(DRAFT)
        found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, IDS, True)
    return found


LAYER = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def raw(**changes):
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": AUX, "use_aux_hidden_state": True}
    return {**config, **changes}


def speculators(**changes):
    config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFT}
    config |= {"transformer_layer_config": LAYER, "eagle_aux_hidden_state_layer_ids": AUX}
    return {**config, **changes}


def write(folder: Path, stored, config) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(model, stored, aux=AUX, norm_before_residual=False, norm_output=False, scale=1.0, wide=False):
    """The head's logits after a history and a path, all rows made again: true states for the history, then its own."""
    target = slow.Model(model)
    embedding = stored.get("embed_tokens.weight", model.model.embed_tokens.weight)
    head = stored.get("lm_head.weight", model.lm_head.weight)

    def rows(hidden, tokens):
        embedded = slow.norm(embedding[tokens], stored["midlayer.input_layernorm.weight"])
        normed = slow.norm(hidden, stored["midlayer.hidden_norm.weight"])
        x = normed if norm_before_residual else hidden
        x = x + slow.attend(torch.cat([embedded, normed], -1), stored, "midlayer.self_attn.", HEADS, KV)
        x = x + slow.gated_mlp(
            slow.norm(x, stored["midlayer.post_attention_layernorm.weight"]), stored, "midlayer.mlp."
        )
        final = slow.norm(x, stored["norm.weight"])
        return final, final if norm_output else x

    def states(history):
        found = target.states(history)
        side = torch.cat([found[index] for index in aux], -1)[:-1]
        if "input_norm.weight" in stored:
            side = slow.norm(side, stored["input_norm.weight"])
        if "fc_norm.0.weight" in stored:
            parts = side.chunk(len(aux), -1)
            side = torch.cat([slow.norm(part, stored[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return side @ stored["fc.weight"].T

    def logits(history, path):
        hidden, tokens = states(history), history[1:]
        for token in path:
            _, handed = rows(hidden, tokens)
            hidden, tokens = torch.cat([hidden, handed[-1:]]), [*tokens, token]
        final, _ = rows(hidden, tokens)
        found = scale * (head @ final[-1])
        if "d2t" not in stored:
            return found
        full = torch.full((VOCABULARY,), -torch.inf)
        for index, offset in enumerate(stored["d2t"].tolist()):
            full[index + offset] = found[index]
        return full

    return target.logits, logits


HEADS_OF = {  # config, tensors beside or instead of the usual, what the reference is told
    "raw": (raw(), {}, {}),
    "raw, norm before residual": (raw(norm_before_residual=True), {}, {"norm_before_residual": True}),
    "speculators": (speculators(), {}, {"norm_before_residual": True}),
    "speculators, norm after residual": (speculators(norm_before_residual=False), {}, {}),
    "own embedding": (raw(), {"embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN)}, {}),
    "norms before fc": (
        raw(norm_before_fc=True, fc_norm=True),
        {"input_norm.weight": torch.rand(3 * HIDDEN), **{f"fc_norm.{i}.weight": torch.rand(HIDDEN) for i in range(3)}},
        {},
    ),
    "norm of what is handed on": (raw(norm_output=True), {}, {"norm_output": True}),
    "logit scale": (raw(logit_scale=0.5), {}, {"scale": 0.5}),
    "two states": (raw(eagle_aux_hidden_state_layer_ids=[0, 2]), tensors(aux=2), {"aux": [0, 2]}),
}


def full_vocabulary(own_head=True):
    """A head whose ids are the target's; without a head of its own it shares the target's."""
    stored = tensors(draft=VOCABULARY)
    if not own_head:
        del stored["lm_head.weight"]
    return raw(draft_vocab_size=None), stored


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_prompt_read_in_pieces_gives_the_same_run(size, target, tmp_path, monkeypatch):
    proposer = Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), Decoder(target), TREE)
    pieces = slow.read_in_pieces(monkeypatch, size)
    found = slow.run(Decoder(target), proposer, PROMPT, new=15, k=3)
    assert found == slow.speculate(*reference(target, tensors()), PROMPT, branching=TREE, new=15, k=3)
    assert max(pieces) == size


@pytest.mark.parametrize(
    ("kind", "branching"), [*((kind, None) for kind in HEADS_OF), ("raw", TREE), ("speculators", TREE)]
)
def test_a_greedy_run_equals_the_slow_reference(kind, branching, target, tmp_path):
    config, other, told = HEADS_OF[kind]
    stored = {**tensors(), **other}
    proposer = Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target), branching)
    settings = {"new": 15, "k": 3}
    found = slow.run(Decoder(target), proposer, PROMPT, **settings)
    assert found == slow.speculate(*reference(target, stored, **told), PROMPT, branching=branching, **settings)
    assert found.token_ids == Runner(Decoder(target)).generate(PROMPT, 15, Law(0.0), 0, ()).token_ids


@pytest.mark.parametrize("branching", [None, TREE])
@pytest.mark.parametrize("own_head", [True, False])
def test_a_sampled_run_equals_the_slow_reference(own_head, branching, target, tmp_path):
    config, stored = full_vocabulary(own_head)
    proposer = Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target), branching)
    settings = {"new": 20, "k": 3, "temperature": 3.0, "seed": 5}
    found = slow.run(Decoder(target), proposer, PROMPT, **settings)
    assert found == slow.speculate(*reference(target, stored), PROMPT, branching=branching, **settings)
    assert sum(map(sum, found.accepted_per_position)) > 5


WRONG = {  # what the reference is told that the head does not do
    "residual": {"norm_before_residual": True},
    "aux layers off by one": {"aux": [0, 1, 2]},
    "another state handed on": {"norm_output": True},
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_reference_notices_another_head(mistake, target, tmp_path):
    proposer = Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), Decoder(target))
    settings = {"new": 10, "k": 3}
    wrong = slow.speculate(*reference(target, tensors(), **WRONG[mistake]), PROMPT, **settings)
    assert slow.run(Decoder(target), proposer, PROMPT, **settings).proposals != wrong.proposals


def test_only_ids_of_the_heads_vocabulary_are_proposed(target, tmp_path):
    proposer = Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), Decoder(target), TREE)
    found = Runner(Decoder(target), proposer, 3).generate(PROMPT, 40, Law(1.0), 0, ())
    proposed = {token for tokens in found.proposals for token in tokens}
    assert proposed <= set(IDS.tolist()) and len(proposed) > 10
    assert not set(found.token_ids) <= set(IDS.tolist())  # the target still writes the others


def test_the_default_states_are_those_of_vllm(tmp_path):
    config = raw()
    del config["eagle_config"]
    deep = Decoder(tiny.random_model("llama", **{**SIZE, "num_hidden_layers": 8}))
    assert Eagle3Proposer.load(write(tmp_path / "head", tensors(), config), deep).features == (2, 4, 5)


def test_a_block_called_as_the_first_layer_is_the_same_head(target, tmp_path):
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors().items()}
    runs = [
        slow.run(
            Decoder(target), Eagle3Proposer.load(write(tmp_path / name, stored, raw()), Decoder(target)), PROMPT, 20, 3
        )
        for name, stored in (("one", tensors()), ("other", renamed))
    ]
    assert runs[0] == runs[1]


def test_a_qwen3_block_has_its_norms_of_queries_and_keys(target, tmp_path):
    stored = tensors() | {f"midlayer.self_attn.{name}_norm.weight": torch.rand(8) for name in "qk"}
    config = raw(model_type="qwen3", head_dim=8)
    proposer = Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target))
    with_norms = slow.run(Decoder(target), proposer, PROMPT, 20, 3)
    plain = Eagle3Proposer.load(write(tmp_path / "plain", tensors(), raw()), Decoder(target))
    without = slow.run(Decoder(target), plain, PROMPT, 20, 3)
    assert with_norms.proposals != without.proposals and with_norms.token_ids == without.token_ids


@pytest.mark.parametrize("branching", [None, TREE])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_session_that_went_through_rejections_equals_a_new_one(branching, temperature, target, tmp_path, monkeypatch):
    config, stored = full_vocabulary()
    folder = write(tmp_path / "head", stored, config)
    twins = slow.Twins(Eagle3Proposer.load(folder, Decoder(target), branching), recurrent, monkeypatch)
    found = Runner(Decoder(target), twins, 3).generate(PROMPT, 30, Law(temperature), 1, ())
    assert twins.worst < 1e-5 and twins.calls > 10
    assert found.accepted < found.proposed
    assert found.accepted > 5 or temperature == 0  # a random head is right by chance only


@pytest.mark.parametrize("branching", [None, TREE])
def test_a_session_that_keeps_drafted_rows_is_caught(branching, target, tmp_path, monkeypatch):
    folder = write(tmp_path / "head", tensors(), raw())
    twins = slow.Twins(Eagle3Proposer.load(folder, Decoder(target), branching), recurrent, monkeypatch)
    monkeypatch.setattr(NodeCache, "forget", lambda self: self._nodes.clear())
    Runner(Decoder(target), twins, 3).generate(PROMPT, 20, Law(0.0), 1, ())
    assert twins.worst > 1e-2


def test_texts_of_a_batch_have_sessions_of_their_own(target, tmp_path):
    config, stored = full_vocabulary()
    proposer = Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target), TREE)
    batch = Runner(Decoder(target), proposer, 3).batch()
    prompts = [PROMPT, [7, 1], [3, 3, 3, 2, 1, 8]]
    texts = [batch.join(Request(prompt, 20, Law(3.0), seed, frozenset())) for seed, prompt in enumerate(prompts)]
    while batch.texts:
        batch.step()
    for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = slow.run(Decoder(target), proposer, prompt, 20, 3, temperature=3.0, seed=seed)
        assert slow.Record.of(text.output) == alone


def test_the_cache_grows_with_the_text(target, tmp_path, monkeypatch):
    config, stored = full_vocabulary()
    proposer = Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target), TREE)
    wide = slow.run(Decoder(target), proposer, PROMPT, 20, 3, temperature=3.0)
    monkeypatch.setattr("compressor.proposers.nodes.CAPACITY", 2)
    assert slow.run(Decoder(target), proposer, PROMPT, 20, 3, temperature=3.0) == wide


@pytest.mark.parametrize("features", [None, torch.zeros(3, 3 * HIDDEN)])
def test_states_that_do_not_match_the_new_tokens_are_refused(features, target, tmp_path):
    session = Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), Decoder(target)).session()
    context = Context(PROMPT, 3, LawState(Law(0.0), VOCABULARY), torch.Generator(), features)
    with pytest.raises(CompressError, match=r"got [03] states of the target for 4 new tokens"):
        session.propose(context)


def without(name):
    return lambda stored: stored.pop(name)


def put(name, tensor):
    return lambda stored: stored.update({name: tensor})


SHIFTED = IDS - torch.arange(DRAFT)
REFUSED = [  # config, what is done to the tensors, message
    (raw(), without("fc.weight"), r"tensor 'fc.weight' is missing"),
    (raw(), without("midlayer.hidden_norm.weight"), r"tensor 'midlayer.hidden_norm.weight' is missing"),
    (raw(), without("midlayer.self_attn.o_proj.weight"), r"tensor 'midlayer.self_attn.o_proj.weight' is missing"),
    (raw(), without("d2t"), r"tensor 'd2t' is missing: it maps 17 ids to the target's 24"),
    (raw(), without("lm_head.weight"), r"tensor 'lm_head.weight' is missing"),
    (raw(), put("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)), r"'fc.weight' has shape \[32, 64\], \[32, 96\] is what"),
    (
        raw(),
        put("midlayer.self_attn.q_proj.weight", torch.zeros(HIDDEN, HIDDEN)),
        r"q_proj.weight' has shape \[32, 32\]",
    ),
    (raw(), put("lm_head.weight", torch.zeros(18, HIDDEN)), r"'lm_head.weight' has shape \[18, 32\], \[17, 32\]"),
    (raw(), put("embed_tokens.weight", torch.zeros(17, HIDDEN)), r"'embed_tokens.weight' has shape \[17, 32\]"),
    (raw(), put("norm.weight", torch.full((HIDDEN,), torch.nan)), r"tensor 'norm.weight' holds 32 NaN"),
    (raw(), put("midlayer.extra.weight", torch.zeros(2)), r"tensor 'midlayer.extra.weight' is not part of"),
    (raw(), put("layers.0.mlp.up_proj.weight", torch.zeros(2)), r"are both 'midlayer.mlp.up_proj.weight'"),
    (raw(), put("d2t", IDS), r"'d2t' maps id \d+ to \d+, outside the target's 24 ids; it holds offsets, not ids"),
    (raw(), put("d2t", -torch.ones(17, dtype=torch.long)), r"'d2t' maps id 0 to -1"),
    (raw(), put("d2t", 3 - torch.arange(17)), r"'d2t' maps two ids to one"),
    (raw(), put("d2t", SHIFTED.float()), r"'d2t' is torch.float32; offsets are integers"),
    (raw(), put("t2d", torch.ones(24, dtype=torch.bool)), r"'t2d' marks other ids than 'd2t' maps to"),
    (
        raw(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
        None,
        r"\[1, 2, 5\]; the target has the states 0 to 4",
    ),
    (
        raw(eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}),
        None,
        r"\[-1, 2, 3\]; the target has the states",
    ),
    (raw(eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 1, 2]}), None, r"\[3, 1, 2\] does not ascend"),
    (raw(eagle_config={"eagle_aux_hidden_state_layer_ids": "all"}), None, r"'all' is not a list of integers"),
    (raw(eagle_config={}), None, r"eagle_aux_hidden_state_layer_ids \(vLLM's default\): \[2, 2, 1\] does not ascend"),
    (raw(eagle_config={"use_aux_hidden_state": False}), None, r"use_aux_hidden_state: false is not supported"),
    (raw(eagle_config=3), None, r"eagle_config: 3 is not an object"),
    (raw(norm_before_residual="yes"), None, r"norm_before_residual: 'yes' is neither true nor false"),
    (raw(target_hidden_size=64), None, r"target_hidden_size: 64; the target has 32"),
    (raw(vocab_size=25), None, r"vocab_size: 25; the target has 24"),
    (raw(draft_vocab_size=0), None, r"draft_vocab_size: 0 is not a positive integer"),
    (raw(num_hidden_layers=2), None, r"num_hidden_layers: 2; a head has one layer"),
    (raw(model_type="gpt2"), None, r"model_type: 'gpt2' is no EAGLE-3 head; llama or qwen3"),
    (raw(logit_scale="big"), None, r"logit_scale: 'big' is not a finite number"),
    (raw(logit_scale=10**400), None, r"logit_scale: 10+…? ?.*is not a finite number"),
    (raw(logit_scale=float("nan")), None, r"logit_scale: nan is not a finite number"),
    (raw(rope_scaling={"rope_type": []}), None, r"rope_type|not a usable config"),
    (raw(hidden_size=10**20), None, r"hidden_size: 10+ is not a whole number"),
    (raw(eagle_config={"eagle_aux_hidden_state_layer_ids": 0}), None, r"0 is not a list of integers"),
    (raw(eagle_config=[]), None, r"eagle_config: \[\] is not an object"),
    (raw(pad_token_id=10**20), None, r"config.json: "),
    (
        raw(),
        put("fc.weight", torch.ones(HIDDEN, 3 * HIDDEN, dtype=torch.int32)),
        r"'fc.weight' is torch.int32; a weight is in floating point",
    ),
    (raw(), put("norm.weight", torch.ones(HIDDEN, dtype=torch.bool)), r"'norm.weight' is torch.bool; a weight"),
    (
        raw(),
        put("norm.weight", torch.full((HIDDEN,), 1e300, dtype=torch.float64)),
        r"'norm.weight' holds values that torch.float32 cannot",
    ),
    (
        raw(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        None,
        r"rope_type: 'dynamic' changes",
    ),
    (
        speculators(speculators_model_type="peagle"),
        None,
        r"speculators_model_type: 'peagle'; an EAGLE-3 head is needed",
    ),
    (speculators(transformer_layer_config=None), None, r"no transformer_layer_config"),
]


@pytest.mark.parametrize(("config", "change", "message"), REFUSED, ids=[entry[2][:50] for entry in REFUSED])
def test_a_head_that_would_be_silently_wrong_is_refused(config, change, message, target, tmp_path):
    stored = tensors()
    if change is not None:
        change(stored)
    with pytest.raises(CompressError, match=message) as caught:
        Eagle3Proposer.load(write(tmp_path / "head", stored, config), Decoder(target))
    assert str(tmp_path / "head") in str(caught.value) and "\n" not in str(caught.value)


def test_a_target_of_another_width_cannot_lend_its_tables(tmp_path):
    wide = Decoder(tiny.random_model("llama", **{**SIZE, "hidden_size": 64}))
    stored = tensors() | {"fc.weight": torch.zeros(HIDDEN, 3 * 64)}
    folder = write(tmp_path / "head", stored, raw(target_hidden_size=64))
    with pytest.raises(CompressError, match=r"tensor 'embed_tokens.weight' is missing, and the target's does not fit"):
        Eagle3Proposer.load(folder, wide)
    stored["embed_tokens.weight"] = torch.zeros(VOCABULARY, HIDDEN)
    Eagle3Proposer.load(write(tmp_path / "head", stored, raw(target_hidden_size=64)), wide)


def test_a_branching_of_zero_is_refused(target, tmp_path):
    with pytest.raises(UsageError, match="branching"):
        Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), Decoder(target), (2, 0))


@pytest.mark.parametrize("branching", [None, TREE])
def test_its_output_has_the_targets_law(branching, target, tmp_path):
    decoder = Decoder(target)
    head = Eagle3Proposer.load(write(tmp_path / "head", tensors(), raw()), decoder, branching=branching)
    assert keeps_the_law(decoder, head, PROMPT)
