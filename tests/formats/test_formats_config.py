"""The registry and the configuration, against compressed-tensors' own schemas and decompressors."""

import json

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_targets

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.formats import config

IGNORE = ["lm_head", "model.layers.0.self_attn.qkv_proj"]


def normal(rows: int, cols: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)


def scheme(fmt) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fmt.weights_config()))


def test_the_registry_knows_eleven_formats_and_corrects_a_misspelling():
    assert len(formats.names()) == 11
    assert all(formats.get(n).name == n for n in formats.names())
    with pytest.raises(UsageError, match="'nvfp5' is unknown; did you mean 'nvfp4'"):
        formats.get("nvfp5")
    with pytest.raises(UsageError, match="option 'exponent_rule' is unknown; it takes underflow"):
        formats.get("nvfp4", exponent_rule="floor")


def test_bits_per_weight_count_the_scales():
    for name in formats.names():
        fmt = formats.get(name)
        tensors = fmt.encode(normal(128, 1024, torch.bfloat16))
        size = sum(t.nbytes for k, t in tensors.items() if k not in ("weight_shape", "weight_global_scale"))
        one_a_row = 16 / 1024 if fmt.group_size is None else 0
        assert size * 8 / (128 * 1024) == fmt.bits_per_weight + one_a_row


@pytest.mark.parametrize(
    ("name", "activations", "preset"),
    [
        ("nvfp4", False, "NVFP4A16"),
        ("nvfp4", True, "NVFP4"),
        ("mxfp4", False, "MXFP4A16"),
        ("mxfp4", True, "MXFP4"),
        ("int4-g128", False, "W4A16"),
        ("int4-g128-asym", False, "W4A16_ASYM"),
        ("int8", True, "INT8"),
        ("fp8", True, "FP8_DYNAMIC"),
        ("fp8-block128", True, "FP8_BLOCK"),
    ],
)
def test_configurations_are_the_presets_of_compressed_tensors(name, activations, preset):
    written = config.quantization_config(formats.get(name), activations=activations, ignore=IGNORE)
    parsed = QuantizationConfig.model_validate(json.loads(json.dumps(written))).config_groups["group_0"]
    expected = preset_name_to_scheme(preset, ["Linear"])
    for part in ("weights", "input_activations", "output_activations"):
        ours, theirs = getattr(parsed, part), getattr(expected, part)
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.model_dump() == theirs.model_dump()


@pytest.mark.parametrize(("name", "layout"), [("int8", "pack-quantized"), ("fp8", "float-quantized")])
def test_beside_inputs_of_16_bits_the_weights_lie_where_vllm_reads_them_alone(name, layout):
    written = config.quantization_config(formats.get(name), activations=False, ignore=[])
    group = written["config_groups"]["group_0"]
    assert (written["format"], group["format"], group["input_activations"]) == (layout, layout, None)
    scheme = config.schemes_from_config(written).of("model.layers.0.mlp.up_proj")
    assert scheme.fmt.compression_format == layout and not scheme.rounds_inputs


@pytest.mark.parametrize("name", formats.names())
def test_a_configuration_is_read_back_as_the_format_that_wrote_it(name):
    fmt = formats.get(name)
    for activations in (False, True) if fmt.activations_config() else (False,):
        written = config.quantization_config(fmt, activations=activations, ignore=IGNORE)
        schemes = config.schemes_from_config(json.loads(json.dumps(written)))
        scheme = schemes.of("model.layers.1.mlp.up_proj")
        assert (scheme.fmt.name, scheme.rounds_inputs, schemes.ignore) == (name, activations, IGNORE)
        assert (schemes.format, scheme.fmt.compression_format) == (written["format"], written["format"])
        # fields that only say how scales were found do not matter
        written["config_groups"]["group_0"]["weights"] |= {"observer": "mse", "actorder": None}
        assert config.schemes_from_config(written).of("x").fmt.name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method: 'compressed-tensors' expected, found 'gptq'"),
        ({"format": "int-quantized"}, "format: 'nvfp4-pack-quantized' expected"),
        ({"quantization_status": "frozen"}, "quantization_status"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups: is empty"),
    ],
)
def test_what_cannot_be_read_is_refused_by_key(change, message):
    written = config.quantization_config(formats.get("nvfp4"), activations=False, ignore=[])
    with pytest.raises(CompressError, match=message):
        config.schemes_from_config({**written, **change})


