"""The command line: a recipe or a command, one line for a user's mistake, the right exit code, JSON on request."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import compressor
from compressor import cli
from compressor.errors import CompressError, UsageError

REPOSITORY = Path(__file__).parents[1]
COMMANDS = {
    *("run", "plan", "schema", "inspect", "generate", "serve", "train", "heal", "check-head", "lower-head"),
    *("verify", "sign", "report", "doctor"),
}
DIGEST = "0" * 64


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "keys"))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: tiny\nsource: {uri: org/name}\n")
    return path


@pytest.fixture
def pipeline(monkeypatch):
    """Stands in for the pipeline: notes its arguments, and returns `bundle` or raises `error`."""
    fake = SimpleNamespace(calls=[], error=None, bundle=SimpleNamespace(path=Path("bundle-tiny"), passport=passport()))

    def run(recipe, **options):
        fake.calls.append((recipe, options))
        if fake.error is not None:
            raise fake.error
        return fake.bundle

    fake.run = run
    monkeypatch.setitem(sys.modules, "compressor.pipeline", fake)
    monkeypatch.setattr(compressor, "pipeline", fake, raising=False)
    return fake


def passport():
    from compressor.bundle.passport import Passport
    from compressor.bundle.record_base import MEASURED

    def acceptance(target, tau):
        row = {"task": "evaluation prompts", "target": target, "k": 3, "conditional": [0.4, 0.6, None], "cycles": 240}
        return {**row, "tau": tau, "ci95": [tau - 0.1, tau + 0.1], "evidence": MEASURED}

    return Passport.make(
        created="2026-11-29T12:00:00Z",
        recipe={"name": "tiny"},
        source={
            "uri": "org/name",
            "kind": "hub",
            "files": {"model.safetensors": DIGEST},
            "parameters": 1_000_000,
            "total_bytes": 2_000_000,
            "tied": True,
        },
        target={
            "architecture": "LlamaForCausalLM",
            "model_type": "llama",
            "hidden_size": 64,
            "layers": 2,
            "vocab_size": 96,
            "dtype": "bfloat16",
        },
        quantization={
            "format": "int4-g64",
            "compression_format": "pack-quantized",
            "bits": 4,
            "group_size": 64,
            "bits_per_weight": 4.25,
            "activations": "16bit",
            "method": "gptq",
            "layers": [],
            "ignored": ["lm_head"],
        },
        proposer={"kind": "ngram", "num_speculative_tokens": 3},
        verifier={"rule": "accept with min(1, p/q)", "law": {"temperature": 0.0}},
        workload={"prompts": 8, "max_new_tokens": 64},
        outcomes={
            "quality": [
                {
                    "name": "self",
                    "dataset": DIGEST,
                    "tokens": 8176,
                    "baseline": 12.5,
                    "quantized": 13.25,
                    "kl_nats": 0.0812,
                    "tv": 0.11,
                    "top1_agreement": 0.87,
                    "evidence": MEASURED,
                }
            ],
            "acceptance": [acceptance("baseline", 1.72), acceptance("quantized", 1.64)],
        },
        ledger={
            "parameters": 1_000_000,
            "original_bytes": 2_000_000,
            "bundle_bytes": 600_000,
            "quantized_bytes": 500_000,
            "scales_bytes": 20_000,
            "unquantized_bytes": 100_000,
            "bits_per_weight_model": 4.8,
            "files": {"model.safetensors": DIGEST},
        },
        environment={"python": "3.11", "packages": {}, "platform": "test", "cpu": "test", "cores": 1},
    )


# ------------------------------------------------------------------ a recipe or a command


def test_help_lists_exactly_the_commands_that_work():
    result = call("--help")
    assert result.exit_code == 0
    listed = re.findall(r"^  ([\w-]+)  ", result.stdout.partition("Commands:")[2], re.MULTILINE)
    assert set(listed) == COMMANDS == set(listed)


def test_version():
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"compress {compressor.__version__}\n")


@pytest.mark.parametrize("words", [["{}"], ["run", "{}"], ["--resume", "{}"], ["{}", "--resume"]])
def test_a_recipe_runs_with_or_without_the_word_run(pipeline, recipe, words):
    result = call(*[word.format(recipe) for word in words])
    assert result.exit_code == 0, result.output
    (job, options), *others = pipeline.calls
    assert not others
    assert job.name == "tiny"
    assert (options["out"], options["work"]) == (Path("bundle-tiny"), Path("bundle-tiny.work"))
    assert (options["resume"], options["offline"]) == ("--resume" in words, False)


def test_options_reach_the_pipeline(pipeline, recipe):
    result = call(recipe, "--out", "a", "--work", "b", "--offline", "--set", "run.seed=3", "--set", "name=u")
    assert result.exit_code == 0, result.output
    ((job, options),) = pipeline.calls
    assert (options["out"], options["work"], options["offline"]) == (Path("a"), Path("b"), True)
    assert (job.run.seed, job.name) == (3, "u")


@pytest.mark.parametrize("work", ["a", "a/b", "."])
def test_a_work_folder_in_or_around_the_bundle_is_refused(pipeline, recipe, work):
    result = call(recipe, "--out", "a", "--work", work)
    assert (result.exit_code, pipeline.calls) == (2, [])
    assert result.stderr.startswith(f"error: --work {work}: lies in the bundle's folder a or around it")


def test_a_mistyped_command_is_met_with_the_nearest():
    result = call("paln", "recipe.yaml")
    assert result.exit_code == 2
    assert "'paln' is neither a command nor a recipe file; did you mean 'plan'?" in result.stderr


def test_later_commands_are_not_pretended():
    for name in ("eval", "bench", "tax", "publish"):
        assert call(name, "bundle").exit_code == 2


@pytest.mark.parametrize("arguments", [["plan"], ["r.yaml", "--bogus"], ["verify"], ["generate", "b", "--k"], []])
def test_bad_options_exit_2(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_commands_shown_in_the_ready_recipes_parse(pipeline, monkeypatch, tmp_path):
    trained = []

    def train(recipe, out, *_, **__):
        trained.append((recipe.name, out))
        raise CompressError("enough")

    monkeypatch.setattr("compressor.train.run.train", train)
    monkeypatch.chdir(tmp_path)
    for path in sorted((REPOSITORY / "recipes").glob("*.yaml")):
        (command,) = re.findall(r"^#   (compress .*)$", path.read_text(), re.MULTILINE)
        _, *arguments = command.split()
        result = call(*[REPOSITORY / word if word.startswith("recipes/") else word for word in arguments])
        assert result.exit_code == (1 if arguments[0] == "train" else 0)
    assert len(pipeline.calls) == 10 and trained == [("smollm2-135m-eagle3", Path("head"))]


# ------------------------------------------------------------------ what the end of a run says


def test_a_run_ends_with_before_and_after_within_80_plain_columns_and_the_path(pipeline, recipe):
    result = call(recipe)
    lines = result.stdout.splitlines()
    assert lines[-1] == "bundle: bundle-tiny"
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in result.stdout and "─" not in result.stdout
    rows = {line[:30].strip(): line.split() for line in lines}
    assert rows["Weights"][1:] == ["2", "MB", "600", "kB", "÷", "3.33"]
    text = " ".join(result.stdout.split())
    for part in ("before after change", "4.25", "12.500 13.250 +6.0 %", "0.0812", "87.0 %"):
        assert part in text
    assert "1.72 [1.62, 1.82]" in text and "1.64 [1.54, 1.74]" in text


def test_json_goes_to_a_file_beside_the_table(pipeline, recipe, tmp_path):
    result = call(recipe, "--json", "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["bundle"] == "bundle-tiny"
    assert written["passport"]["outcomes"]["quality"][0]["kl_nats"] == 0.0812
    assert "bundle: bundle-tiny" in result.stdout


def test_json_on_stdout_is_alone_there(pipeline, recipe):
    result = call(recipe, "--json", "-")
    assert json.loads(result.stdout)["bundle"] == "bundle-tiny"
    assert "bundle: bundle-tiny" in result.stderr


def test_a_json_file_in_no_folder_is_refused_before_the_work(pipeline, recipe):
    result = call(recipe, "--json", "none/result.json")
    assert (result.exit_code, pipeline.calls) == (2, [])
    assert "--json none/result.json: folder" in result.stderr


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CompressError("model.safetensors: truncated"), 1, "error: model.safetensors: truncated"),
        (UsageError("--out x: exists"), 2, "error: --out x: exists"),
        (CompressError("two\nlines"), 1, "error: two lines"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/w/block-00001.safetensors.tmp"),
            1,
            "error: no space left on device while writing /w/block-00001.safetensors.tmp: free space or choose another "
            "place",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "error: no space left on device: free space or choose another place",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/w"), 1, "error: /w: permission denied"),
        (OSError("a message\n  of a library"), 1, "error: a message of a library"),
        (KeyboardInterrupt(), 130, "error: interrupted; continue with --resume"),
    ],
)
def test_what_a_user_can_cause_is_one_line(pipeline, recipe, error, code, line):
    pipeline.error = error
    result = call(recipe)
    assert (result.exit_code, result.stderr, result.stdout) == (code, line + "\n", "")


def test_a_programming_error_keeps_its_traceback(pipeline, recipe):
    pipeline.error = ValueError("ours")
    result = call(recipe)
    assert isinstance(result.exception, ValueError)
    assert result.exit_code == 1


def test_a_bad_recipe_exits_2_in_one_line_and_starts_nothing(pipeline, recipe):
    recipe.write_text("name: tiny\nsource: {uri: org/name}\nquantization: {metod: gptq}\n")
    for words in ([recipe], ["plan", recipe]):
        result = call(*words)
        assert (result.exit_code, pipeline.calls) == (2, [])
        assert result.stderr == f"error: {recipe}: quantization.metod: unknown key; did you mean 'method'?\n"


def test_the_real_command_prints_no_traceback_and_the_right_code(tmp_path):
    command = [sys.executable, "-m", "compressor.cli"]
    done = subprocess.run([*command, "none.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: none.yaml: no such recipe file\n")


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    code = "from compressor import cli; import sys; sys.argv = ['compress', 'schema']; cli.main()"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize("words", [["--help"], ["schema"], ["run", "--help"]])
def test_help_and_schema_import_nothing_heavy(words):
    code = (
        "import sys; from typer.testing import CliRunner; from compressor import cli; "
        f"assert CliRunner().invoke(cli.app, {words}).exit_code == 0; "
        "sys.exit(','.join({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------ the other commands


def test_schema_prints_the_shipped_schema(tmp_path):
    from compressor.recipe import shipped_schema

    assert call("schema").stdout == shipped_schema()
    assert call("schema", "--json", "schema.json").exit_code == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == json.loads(shipped_schema())


@pytest.fixture
def checkpoint(tmp_path):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"]
    save_file({name: torch.zeros(4, 8, dtype=torch.bfloat16) for name in names}, folder / "model.safetensors")
    return folder


def test_inspect_shows_tensors_bytes_and_mtp_modules(checkpoint):
    result = call("inspect", checkpoint, "--json", "-")
    found = json.loads(result.stdout)
    assert (found["kind"], found["bytes"], found["parameters"]) == ("folder", 4 * 64, 4 * 32)
    assert (found["mtp_modules"], found["tied"], found["format"]) == (["mtp"], False, None)
    assert found["tensors"][0] == {"name": "lm_head.weight", "dtype": "bfloat16", "shape": [4, 8], "bytes": 64}
    text = call("inspect", checkpoint).stdout
    assert "model.layers.*.self_attn.q_proj.weight" in text and "MTP modules: mtp" in text
    assert all(len(line) <= 80 or line.startswith(str(checkpoint)) for line in text.splitlines())


def test_inspect_names_the_format_of_a_quantized_checkpoint_or_why_it_cannot(checkpoint):
    from compressor import formats

    config = json.loads((checkpoint / "config.json").read_text())
    ours = formats.config.quantization_config(formats.get("nvfp4"), activations=True, ignore=["lm_head"])
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": ours}))
    found = json.loads(call("inspect", checkpoint, "--json", "-").stdout)["format"]
    assert (found["name"], found["activations"], found["ignore"]) == ("nvfp4", "4bit", ["lm_head"])
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    found = json.loads(call("inspect", checkpoint, "--json", "-").stdout)["format"]
    assert (found["name"], found["quant_method"]) == (None, "gptq")


def test_inspect_reads_a_gguf_header_and_refuses_a_broken_one(tmp_path):
    import gguf
    import numpy

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_q.weight", numpy.zeros((4, 8), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = json.loads(call("inspect", "tiny.gguf", "--json", "-").stdout)
    assert (found["kind"], found["architecture"], found["layers"]) == ("gguf", "llama", 1)
    assert found["tensors"] == [{"name": "blk.0.attn_q.weight", "dtype": "F32", "shape": [4, 8], "bytes": 128}]
    Path("broken.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    result = call("inspect", "broken.gguf")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: broken.gguf: not a readable GGUF file, or truncated")


@pytest.mark.parametrize(("path", "code"), [("none", 2), ("recipe.yaml", 2), (".", 1)])
def test_inspect_refuses_what_is_no_checkpoint(recipe, path, code):
    result = call("inspect", path)
    assert result.exit_code == code
    assert result.stderr.count("\n") == 1 and path in result.stderr


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "passport.json").write_text(passport().to_json())
    return folder


def test_sign_then_verify_signature_names_the_key_and_what_differs(bundle):
    result = call("sign", "bundle", "--json", "signed.json")
    assert result.exit_code == 0, result.output
    signed = json.loads(Path("signed.json").read_text())
    assert Path(signed["signature"]).name == "model.sig" and Path(signed["public_key"]).exists()
    (bundle / "added.txt").write_text("x")
    result = call("verify", "bundle", "--json", "verified.json")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and "added.txt" in result.stderr
    assert json.loads(Path("verified.json").read_text())["verified"] is False


def test_verify_says_so_when_everything_holds(bundle, monkeypatch):
    from compressor.bundle import Bundle

    monkeypatch.setattr(Bundle, "verify", lambda self, public_key: None)
    result = call("verify", "bundle", "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["verified"]) == (0, True)


def test_a_folder_that_is_no_bundle_is_refused_by_every_bundle_command(tmp_path):
    (tmp_path / "empty").mkdir()
    for words in (["verify"], ["sign"], ["report"], ["generate", "--prompt", "x"]):
        result = call(words[0], "empty", *words[1:])
        assert result.exit_code == 1
        assert "passport.json: not found" in result.stderr and result.stderr.count("\n") == 1
    assert list((tmp_path / "empty").iterdir()) == []


def test_report_writes_a_page_outside_the_bundle_only(bundle, monkeypatch):
    from compressor.bundle import report

    monkeypatch.setattr(report, "render", lambda passport: f"<html>{passport.recipe['name']}</html>")
    assert call("report", "bundle").stdout == "report: report-bundle.html\n"
    assert Path("report-bundle.html").read_text() == "<html>tiny</html>"
    result = call("report", "bundle", "--out", "bundle/report.html")
    assert result.exit_code == 2 and "lies in the bundle" in result.stderr
    assert not (bundle / "report.html").exists()


def test_generate_prints_the_text_as_it_grows_and_how_it_was_made(bundle, monkeypatch):
    import tiny_models as tiny

    from compressor.bundle import Bundle
    from compressor.decode import Output

    tokenizer = tiny.tokenizer()
    words = tokenizer("né!").input_ids  # the last one is the model's end of text, and no special token

    class Runner:
        stop = "eos"

        def stream(self, ids, max_new_tokens, law, seed):
            assert (max_new_tokens, seed, law.temperature, law.top_k) == (4, 7, 0.5, 9)
            assert (law.top_p, law.min_p, law.repetition_penalty) == (0.9, 0.1, 1.2)
            Runner.prompt = tokenizer.decode(ids)
            yield words[:1], Output()
            yield words[1:], Output(words, accepted_per_position=[(), (1, 0)], stop=Runner.stop)

    def runner(self, proposer, k, *, branching, rule, kernel):
        assert (proposer, k, branching, rule, kernel) == ("mtp", 2, (3, 1), "typical", "dequantized")
        return Runner()

    monkeypatch.setattr("compressor.generation._grammar", lambda *arguments: None)
    monkeypatch.setattr(Bundle, "tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(Bundle, "runner", runner)
    law = ["--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.1"]
    law += ["--repetition-penalty", "1.2", "--seed", "7"]
    how = ["--proposer", "mtp", "--k", "2", "--branching", "3,1", "--rule", "typical", "--kernel", "dequantized"]
    words_ = ["generate", "bundle", "--prompt", "Hello", "--max-new-tokens", "4", *law, *how]
    result = call(*words_)
    assert (result.exit_code, result.stdout) == (0, "né\n"), result.output
    assert Runner.prompt == "<s>user\nHello</s>\n<s>assistant\n"
    assert "[4 tokens, ended by the model; 2 cycles that verified 1.50 tokens each, accepted 1.00/.00" in result.stderr
    assert "LOSSY acceptance" in result.stderr
    answer = json.loads(call(*words_, "--raw", "--json", "-").stdout)
    assert (answer["prompt_tokens"], answer["chat_template"], answer["lossy"]) == (5, False, True)
    assert answer["accepted_per_position"] == [[], [1, 0]] and answer["text"] == "né"
    assert answer["token_ids"] == words
    Runner.stop = "length"  # the same token ends nothing
    assert call(*words_).stdout == "né!\n"
    cut = "warning: cut at 4 tokens, before the grammar was complete"
    assert cut in call(*words_, "--regex", "x+").stderr and cut not in call(*words_).stderr


@pytest.mark.parametrize(("options", "text"), [(["--raw"], " w5 w6"), ([], "w5 w6")], ids=["continued", "answered"])
def test_generate_keeps_the_space_between_a_raw_prompt_and_what_follows(bundle, monkeypatch, options, text):
    import tiny_models as tiny

    from compressor.bundle import Bundle
    from compressor.decode import Output

    class Runner:
        decoder = SimpleNamespace(stops=frozenset(), vocab_size=8)

        def stream(self, *arguments):
            yield [5], Output()
            yield [6], Output([5, 6], accepted_per_position=[(), ()])

    monkeypatch.setattr(Bundle, "tokenizer", lambda self: tiny.sentencepiece(["▁w3", "▁w4", "▁w5", "▁w6", "x"]))
    monkeypatch.setattr(Bundle, "runner", lambda *arguments, **options: Runner())
    result = call("generate", "bundle", "--prompt", "x", *options)
    assert (result.exit_code, result.stdout) == (0, f"{text}\n"), result.output


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--k", "0", "neither a number from 1 to 64 nor auto"),
        ("--k", "many", "neither a number from 1 to 64 nor auto"),
        ("--k", "65", "neither a number from 1 to 64 nor auto"),
        ("--k", "9" * 5000, "neither a number from 1 to 64 nor auto"),
        ("--branching", "3,0", "not a list of numbers from 1 to 64"),
        ("--branching", "3," + "9" * 5000, "not a list of numbers from 1 to 64"),
        ("--branching", "3,2", "drafts one chain; leave the branching out, or take draft, medusa, eagle3, mtp"),
        ("--branching", "9,9,9", "branching: 9,9,9: its tree has more than the 64 nodes that a draft can have"),
        ("--branching", "2,1,1,1", "its 4 levels are more than num_speculative_tokens (k), which is 3"),
        ("--rule", "medusa", "rule: 'medusa' is not one of exact, typical"),
        ("--kernel", "gpu", "kernel: 'gpu' is not one of auto, cpu-int4, dequantized"),
        ("--json-schema", "nowhere", "--json-schema nowhere: cannot be read (No such file or directory)"),
        ("--json-schema", ".", "--json-schema .: cannot be read (Is a directory)"),
        ("--json-schema", "bundle/notes", "--json-schema bundle/notes: not JSON (Expecting value: line 1 column 1"),
        ("--proposer", "eagle9", "proposer 'eagle9' is unknown"),
        ("--proposer", "draft", "proposer holds no config.json"),
        ("--proposer", "draft:nowhere", "nowhere holds no config.json"),
        ("--proposer", "eagle3", "holds no config.json"),
        ("--proposer", "ngram:x", "takes no folder"),
        ("--min-p", "2", "min_p: 2.0 is not a number in [0, 1]"),
    ],
)
def test_generate_refuses_before_anything_is_loaded(bundle, monkeypatch, option, value, says):
    (bundle / "notes").write_text("a colour and an animal")
    monkeypatch.setattr("compressor.decode.engine.load", None)
    monkeypatch.setattr("compressor.bundle.Bundle.tokenizer", lambda self: __import__("tiny_models").tokenizer())
    result = call("generate", "bundle", "--prompt", "x", option, value)
    assert result.exit_code == 2 and says in " ".join(result.stderr.split()), result.output


def test_generate_loads_what_it_has_no_reason_to_refuse(bundle, monkeypatch):
    monkeypatch.setattr("compressor.decode.engine.load", None)
    monkeypatch.setattr("compressor.bundle.Bundle.tokenizer", lambda self: __import__("tiny_models").tokenizer())
    (bundle / "schema.json").write_text("{}")
    options = ["--proposer", "mtp", "--k", "2", "--branching", "4,15", "--rule", "typical", "--kernel", "cpu-int4"]
    result = call("generate", "bundle", "--prompt", "x", *options, "--json-schema", "bundle/schema.json")
    assert isinstance(result.exception, TypeError)  # None is not callable


SERVE_REFUSES = [
    ("--k", "65", "--k 65: neither a number from 1 to 64 nor auto"),
    ("--branching", "9,9,9", "branching: 9,9,9: its tree has more than the 64 nodes that a draft can have"),
    ("--branching", "2,1,1,1", "its 4 levels are more than num_speculative_tokens (k), which is 3"),
    ("--rule", "medusa", "rule: 'medusa' is not one of exact, typical"),
    ("--kernel", "gpu", "kernel: 'gpu' is not one of auto, cpu-int4, dequantized"),
    ("--host", "x..y", "--host x..y: neither an address nor a host name"),
]


@pytest.mark.parametrize(("option", "value", "says"), SERVE_REFUSES)
def test_serve_refuses_before_the_bundle_is_opened(monkeypatch, option, value, says):
    opened = []
    monkeypatch.setattr("compressor.bundle.Bundle.open", lambda path: opened.append(path) or 1 / 0)
    result = call("serve", "bundle", option, value)
    assert result.exit_code == 2 and says in " ".join(result.stderr.split()), result.output
    assert not opened
    assert isinstance(call("serve", "bundle", "--port", "0").exception, ZeroDivisionError) and opened


@pytest.mark.parametrize(("option", "value", "says"), [("--proposer", "eagle9", "'eagle9' is unknown")])
def test_serve_refuses_before_the_model_is_loaded(bundle, monkeypatch, option, value, says):
    monkeypatch.setattr("compressor.decode.engine.load", None)
    monkeypatch.setattr("compressor.bundle.Bundle.tokenizer", lambda self: None)
    result = call("serve", "bundle", "--port", "0", option, value)
    assert result.exit_code == 2 and says in result.stderr, result.output
    assert isinstance(call("serve", "bundle", "--port", "0").exception, TypeError)


@pytest.mark.parametrize(
    ("k", "branching", "deepest"),
    [("auto", None, 8), ("auto", "3,2", 2), ("auto", "1," * 9 + "1", 10), ("5", "3,2", 5)],
)
def test_an_automatic_length_chooses_among_the_levels_of_the_tree(k, branching, deepest):
    from compressor import generation

    made = generation.settings("mtp", k, branching, "exact", "auto")
    assert (made.k if k != "auto" else made.k.limit) == deepest


def test_generate_refuses_a_law_outside_its_range(bundle):
    result = call("generate", "bundle", "--prompt", "x", "--top-p", "0")
    assert result.exit_code == 2 and "top_p" in result.stderr


def test_doctor_proves_a_path_for_every_format():
    from compressor import formats

    result = call("doctor", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [kernel["format"] for kernel in found["kernels"]] == formats.names()
    assert all(kernel["proof"] for kernel in found["kernels"])
    assert found["memory_bytes"] > 1e8 and found["here"]["free_bytes"] > 0


# ------------------------------------------------------------------ the package


def test_the_public_names_are_there_and_others_are_not():
    from compressor.recipe import Recipe

    assert compressor.Recipe is Recipe and compressor.UsageError is UsageError
    assert {"Recipe", "Bundle", "compress"} <= set(dir(compressor))
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = compressor.Recipes


def test_compress_is_what_the_command_does(pipeline, recipe):
    made = compressor.compress(compressor.Recipe.load(recipe), out="there/")
    assert made is pipeline.bundle
    ((_, options),) = pipeline.calls
    assert (options["out"], options["work"], options["resume"]) == (Path("there"), Path("there.work"), False)


def test_the_current_folder_may_be_the_bundle(pipeline, recipe, tmp_path):
    compressor.compress(compressor.Recipe.load(recipe), out=".")
    ((_, options),) = pipeline.calls
    assert (options["out"], options["work"]) == (tmp_path, tmp_path.parent / f"{tmp_path.name}.work")
