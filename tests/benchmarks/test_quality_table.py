"""Every tool of the table gets the same rows and the same linears; a cell is made, judged, or says why not."""

import argparse
import json
import sys

import peer
import pytest
import quality_table
import tiny_models as tiny
import torch
from _quality import FORMATS, OURS, OWN_JUDGE, Record

from compressor.errors import CompressError
from compressor.recipe import Recipe

JUDGE = """
import json, sys
reference, bundle, _, text, _, windows, _, length = sys.argv[1:]
print("loading")
print(json.dumps({"kl_nats": 0.25, "top1_agreement": 0.5, "ppl": 3.0, "tokens": int(windows) * int(length)}))
"""


def shapes(**widths: tuple[int, int]) -> quality_table.Shapes:
    return {f"model.layers.{i}.mlp.{name}": shape for i in range(2) for name, shape in widths.items()}


@pytest.fixture
def args(tmp_path):
    """A tiny model, a text, and a judge that says the same of everything."""
    (tmp_path / "text.txt").write_text("Once upon a time there was a bundle. " * 40)
    (tmp_path / "judge.py").write_text(JUDGE)
    return argparse.Namespace(
        model=tiny.save(tmp_path / "tiny"),
        text={"tales": tmp_path / "text.txt"},
        judge=f"{sys.executable} {tmp_path / 'judge.py'}",
        peer_python=None,
        only=["rtn:int8-w8a8"],
        again=False,
        dtype="bfloat16",
        rows=8,
        row_length=16,
        windows=2,
        length=16,
        steps=2,
        iterations=1,
    )


def test_rows_begin_every_document_as_the_tokenizer_does():
    tokenizer = tiny.tokenizer()
    rows = quality_table.calibration_rows("ab<cut>cd <cut> ", tokenizer, 1, 4, "<cut>", "tales")
    first, second = tokenizer("ab").input_ids, tokenizer("cd").input_ids
    assert rows.dtype == torch.long
    assert rows.flatten().tolist() == [*first, tokenizer.eos_token_id, *second, tokenizer.eos_token_id][:4]


def test_too_short_a_text_is_refused_by_name():
    with pytest.raises(CompressError, match="tales"):
        quality_table.calibration_rows("ab", tiny.tokenizer(), 2, 64, None, "tales")


def test_linears_that_a_group_does_not_divide_are_kept_in_every_tool():
    found = shapes(up_proj=(160, 64), down_proj=(64, 160))
    assert quality_table.misfits("int4-g64", found) == [name for name in found if "down" in name]
    assert quality_table.misfits("int4-g128", found) == [*found]
    assert quality_table.misfits("nvfp4", found) == quality_table.misfits("fp8", found) == []


def test_linears_that_one_tool_skips_are_kept_in_every_tool():
    found = shapes(up_proj=(peer.AUTO_ROUND_SIDES + 4, 64))
    assert quality_table.misfits("int4-g64", found) == [*found]
    assert quality_table.misfits("mxfp4", found) == []


def test_kept_linears_become_one_pattern_where_every_block_keeps_them():
    found = shapes(up_proj=(160, 64), down_proj=(64, 160))
    one = [name for name in found if name.endswith("0.mlp.up_proj")]
    downs = [name for name in found if "down" in name]
    assert quality_table.patterns([*one, *downs], found) == ["model.layers.0.mlp.up_proj", "*.mlp.down_proj"]


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_cell_of_ours_is_a_recipe(args, tmp_path, method, name):
    (tmp_path / "ids.pt").touch()
    words = quality_table.command((method, name), args, tmp_path / "ids.pt", ["*.down_proj"], tmp_path / "bundle")
    recipe = Recipe.load(words[words.index("compressor.cli") + 1])
    assert recipe.quantization.ignore == ["*.down_proj"]
    assert recipe.quantization.guided == (method in ("guided", "best"))
    assert (recipe.distillation is not None) == (method == "best")


