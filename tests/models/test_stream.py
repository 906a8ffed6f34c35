"""A model run one block at a time gives what transformers gives with the whole model in memory."""

import pytest
import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM

from compressor import models
from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError
from compressor.models.skeleton import model_config
from compressor.models.stream import BlockStream


def streamed_logits(folder, ids):
    config, _ = model_config(folder)
    stream = BlockStream(Weights(folder), config, torch.float32)
    hidden = stream.embed(ids)
    stream.release_embedding()
    for index in range(len(stream)):
        with stream.block(index) as layer:  # in batches of another size than was embedded
            hidden = torch.cat([stream.run(index, layer, part) for part in hidden.split(2)])
    with stream.head() as logits:
        return stream, logits(hidden)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_streamed_logits_equal_transformers(tmp_path, kind):
    folder = tiny.save(tmp_path, kind, dtype=torch.float32)
    ids = torch.randint(3, tiny.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    stream, logits = streamed_logits(folder, ids)
    torch.testing.assert_close(logits, reference.detach(), atol=2e-5, rtol=1e-5)
    assert all(p.is_meta for p in stream.model.parameters()), "weights stay in memory after their block has run"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_blocks_run_on_after_the_head_saw_rows_of_another_length(tmp_path, kind):
    folder = tiny.save(tmp_path, kind, dtype=torch.float32)
    config, _ = model_config(folder)
    stream = BlockStream(Weights(folder), config, torch.float32)
    hidden = stream.embed(torch.arange(3, 27)[None])
    with stream.block(0) as layer:
        before = stream.run(0, layer, hidden)
    with stream.head() as logits:
        logits(hidden[:, :5])
    with stream.block(0) as layer:
        assert torch.equal(stream.run(0, layer, hidden), before)


def test_a_wrong_block_order_is_seen(tmp_path):
    folder = tiny.save(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 27)[None]
    config, _ = model_config(folder)
    stream = BlockStream(Weights(folder), config, torch.float32)
    hidden = stream.embed(ids)
    for index in (1, 0):
        with stream.block(index) as layer:
            hidden = stream.run(index, layer, hidden)
    with stream.head() as logits:
        wrong = logits(hidden)
    assert not torch.allclose(wrong, streamed_logits(folder, ids)[1], atol=1e-2)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_families_name_every_linear_of_a_block(tmp_path, kind):
    config = tiny.CONFIGS[kind]()
    model = AutoModelForCausalLM.from_config(config)
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    family = models.get(config.model_type)
    assert {name for name, _, _ in family.linears(config)} == linears


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_linears_of_a_group_read_the_same_input(tmp_path, kind):
    folder = tiny.save(tmp_path, kind, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: seen.setdefault(name, args[0]))
    model(torch.arange(3, 20)[None])
    family, order = models.get(model.config.model_type), []
    for group in family.linear_groups(model.config, 0):
        inputs = [seen[family.block(0) + name] for name in group.names]
        assert all(torch.equal(inputs[0], x) for x in inputs)
        order.append(inputs[0])
    assert not any(torch.equal(order[0], x) for x in order[1:] if x.shape == order[0].shape)


def test_an_unknown_architecture_is_named():
    with pytest.raises(CompressError, match=r"model_type 'mamba' is not supported; supported: .*llama"):
        models.get("mamba")
