"""The inventory: counts, native MTP modules by name, tied tables, and configs that contradict the tensors."""

import json

import pytest
import torch

from compressor.checkpoint.inventory import Inventory, read_config
from compressor.checkpoint.reader import INDEX_NAME
from compressor.checkpoint.writer import save_atomic
from compressor.errors import CompressError


def checkpoint(folder, names, **config):
    """A folder whose tensors are 2 × 2 bfloat16 under the given names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "num_hidden_layers": 2} | config))
    tensors = names if isinstance(names, dict) else {name: torch.ones(2, 2).bfloat16() for name in names}
    save_atomic(folder / "model.safetensors", tensors)
    return folder


BASE = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]


def test_counts_agree_with_transformers(sharded):
    from transformers import AutoModelForCausalLM

    inventory = Inventory.read(sharded)
    model = AutoModelForCausalLM.from_pretrained(sharded)
    assert inventory.parameters == model.num_parameters()
    assert inventory.total_bytes == 2 * inventory.parameters
    assert inventory.total_bytes == json.loads((sharded / INDEX_NAME).read_text())["metadata"]["total_size"]
    assert inventory.bytes_by_dtype() == {"bfloat16": inventory.total_bytes}
    assert inventory.tensors.keys() == model.state_dict().keys()
    assert inventory.tensors["lm_head.weight"] == (torch.bfloat16, (128, 64), 128 * 64 * 2)
    assert inventory.mtp_modules == [] and inventory.mtp_tensors() == [] and not inventory.tied


MTP = [  # family, tensors beside the base, modules
    ("deepseek", ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"], ["model.layers.2"]),
    (
        "two modules",
        ["model.layers.2.eh_proj.weight", "model.layers.10.eh_proj.weight"],
        ["model.layers.2", "model.layers.10"],
    ),
    (
        "step-3.5",
        ["model.layers.2.eh_proj.weight", "model.layers.2.transformer.shared_head.output.weight"],
        ["model.layers.2"],
    ),
    ("qwen3-next", ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"], ["mtp"]),
    ("nemotron-h", ["mtp.layers.0.mixer.weight", "mtp.layers.1.mixer.weight"], ["mtp.layers.0", "mtp.layers.1"]),
    ("deepseek-v4", ["mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], ["mtp"]),
    ("mimo-7b", ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.weight"], ["model.mtp_layers.0"]),
    ("mimo-v2", ["model.mtp.layers.0.eh_proj.weight"], ["model.mtp.layers.0"]),
    ("longcat", ["model.mtp.layers.0.enorm.m.weight", "model.mtp.norm.weight"], ["model.mtp"]),
    (
        "ernie",
        ["model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.weight"],
        ["model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_linear_proj.0"],
    ),
]


@pytest.mark.parametrize(("family", "extra", "modules"), MTP)
def test_native_mtp_modules_are_found_by_name(tmp_path, family, extra, modules):
    inventory = Inventory.read(checkpoint(tmp_path / "m", BASE + extra))
    assert inventory.mtp_modules == modules
    assert inventory.mtp_tensors() == sorted(extra)


def test_names_that_only_resemble_mtp_are_left_alone(tmp_path):
    names = [*BASE, "model.smtp.layers.0.weight", "vision_tower.encoder.layers.30.mlp.weight", "lm_head.weight"]
    assert Inventory.read(checkpoint(tmp_path / "m", names)).mtp_modules == []


def test_mtp_layers_count_from_the_language_model_of_a_multimodal_config(tmp_path):
    names = ["model.language_model.layers.4.eh_proj.weight", "model.language_model.layers.3.mlp.weight"]
    folder = checkpoint(tmp_path / "m", names, text_config={"num_hidden_layers": 4})
    assert Inventory.read(folder).mtp_modules == ["model.language_model.layers.4"]


def test_layers_the_config_does_not_count_are_refused_by_name(tmp_path):
    folder = checkpoint(tmp_path / "m", BASE, num_hidden_layers=1)
    with pytest.raises(CompressError, match=r"model\.layers\.1 is beyond num_hidden_layers 1"):
        Inventory.read(folder)


@pytest.mark.parametrize(
    ("config", "head", "tied"),
    [
        ({"tie_word_embeddings": True}, False, True),
        ({"tie_word_embeddings": False}, True, False),
        ({}, False, True),
        ({}, True, False),
        ({"text_config": {"tie_word_embeddings": True}}, False, True),
    ],
)
def test_tied_tables_are_recognised(tmp_path, config, head, tied):
    folder = checkpoint(tmp_path / "m", BASE + ["lm_head.weight"] * head, **config)
    assert Inventory.read(folder).tied is tied


def test_a_head_that_is_neither_tied_nor_there_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "m", BASE, tie_word_embeddings=False, architectures=["XForCausalLM"])
    with pytest.raises(CompressError, match=r"no lm_head\.weight"):
        Inventory.read(folder)


def test_packed_weights_count_as_what_they_unpack_to(tmp_path):
    tensors = {
        "model.layers.0.q.weight_packed": torch.zeros(16, 8, dtype=torch.int32),  # 16 × 64 weights of 4 bits
        "model.layers.0.q.weight_scale": torch.ones(16, 1).bfloat16(),
        "model.layers.0.q.weight_shape": torch.tensor([16, 64]),
        "model.embed_tokens.weight": torch.ones(4, 64).bfloat16(),
    }
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    inventory = Inventory.read(checkpoint(tmp_path / "m", tensors, quantization_config=groups))
    assert inventory.parameters == 16 * 64 + 4 * 64
    assert inventory.total_bytes == 16 * 8 * 4 + 16 * 2 + 2 * 8 + 4 * 64 * 2
    with pytest.raises(CompressError, match="num_bits"):
        Inventory.read(checkpoint(tmp_path / "m", tensors))


def test_packed_weights_of_several_widths_count_by_their_group(tmp_path):
    tensors = {
        "model.layers.0.q.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "model.layers.0.o.weight_packed": torch.zeros(16, 16, dtype=torch.int32),  # 16 × 64 weights of 8 bits
        "model.layers.0.o.weight_scale": torch.ones(16, 1).bfloat16(),
        "model.layers.0.k.weight": torch.zeros(16, 64, dtype=torch.int8),
        "model.layers.0.k.weight_scale": torch.ones(16, 1).bfloat16(),
    }
    four, eight = {"targets": ["Linear"], "weights": {"num_bits": 4}}, {"weights": {"num_bits": 8}}
    groups = {"group_0": four, "group_1": eight | {"targets": [r"re:.*\.o$"]}}
    inventory = Inventory.read(checkpoint(tmp_path / "m", tensors, quantization_config={"config_groups": groups}))
    assert inventory.parameters == 3 * 16 * 64
    four["targets"] = ["model.layers.0.v"]
    with pytest.raises(CompressError, match=r"q\.weight_packed' is packed, but .* states no num_bits for it"):
        Inventory.read(checkpoint(tmp_path / "n", tensors, quantization_config={"config_groups": groups}))


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "no model_type"), (None, r"config\.json: not found")],
)
def test_an_unusable_config_is_one_line(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CompressError, match=words) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_usable_config_is_returned(sharded):
    assert read_config(sharded)["model_type"] == "llama"
