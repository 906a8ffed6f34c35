"""Parts of one engine matrix must share their global scales; a bundle where they differ is refused although signed."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from compressor.bundle import Passport, contents, sha256, signing

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.0.mlp"


@pytest.fixture
def scaled(built, lie, tmp_path):
    """Double one global scale of an NVFP4 bundle, and let passport and signature follow."""

    def change(tensor: str, *, activations: bool = False):
        folder = shutil.copytree(built("nvfp4", activations=activations), tmp_path / tensor)
        changed = []
        for shard in folder.glob("*.safetensors"):
            tensors = load_file(shard)
            if tensor in tensors:
                save_file(tensors | {tensor: tensors[tensor] * 2}, shard, {"format": "pt"})
                changed.append(shard)
        assert len(changed) == 1
        lie(folder, lambda fields: fields["ledger"]["files"].update({changed[0].name: sha256(changed[0])}))
        return folder

    return change


@pytest.mark.parametrize(
    ("changed", "other", "fused"),
    [
        (f"{ATTENTION}.v_proj", f"{ATTENTION}.q_proj", f"{ATTENTION}.qkv_proj"),
        (f"{MLP}.up_proj", f"{MLP}.gate_proj", f"{MLP}.gate_up_proj"),
    ],
)
@pytest.mark.parametrize("suffix", ["weight_global_scale", "input_global_scale"])
def test_fused_parts_with_two_scales_are_named(scaled, refusal, changed, other, fused, suffix):
    message = refusal(scaled(f"{changed}.{suffix}", activations=True))
    assert f"{changed}.{suffix}: " in message
    assert f"in {other}; engines run both as {fused} with one scale" in message
    assert message.count("engines run both") == 1  # and nothing else was wrong


def test_a_lone_first_part_differs_from_both_others(scaled, refusal):
    message = refusal(scaled(f"{ATTENTION}.q_proj.weight_global_scale"))
    assert message.count(f"in {ATTENTION}.q_proj; engines run both") == 2


@pytest.mark.parametrize("layer", [f"{MLP}.down_proj", "model.layers.0.self_attn.o_proj"])
def test_a_linear_that_stays_apart_has_a_scale_of_its_own(scaled, keys, layer):
    folder = scaled(f"{layer}.weight_global_scale")
    assert contents.differences(folder, Passport.load(folder), signing.verify_signature(folder, keys[1])) == []
