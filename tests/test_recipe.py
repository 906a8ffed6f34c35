"""A recipe is accepted whole or refused in one line that names the file, the key, the value and what is allowed."""

import json
import re
from pathlib import Path

import pytest
import yaml

from compressor import recipe as recipes
from compressor.errors import UsageError
from compressor.recipe import Recipe
from compressor.recipe_text import changes

SHIPPED = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
BASE = "name: t\nsource: {uri: org/name}\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(path, overrides=()):
    """The message of the refusal, which must be one line."""
    with pytest.raises(UsageError) as caught:
        Recipe.load(path, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------ shipped recipes and schema


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid_by_the_classes_and_by_the_schema(path):
    recipe = Recipe.load(path)
    assert violations(yaml.safe_load(path.read_text()), json.loads(recipes.shipped_schema())) == []
    assert f"compress recipes/{path.name}" in path.read_text()
    assert recipe.name != "recipe"


def test_the_ready_recipes_are_the_promised_ones():
    found = {path.stem: Recipe.load(path).quantization for path in SHIPPED}
    assert {stem: (q.format, q.activations, q.method) for stem, q in found.items()} == {
        "quickstart": ("int4-g64", "16bit", "gptq"),
        "eagle3-smollm2": ("int4-g64", "16bit", "gptq"),
        "nvfp4-weight-only": ("nvfp4", "16bit", "gptq"),
        "nvfp4-w4a4": ("nvfp4", "4bit", "gptq"),
        "mxfp4": ("mxfp4", "16bit", "gptq"),
        "int4-g128": ("int4-g128", "16bit", "gptq"),
        "mixed-int4-int8": ("int4-g64", "16bit", "gptq"),
        "best-int4-g64": ("int4-g64", "16bit", "gptq"),
        "fast-int4-g64": ("int4-g64", "16bit", "rtn"),
        "fast-nvfp4": ("nvfp4", "16bit", "rtn"),
        "fast-mxfp4": ("mxfp4", "16bit", "rtn"),
    }
    assert all(q.scale_search == "mse" for q in found.values())
    assert {stem for stem, q in found.items() if q.guided} == {stem for stem in found if stem.startswith("best-")}


def test_the_shipped_schema_is_generated_from_the_classes():
    assert recipes.shipped_schema() == recipes.schema_text()


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"source": {"uri": "a/b", "extra": 1}},
        {"quantization": {"format": "int4-g63"}},
        {"quantization": {"damping": 0}},
        {"calibration": {"rows": "many"}},
        {"source": {}},
        {"proposer": {"num_speculative_tokens": 65}},
    ],
)
def test_the_schema_refuses_what_the_classes_refuse(change):
    data = {"name": "t", "source": {"uri": "a/b"}, **change}
    with pytest.raises(UsageError):
        Recipe.from_dict(data)
    assert violations(data, json.loads(recipes.shipped_schema()))


def violations(value, schema, root=None, at="$"):
    """Breaches of the part of JSON Schema that our schema uses; an unknown keyword is an error of this checker."""
    root = root or schema
    schema = dict(schema)
    if "$ref" in schema:
        target = root["$defs"][schema.pop("$ref").removeprefix("#/$defs/")]
        return violations(value, target, root, at)
    for keyword in ("title", "description", "default", "$defs", "$schema"):
        schema.pop(keyword, None)
    if "anyOf" in schema:
        options = [violations(value, option, root, at) for option in schema.pop("anyOf")]
        assert not schema
        return [] if any(not option for option in options) else options[0]
    found = []
    types = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "null": type(None)}
    types["boolean"] = bool
    kind = schema.pop("type")
    if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return [f"{at}: type"]
    properties = schema.pop("properties", {})
    for key in schema.pop("required", []):
        found += [] if key in value else [f"{at}.{key}: missing"]
    if schema.pop("additionalProperties", True) is False:
        found += [f"{at}.{key}: unknown" for key in value if key not in properties]
    for key, inner in properties.items():
        if isinstance(value, dict) and key in value:
            found += violations(value[key], inner, root, f"{at}.{key}")
    items = schema.pop("items", None)
    for index, item in enumerate(value if items else []):
        found += violations(item, items, root, f"{at}[{index}]")
    checks = {
        "enum": lambda allowed: value in allowed,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "minLength": lambda n: len(value) >= n,
        "minItems": lambda n: len(value) >= n,
        "minimum": lambda n: value >= n,
        "maximum": lambda n: value <= n,
        "exclusiveMinimum": lambda n: value > n,
        "exclusiveMaximum": lambda n: value < n,
    }
    for keyword, argument in schema.items():
        found += [] if checks[keyword](argument) else [f"{at}: {keyword}"]
    return found


