"""report.html and README.md: self-contained, the same every time, and they show the passport's numbers."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from compressor.bundle import Bundle, Passport, card, report, summary


@pytest.fixture
def fields(built) -> dict:
    return Bundle.open(built()).passport.model_dump(mode="json")


class Page(HTMLParser):
    """Tags, their attributes, and ids; complains about tags closed out of order."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.ids, self._open = [], [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


class TestReport:
    def test_nothing_is_fetched_and_nothing_runs(self, fields):
        page = Page(report.render(Passport.make(**fields)))
        for tag, attributes in page.tags:
            assert tag not in ("script", "link", "iframe", "img", "object")
            for name, value in attributes.items():
                assert not name.startswith("on")
                if name in ("src", "href", "xlink:href", "data"):
                    assert value.startswith("#")

    def test_it_is_well_formed_and_its_figures_share_no_ids(self, fields):
        text = report.render(Passport.make(**fields))
        page = Page(text)
        assert len(page.ids) == len(set(page.ids))
        figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        assert len(figures) == 2
        for figure in figures:
            ElementTree.fromstring(figure)

    def test_figures_take_the_colours_of_the_page(self, fields):
        text = report.render(Passport.make(**fields))
        assert "prefers-color-scheme: dark" in text
        assert "currentColor" in text
        assert "#01020" not in text  # the stand-ins are all replaced
        assert "font-family" not in "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))

    def test_the_same_passport_gives_the_same_page(self, fields):
        assert report.render(Passport.make(**fields)) == report.render(Passport.make(**fields))

    def test_the_headline_numbers_are_in_it(self, fields):
        text = report.render(Passport.make(**fields))
        for number in (
            "13.250",
            "0.0800",
            "0.1100",
            "87.0 %",
            "1.72 [1.62,\u00a01.82]",
            "\u22123.0\u00a0points",
            "4.5",
        ):
            assert f">{number}<" in text

    def test_every_layer_class_has_a_line(self, fields):
        text = report.render(Passport.make(**fields))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            assert re.search(rf">{name}</text>", text)

    def test_text_from_a_passport_cannot_become_markup(self, fields):
        fields["recipe"]["name"] = "<script>alert(1)</script>"
        fields["decisions"][0]["why"] = '<img src="http://example.org/x">'
        text = report.render(Passport.make(**fields))
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text

    def test_a_layer_name_cannot_become_markup_in_the_figure(self, fields):
        for layer in fields["quantization"]["layers"]:
            layer["name"] = layer["name"].replace("q_proj", "<script>x</script>")
        assert "<script" not in report.render(Passport.make(**fields))

    def test_what_was_not_measured_is_left_out(self, fields):
        fields["outcomes"] = {}
        fields["quantization"]["calibration"] = None
        for layer in fields["quantization"]["layers"]:
            layer["error"] = layer["sqnr_db"] = None
        text = report.render(Passport.make(**fields))
        Page(text)
        assert "Acceptance" not in text
        assert "Error of each layer" not in text
        assert "Where the bytes are" in text

    def test_an_error_of_the_diagonal_alone_has_a_name_of_its_own(self, fields):
        assert "Relative output error of each quantized linear" in report.render(Passport.make(**fields))
        for layer in fields["quantization"]["layers"]:
            layer["diagonal_error"] = layer.pop("error")
        text = report.render(Passport.make(**fields))
        Page(text)
        assert "Relative weighted error of each quantized linear" in text and "Σ h E²" in text
        assert "elative output error" not in text.replace("not to be compared with a relative output error", "")
        assert "tr(E H Eᵀ)" not in text

    def test_speed_and_tax_appear_when_they_are_there(self, fields):
        measured = {"kind": "measured"}
        derived = {"kind": "derived", "formula": "1 - realized / potential", "inputs": ["outcomes.configurations"]}
        fields["outcomes"]["configurations"] = [{"name": "combined", "tok_s": 41.5, "evidence": measured}]
        fields["outcomes"]["tax"] = {
            "potential_gain": 2.0,
            "realized_gain": 1.5,
            "tax": 0.25,
            "verdict": "heal the head",
            "evidence": derived,
        }
        text = report.render(Passport.make(**fields))
        Page(text)
        assert ">41.5<" in text
        assert "Acceptance tax 0.25: heal the head" in text


class TestCard:
    def test_it_says_how_to_load_and_verify(self, fields):
        text = card.render(Passport.make(**fields), key="ab" * 32)
        for part in (
            "AutoModelForCausalLM.from_pretrained",
            "vllm serve",
            '"method": "ngram"',
            "compress verify",
            "ab" * 32,
        ):
            assert part in text

    def test_a_hub_source_is_the_base_model(self, fields):
        assert "base_model" not in card.render(Passport.make(**fields))
        fields["source"]["kind"] = "hub"
        assert "\nbase_model: example/tiny\n" in card.render(Passport.make(**fields))

    def test_without_a_proposer_it_serves_without_speculation(self, fields):
        fields["proposer"] = {"kind": "none"}
        text = card.render(Passport.make(**fields))
        assert "speculative-config" not in text
        assert 'runner(proposer="none")' in text

    def test_text_from_a_passport_cannot_break_its_tables(self, fields):
        fields["decisions"] = [{"what": "a|b\n# heading", "why": "`code`"}]
        assert r"- a\|b # heading: 'code'" in card.render(Passport.make(**fields))

    def test_every_table_row_has_four_cells(self, fields):
        lines = card.render(Passport.make(**fields)).split("## Results")[1].split("## Use")[0].splitlines()
        table = [line for line in lines if line.startswith("|")]
        assert len(table) == 2 + len(summary.rows(Passport.make(**fields)))
        assert {line.count("|") for line in table} == {5}


class TestSummary:
    def test_a_number_that_does_not_apply_is_a_dash(self, fields):
        rows = {row.what: row for row in summary.rows(Passport.make(**fields))}
        assert rows["Acceptance at position 3"][1:] == ("73.0 %", "–", "–")
        assert rows["KL divergence, nats a token"].before == "–"

    def test_the_ratio_is_of_whole_models(self, fields):
        fields["source"].update(total_bytes=4000, parameters=2000)
        fields["ledger"].update(original_bytes=4000, bundle_bytes=1000, bits_per_weight_model=4.0)
        rows = summary.rows(Passport.make(**fields))
        assert rows[0] == ("Weights", "4 kB", "1 kB", "÷ 4.00")
        assert rows[1] == ("Bits per weight, whole model", "16.00", "4.00", "÷ 4.00")

    @pytest.mark.parametrize(
        ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (269_060_352, "269.1 MB"), (3.2e12, "3.2 TB")]
    )
    def test_sizes_are_decimal(self, count, text):
        assert summary.size(count) == text


@pytest.mark.parametrize("lossy", [True, False])
def test_a_lossy_acceptance_rule_is_marked(fields, lossy):
    fields["verifier"]["lossy"] = lossy
    passport = Passport.model_validate(fields)
    for text in (report.render(passport), card.render(passport, key="k")):
        assert ("not have the target's law" in text.replace("&#39;", "'")) == lossy
