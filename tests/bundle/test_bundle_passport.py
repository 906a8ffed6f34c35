"""The passport's schema is shipped, strict, and refuses in one line."""

import json
from importlib import resources

import pytest

from compressor.bundle import Bundle, Passport
from compressor.bundle.passport import schema_text
from compressor.errors import CompressError

TOP_LEVEL = [
    "schema_version",
    "created",
    "recipe",
    "source",
    "target",
    "quantization",
    "proposer",
    "verifier",
    "workload",
    "outcomes",
    "ledger",
    "kernels",
    "environment",
    "decisions",
]


@pytest.fixture
def fields(built) -> dict:
    return Bundle.open(built()).passport.model_dump(mode="json")


def problem(fields: dict) -> str:
    with pytest.raises(CompressError) as caught:
        Passport.make(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_schema_is_the_models():
    shipped = resources.files("compressor.bundle").joinpath("passport.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), (
        'python -c "from compressor.bundle.passport import schema_text; print(schema_text(), end=str())"'
        " > compressor/bundle/passport.schema.json"
    )


def test_the_top_level_keys_are_those_tools_read(built):
    assert list(json.loads((built() / "passport.json").read_text())) == TOP_LEVEL
    assert list(json.loads(schema_text())["properties"]) == TOP_LEVEL


def test_writing_and_reading_gives_the_same_passport(fields):
    passport = Passport.make(**fields)
    assert Passport.model_validate_json(passport.to_json()) == passport


def test_the_same_passport_gives_the_same_bytes(fields):
    assert Passport.make(**fields).to_json() == Passport.make(**json.loads(json.dumps(fields))).to_json()


@pytest.mark.parametrize(
    "section",
    ["source", "target", "quantization", "proposer", "verifier", "workload", "outcomes", "ledger", "environment"],
)
def test_an_unknown_key_is_refused_anywhere(fields, section):
    fields[section]["surprise"] = 1
    assert f"{section}.surprise" in problem(fields)


def test_an_unknown_top_level_key_is_refused(fields):
    assert "surprise" in problem(fields | {"surprise": 1})


@pytest.mark.parametrize("key", [k for k in TOP_LEVEL if k not in ("schema_version", "kernels", "decisions")])
def test_a_missing_section_is_named(fields, key):
    del fields[key]
    assert problem(fields).startswith(f"passport: {key}: ")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda f: f.update(schema_version="9"), "schema_version"),
        (lambda f: f.update(created="2026-11-29T12:00:00"), "created"),
        (lambda f: f["source"]["files"].update(a="short"), "source.files.a"),
        (lambda f: f["source"].update(kind="torrent"), "source.kind"),
        (lambda f: f["quantization"]["layers"][3].update(shape=[1]), "quantization.layers.3.shape"),
        (lambda f: f["quantization"]["layers"][3].update(error=-1.0), "quantization.layers.3.error"),
        (lambda f: f["outcomes"]["quality"][0].update(kl_nats=float("nan")), "outcomes.quality.0.kl_nats"),
        (lambda f: f["outcomes"]["quality"][0].update(tv=1.5), "outcomes.quality.0.tv"),
        (lambda f: f["outcomes"]["acceptance"][1].update(k=4), "conditional has 3 positions, k is 4"),
        (lambda f: f["outcomes"]["acceptance"][1].update(tau=0.5), "outcomes.acceptance.1.tau"),
        (lambda f: f["outcomes"]["acceptance"][1].update(target="other"), "outcomes.acceptance.1.target"),
        (lambda f: f["outcomes"]["acceptance"][1].pop("evidence"), "outcomes.acceptance.1.evidence"),
    ],
)
def test_a_bad_value_is_named_by_its_key(fields, edit, expected):
    edit(fields)
    assert expected in problem(fields)


def test_a_number_says_how_it_is_known(fields):
    row = fields["outcomes"]["quality"][0]
    row["evidence"] = {"kind": "derived"}
    assert "must name its formula and inputs" in problem(fields)
    row["evidence"] = {"kind": "published"}
    assert "must name its reference" in problem(fields)
    row["evidence"] = {"kind": "guessed"}
    assert "outcomes.quality.0.evidence.kind" in problem(fields)
    row["evidence"] = {"kind": "derived", "formula": "exp(nll)", "inputs": ["nll"]}
    assert Passport.make(**fields).outcomes.quality[0].evidence.formula == "exp(nll)"


def test_a_nan_among_free_settings_is_refused(fields):
    fields["quantization"]["settings"]["search"] = {"damping": [0.01, float("nan")]}
    assert "quantization.settings.search" in problem(fields)


def test_the_infinite_ratio_of_an_exact_copy_is_null(fields):
    fields["quantization"]["layers"][0].update(sqnr_db=float("inf"), error=0.0)
    assert Passport.make(**fields).quantization.layers[0].sqnr_db is None
    fields["quantization"]["layers"][0]["sqnr_db"] = float("-inf")
    assert "quantization.layers.0.sqnr_db" in problem(fields)


class TestLoad:
    def test_from_a_file_and_from_a_bundle(self, built):
        assert Passport.load(built()) == Passport.load(built() / "passport.json")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(CompressError, match=r"passport\.json: not found"):
            Passport.load(tmp_path)

    @pytest.mark.parametrize("size", [0, 1, 100, -10])
    def test_a_truncated_file_is_one_line(self, built, tmp_path, size):
        path = tmp_path / "passport.json"
        path.write_bytes((built() / "passport.json").read_bytes()[:size])
        with pytest.raises(CompressError, match=r"passport\.json: not a readable passport") as caught:
            Passport.load(path)
        assert "\n" not in str(caught.value)

    def test_bytes_that_are_not_text_are_one_line(self, tmp_path):
        (tmp_path / "passport.json").write_bytes(bytes(range(256)))
        with pytest.raises(CompressError, match=r"passport\.json: ") as caught:
            Passport.load(tmp_path)
        assert "\n" not in str(caught.value)