# ------------------------------------------------------------------ what is accepted


def test_defaults_are_the_documented_ones(write):
    recipe = Recipe.load(write(BASE))
    assert recipe.to_dict() == {
        "name": "t",
        "source": {"uri": "org/name", "revision": None, "sha256": None, "dtype": "bfloat16"},
        "transform": {"rotation": "none", "smoothing": "none", "alpha": None},
        "quantization": {
            "format": "int4-g64",
            "activations": "16bit",
            "method": "gptq",
            "scale_search": "mse",
            "damping": 0.01,
            "order": "static",
            "block_size": 128,
            "asymmetric": False,
            "guided": False,
            "refit": False,
            "ignore": [],
            "overrides": [],
            "allocation": None,
        },
        "calibration": {
            "kind": "self",
            "path": None,
            "dataset": None,
            "subset": None,
            "split": "train",
            "column": "text",
            "rows": 128,
            "length": 512,
            "batch_size": 8,
            "temperature": 1.0,
            "top_p": 1.0,
        },
        "distillation": None,
        "proposer": {
            "kind": "ngram",
            "path": None,
            "training": None,
            "heal": None,
            "precision": "bf16",
            "precision_loss": None,
            "num_speculative_tokens": 3,
            "branching": None,
            "rule": "exact",
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
        },
        "measure": {
            "quality": {"kind": "self", "path": None, "rows": 16, "length": 512},
            "acceptance": {"prompts": 8, "max_new_tokens": 64, "temperature": 0.0, "top_k": None, "top_p": 1.0},
        },
        "bundle": {"private_key": None, "max_shard_bytes": 5_000_000_000},
        "run": {"seed": 0, "threads": None, "activation_budget_bytes": 4_000_000_000},
    }


def test_the_last_override_that_names_a_linear_counts_and_ignore_before_them_all(write):
    entries = ["{targets: ['*.mlp.*'], format: int8}", "{targets: ['*.0.*', b], format: fp8, activations: 8bit}"]
    entries.append("{targets: [b], format: none}")
    settings = "quantization: {format: mxfp4, ignore: [a.mlp.x], overrides: [" + ", ".join(entries) + "]}"
    found = Recipe.load(write(BASE + settings)).quantization
    assert found.choice("a.1.mlp.up") == ("int8", "16bit")
    assert found.choice("a.0.mlp.up") == ("fp8", "8bit")
    assert found.choice("a.1.self_attn.q") == ("mxfp4", "16bit")
    assert found.choice("b") is found.choice("a.mlp.x") is None
    assert not found.model_copy(update={"method": "rtn", "scale_search": "none"}).needs_data
    assert Recipe.load(write(BASE), ["quantization.overrides=[{targets: [a], format: int8}]"]).quantization.overrides


def test_an_exponent_without_a_point_is_a_number(write):
    assert Recipe.load(write(BASE + "quantization: {damping: 5e-3}\n")).quantization.damping == 0.005


@pytest.mark.parametrize("draft", ["{num_speculative_tokens: 64}", "{kind: mtp, branching: [4, 15]}"])
def test_the_largest_drafts_are_accepted(write, draft):
    assert Recipe.load(write(f"{BASE}proposer: {draft}\n"))