def test_a_peer_gets_the_same_rows_and_patterns(args, tmp_path):
    args.peer_python = "python"
    words = quality_table.command(("llmc-gptq", "nvfp4"), args, tmp_path / "ids.pt", ["*.x", "*.y"], tmp_path / "b")
    assert words[2:4] == ["gptq", "nvfp4"]
    assert str(tmp_path / "ids.pt") in words and words[-2:] == ["--ignore=*.x", "--ignore=*.y"]


def test_a_cell_is_made_judged_and_not_made_again(args, tmp_path, monkeypatch):
    record = Record(tmp_path / "record.json", {}, {"tales": "text.txt"})
    ids = torch.randint(3, 200, (8, 16), generator=torch.Generator().manual_seed(0))
    quality_table.fill(args, record, ids)
    cell = record.cell(("rtn", "int8-w8a8"))
    assert cell["texts"] == {"tales": {"kl_nats": 0.25, "top1_agreement": 0.5, "ppl": 3.0, "judge": "judge.py"}}
    assert cell["seconds"] > 0 and cell["peak_bytes"] > cell["bundle_bytes"] > 0
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()
    monkeypatch.setattr(quality_table, "make", lambda *_: pytest.fail("made again"))
    quality_table.fill(args, record, ids)


def test_a_bundle_with_other_linears_is_no_figure(args, tmp_path):
    ids = tmp_path / "ids.pt"
    torch.save(torch.randint(3, 200, (8, 16)), ids)
    wanted = {*quality_table.linear_shapes(args.model)}
    cell = quality_table.make(("rtn", "int8-w8a8"), args, ids, ["*.o_proj"], wanted)
    assert cell == {
        "failed": "other linears are quantized than in the other tools: 2, model.layers.0.self_attn.o_proj first"
    }


def test_a_tool_that_fails_is_quoted_without_paths(args, tmp_path):
    cell = quality_table.make(("rtn", "int8-w8a8"), args, args.model, [], set())
    assert cell["failed"].endswith("'tiny' does not exist or is not a file")


def test_our_evaluation_judges_what_the_judge_refuses(args):
    args.judge = f"{sys.executable} -c \"import sys; sys.exit('8-bit inputs')\""
    found = quality_table.judged(args, args.model, args.text["tales"])
    assert found["judge"] == OWN_JUDGE
    assert found["kl_nats"] == pytest.approx(0, abs=1e-6) and found["top1_agreement"] == 1


def test_no_figure_is_made_up_where_no_judge_can_say(args, tmp_path):
    args.judge = f"{sys.executable} -c \"print('nan')\""
    (tmp_path / "empty").mkdir()
    found = quality_table.judged(args, tmp_path / "empty", args.text["tales"])
    assert found.keys() == {"not_judged"} and "no safetensors files" in found["not_judged"]


def test_our_evaluation_refuses_a_text_shorter_than_a_window(args, tmp_path):
    args.judge = f"{sys.executable} -c \"import sys; sys.exit('8-bit inputs')\""
    short = tmp_path / "short.txt"
    short.write_text("Once")
    assert "a row of 16 needs 17" in quality_table.judged(args, args.model, short)["not_judged"]


def test_the_requirement_decides_the_exit_code(tmp_path, monkeypatch):
    def code(ours: float) -> int:
        judged = {"top1_agreement": 1.0, "ppl": 2.0, "judge": "judge.py"}
        cells = {
            method: {name: {"texts": {"tales": {"kl_nats": kl, **judged}}} for name in FORMATS}
            for method, kl in (("best", ours), ("auto-round", 0.1))
        }
        data = {"settings": {}, "texts": {"tales": "t.txt"}, "tools": {}, "left_out": {}, "kept": {}, "cells": cells}
        path = tmp_path / "record.json"
        path.write_text(json.dumps(data))
        monkeypatch.setattr(sys, "argv", ["quality_table.py", "model", "--record", str(path), "--require", "0.7"])
        with pytest.raises(SystemExit) as ended:
            quality_table.main()
        return ended.value.code

    assert code(0.06) == 0
    assert code(0.08) == 1
