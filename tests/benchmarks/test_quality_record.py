"""The record of the table resumes, refuses to mix, and its requirement fails where it should."""

import json

import pytest
from _quality import FORMATS, METHODS, OWN_JUDGE, PEERS, Record, chosen, markdown, ratio, unmet

SETTINGS = {"model": "tiny", "calibration": {"sha256": "00"}}
TEXTS = {"tales": "tales.txt"}
FOUR_BIT = [name for name, form in FORMATS.items() if form.four_bit]


def cell(kl: float, judge: str = "judge.py", text: str = "tales") -> dict:
    found = {"kl_nats": kl, "top1_agreement": 0.9, "ppl": 5.0, "judge": judge}
    return {"seconds": 1.0, "cpu_seconds": 2.0, "peak_bytes": 10**6, "bundle_bytes": 1000, "texts": {text: found}}


@pytest.fixture
def record(tmp_path) -> Record:
    """Every 4-bit format: ours 0.06 at best, the peers 0.10."""
    made = Record(tmp_path / "quality" / "tiny.json", SETTINGS, TEXTS)
    for name in FOUR_BIT:
        made.put(("gptq", name), cell(0.07))
        made.put(("best", name), cell(0.06))
        made.put(("llmc-gptq", name), cell(0.2))
        made.put(("auto-round", name), cell(0.1))
    return made


def test_a_killed_run_asks_for_the_missing_cells_only(record):
    again = Record(record.path, SETTINGS, TEXTS)
    cells = chosen(["gptq:nvfp4", "rtn:nvfp4", "llmc-rtn:nvfp4"], [])
    again.put(("llmc-rtn", "nvfp4"), {"failed": "no such format"})
    assert again.missing(cells, TEXTS) == [("rtn", "nvfp4")]
    assert again.missing(cells, TEXTS, again=True) == cells


def test_a_text_more_makes_its_cells_missing(record):
    more = Record(record.path, SETTINGS, {"news": "news.txt"})
    assert more.texts == ["tales", "news"]
    assert more.missing([("gptq", "nvfp4")], ["news"]) == [("gptq", "nvfp4")]
    assert more.missing([("gptq", "nvfp4")], ["tales"]) == []


def test_cells_of_other_settings_are_not_mixed(record):
    with pytest.raises(SystemExit, match=r"calibration .*'00'.* not .*'11'"):
        Record(record.path, SETTINGS | {"calibration": {"sha256": "11"}}, TEXTS)
    with pytest.raises(SystemExit, match=r"text tales 'tales\.txt', not 'other\.txt'"):
        Record(record.path, SETTINGS, {"tales": "other.txt"})


def test_the_file_is_whole_after_every_cell(record):
    assert json.loads(record.path.read_text()) == record.data
    assert [file.name for file in record.path.parent.iterdir()] == ["tiny.json"]


def test_patterns_choose_cells():
    assert chosen(["gptq:nvfp4*"], []) == [("gptq", "nvfp4"), ("gptq", "nvfp4-w4a4")]
    assert chosen(["gptq:nvfp4*"], ["nvfp4"]) == [("gptq", "nvfp4-w4a4")]
    assert len(chosen([], [])) == len(METHODS) * len(FORMATS)


@pytest.mark.parametrize("pattern", ["gptq", "gptg:nvfp4", "gptq:nvfp5"])
def test_a_pattern_that_names_no_cell_is_refused(pattern):
    with pytest.raises(SystemExit, match=f"--only {pattern}: names no cell"):
        chosen([pattern], [])


def test_the_ratio_is_of_the_best_on_either_side(record):
    found = ratio(record, "nvfp4", "tales")
    assert (found.our_method, found.peer_method) == ("best", "auto-round")
    assert found.value == pytest.approx(0.6)


def test_the_requirement_holds_where_every_format_meets_it(record):
    assert list(unmet(record, 0.7)) == []


def test_one_format_above_the_limit_fails_the_requirement(record):
    record.put(("auto-round", "mxfp4"), cell(0.08))
    assert list(unmet(record, 0.7)) == ["mxfp4 on tales: 0.750, more than 0.7"]


def test_a_figure_that_is_no_number_fails_the_requirement(record):
    record.put(("best", "mxfp4"), cell(float("nan")))
    record.put(("gptq", "mxfp4"), cell(float("nan")))
    assert any(line.startswith("mxfp4 on tales") for line in unmet(record, 0.7))


@pytest.mark.parametrize("method", ["ours", "peers"])
def test_a_side_that_was_not_measured_fails_the_requirement(record, method):
    for name in METHODS:
        if (name in PEERS) == (method == "peers"):
            record.put((name, "nvfp4"), {"failed": "killed"})
    assert list(unmet(record, 0.7)) == ["nvfp4 on tales: not measured on both sides"]


def test_formats_that_are_left_out_require_nothing_unless_all_are(record):
    record.data["left_out"] = {"int4-g128": "no linear can be grouped so"}
    record.put(("best", "int4-g128"), cell(9.0))
    assert list(unmet(record, 0.7)) == []
    record.data["left_out"] = dict.fromkeys(FOUR_BIT, "no linear can be grouped so")
    assert list(unmet(record, 0.7)) == ["no 4-bit format fits this model"]


def test_eight_bits_require_nothing(record):
    record.put(("best", "fp8"), cell(0.5))
    record.put(("auto-round", "fp8"), cell(0.1))
    assert list(unmet(record, 0.7)) == []


def test_the_table_says_what_is_missing_and_who_judged(record):
    record.data["kept"] = {"nvfp4": ["*.mlp.down_proj"]}
    record.data["left_out"] = {"int4-g128": "no linear can be grouped so (inputs: 64)"}
    record.put(("rtn", "int8-w8a8"), cell(0.001, judge=OWN_JUDGE))
    record.put(("auto-round", "fp8-w8a8"), {"failed": "auto-round has no format fp8-w8a8"})
    unjudged = cell(0) | {"texts": {"tales": {"not_judged": "cannot be read"}}}
    record.put(("llmc-rtn", "fp8"), unjudged)
    shown = markdown(record)
    row = next(line for line in shown.splitlines() if line.startswith("| nvfp4 |"))
    assert "| 0.07000 / 5.00 / 90.0% | – | **0.06000** / 5.00" in row and "| 0.60 (best / auto-round) |" in row
    assert "| 0.00100 / 5.00 / 90.0%\\* |" in shown
    assert "- nvfp4: unquantized in every tool: *.mlp.down_proj" in shown
    assert "- int4-g128: left out; no linear can be grouped so (inputs: 64)" in shown
    assert "- auto-round, fp8-w8a8: no figure; auto-round has no format fp8-w8a8" in shown
    assert "- llmc-rtn, fp8, tales: not judged; cannot be read" in shown
    assert "\\* judged by this project's own evaluation" in shown