def test_overrides_are_yaml_and_win_over_the_file(write):
    path = write(BASE + "quantization: {format: nvfp4}\n")
    recipe = Recipe.load(path, ["quantization.format=mxfp4", "run.seed=7", "quantization.ignore=['*.o_proj']"])
    assert (recipe.quantization.format, recipe.run.seed) == ("mxfp4", 7)
    assert recipe.quantization.ignore == ["*.o_proj"]
    assert Recipe.load(path, ["source.revision="]).source.revision is None


def test_ignore_patterns_match_whole_module_names(write):
    quantization = Recipe.load(write(BASE + "quantization: {ignore: ['*.mlp.*', model.layers.0.*]}\n")).quantization
    assert quantization.ignores("model.layers.7.mlp.down_proj")
    assert quantization.ignores("model.layers.0.self_attn.q_proj")
    assert not quantization.ignores("model.layers.1.self_attn.q_proj")


def test_relative_paths_are_taken_from_the_recipe_and_those_of_overrides_from_here(write, tmp_path, monkeypatch):
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "nested" / "model").mkdir()
    path = write("name: t\nsource: {uri: model}\ncalibration: {kind: jsonl, path: rows.jsonl}\n", "nested/recipe.yaml")
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(path)
    assert recipe.calibration.path == str(tmp_path / "nested" / "rows.jsonl")
    assert recipe.source.uri == str(tmp_path / "nested" / "model")
    assert Recipe.load(path, ["calibration.path=rows.jsonl"]).calibration.path == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("uri", ["org/name", "pypi:a==1#b.gguf"])
def test_a_uri_that_names_no_path_stays_as_written(write, uri):
    assert Recipe.load(write(f"name: t\nsource: {{uri: '{uri}'}}\n")).source.uri == uri


@pytest.mark.parametrize("uri", ["./model", "../model", "model.gguf"])
def test_a_uri_that_looks_like_a_path_becomes_absolute(write, uri):
    assert Path(Recipe.load(write(f"name: t\nsource: {{uri: {uri}}}\n")).source.uri).is_absolute()


# ------------------------------------------------------------------ digest and diff


def test_the_digest_is_of_the_content_and_not_of_the_text(write):
    one = Recipe.load(write(BASE + "run: {seed: 0}\n"))
    assert one.digest() == Recipe.load(write("source: {uri: org/name}\n# a comment\nname: t\n")).digest()
    assert one.digest() != Recipe.load(write(BASE), ["run.seed=1"]).digest()
    assert re.fullmatch("[0-9a-f]{64}", one.digest())


def test_diff_names_every_changed_key_with_both_values(write):
    before, after = Recipe.load(write(BASE)), Recipe.load(write(BASE), ["quantization.damping=0.05", "name=u"])
    assert changes(before.to_dict(), after.to_dict()) == ['name: "t" → "u"', "quantization.damping: 0.01 → 0.05"]
    assert changes(after.to_dict(), after.to_dict()) == []


def test_diff_shows_keys_that_only_one_version_knows(write):
    recipe = Recipe.load(write(BASE))
    older = recipe.to_dict()
    del older["run"]["threads"]
    older["run"]["cores"] = 2
    assert changes(older, recipe.to_dict()) == ["run.threads: (absent) → null", "run.cores: 2 → (absent)"]


# ------------------------------------------------------------------ training and healing


def trained(settings, kind="eagle3"):
    return f"{BASE}proposer: {{kind: {kind}, training: {settings}}}\n"


def test_a_head_in_4_bits_is_allowed_where_its_loss_is_stated(write):
    text = "proposer: {kind: eagle3, path: h, precision: int4-g64, precision_loss: 0.2}\n"
    assert Recipe.load(write(BASE + text)).proposer.precision_loss == 0.2


