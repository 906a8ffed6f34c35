"""A head in fewer bits: the same drafts or nearly so, in files that say what they are; a refusal where they are not."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache
from compressor.recipe_training import LOWER, allowed_loss
from compressor.train import export, precision

LOWEST = {"fp8": 0.1, "int8": 0.03, "int4-g32": 0.4}
"""Norm of what the rounding changes, by the norm of the state: random weights round as badly as any."""


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def decoder(request):
    return Decoder(tiny.random_model(num_hidden_layers=4).to(request.param))


@pytest.fixture(scope="module")
def head(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    export.write(random_head(decoder), folder)
    (folder / "recipe.yaml").write_text("name: x")
    (folder / "passport.json").write_text("{}")
    return folder


def states(folder, decoder):
    """What the first drafted token is made of."""
    proposer = Eagle3Proposer.load(folder, decoder)
    tokens = [5, 9, 3, 5, 11, 40]
    features = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(2)).to(decoder.dtype)
    hidden = proposer.enter(features)
    module = proposer.modules[0]
    found, _ = module(hidden, torch.tensor(tokens[1:]), NodeCache(module.cache).text(5))
    return proposer.logits(found).float()


@pytest.mark.parametrize("to", LOWEST)
def test_a_lowered_head_computes_nearly_the_same(decoder, head, tmp_path, to):
    precision.lower(head, tmp_path, to)
    before, after = states(head, decoder), states(tmp_path, decoder)
    known = before.isfinite()
    assert torch.equal(known, after.isfinite())
    change = float((after - before)[known].norm() / before[known].norm())
    assert 0 < change < LOWEST[to]


@pytest.mark.parametrize("to", LOWEST)
def test_every_matrix_is_rounded_and_nothing_else(head, tmp_path, to):
    precision.lower(head, tmp_path, to)
    old, new = load_file(head / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    kept = {name for name in old if name in new and new[name].dtype == old[name].dtype}
    assert kept == {name for name in old if "norm" in name} | {"d2t", "t2d"}
    assert (tmp_path / "recipe.yaml").read_text() == "name: x" and not (tmp_path / "passport.json").exists()
    size = sum(value.nbytes for name, value in new.items() if name not in kept)
    assert size < sum(value.nbytes for name, value in old.items() if name not in kept) * (0.4 if "4" in to else 0.6)


def test_the_speculators_layout_is_lowered_too(decoder, tmp_path):
    export.write(random_head(decoder), tmp_path / "head", layout="speculators")
    precision.lower(tmp_path / "head", tmp_path / "low", "int8")
    assert states(tmp_path / "low", decoder).isfinite().any()


def test_a_lowered_head_is_neither_lowered_again_nor_trained(decoder, head, tmp_path):
    precision.lower(head, tmp_path / "a", "int8")
    with pytest.raises(UsageError, match="is there already; take the head in bf16"):
        precision.lower(tmp_path / "a", tmp_path / "b", "fp8")
    with pytest.raises(UsageError, match="its weights are in int8; train the head that it was made from"):
        export.load(tmp_path / "a", decoder)


@pytest.mark.parametrize("to", ["bf16", "int3"])
def test_another_precision_is_refused(head, tmp_path, to):
    with pytest.raises(UsageError, match=f"precision: '{to}' is not one of fp8, int8, int4-g32"):
        precision.lower(head, tmp_path / "out", to)


def test_groups_that_do_not_divide_the_width_are_refused(head, tmp_path):
    with pytest.raises(UsageError, match=r"fc.weight has 192 inputs, which groups of int4-g128 do not divide"):
        precision.lower(head, tmp_path / "out", "int4-g128")


def damaged(head, folder, change):
    precision.lower(head, folder, "int8")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: config.pop("quantization_config"), "fc.weight_scale' belongs to a quantized weight"),
        (lambda tensors, config: tensors.pop("fc.weight_scale"), "'fc.weight' is torch.int8; a weight is in floating"),
        (
            lambda tensors, config: tensors.update({"fc.weight": tensors["fc.weight"][:, :64].contiguous()}),
            r"fc is quantized in the shape \[64, 64\], \[64, 192\] is what fits",
        ),
        (
            lambda tensors, config: tensors.update({"fc.weight_scale": tensors["fc.weight_scale"][:9].contiguous()}),
            r"fc: weight_scale: shape \[64, 1\] expected",
        ),
        (lambda tensors, config: tensors["lm_head.weight_scale"].fill_(float("inf")), "infinite values"),
        (lambda tensors, config: config["quantization_config"].update(format="x"), "config.json: quantization_config"),
        (lambda tensors, config: tensors.update({"fc.input_scale": torch.ones(1)}), "'fc.input_scale' is not part of"),
    ],
)
def test_a_damaged_lowered_head_is_refused_by_name(decoder, head, tmp_path, change, message):
    with pytest.raises(CompressError, match=message):
        Eagle3Proposer.load(damaged(head, tmp_path / "damaged", change), decoder)


def test_4_bits_need_a_stated_loss():
    assert all((allowed_loss(to, None) is None) is to.startswith("int4") for to in LOWER)
    assert allowed_loss("int4-g64", 0.2) == allowed_loss("int8", 0.2) == 0.2


def test_more_loss_than_allowed_is_refused(head):
    precision.refuse_loss(head, "int8", {"tau": 2.0}, {"tau": 1.96}, 0.05)
    with pytest.raises(CompressError, match=r"the check finds 1\.940 tokens a cycle, 2\.000 before: a loss of 6\.0%"):
        precision.refuse_loss(head, "int8", {"tau": 2.0}, {"tau": 1.94}, 0.05)


def stored(head, folder, **changes):
    """The head with other tensors in `folder`."""
    folder.mkdir()
    save_file(load_file(head / "model.safetensors") | changes, folder / "model.safetensors")
    (folder / "config.json").write_text((head / "config.json").read_text())
    return folder


def test_an_embedding_and_what_is_no_weight_keep_their_dtype(decoder, head, tmp_path):
    own = decoder.embedding.weight.detach().bfloat16().contiguous()
    extra = {"embed_tokens.weight": own, "mask_hidden": torch.zeros(1, 192, dtype=torch.bfloat16)}
    precision.lower(stored(head, tmp_path / "own", **extra), tmp_path / "low", "int8")
    found = load_file(tmp_path / "low" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in extra.items())
    assert states(tmp_path / "low", decoder).isfinite().any()


@pytest.mark.parametrize("to", LOWEST)
def test_a_head_with_the_whole_vocabulary_is_lowered_too(decoder, tmp_path, to):
    export.write(random_head(decoder, size=decoder.vocab_size), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")},
        tmp_path / "head" / "model.safetensors",
    )
    precision.lower(tmp_path / "head", tmp_path / "low", to)
    change = states(tmp_path / "low", decoder) - states(tmp_path / "head", decoder)
    assert 0 < float(change.norm()) < LOWEST[to] * float(states(tmp_path / "head", decoder).norm())


def test_a_sharded_head_becomes_one_file(decoder, head, tmp_path):
    tensors = load_file(head / "model.safetensors")
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text((head / "config.json").read_text())
    files = {"a.safetensors": {"fc.weight": tensors.pop("fc.weight")}, "b.safetensors": tensors}
    for name, part in files.items():
        save_file(part, folder / name)
    places = {tensor: name for name, part in files.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    precision.lower(folder, tmp_path / "low", "int8")
    precision.lower(head, tmp_path / "whole", "int8")
    assert torch.equal(states(tmp_path / "low", decoder), states(tmp_path / "whole", decoder))


def test_a_nan_is_named(head, tmp_path):
    broken = stored(head, tmp_path / "nan", **{"fc.weight": torch.full((64, 192), float("nan"))})
    with pytest.raises(CompressError, match=r"nan/model\.safetensors: tensor 'fc\.weight' holds 12288 NaN"):
        precision.lower(broken, tmp_path / "low", "int8")
    assert not (tmp_path / "low" / "config.json").exists()
