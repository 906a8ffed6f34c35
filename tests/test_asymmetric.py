"""Asymmetric calibration carries two streams of hidden states, in memory or spilled, and resumes with both."""

import json

import pytest
import tiny_models as tiny
import torch

from compressor import pipeline
from compressor.errors import CompressError
from compressor.recipe import Recipe
from compressor.ui import NullUI


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A function that makes a recipe on a tiny model of three blocks."""
    monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "keys"))
    source = tiny.save(tmp_path / "source", num_hidden_layers=3)
    tiny.save_rows(tmp_path)

    def make(budget: int = 1 << 30, **quantization) -> Recipe:
        return Recipe.from_dict(
            {
                "name": "tiny",
                "source": {"uri": str(source)},
                "quantization": {"format": "int4-g32", **quantization},
                "calibration": {"kind": "tokens", "path": str(tmp_path / "rows.safetensors"), "rows": 6, "length": 32}
                | {"batch_size": 4},
                "proposer": {"kind": "none"},
                "measure": {"quality": {"kind": "none"}},
                "run": {"activation_budget_bytes": budget},
            }
        )

    return make


def run(tmp_path, made, name, **options):
    return pipeline.run(made, out=tmp_path / name, work=tmp_path / f"{name}.work", ui=NullUI(), **options)


def weights(bundle) -> dict[str, str]:
    return {name: digest for name, digest in bundle.passport.ledger.files.items() if name.endswith(".safetensors")}


def test_spilled_or_not_it_gives_the_same_weights_and_only_later_blocks_shift(tmp_path, recipe):
    memory, disk = (run(tmp_path, recipe(budget, asymmetric=True), f"b{budget}") for budget in (1 << 30, 0))
    plain = run(tmp_path, recipe(), "plain")
    assert weights(memory) == weights(disk) != weights(plain)
    rows = zip(memory.passport.quantization.layers, plain.passport.quantization.layers, strict=True)
    for ours, theirs in rows:
        assert (ours.stats["shift"] == 0) == (".layers.0." in ours.name)  # nothing is quantized before block 0
        assert (ours.error == theirs.error) == (".layers.0." in ours.name)
        assert "shift" not in theirs.stats


def test_the_full_precision_stream_is_that_of_the_source(tmp_path, recipe, monkeypatch):
    """What reaches the last block is what the source's own blocks give; the other stream is not."""
    seen = {}
    kept = pipeline.quantize_block

    def keep(state, stream, index, flows, advance):
        seen[index] = [flow.current.clone() for flow in flows]
        kept(state, stream, index, flows, advance)

    monkeypatch.setattr(pipeline, "quantize_block", keep)
    run(tmp_path, recipe(asymmetric=True), "bundle")
    model = tiny.random_model("llama", dtype=torch.bfloat16, num_hidden_layers=3)
    ids = torch.randint(3, tiny.VOCABULARY, (6, 32), generator=torch.Generator().manual_seed(3))
    states = model(ids, output_hidden_states=True).hidden_states
    for index in range(3):
        quantized, exact = (flow.float() for flow in seen[index])
        assert torch.equal(quantized, exact) == (index == 0)
        far = float((quantized - exact).norm())
        assert float((exact - states[index].float()).norm()) <= 0.2 * far  # bfloat16 rounds another way in a batch


@pytest.mark.parametrize("budget", [1 << 30, 0])
def test_an_interrupted_run_resumes_to_the_same_bytes_and_refuses_a_damaged_stream(
    tmp_path, recipe, monkeypatch, budget
):
    made = recipe(budget, asymmetric=True, refit=True)
    expected = weights(run(tmp_path, made, "whole"))
    kept = pipeline.quantize_block

    def stop(state, stream, index, flows, advance):
        if index == 2:
            raise KeyboardInterrupt
        kept(state, stream, index, flows, advance)

    monkeypatch.setattr(pipeline, "quantize_block", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, made, "cut")
    monkeypatch.setattr(pipeline, "quantize_block", kept)
    work = tmp_path / "cut.work"
    assert sorted(path.name for path in work.glob("*-0000?.bin")) == ["hidden-00002.bin", "reference-00002.bin"]
    block = json.loads((work / "job.json").read_text())["blocks"]["1"]
    assert block["activations"] != block["reference"]
    stream = work / "reference-00002.bin"
    data = stream.read_bytes()
    stream.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CompressError, match=r"reference-00002\.bin: damaged"):
        run(tmp_path, made, "cut", resume=True)
    stream.write_bytes(data)
    assert weights(run(tmp_path, made, "cut", resume=True)) == expected


def test_a_block_without_quantized_linears_still_moves_both_streams(tmp_path, recipe):
    bundle = run(tmp_path, recipe(asymmetric=True, ignore=["model.layers.1.*"]), "bundle")
    shifted = {row.name: row.stats["shift"] > 0 for row in bundle.passport.quantization.layers}
    assert {name.split(".")[2] for name in shifted} == {"0", "2"}
    assert all(value == (".layers.2." in name) for name, value in shifted.items())