def test_the_defaults_of_training_and_healing_are_the_documented_ones(write):
    optimization = {"batch_tokens": 4096, "accumulation": 1, "evaluate_every": 200, "patience": None, "save_every": 200}
    answers = {
        "prompts": None,
        "self_written": 0.0,
        "max_new_tokens": 128,
        "temperature": 0.0,
        "held_out": 128,
        "cache": "disk",
        "cache_format": "bf16",
        "cache_bytes": 20_000_000_000,
    }
    proposer = Recipe.load(write(BASE + "proposer: {kind: eagle3, training: {}, heal: {}}\n")).to_dict()["proposer"]
    assert proposer["training"] == {
        "answers": {**answers, "count": 12_000},
        "optimization": {"steps": 1500, "rate": 1e-3, "warmup": 50, **optimization},
        "draft_vocab_size": 8192,
        "aux": None,
        "heads": 3,
        "layers": 4,
        "layout": "vllm",
        "unroll": 3,
        "decay": 0.8,
    }
    assert proposer["heal"] == {
        "unroll": 3,
        "decay": 0.8,
        "answers": {**answers, "count": 2000},
        "optimization": {"steps": 200, "rate": 2e-4, "warmup": 20, **optimization},
    }


@pytest.mark.parametrize(
    ("answers", "held_out"),
    [("{}", 128), ("{count: 100}", 12), ("{count: 2}", 1), ("{count: 1024}", 128), ("{count: 100, held_out: 50}", 50)],
)
def test_the_held_out_documents_are_an_eighth_unless_the_recipe_says_otherwise(write, answers, held_out):
    assert Recipe.load(write(trained(f"{{answers: {answers}}}"))).proposer.training.answers.held_out == held_out


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft"])
def test_a_recipe_with_every_default_written_out_loads_again(kind):
    made = Recipe.from_dict({"name": "t", "source": {"uri": "a/b"}, "proposer": {"kind": kind, "training": {}}})
    again = Recipe.from_dict(made.to_dict())
    assert again == made and again.digest() == made.digest()


USED = {
    "draft_vocab_size: 100": {"eagle3", "medusa"},
    "aux: [1, 2]": {"eagle3"},
    "heads: 4": {"medusa"},
    "layers: 2": {"draft"},
    "unroll: 2": {"eagle3", "draft"},
    "decay: 0.5": {"eagle3", "medusa"},
}


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft"])
@pytest.mark.parametrize("setting", USED)
def test_a_setting_that_a_kind_does_not_read_is_refused(write, setting, kind):
    path = write(trained(f"{{{setting}}}", kind))
    if kind in USED[setting]:
        assert Recipe.load(path).proposer.training is not None
    else:
        key, _, value = setting.partition(": ")
        said = f"{path}: proposer.training.{key}: {value} is not allowed: kind {kind} does not use it; remove it"
        assert refusal(path) == said


def test_a_part_of_an_optimization_keeps_the_defaults_of_the_rest(write):
    text = trained("{optimization: {rate: 0.1}}")
    training = Recipe.load(write(text)).proposer.training
    assert (training.optimization.steps, training.optimization.rate, training.optimization.warmup) == (1500, 0.1, 50)
    heal = Recipe.load(write(text), ["proposer.heal.optimization.steps=7"]).proposer.heal
    assert (heal.optimization.steps, heal.optimization.rate, heal.optimization.warmup) == (7, 2e-4, 20)
    assert Recipe.load(write(text), ["proposer.heal.answers.self_written=0.5"]).proposer.heal.answers.count == 2000


def test_overrides_reach_into_sections_that_may_be_absent(write):
    path = write(trained("{optimization: {steps: 7, rate: 0.1}}"))
    training = Recipe.load(path, ["proposer.training.answers.count=100"]).proposer.training
    assert (training.answers.count, training.answers.held_out, training.optimization.steps) == (100, 12, 7)
    absent = write(trained("null"), "absent.yaml")
    assert Recipe.load(absent, ["proposer.training.unroll=2"]).proposer.training.unroll == 2
    assert Recipe.load(path, ["proposer.heal={}"]).proposer.heal.optimization.steps == 200
    assert Recipe.load(path, ["proposer.training=", "proposer.kind=ngram"]).proposer.training is None


