"""8 bits a weight with a scale an output channel, against compressed-tensors' own schemas and decompressors."""

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from compressor import formats
from compressor.errors import CompressError
from compressor.formats.channel import FORMATS
from compressor.formats.config import HEAD_LINEARS, head_format_from_config, quantization_config

PRESETS = {"int8": "W8A8", "fp8": "FP8_DYNAMIC"}


def weight(rows=24, cols=40):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()


def section(fmt):
    return quantization_config(fmt, activations=fmt.name in FORMATS, ignore=[], targets=HEAD_LINEARS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_tensors_decode_as_compressed_tensors_decodes_them(name):
    fmt, stored = FORMATS[name], FORMATS[name].encode(weight())
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**fmt.weights_config()), format=fmt.compression_format
    )
    theirs = BaseCompressor.get_value_from_registry(fmt.compression_format).decompress(dict(stored), scheme)
    assert torch.equal(fmt.decode(stored).bfloat16(), theirs["weight"].bfloat16())


@pytest.mark.parametrize("name", FORMATS)
def test_no_weight_is_further_off_than_half_a_step(name):
    fmt, original = FORMATS[name], weight()
    stored = fmt.encode(original)
    step = stored["weight_scale"].float()
    if name == "fp8":  # 3 bits behind the point: half a step is a sixteenth of the number, or of the smallest normal
        step = torch.maximum(original.float().abs() / 8, step * 2.0**-9)
    # the scale, rounded to bfloat16, may cut the largest weight by half its own step
    cut = original.float().abs().amax(1, keepdim=True) * 2.0**-8
    assert bool(((fmt.decode(stored) - original.float()).abs() <= step / 2 + cut).all())
    larger = {**stored, "weight_scale": stored["weight_scale"] * 1.25}  # the bound sees a wrong scale
    assert not bool(((fmt.decode(larger) - original.float()).abs() <= step / 2 + cut).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_channel_of_zeros_stays_zero_and_nan_is_refused(name):
    broken = weight()
    broken[3] = 0
    assert bool((FORMATS[name].decode(FORMATS[name].encode(broken))[3] == 0).all())
    broken[4, 1] = float("nan")
    with pytest.raises(CompressError, match="NaN or Inf"):
        FORMATS[name].encode(broken)


@pytest.mark.parametrize("name", FORMATS)
def test_the_configuration_is_the_preset_of_compressed_tensors(name):
    ours = QuantizationConfig.model_validate(section(FORMATS[name])).config_groups["group_0"]
    theirs = preset_name_to_scheme(PRESETS[name], ["Linear"])
    for part in ("weights", "input_activations"):
        left, right = getattr(ours, part).model_dump(), getattr(theirs, part).model_dump()
        differing = {key for key in left if left[key] != right[key]} - {"observer", "observer_kwargs"}
        assert not differing, (part, differing)


@pytest.mark.parametrize("name", [*FORMATS, "int4-g64", "nvfp4"])
def test_a_heads_configuration_is_read_back(name):
    fmt = FORMATS.get(name) or formats.get(name)
    assert head_format_from_config(section(fmt)).name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "is not an object"),
        ({"quant_method": "gguf"}, "quant_method: 'compressed-tensors' expected"),
        ({"config_groups": {"a": {"targets": ["Embedding"]}}}, "only targets"),
        ({"config_groups": {"a": {"targets": 5}}}, "only targets"),
    ],
)
def test_another_configuration_of_a_head_is_refused(change, message):
    config = {**section(FORMATS["int8"]), **change} if isinstance(change, dict) else change or [1]
    with pytest.raises(CompressError, match=message):
        head_format_from_config(config)


def test_a_head_with_inputs_in_4_bits_is_refused():
    config = quantization_config(formats.get("nvfp4"), activations=True, ignore=[])
    with pytest.raises(CompressError, match="4-bit inputs"):
        head_format_from_config(config)
