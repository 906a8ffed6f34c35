"""Checkpoints and small bundles, loaded and compared with transformers."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GenerationConfig

from compressor import formats
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.weights import Weights
from compressor.decode import Law, Runner, engine
from compressor.errors import CompressError, UsageError
from compressor.formats.config import quantization_config
from compressor.kernels.linear import PackedLinear

IDS = torch.arange(3, 27)[None]


def read(folder):
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def write(folder, tensors):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def bundle(folder, kind="llama", fmt="int4-g32", activations=False, **config):
    """A quantized checkpoint by round-to-nearest, written here: every linear of every block packed."""
    fmt, amax = formats.get(fmt), 4.0
    tiny.save(folder, kind, **config)
    tensors = read(folder)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight, base = tensors.pop(name), name.removesuffix("weight")
        tensors |= {base + suffix: tensor for suffix, tensor in fmt.encode(weight).items()}
        if activations and fmt.input_global_scale(amax) is not None:
            tensors[base + "input_global_scale"] = fmt.input_global_scale(amax)
    write(folder, tensors)
    tiny.edit_config(folder, quantization_config=quantization_config(fmt, activations=activations, ignore=["lm_head"]))
    return folder


@torch.inference_mode()
def logits(model):
    return model(IDS).logits.float()


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_a_full_precision_checkpoint_gives_the_logits_of_transformers(tmp_path, kind):
    tiny.save(tmp_path, kind)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = engine.load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(model), logits(reference))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(("dtype", "copied"), [(torch.bfloat16, False), (torch.float32, True)])
def test_weights_are_copied_only_to_change_their_dtype(tmp_path, monkeypatch, dtype, copied):
    tiny.save(tmp_path)
    read_at, get = {}, Weights.get

    def noted(self, name):
        tensor = get(self, name)
        read_at[name] = tensor.data_ptr()
        return tensor

    monkeypatch.setattr(Weights, "get", noted)
    parameters = dict(engine.load(tmp_path, dtype=dtype).named_parameters())
    assert parameters.keys() == read_at.keys()
    assert all((parameters[name].data_ptr() != read_at[name]) == copied for name in parameters)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gemma3", "phi3"])
@pytest.mark.parametrize("fmt", ["int4-g32", "int4-g32-asym"])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_packed_bundle_gives_the_logits_of_transformers(tmp_path, kind, fmt):
    bundle(tmp_path, kind, fmt)
    # compressed-tensors 0.20.0 does not expect packed zero points on the meta device, so transformers can only decode
    # asymmetric layers while loading, which it does in bfloat16.
    asymmetric = fmt.endswith("asym")
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    reference = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options))
    dense = logits(engine.load(tmp_path, dtype=torch.float32))
    assert (dense - reference).norm() / reference.norm() < (1e-2 if asymmetric else 1e-4)
    model = engine.load(tmp_path)
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert packed and {m.path for m in packed} == {"cpu-int4"}
    assert (logits(model) - reference).norm() / reference.norm() < 2e-2


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_four_bit_inputs_are_rounded(tmp_path, fmt):
    weights_only = logits(engine.load(bundle(tmp_path / "w4", fmt=fmt), dtype=torch.float32))
    both = engine.load(bundle(tmp_path / "w4a4", fmt=fmt, activations=True), dtype=torch.float32)
    assert all("4-bit inputs emulated" in m.proof for m in both.modules() if isinstance(m, PackedLinear))
    difference = (logits(both) - weights_only).norm() / weights_only.norm()
    assert 0.01 < difference < 0.5


def test_a_bundle_generates_from_packed_weights(tmp_path):
    bundle(tmp_path)
    GenerationConfig(eos_token_id=[2, 9]).save_pretrained(tmp_path)
    model = engine.load(tmp_path)
    assert model.generation_config.eos_token_id == [2, 9]
    assert len(Runner(model).generate([3, 4, 5], 8, Law(0.0), seed=0, eos_token_ids=()).token_ids) == 8


def drop(tensors, name):
    del tensors[name]


def add(tensors, name):
    tensors[name] = torch.zeros(2)


def shrink(tensors, name):
    tensors[name] = tensors[name][:-1]


def poison(tensors, name):
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] = torch.nan


Q = "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (drop, "model.norm.weight", "'model.norm.weight' is missing"),
        (drop, "lm_head.weight", "tie_word_embeddings false, but there is no lm_head.weight"),
        (drop, Q + "weight_packed", Q.strip(".") + ": weight_packed is missing"),
        (drop, Q + "weight_scale", Q.strip(".") + ": weight_scale is missing"),
        (add, "model.layers.1.extra", "'model.layers.1.extra' is not part of a llama"),
        (add, Q + "bias", "q_proj.bias"),
        (shrink, "model.norm.weight", "'model.norm.weight' has shape"),
        (poison, "model.norm.weight", "'model.norm.weight' holds 1 NaN"),
    ],
)
def test_a_damaged_bundle_is_refused_by_name(tmp_path, damage, name, says):
    bundle(tmp_path)
    tensors = read(tmp_path)
    damage(tensors, name)
    write(tmp_path, tensors)
    with pytest.raises(CompressError, match=says):
        engine.load(tmp_path)


@pytest.fixture
def packed_mtp(tmp_path):
    """A bundle with a packed module beside the model."""
    bundle(tmp_path)
    tensors = read(tmp_path)
    packed = formats.get("int4-g32").encode(torch.randn(64, 64).bfloat16())
    extra = {f"mtp.layers.0.self_attn.q_proj.{suffix}": tensor for suffix, tensor in packed.items()}
    extra |= {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    write(tmp_path, {**tensors, **extra})
    return tmp_path


def test_tensors_of_an_mtp_module_are_left_alone(packed_mtp):
    assert not any("mtp" in name for name, _ in engine.load(packed_mtp).named_parameters())


def test_the_inventory_is_read_once(packed_mtp, monkeypatch):
    folders, inventory = [], Inventory.read
    monkeypatch.setattr(Inventory, "read", lambda folder: folders.append(folder) or inventory(folder))
    engine.load(packed_mtp)
    assert folders == [packed_mtp]


def test_a_packed_layer_of_another_shape_or_name_is_refused(tmp_path):
    bundle(tmp_path)
    original = read(tmp_path)
    fmt = formats.get("int4-g32")
    small = {**original, **{Q + s: t for s, t in fmt.encode(torch.randn(48, 64).bfloat16()).items()}}
    write(tmp_path, small)
    with pytest.raises(CompressError, match=r"q_proj' has shape \[48, 64\], the config asks for \[64, 64\]"):
        engine.load(tmp_path)
    stray = {f"model.norm.{s}": t for s, t in fmt.encode(torch.randn(64, 64).bfloat16()).items()}
    write(tmp_path, {**original, **stray})
    with pytest.raises(CompressError, match=r"'model\.norm' is packed, but the model has no linear"):
        engine.load(tmp_path)


def test_a_head_that_contradicts_its_tie_is_refused_and_an_equal_one_is_tied(tmp_path):
    tiny.save(tmp_path, "llama-tied")
    tensors = read(tmp_path)
    table = tensors["model.embed_tokens.weight"]
    write(tmp_path, {**tensors, "lm_head.weight": table.clone()})
    model = engine.load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    write(tmp_path, {**tensors, "lm_head.weight": table + 1})
    with pytest.raises(CompressError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        engine.load(tmp_path)


def test_an_unreadable_generation_config_is_named(tmp_path):
    tiny.save(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CompressError, match=r"generation_config\.json"):
        engine.load(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert engine.load(tmp_path).generation_config.eos_token_id == 2


def test_an_unknown_kernel_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match="kernel: 'fast' is not one of auto, cpu-int4, dequantized"):
        engine.load(tmp_path, kernel="fast")