# ------------------------------------------------------------------ what is refused

REFUSED = {
    "quantization: {metod: gptq}": "quantization.metod: unknown key; did you mean 'method'?",
    "damping: 0.1": "damping: unknown key; did you mean 'quantization.damping'?",
    "quantization: {rows: 4}": "quantization.rows: unknown key; did you mean 'quantization.allocation.rows'?",
    "quantization: {zzz: 4}": "quantization.zzz: unknown key; allowed: format, activations",
    "quantization: {method: gtpq}": "quantization.method: 'gtpq' is not allowed; must be one of gptq, rtn; did you",
    "quantization: {format: int4-g63}": "must be one of int4-g32, int4-g64",
    "quantization: {activations: 4bit}": "format int4-g64 has no 4-bit activations; use 16bit, or format nvfp4",
    "quantization: {damping: 0}": "quantization.damping: 0 is not allowed; must be greater than 0",
    "quantization: {damping: .nan}": "quantization.damping: NaN is not allowed; must be a finite number",
    "quantization: {damping: '0.1'}": "quantization.damping: '0.1' is not allowed; must be a number",
    "quantization: {ignore: lm_head}": "quantization.ignore: 'lm_head' is not allowed; must be a list",
    "quantization: {ignore: [a, 1]}": "quantization.ignore[1]: 1 is not allowed; must be text",
    "quantization: {guided: true, method: rtn, scale_search: none}": "guided: true is not allowed: there is no",
    "quantization: {format: fp8-block128, refit: true}": "refit: true is not allowed: fp8-block128 shares",
    "quantization: {format: fp8-block128}\ndistillation: {}": "distillation: '…' is not allowed: fp8-block128",
    "distillation: {}\nquantization: {method: rtn, scale_search: none}": "'…' is not allowed: there are no calibration",
    "distillation: {}\ncalibration: {rows: 4}": "distillation.held_out: 4 is not allowed: of 4 calibration rows none",
    "distillation: {steps: 0}": "distillation.steps: 0 is not allowed; must be at least 1",
    "transform: {rotation: r3}": "transform.rotation: 'r3' is not allowed; must be one of none, r1, r2, r1+r2",
    "transform: {alpha: 0.5}": "transform.alpha: 0.5 is not allowed: smoothing none has no exponent; remove it",
    "transform: {smoothing: awq, alpha: 2}": "transform.alpha: 2 is not allowed; must be at most 1",
    "transform: {smoothing: awq}\nquantization: {method: rtn, scale_search: none}": "transform.smoothing: 'awq' is not "
    "allowed: its scales are found on calibration inputs; set quantization.scale_search: mse or method: gptq",
    "transform: {rotation: r1}\nproposer: {kind: mtp}": "transform.rotation: 'r1' is not allowed: proposer.kind mtp",
    "quantization: {activations: 8bit}": "format int4-g64 has no 8-bit activations; use 16bit, or format int8 or fp8",
    "quantization: {format: fp8, activations: 4bit}": "quantization.activations: '4bit' is not allowed: format fp8",
    "quantization: {overrides: [{targets: [a], format: int5}]}": "overrides[0].format: 'int5' is not allowed; must be",
    "quantization: {overrides: [{targets: [a]}]}": "quantization.overrides[0].format: missing (Number format",
    "quantization: {overrides: [{targets: [], format: int8}]}": "quantization.overrides[0].targets: [] is not allowed",
    "quantization: {overrides: [{targets: [a], format: fp8, fromat: x}]}": "[0].fromat: unknown key; did you mean",
    "quantization: {format: fp8, activations: 8bit, overrides: [{targets: [a], format: int4-g32}]}": (
        "quantization.overrides[0].activations: '8bit' is not allowed: format int4-g32 has no 8-bit activations"
    ),
    "quantization: {overrides: [{targets: [a], format: none, activations: 16bit}]}": "format none rounds nothing",
    "quantization: {overrides: [{targets: [a], format: int4-g32-asym}]}": "overrides: 'int4-g32-asym' is not allowed:",
    **{
        f"quantization: {{{settings}}}": said
        for settings, said in {
            "allocation: {bits_per_weight: 5}": "quantization.allocation.formats: missing (Formats to choose from",
            "allocation: {formats: [int4-g64, int8]}": "quantization.allocation.bits_per_weight: missing",
            "allocation: {bits_per_weight: 0, formats: [int4-g64, int8]}": "bits_per_weight: 0 is not allowed; must be",
            "allocation: {bits_per_weight: 5, formats: [int4-g64]}": (
                'quantization.allocation.formats: ["int4-g64"] is not allowed; must be a list of at least 2'
            ),
            "allocation: {bits_per_weight: 5, formats: [int4-g64, int9]}": (
                "quantization.allocation.formats[1]: 'int9' is not allowed; must be one of int4-g32"
            ),
            "allocation: {bits_per_weight: 5, formats: [int4-g64, int8, int4-g64]}": (
                "quantization.allocation.formats: 'int4-g64' is not allowed: it is listed twice; remove one"
            ),
            "format: int4-g64-asym, allocation: {bits_per_weight: 5, formats: [int4-g64-asym, int8]}": (
                "quantization.allocation.formats: 'int4-g64-asym' is not allowed: transformers cannot load it beside"
            ),
            "allocation: {bits_per_weight: 5, formats: [int8, none]}": (
                "quantization.format: 'int4-g64' is not allowed: allocation.formats (int8, none) does not hold it"
            ),
            "overrides: [{targets: [a], format: int8}], allocation: {bits_per_weight: 5, formats: [int4-g64, int8]}": (
                "quantization.overrides: '…' is not allowed: allocation chooses every linear's format; remove one"
            ),
            "allocation: {bits_per_weight: 5, formats: [int4-g64, int8], rows: 129}": (
                "quantization.allocation.rows: 129 is not allowed: there are 128 calibration rows; lower it"
            ),
            "refit: true, allocation: {bits_per_weight: 5, formats: [int4-g64, fp8-block128]}": (
                "refit: true is not allowed: fp8-block128 shares"
            ),
        }.items()
    },
    "calibration: {rows: 0}": "calibration.rows: 0 is not allowed; must be at least 1",
    "calibration: {rows: 1.5}": "calibration.rows: 1.5 is not allowed; must be a whole number",
    "calibration: {rows: true}": "calibration.rows: true is not allowed; must be a whole number",
    "calibration: {top_p: 1.5}": "calibration.top_p: 1.5 is not allowed; must be at most 1",
    "quantization: {method: rtn, asymmetric: true}": "quantization.asymmetric: true is not allowed: method rtn",
    "quantization: {method: rtn, refit: true}": "quantization.refit: true is not allowed: method rtn does not use it",
    "calibration: {kind: jsonl}": "calibration.path: missing; kind jsonl needs it",
    "calibration: {kind: hub}": "calibration.dataset: missing; kind hub needs it",
    "calibration: {dataset: a/b}": "kind self does not use it; remove it, or set kind: hub",
    "calibration: {kind: jsonl, path: none.jsonl}": "none.jsonl' does not exist or is not a file",
    "calibration: 3": "calibration: 3 is not allowed; must be a mapping with keys among kind, path",
    "proposer:": "proposer: null is not allowed; must be a mapping",
    "proposer: {prompt_lookup_min: 5}": "prompt_lookup_max: 4 is not allowed: must be at least prompt_lookup_min (5)",
    "proposer: {kind: draft}": "proposer.path: missing; kind draft needs it",
    "proposer: {kind: medusa, training: {answers: {cache_format: fp8}}}": "cache_format: 'fp8' is not allowed: kind",
    "proposer: {kind: eagle3, training: {answers: {cache: none, cache_format: fp8}}}": "cache none keeps nothing",
    "proposer: {precision: int8}": "proposer.precision: 'int8' is not allowed: kind ngram keeps its own; remove it",
    "proposer: {kind: eagle3, path: h, precision_loss: 0.1}": "precision_loss: 0.1 is not allowed: precision bf16",
    "proposer: {kind: eagle3, path: h, precision: int4-g64}": "'int4-g64' is not allowed: a head in 4 bits can lose",
    "proposer: {kind: eagle3, path: h, precision: int3}": "precision: 'int3' is not allowed; must be one of bf16",
    "proposer: {path: head}": "/head' is not allowed: kind ngram does not use it; remove it",
    "proposer: {branching: [2, 1]}": "proposer.branching: [2, 1] is not allowed: kind ngram drafts no tree; remove it",
    **{
        f"proposer: {{kind: eagle3, training: {settings}}}": said
        for settings, said in {
            "5": "proposer.training: 5 is not allowed; must be a mapping with keys among answers, optimization, draft",
            "{optimisation: {}}": "proposer.training.optimisation: unknown key; did you mean 'optimization'?",
            "{aux: 5}": "proposer.training.aux: 5 is not allowed; must be a list",
            "{aux: [-1]}": "proposer.training.aux[0]: -1 is not allowed; must be at least 0",
            "{answers: 5}": "proposer.training.answers: 5 is not allowed; must be a mapping with keys among prompts",
            "{answers: {cuont: 1}}": "proposer.training.answers.cuont: unknown key; did you mean 'count'?",
            "{answers: {zzz: 1}}": "proposer.training.answers.zzz: unknown key; allowed: prompts, count, self_written",
            "{answers: {cache: dsk}}": "answers.cache: 'dsk' is not allowed; must be one of disk, none; did you mean",
            "{answers: {count: 'x'}}": "proposer.training.answers.count: 'x' is not allowed; must be a whole number",
            "{answers: {count: 9, held_out: 9}}": "answers.held_out: 9 is not allowed: must be smaller than count (9)",
        }.items()
    },
    "proposer: {kind: eagle3, path: h, heal: {decya: 1}}": "proposer.heal.decya: unknown key; did you mean 'decay'?",
    "steps: 5": "steps: unknown key; did you mean 'distillation.steps'?",
    "proposer: {num_speculative_tokens: 65}": "proposer.num_speculative_tokens: 65 is not allowed: a draft can have 64",
    "proposer: {kind: mtp, branching: [9, 9, 9]}": "proposer.branching: [9, 9, 9] is not allowed: its tree has",
    "proposer: {kind: mtp, branching: [4, 16]}": "more than the 64 nodes that a draft can have; lower it",
    "proposer: {kind: mtp, branching: [2, 1, 1, 1]}": "4 levels are more than num_speculative_tokens (k), which is 3",
    "proposer: {kind: mtp, branching: [2, 0]}": "proposer.branching[1]: 0 is not allowed; must be at least 1",
    "measure: {quality: {kind: text}}": "measure.quality.path: missing; kind text needs it",
    "measure: {quality: 4, acceptance: 3}": "among kind, path, rows, length (and 1 more)",
    "run: {seed: -1}": "run.seed: -1 is not allowed; must be at least 0",
    "bundle: {private_key: none.pem}": "bundle.private_key:",
    "1: 2": "line 3, column 1: keys must be text",
    "name: again": "line 3, column 1: duplicate key 'name'",
    "run: {seed: 1, seed: 2}": "line 3, column 16: duplicate key 'seed'",
    "run: [": "line 4, column 1:",
    "run: !!python/name:os.system": "could not determine a constructor for the tag",
    "run: 2024-99-99": "month must be in 1..12",
    "---": "another document",
}