def test_foreign_groups_are_refused():
    for part, change in (("weights", {"num_bits": 3}), ("weights", {"group_size": 48}), ("input_activations", None)):
        written = config.quantization_config(formats.get("int4-g64"), activations=False, ignore=[])
        group = written["config_groups"]["group_0"]
        group[part] = {"num_bits": 8, "type": "int"} if change is None else {**group[part], **change}
        with pytest.raises(CompressError, match=f"config_groups.group_0.{part}"):
            config.schemes_from_config(written)
    with pytest.raises(UsageError, match="int4-g64 has no 4-bit or 8-bit activations"):
        config.quantization_config(formats.get("int4-g64"), activations=True, ignore=[])


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("search", ["none", "mse"])
def test_compressed_tensors_decodes_our_tensors_to_our_weights(name, search):
    fmt = formats.get(name)
    decompress = BaseCompressor.get_value_from_registry(fmt.compression_format).decompress
    # float32 scales keep INT4 exact in their decoder; the FP4 decoders always answer in bfloat16
    tensors = fmt.encode(normal(24, 256), search=search)
    ours = fmt.decode(tensors)
    theirs = decompress(tensors, scheme(fmt))["weight"]
    assert torch.equal(ours.to(theirs.dtype), theirs)
    for suffix in set(tensors) - {"weight_shape"}:
        flipped = tensors[suffix].clone()
        flipped.view(torch.uint8).view(-1)[-1] ^= 0x11  # the high bits: a bfloat16 decoder must see them
        changed = {**tensors, suffix: flipped}
        theirs_changed = decompress(changed, scheme(fmt))["weight"]
        assert torch.equal(fmt.decode(changed).to(theirs.dtype), theirs_changed)
        assert not torch.equal(theirs_changed, theirs)


@pytest.mark.parametrize("name", [n for n in formats.names() if n.startswith("int4")])
def test_int4_encodes_as_compressed_tensors_does(name):
    fmt, weight = formats.get(name), normal(24, 256)
    groups = weight.unflatten(1, (-1, fmt.group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme(fmt).weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme(fmt))
    ours = fmt.encode(weight)
    assert set(ours) == set(theirs) and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert not torch.equal(fmt.encode(weight, search="mse")["weight_packed"], theirs["weight_packed"])


MLP, ATTENTION = "re:model\\.layers\\.(0|1)\\.(mlp\\.down_proj)$", "model.layers.0.self_attn.o_proj"


def mixed(*overrides):
    return config.quantization_config(
        formats.get("int4-g32"), activations=False, ignore=IGNORE, overrides=list(overrides)
    )


def test_several_formats_are_read_back_by_layer_and_match_as_compressed_tensors_matches_them():
    written = mixed((formats.scheme("fp8", "8bit"), [MLP]), (formats.scheme("int4-g64", "16bit"), [ATTENTION]))
    assert written["format"] == "mixed-precision"
    schemes = config.schemes_from_config(json.loads(json.dumps(written)))
    theirs = QuantizationConfig.model_validate(written)
    targets = {target: group for group in theirs.config_groups.values() for target in group.targets}
    linear = torch.nn.Linear(2, 2)
    found = set()
    for name in ("0.mlp.down_proj", "1.mlp.down_proj", "2.mlp.down_proj", "0.self_attn.o_proj", "0.mlp.up_proj"):
        scheme = schemes.of(f"model.layers.{name}")
        group = targets[match_targets(f"model.layers.{name}", linear, targets)[0]]
        assert scheme.fmt.compression_format == group.format
        assert scheme.rounds_inputs == (group.input_activations is not None)
        assert scheme.fmt.group_size == group.weights.group_size
        found.add(scheme.fmt.name)
    assert found == {"int4-g32", "int4-g64", "fp8"}


def test_groups_of_one_layout_share_its_name():
    assert mixed((formats.scheme("int8", "16bit"), [MLP]))["format"] == "pack-quantized"
    assert mixed((formats.scheme("int8", "8bit"), [MLP]))["format"] == "mixed-precision"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="pack-quantized"), "format: 'mixed-precision' expected"),
        (lambda c: c["config_groups"]["group_1"].update(targets=["Linear"]), "'Linear' is a target of two groups"),
        (lambda c: c["config_groups"]["group_1"].update(targets=["re:("]), "not a regular expression"),
        (lambda c: c["config_groups"]["group_1"].update(targets=["Embedding"]), "only targets that are linears"),
        (lambda c: c["config_groups"]["group_1"].update(format="int-quantized"), "group_1.format: 'float-quantized'"),
        (lambda c: c["config_groups"].update(group_2=c["config_groups"]["group_0"] | {"targets": [MLP[:-1]]}), None),
    ],
)
def test_groups_that_contradict_each_other_are_refused(change, message):
    written = mixed((formats.scheme("fp8", "8bit"), [MLP]))
    assert config.schemes_from_config(written).of("model.layers.0.mlp.down_proj").fmt.name == "fp8"
    change(written)
    with pytest.raises(CompressError, match=message or "matches the targets of several groups"):
        config.schemes_from_config(written).of("model.layers.0.mlp.down_proj")
