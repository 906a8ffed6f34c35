"""The benchmark of mixed precision: every point is made once, and a choice that is no gain is found."""

import copy
import json

import mixed_precision
import pytest
import tiny_models as tiny

from compressor import pipeline
from compressor.allocate import stage

pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def call(tmp_path, rows):
    """Runs the benchmark on a tiny model with these options; returns what its file then holds."""
    source, text = tiny.save(tmp_path / "source", "llama-tied"), tmp_path / "text.txt"
    out = tmp_path / "made" / "points.json"
    text.write_text("the cat sat on the mat and saw a dog " * 40)
    small = ["--calibration-rows", "6", "--batch-size", "2", "--text-rows", "2", "--length", "32"]

    def run(options):
        paths = [source, rows, "--text", text, "--json", out]
        mixed_precision.main([*map(str, paths), *small, *options.split()])
        return json.loads(out.read_text())

    run.out = out
    return run


OPTIONS = "--uniform int4-g64 int4-g32 int8 --formats int4-g64 int4-g32 int8 none --budgets int4-g32 6 9 --shuffled 1"


def test_one_command_makes_every_point_and_measures_costs_once(call, monkeypatch):
    measured = []
    original = stage.measure
    monkeypatch.setattr(stage, "measure", lambda *args, **options: measured.append(1) or original(*args, **options))
    monkeypatch.setattr(mixed_precision, "faults", lambda rows: [])  # a random model promises nothing
    made = call(OPTIONS)
    rows = made["points"]
    assert [row["kind"] for row in rows] == ["uniform"] * 3 + ["mixed", "shuffled"] * 3 and len(measured) == 1
    uniform = {row["format"]: row for row in rows if row["kind"] == "uniform"}
    assert next(row for row in rows if row["kind"] == "mixed")["budget_bytes"] == uniform["int4-g32"]["bytes"]
    for row in rows[3:]:
        assert row["bytes"] <= row["budget_bytes"] and row["kl"] > 0
    assert rows[-2]["bytes"] > uniform["int8"]["bytes"] and sum(rows[-2]["linears"].values()) < 14  # some unquantized
    assert call.out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not call.out.with_suffix(".work").exists()
    monkeypatch.setattr(pipeline, "run", None)  # would fail
    assert call(OPTIONS) == made
    with pytest.raises(SystemExit, match="of other settings"):
        call(OPTIONS + " --method rtn")


def test_points_of_overrides_are_those_of_an_allocation(call, monkeypatch):
    """The first budget's bundle is made by an allocation, the others' by overrides that name the same choice."""
    monkeypatch.setattr(mixed_precision, "faults", lambda rows: [])
    rows = call("--uniform int4-g64 --budgets 6 5")["points"]
    call.out.unlink()
    turned = call("--uniform int4-g64 --budgets 5 6")["points"]
    by_budget = [{row["budget"]: row for row in some[1:]} for some in (rows, turned)]
    for name in ("5", "6"):
        for key in ("bytes", "kl", "linears", "kl_sum"):
            assert by_budget[0][name][key] == by_budget[1][name][key]
    assert by_budget[0]["5"]["linears"] != by_budget[0]["6"]["linears"]


def stop(*_):
    raise KeyboardInterrupt


def test_an_interrupted_run_keeps_its_points_and_goes_on_within_one(call, monkeypatch):
    options = "--uniform int4-g64 --budgets 5"
    monkeypatch.setattr(mixed_precision, "faults", lambda rows: [])
    with monkeypatch.context() as patch:
        patch.setattr(stage, "_choose", stop)  # all costs are measured by then
        with pytest.raises(KeyboardInterrupt):
            call(options)
    assert [row["kind"] for row in json.loads(call.out.read_text())["points"]] == ["uniform"]
    monkeypatch.setattr(stage, "measure", None)  # would fail
    assert [row["kind"] for row in call(options)["points"]] == ["uniform", "mixed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--uniform int4-g64 --budgets int8", "2"),
        ("--uniform int4-g64 --budgets 5 16", r"--budgets: 16 is \d+ bytes; the formats take from"),
        ("--uniform int4-g64 --budgets 4", r"quantization\.allocation\.bits_per_weight: 4 is less than this model"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_in_one_line(call, options, said):
    with pytest.raises(SystemExit, match=said) as caught:
        call(options)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ the check


def point(kind, size, kl, **more):
    return {"kind": kind, "bytes": size, "kl": kl, **more}


GOOD = [
    point("uniform", 100, 0.2, format="int4-g64", linears={"int4-g64": 4}),
    point("uniform", 106, 0.18, format="int4-g32", linears={"int4-g32": 4}),
    point("uniform", 200, 0.001, format="int8", linears={"int8": 4}),
    point("mixed", 105, 0.15, budget="int4-g32", budget_bytes=106, linears={"int4-g64": 3, "int8": 1}),
    point("mixed", 200, 0.001, budget="int8", budget_bytes=200, linears={"int8": 4}),
    point("shuffled", 105, 0.3, budget="int4-g32", budget_bytes=106, linears={"int4-g64": 3, "int8": 1}),
]


def test_less_kl_than_every_uniform_format_within_the_budget_is_no_fault():
    assert mixed_precision.faults(GOOD) == []


CHANGES = {
    "is not below int4-g64 (100 bytes, KL 0.20000)": {"kl": 0.25},
    "is not below int4-g32 (106 bytes, KL 0.18000)": {"kl": 0.18},
    "the choice at int4-g32 (105 bytes, KL nan) is not below": {"kl": float("nan")},
    "takes more than its 106 bytes": {"bytes": 107},
    "is not below int8 (200 bytes, KL 0.00100)": {"budget_bytes": 200},
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_choice_that_is_no_gain_is_found(said):
    rows = copy.deepcopy(GOOD)
    rows[3].update(CHANGES[said])
    assert any(said in line for line in mixed_precision.faults(rows)), mixed_precision.faults(rows)


def test_a_run_that_compares_nothing_does_not_pass():
    for rows in ([], GOOD[:3], GOOD[3:], [GOOD[2], GOOD[3]]):
        assert mixed_precision.faults(rows) == ["no uniform format fits the budget of a choice: nothing was compared"]


def test_a_fault_ends_the_command(call, monkeypatch):
    monkeypatch.setattr(mixed_precision, "faults", lambda rows: ["the choice is no gain"])
    with pytest.raises(SystemExit, match="the choice is no gain"):
        call("--uniform int4-g64 --budgets 5")
    assert call.out.with_suffix(".png").exists()
