"""A bundle whose files are absurd, though signed with the right key: each command ends in one line, never a traceback.

The variants go through the command line on a bundle of the real pipeline, so that `generate` gets as far as it can.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models as tiny
from typer.testing import CliRunner

from compressor import cli, pipeline
from compressor.bundle import signing
from compressor.recipe import Recipe
from compressor.ui import NullUI

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("real")
    signing.ensure_keypair(root / "keys")
    made = Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(tiny.save(root / "source", "llama-tied"))},
            "quantization": {"format": "nvfp4", "method": "rtn", "scale_search": "none"},
            "bundle": {"private_key": str(root / "keys" / signing.PRIVATE_KEY)},
            "proposer": {"kind": "none"},
            "measure": {"quality": {"kind": "none"}},
        }
    )
    pipeline.run(made, out=root / "bundle", work=root / "work", ui=NullUI())
    return root


@pytest.fixture
def errors(real, tmp_path) -> Callable[..., dict[str, str]]:
    """Edit a copy, sign it, and run the three commands; their error lines by command, empty where they succeed."""
    folder, private, public = tmp_path / "bundle", *(real / "keys" / name for name in ("signing.key", "signing.pub"))
    shutil.copytree(real / "bundle", folder)

    def run(file: str, text: str | bytes, *, sign: bool = True) -> dict[str, str]:
        (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        if sign:
            signing.sign(folder, private)
        commands = {
            "verify": ["--public-key", str(public)],
            "inspect": ["--json", str(tmp_path / "out.json")],
            "generate": ["--prompt", "hi", "--max-new-tokens", "2"],
        }
        found = {}
        for command, options in commands.items():
            result = CliRunner().invoke(cli.app, [command, str(folder), *options])
            assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
            lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            assert (result.exit_code, len(lines)) in ((0, 0), (1, 1)), (command, result.stderr)
            found[command] = "".join(lines)
        return found

    return run


def config_of(real: Path) -> dict:
    return json.loads((real / "bundle/config.json").read_text())


def test_the_bundle_itself_passes(real, errors):
    assert set(errors("config.json", json.dumps(config_of(real))).values()) == {""}


def test_a_programming_error_would_show(real, errors, monkeypatch):
    monkeypatch.setattr("compressor.bundle.contents.Inventory.read", lambda folder: 5)
    with pytest.raises(AssertionError, match="verify"):
        errors("config.json", json.dumps(config_of(real)))


WHOLE = {  # what stands in for the whole file
    "empty": b"",
    "half": b"{",
    "bytes": b"\xff\xfe\x00",
    "number": b"5",
    "list": b"[]",
    "null": b"null",
    "deep": DEEP.encode(),
    "deeper than repr": b"[" * 500 + b"]" * 500,
    "long integer": b'{"a": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_that_is_no_object(errors, name):
    assert all("config.json: " in line for line in errors("config.json", WHOLE[name]).values())


TOP = [  # all three commands name the key
    *(("quantization_config", value) for value in (5, "x", [], [{}], True)),
    *(("architectures", value) for value in (5, "x", [5], {}, [["a"]])),
    *(("tie_word_embeddings", value) for value in ("x", 5, [])),
    *(("text_config", value) for value in (5, "x", [1])),
    *((key, value) for key in ("num_hidden_layers", "hidden_size", "vocab_size") for value in ("x", -1, 1.5, 10**10)),
    *(("dtype", value) for value in (5, [], [[1]])),
    *(("model_type", value) for value in (5, None)),
]


@pytest.mark.parametrize(("key", "value"), TOP)
def test_a_field_of_the_wrong_type(real, errors, key, value):
    found = errors("config.json", json.dumps({**config_of(real), key: value}))
    assert all("config.json: " in line and key in line for line in found.values())


SECTION = [  # verify and generate need them
    *(("ignore", value) for value in (5, [{}], "lm_head", [None], {"a": 1}, ["re:("], ["re:" + "(" * 5000])),
    *(("config_groups", value) for value in (5, [1], {}, {"a": 5}, {"a": []}, {"a": {}}, {"a": {"weights": 5}})),
    *(("config_groups", {"a": {"targets": ["Linear"], "weights": w}}) for w in ([], "x", {"num_bits": []})),
    ("config_groups", {"a": {"targets": ["Linear"], "weights": {"num_bits": 0}}}),
    *(("format", value) for value in (5, [1], {})),
    *(("kv_cache_scheme", value) for value in (5, [1])),
]


@pytest.mark.parametrize(("key", "value"), SECTION)
def test_an_absurd_quantization_section(real, errors, key, value):
    config = config_of(real)
    config["quantization_config"][key] = value
    found = errors("config.json", json.dumps(config))
    assert all("config.json: " in found[command] for command in ("verify", "generate"))
    assert f"quantization_config.{key}" in found["generate"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_attention_heads", value) for value in ("x", 0, 3, True)),
        *(("rope_parameters", value) for value in (5, [], "x")),
        *(("hidden_act", value) for value in (5, "x", {})),
        *(("eos_token_id", value) for value in ("x", {}, [[1]])),
        *(("layer_types", value) for value in ("x", [])),
        *((key, value) for key in ("per_layer_config", "to_dict") for value in (5, "x")),
        ("num_labels", "x"),
        ("_attn_implementation", "x"),
    ],
)
def test_a_field_that_only_transformers_reads(real, errors, key, value):
    assert errors("config.json", json.dumps({**config_of(real), key: value}))["generate"]


def test_a_model_that_would_answer_with_tuples_generates(real, errors):
    assert set(errors("config.json", json.dumps({**config_of(real), "return_dict": False})).values()) == {""}


@pytest.mark.parametrize("dtype", ["float7", "int8", "float64", "__name__"])
def test_a_passport_with_a_dtype_that_no_model_has(real, errors, dtype):
    fields = json.loads((real / "bundle/passport.json").read_text())
    fields["target"]["dtype"] = dtype
    found = errors("passport.json", json.dumps(fields))
    for command in ("verify", "generate"):
        assert f"target.dtype: {dtype} is not a torch dtype" in found[command]


@pytest.mark.parametrize(
    "text", ["5", "{", DEEP, '{"eos_token_id": "x"}', '{"eos_token_id": 1.5}', '{"eos_token_id": true}']
)
def test_an_absurd_generation_config(errors, text):
    assert "generation_config.json: " in errors("generation_config.json", text)["generate"]


@pytest.mark.parametrize("text", ["5", "{", DEEP, '{"weight_map": 5}'])
def test_an_absurd_index(errors, text):
    assert all("index.json: " in line for line in errors("model.safetensors.index.json", text).values())


@pytest.mark.parametrize("text", ["5", DEEP])
def test_an_absurd_tokenizer_config(errors, text):
    assert "no usable tokenizer" in errors("tokenizer_config.json", text)["generate"]
