"""JSON files of a checkpoint are refused in one line naming file, key and value, whatever is in them."""

import json

import pytest

from compressor.checkpoint.config import read_config, read_json_object
from compressor.errors import CompressError, brief

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "compressed-tensors"},
}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def refusal(read, path) -> str:
    with pytest.raises(CompressError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b"5", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (nested(100_000).encode(), "nested too deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
        (b'{"a":' + nested(70).encode() + b"}", "nested deeper than 64 levels"),
        (b'{"a": "\\ud800"}', "no Unicode text"),
        (b'{"\\udfff": 1}', "no Unicode text"),
    ],
)
def test_what_is_no_json_object_is_named(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    assert f"{path}: " in refusal(read_json_object, path)
    assert said in refusal(read_json_object, path)


def test_a_missing_file_and_a_folder_in_its_place_are_named(tmp_path):
    assert f"{tmp_path / 'config.json'}: not found" in refusal(read_config, tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json: cannot be read" in refusal(read_config, tmp_path)


def test_ordinary_nesting_and_text_are_read_as_they_are(tmp_path):
    value = {"a": {"b": [{"c": "\N{SNOWMAN}"}]}, "d": json.loads(nested(50))}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_json_object(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": 5}, "no model_type"),
        *(({"architectures": value}, "architectures: ") for value in (5, "x", [5], [None], {})),
        *(({"tie_word_embeddings": value}, "tie_word_embeddings: ") for value in ("x", 1, [])),
        *(({"quantization_config": value}, "quantization_config: ") for value in (5, [], "x", True)),
        *(({"text_config": value}, "text_config: ") for value in (5, [1], "x")),
        *(({"num_hidden_layers": value}, "num_hidden_layers: ") for value in ("2", 0, -1, 2.5, True, 10**9, [2])),
        ({"hidden_size": 1e400}, "hidden_size: inf is not a whole number"),
        ({"vocab_size": {}}, "vocab_size: {} is not a whole number"),
        *(({"dtype": value}, "dtype: ") for value in (5, [], True)),
        ({"torch_dtype": [1]}, "torch_dtype: [1] is not the name of a dtype"),
        ({"text_config": {"num_hidden_layers": "x"}}, "text_config.num_hidden_layers: 'x'"),
        ({"text_config": {"tie_word_embeddings": "x"}}, "text_config.tie_word_embeddings: 'x'"),
        ({"architectures": [{"a": "b" * 10_000}]}, "architectures: [{'a': 'bbb"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tmp_path, change, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    message = refusal(read_config, tmp_path)
    assert message.startswith(f"{path}: ") and said in message


@pytest.mark.parametrize("change", [{}, {"text_config": {"hidden_size": 64}}, {"dtype": {"text_config": "bfloat16"}}])
def test_a_sound_config_is_read(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert read_config(tmp_path) == {**CONFIG, **change}


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
def test_a_config_may_leave_out_or_null_what_its_class_knows(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: None}))
    assert read_config(tmp_path)[key] is None
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
    assert key not in read_config(tmp_path)


def test_a_long_value_is_cut_for_a_message():
    assert brief([1, 2]) == "[1, 2]"
    assert len(brief("x" * 1000)) == 80
