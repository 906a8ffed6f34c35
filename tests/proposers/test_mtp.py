"""Native modules of random weights, in every layout, against the modules written again, and what `load` refuses."""

from pathlib import Path

import pytest
import slow_speculation as slow
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from toys import keeps_the_law

from compressor import formats
from compressor.decode import Decoder, Law, Runner
from compressor.decode.engine import load
from compressor.errors import CompressError, UsageError
from compressor.formats.config import quantization_config
from compressor.proposers import recurrent
from compressor.proposers.mtp import MtpProposer
from compressor.proposers.nodes import NodeCache

PROMPT = [5, 9, 3, 5, 11]
SIZE = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-6}
SIZE |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
HEADS, KV, LAYERS = 4, 2, 2
TREE = (3, 2, 1, 1)

# layout: module name, embedding norm, state norm, projection, final norm, block's prefix, state first, embedding 0 at
# position 0, norms that multiply by 1 + w
LAYOUTS = {
    "mimo": (
        "model.mtp_layers.{}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        "",
        1,
        1,
        0,
    ),
    "deepseek": ("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "", 0, 1, 0),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.{}.", 0, 0, 1),
}
CASES = [("mimo", 1), ("mimo", 2), ("deepseek", 1), ("deepseek", 3), ("qwen", 1), ("qwen", 2)]


def roots(layout, count):
    """(root, prefix of the block) of every module."""
    root, block = LAYOUTS[layout][0], LAYOUTS[layout][5]
    first = LAYERS if layout == "deepseek" else 0
    return [(root.format(first + index), root.format(first + index) + block.format(index)) for index in range(count)]


