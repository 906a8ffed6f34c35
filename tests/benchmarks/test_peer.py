"""What is ours in the script that runs other tools; the tools themselves are not needed."""

import argparse
import json

import peer
import pytest
from _quality import FORMATS, PEERS
from torch import nn


def test_patterns_name_linears_by_their_whole_name():
    model = nn.ModuleDict({"a": nn.ModuleDict({"down_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})})
    assert peer.ignored(model, ["*.down_proj", "*.norm"]) == ["a.down_proj"]
    assert peer.ignored(model, ["down_proj"]) == []


def test_a_weight_only_config_rounds_no_inputs(tmp_path):
    path = tmp_path / "config.json"
    group = {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 4}}
    path.write_text(json.dumps({"quantization_config": {"config_groups": {"group_0": group}}}))
    peer.as_weight_only(path)
    kept = json.loads(path.read_text())["quantization_config"]["config_groups"]["group_0"]
    assert kept == {"weights": {"num_bits": 4}, "input_activations": None}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_one_tools_at_least(name):
    assert name in peer.AUTO_ROUND or name in peer.PRESETS or name in peer.WEIGHTS


def test_the_columns_of_other_tools_are_its_methods():
    assert set(PEERS.values()) == set(peer.METHODS)


def test_a_format_that_a_tool_does_not_have_is_said():
    args = argparse.Namespace(format="fp8-w8a8")
    with pytest.raises(SystemExit, match="auto-round has no format fp8-w8a8"):
        peer.auto_round(args, None, None, None, [])