@pytest.mark.parametrize("line", REFUSED, ids=range(len(REFUSED)))
def test_a_bad_line_is_refused_by_name(write, line):
    path = write(f"{BASE}{line}\n")
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert REFUSED[line] in message


SOURCES = {
    "{}": "source.uri: missing (Folder, hub id",
    "{uri: ''}": "source.uri: '' is not allowed; must not be empty",
    "{uri: a/b, revision: 1234567}": "source.revision: 1234567 is not allowed; must be text (write it in quotes)",
    "{uri: 'pypi:a==1#b.gguf', sha256: ABC}": "source.sha256: 'ABC' is not allowed; must be 64 lower-case hex digits",
    "{uri: 'pypi:a==1#b.gguf', revision: main}": "only a hub id has revisions; remove it",
    f"{{uri: a/b, sha256: '{'0' * 64}'}}": "only a pypi: or .gguf source has one file to check; remove it",
}


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_a_bad_source_is_refused_by_name(write, source):
    assert SOURCES[source] in refusal(write(f"name: t\nsource: {source}\n"))


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b", ".hidden"])
def test_a_name_that_is_no_plain_folder_name_is_refused(write, name):
    assert "name: " in refusal(write(f"name: '{name}'\nsource: {{uri: a/b}}\n"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("[1, 2]", "holds a list, not a mapping"),
        ("words", "holds text, not a mapping"),
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0)"),
        (b"name: \x01", "special characters are not allowed"),
        ("[" * 3000, "nested too deeply"),
        ("\tname: t", "line 1, column 1"),
    ],
    ids=range(7),
)
def test_a_file_that_is_no_recipe_is_refused(write, content, said):
    assert said in refusal(write(content))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert refusal(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such recipe file"
    assert "is a directory" in refusal(tmp_path)


OVERRIDES = {
    "x": "--set x: write it as key=value",
    "=3": "write it as key=value",
    "quantization.metod=rtn": "--set: quantization.metod: unknown key; did you mean 'method'?",
    "seed=1": "--set: seed: unknown key; did you mean 'run.seed'?",
    "quantization=rtn": "--set: quantization: is a section; set one of its keys: format",
    "proposer.training=5": "--set: proposer.training: is a section; set one of its keys: answers, optimization, draft",
    "proposer.training.unrol=5": "--set: proposer.training.unrol: unknown key; did you mean 'unroll'?",
    "proposer.training.answers.cuont=5": "--set: proposer.training.answers.cuont: unknown key; did you mean 'count'?",
    "proposer.training.answers.count=0": "--set: proposer.training.answers.count: 0 is not allowed; must be at least 2",
    "proposer.training.answers.count.x=0": "proposer.training.answers.count is a value, not a section",
    "name.x=1": "--set: name.x: name is a value, not a section",
    "quantization.damping=-1": "--set: quantization.damping: -1 is not allowed; must be greater than 0",
    "quantization.ignore=[": "--set: quantization.ignore: line 1, column 2",
    "quantization.overrides.format=int8": "--set: quantization.overrides.format: quantization.overrides is a value",
    "quantization.overrides=[{targets: [a], format: x}]": "quantization.overrides[0].format: 'x' is not allowed",
    "calibration.path=none": "calibration.path: '",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_a_bad_override_is_refused_by_name(write, override):
    assert OVERRIDES[override] in refusal(write(BASE), [override])


def test_an_override_of_a_section_that_is_no_mapping_names_the_file(write):
    path = write(BASE + "run: 3\n")
    assert refusal(path, ["run.seed=1"]) == f"{path}: run: 3 is not allowed; must be a mapping"


def test_a_recipe_cannot_be_changed_after_its_check(write):
    with pytest.raises(ValueError, match="frozen"):
        Recipe.load(write(BASE)).name = "u"