def modules(layout, count, biased=True):
    generator = torch.Generator().manual_seed(0)
    width, size = 32, 8

    def normal(*shape):
        return 0.25 * torch.randn(shape, generator=generator)

    def positive(size):
        return 0.6 + torch.rand(size, generator=generator)

    _, embedding_norm, hidden_norm, projection, final_norm, *_ = LAYOUTS[layout]
    found = {}
    for root, block in roots(layout, count):
        if f"{root}{projection}.weight" not in found:
            found |= {f"{root}{name}.weight": positive(width) for name in (embedding_norm, hidden_norm, final_norm)}
            found[f"{root}{projection}.weight"] = normal(width, 2 * width)
        found |= {f"{block}{name}.weight": positive(width) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", HEADS * size), ("k", KV * size), ("v", KV * size)):
            found[f"{block}self_attn.{name}_proj.weight"] = normal(rows, width)
            if biased:
                found[f"{block}self_attn.{name}_proj.bias"] = normal(rows)
        found[f"{block}self_attn.o_proj.weight"] = normal(width, width)
        found |= {f"{block}mlp.{name}_proj.weight": normal(48, width) for name in ("gate", "up")}
        found[f"{block}mlp.down_proj.weight"] = normal(width, 48)
    return found


def write(folder: Path, stored, kind="qwen2") -> Path:
    """A target with the module's tensors beside its own."""
    tiny.random_model(kind, seed=1, **SIZE).save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    return folder


def reference(model, stored, layout, count, *, recycle="post_norm", **wrong):
    """Logits of a draft's next level. Level d is module d's: it and those before it read all rows of the history, each
    with tokens that are shifted by one more. Further levels append rows to the last module."""
    target = slow.Model(model)
    _, embedding_norm, hidden_norm, projection, final_norm, _, hidden_first, zero_first, offset = LAYOUTS[layout]
    hidden_first, zero_first = wrong.get("hidden_first", hidden_first), wrong.get("zero_first", zero_first)

    def run(module, hidden, tokens):
        root, block = roots(layout, count)[module]

        def scale(name):
            return offset + stored[f"{root}{name}.weight"]

        embedded = model.model.embed_tokens.weight[tokens].clone()
        if zero_first:
            embedded[0] = 0
        parts = [slow.norm(embedded, scale(embedding_norm)), slow.norm(hidden, scale(hidden_norm))]
        x = torch.cat(parts[::-1] if hidden_first else parts, -1) @ stored[f"{root}{projection}.weight"].T
        normed = slow.norm(x, stored[f"{block}input_layernorm.weight"])
        x = x + slow.attend(normed, stored, f"{block}self_attn.", HEADS, KV)
        normed = slow.norm(x, stored[f"{block}post_attention_layernorm.weight"])
        x = x + slow.gated_mlp(normed, stored, f"{block}mlp.")
        final = slow.norm(x, scale(final_norm))
        return final, final if recycle == "post_norm" else x

    def logits(history, path):
        rows, tokens = len(history) - 1, history + path
        raw = wrong.get("raw_state", layout == "mimo")  # before the target's final norm
        handed = (target.before_norm(history) if raw else target.states(history)[-1])[:rows]
        for module in range(min(len(path) + 1, count)):
            read, shifted = handed, tokens[module + 1 : module + 1 + rows]
            final, handed = run(module, read, shifted)
        for token in path[count - 1 :] if len(path) >= count else []:
            read, shifted = torch.cat([read, handed[-1:]]), [*shifted, token]
            final, handed = run(count - 1, read, shifted)
        return model.lm_head.weight @ final[-1]

    return target.logits, logits


def loaded(folder, **options):
    model = load(folder, dtype=torch.float32)
    decoder = Decoder(model)
    return model, decoder, MtpProposer.load(folder, decoder, **options)


@pytest.mark.parametrize(("layout", "count"), CASES)
@pytest.mark.parametrize(("branching", "temperature"), [(None, 0.0), (TREE, 0.0), (None, 3.0)])
def test_a_run_equals_the_slow_reference(layout, count, branching, temperature, tmp_path):
    stored = modules(layout, count)
    model, decoder, proposer = loaded(write(tmp_path / "model", stored), branching=branching)
    assert len(proposer.modules) == count
    settings = {"new": 12, "k": 4, "temperature": temperature, "seed": 2}
    found = slow.run(decoder, proposer, PROMPT, **settings)
    assert found == slow.speculate(*reference(model, stored, layout, count), PROMPT, branching=branching, **settings)
    if temperature:
        assert sum(map(sum, found.accepted_per_position)) > 2
    else:
        assert found.token_ids == Runner(decoder).generate(PROMPT, 12, Law(0.0), 0, ()).token_ids


@pytest.mark.parametrize("size", [1, 2])
def test_a_prompt_read_in_pieces_gives_the_same_run(size, tmp_path, monkeypatch):
    stored = modules("deepseek", 3)
    model, decoder, proposer = loaded(write(tmp_path / "model", stored))
    pieces = slow.read_in_pieces(monkeypatch, size)
    found = slow.run(decoder, proposer, PROMPT, new=12, k=4)
    assert found == slow.speculate(*reference(model, stored, "deepseek", 3), PROMPT, new=12, k=4)
    assert max(pieces) == size


@pytest.mark.parametrize(("layout", "count"), CASES)
@pytest.mark.parametrize("prompt", [[7], [7, 3]])
def test_a_text_shorter_than_the_modules_look_back_equals_the_reference(layout, count, prompt, tmp_path):
    stored = modules(layout, count)
    model, decoder, proposer = loaded(write(tmp_path / "model", stored), branching=TREE)
    settings = {"new": 6, "k": 4}
    found = slow.run(decoder, proposer, prompt, **settings)
    assert found == slow.speculate(*reference(model, stored, layout, count), prompt, branching=TREE, **settings)


@pytest.mark.parametrize("count", [1, 2])
def test_states_before_the_norm_can_be_handed_on(count, tmp_path):
    stored = modules("mimo", count)
    model, decoder, proposer = loaded(write(tmp_path / "model", stored), recycle="pre_norm")
    found = slow.run(decoder, proposer, PROMPT, new=16, k=4)
    before, after = (
        slow.speculate(*reference(model, stored, "mimo", count, recycle=recycle), PROMPT, new=16, k=4)
        for recycle in ("pre_norm", "post_norm")
    )
    assert found == before and found.proposals != after.proposals


@pytest.mark.parametrize("wrong", [{"hidden_first": 0}, {"zero_first": 0}, {"raw_state": 0}], ids=str)
def test_the_reference_notices_another_wiring(wrong, tmp_path):
    stored, prompt = modules("mimo", 1), [5, 9]
    settings = {"new": 24, "k": 4, "temperature": 3.0}
    model, decoder, proposer = loaded(write(tmp_path / "model", stored))
    found = slow.run(decoder, proposer, prompt, **settings)
    other = slow.speculate(*reference(model, stored, "mimo", 1, **wrong), prompt, **settings)
    assert found.proposals != other.proposals


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma3", "phi3"])
def test_the_block_is_a_layer_of_the_targets_family(kind, tmp_path):
    """A module whose projection passes the state on and whose block is the target's last one, by its own names."""
    folder = write(tmp_path / "model", {}, kind)
    whole = load_file(folder / "model.safetensors")
    block = f"model.layers.{LAYERS - 1}."
    parts = {name.removeprefix(block): tensor for name, tensor in whole.items() if name.startswith(block)}
    stored = {f"model.mtp_layers.0.{name}": tensor.clone() for name, tensor in parts.items()}
    stored |= {f"model.mtp_layers.0.{name}_layernorm.weight": torch.ones(32) for name in ("token", "hidden", "final")}
    stored["model.mtp_layers.0.input_proj.weight"] = torch.eye(32, 64)  # the state comes first
    save_file(whole | stored, folder / "model.safetensors")
    model, _, proposer = loaded(folder)
    cache = NodeCache(proposer.modules[0].cache)
    hidden = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    found, _ = proposer.modules[0](hidden, torch.arange(12), cache.text(12))

    inner, kind_of_layer = model.model, getattr(model.config, "layer_types", ["full_attention"])[-1]
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    extra = (kind_of_layer,) if kind == "gemma3" else ()
    rope = inner.rotary_emb(normed[None], torch.arange(12)[None], *extra)
    far = torch.arange(12)[:, None] - torch.arange(12)
    window = 8 if kind == "mistral" else 99
    mask = torch.zeros(12, 12).masked_fill((far < 0) | (far >= window), -torch.inf)[None, None]
    output = inner.layers[-1](normed[None], attention_mask=mask, position_embeddings=rope)
    output = output[0] if isinstance(output, tuple) else output[0][None]
    torch.testing.assert_close(found, slow.norm(output.view(12, 32), torch.ones(32)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("layout", "count"), CASES)
@pytest.mark.parametrize("branching", [None, TREE])
def test_a_session_that_went_through_rejections_equals_a_new_one(layout, count, branching, tmp_path, monkeypatch):
    _, decoder, proposer = loaded(write(tmp_path / "model", modules(layout, count)), branching=branching)
    twins = slow.Twins(proposer, recurrent, monkeypatch)
    found = Runner(decoder, twins, 4).generate(PROMPT, 40, Law(3.0), 1, ())
    assert twins.worst < 1e-5 and twins.calls > 5
    assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("branching", [None, TREE])
def test_a_session_that_keeps_drafted_rows_is_caught(count, branching, tmp_path, monkeypatch):
    _, decoder, proposer = loaded(write(tmp_path / "model", modules("mimo", count)), branching=branching)
    twins = slow.Twins(proposer, recurrent, monkeypatch)
    monkeypatch.setattr(NodeCache, "forget", lambda self: self._nodes.clear())
    Runner(decoder, twins, 4).generate(PROMPT, 20, Law(0.0), 1, ())
    assert twins.worst > 1e-2


def test_a_module_is_given_the_embedding_of_the_token_after_the_state(tmp_path):
    """A module that ignores the state and maps token t to t + 5 writes what follows the last committed token."""
    folder, prefix = write(tmp_path / "model", modules("mimo", 1)), "model.mtp_layers.0."
    whole = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        whole[f"{prefix}{name}.weight"] *= 0.0  # the block changes nothing
    head = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    embedded = slow.norm(whole["model.embed_tokens.weight"], whole[f"{prefix}token_layernorm.weight"])
    following = torch.arange(24).roll(-5)
    mapped = torch.linalg.pinv(embedded.double()) @ head[following].double()
    whole[f"{prefix}input_proj.weight"] = torch.cat([torch.zeros(32, 32), mapped.T.float()], 1)
    whole[f"{prefix}final_layernorm.weight"] = torch.ones(32)
    save_file(whole | {"lm_head.weight": head}, folder / "model.safetensors")
    _, decoder, proposer = loaded(folder)
    found = Runner(decoder, proposer, 3).generate(PROMPT, 12, Law(0.0), 0, ())
    text, length = PROMPT + found.token_ids, len(PROMPT)
    for proposal, accepted in zip(found.proposals, found.accepted_per_position, strict=True):
        chain = [text[length - 1], *proposal]
        assert list(proposal) == [int(following[token]) for token in chain[:-1]]
        length += sum(accepted) + 1
    assert found.proposed > 5


def missing(name):
    return lambda stored: stored.pop(name)


def put(name, tensor):
    return lambda stored: stored.update({name: tensor})


MIMO = "model.mtp_layers.0."
REFUSED = [  # layout, what is done to the tensors, message
    ("mimo", missing(f"{MIMO}input_proj.weight"), r"tensor 'model.mtp_layers.0.input_proj.weight' is missing"),
    (
        "mimo",
        missing(f"{MIMO}final_layernorm.weight"),
        r"tensor 'model.mtp_layers.0.final_layernorm.weight' is missing",
    ),
    ("mimo", missing(f"{MIMO}mlp.up_proj.weight"), r"tensor 'model.mtp_layers.0.mlp.up_proj.weight' is missing"),
    ("mimo", missing(f"{MIMO}self_attn.k_proj.bias"), r"tensor 'model.mtp_layers.0.self_attn.k_proj.bias' is missing"),
    ("deepseek", missing("model.layers.2.enorm.weight"), r"tensor 'model.layers.2.enorm.weight' is missing"),
    ("qwen", missing("mtp.norm.weight"), r"tensor 'mtp.norm.weight' is missing"),
    ("mimo", put(f"{MIMO}input_proj.weight", torch.zeros(32, 32)), r"has shape \[32, 32\], \[32, 64\] is what fits"),
    ("mimo", put(f"{MIMO}mlp.up_proj.weight", torch.zeros(40, 32)), r"has shape \[40, 32\], \[48, 32\] is what fits"),
    ("mimo", put(f"{MIMO}extra.weight", torch.zeros(2)), r"tensor 'model.mtp_layers.0.extra.weight' is not part of"),
    ("mimo", put(f"{MIMO}hidden_layernorm.weight", torch.full((32,), torch.inf)), r"holds 0 NaN and 32 infinite"),
    ("mimo", lambda stored: stored.clear(), r"no multi-token prediction modules in this checkpoint"),
    ("mimo", put("model.mtp_block.0.mlp.up_proj.weight", torch.zeros(2)), r"module 'model.mtp_block.0' is of no known"),
    (
        "deepseek",
        put("model.layers.2.shared_head.head.weight", torch.zeros(24, 32)),
        r"head.weight' differs from 'lm_head",
    ),
    ("deepseek", put("model.layers.2.embed_tokens.weight", torch.zeros(24, 32)), r"differs from 'model.embed_tokens"),
]


@pytest.mark.parametrize(("layout", "change", "message"), REFUSED, ids=[entry[2][:60] for entry in REFUSED])
def test_modules_that_would_be_silently_wrong_are_refused(layout, change, message, tmp_path):
    stored = modules(layout, 1)
    change(stored)
    folder = write(tmp_path / "model", stored)
    decoder = Decoder(tiny.random_model("qwen2", seed=1, **SIZE))
    with pytest.raises(CompressError, match=message) as caught:
        MtpProposer.load(folder, decoder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("layout", "key"), [("mimo", "num_nextn_predict_layers"), ("qwen", "mtp_num_hidden_layers")])
def test_a_module_that_the_config_counts_and_nobody_stored_is_missed(layout, key, tmp_path):
    folder = write(tmp_path / "model", modules(layout, 2))
    decoder = Decoder(tiny.random_model("qwen2", seed=1, **SIZE))
    tiny.edit_config(folder, **{key: 2})
    assert len(MtpProposer.load(folder, decoder).modules) == 2
    tiny.edit_config(folder, **{key: 3})
    with pytest.raises(CompressError, match=rf"config.json: {key}: 3; the checkpoint holds 2 modules"):
        MtpProposer.load(folder, decoder)


def test_stored_copies_of_the_targets_tables_are_no_fault(tmp_path):
    folder = write(tmp_path / "model", modules("deepseek", 1))
    whole = load_file(folder / "model.safetensors")
    whole["model.layers.2.shared_head.head.weight"] = whole["lm_head.weight"].clone()
    whole["model.layers.2.embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
    save_file(whole, folder / "model.safetensors")
    _, decoder, proposer = loaded(folder)
    without = MtpProposer.load(write(tmp_path / "other", modules("deepseek", 1)), decoder)
    assert slow.run(decoder, proposer, PROMPT, 10, 3) == slow.run(decoder, without, PROMPT, 10, 3)


def test_an_unknown_recycling_is_refused(tmp_path):
    folder = write(tmp_path / "model", modules("mimo", 1))
    with pytest.raises(UsageError, match="recycle: 'both' is not one of post_norm, pre_norm"):
        loaded(folder, recycle="both")
    with pytest.raises(UsageError, match="branching"):
        loaded(folder, branching=(0,))


def test_packed_modules_are_the_values_that_they_decode_to(tmp_path):
    fmt, dense = formats.get("int4-g32"), modules("mimo", 1)
    packed = dict(dense)
    for name in ("input_proj", "self_attn.q_proj", "mlp.up_proj"):
        parts = fmt.encode(packed.pop(f"{MIMO}{name}.weight").bfloat16())
        packed |= {f"{MIMO}{name}.{suffix}": tensor for suffix, tensor in parts.items()}
        dense[f"{MIMO}{name}.weight"] = fmt.decode(parts)
    folder = write(tmp_path / "packed", packed)
    tiny.edit_config(folder, quantization_config=quantization_config(fmt, activations=False, ignore=["lm_head"]))
    _, decoder, other = loaded(write(tmp_path / "whole", modules("mimo", 1)))
    packed_and_dense = (MtpProposer.load(each, decoder) for each in (folder, write(tmp_path / "dense", dense)))
    runs = [slow.run(decoder, each, PROMPT, 30, 3, temperature=3.0) for each in (*packed_and_dense, other)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("branching", [None, TREE])
def test_its_output_has_the_targets_law(branching, tmp_path):
    folder = write(tmp_path / "model", modules("deepseek", 1))
    _, decoder, module = loaded(folder, branching=branching)
    assert keeps_the_law(decoder, module, PROMPT)
