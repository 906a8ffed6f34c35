"""The JSON files of a checkpoint folder, checked once where they are read so that their readers need not doubt them."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from compressor.errors import CompressError, brief
from compressor.text import is_unicode

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# What transformers raises for values of a config that it does not expect.
TRANSFORMERS_ERRORS = (
    *(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, RuntimeError, AssertionError),
    StrictDataclassError,
)
# A config nests about six levels. Far deeper ones exhaust the stack of whatever walks them: repr, copies, transformers.
_DEEPEST = 64
# Far above any model. A layer count that no shard matches would otherwise be built before anything compares the two.
_LARGEST = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "vocab_size": 1 << 28}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. CompressError, one line, if missing, not JSON, nested too deep or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CompressError(f"{path}: not found; a checkpoint folder holds it beside its safetensors") from None
    except OSError as error:
        raise CompressError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise CompressError(f"{path}: nested too deep; no checkpoint's JSON is") from None
    except ValueError as error:
        raise CompressError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CompressError(f"{path}: not a JSON object")
    _check_values(value, path)
    return value


def read_config(folder: Path | str) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    What this package reads of it has the right type or is absent: `model_type` (always there), `architectures`,
    `tie_word_embeddings`, the sizes, and the sections `text_config` and `quantization_config`, whose own fields
    `compressor.formats.config` checks. Raises CompressError, one line, naming file, key and value otherwise.
    """
    path = Path(folder) / CONFIG
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise CompressError(f"{path}: no model_type, so the architecture is unknown")
    for key in ("text_config", "quantization_config"):
        if not isinstance(config.get(key), dict | None):
            raise CompressError(f"{path}: {key}: {brief(config[key])} is not an object; correct or remove it")
    check_fields(config, f"{path}: ")
    check_fields(config.get("text_config") or {}, f"{path}: text_config.")
    return config


def check_fields(section: dict[str, Any], where: str) -> None:
    """What `read_config` promises of a section. Raises CompressError, its line begun by `where`."""
    for key, largest in _LARGEST.items():
        value = section.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            raise CompressError(f"{where}{key}: {brief(value)} is not a whole number from 1 to {largest}; correct it")
    tied = section.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise CompressError(f"{where}tie_word_embeddings: {brief(tied)} is neither true nor false; correct it")
    for key in ("dtype", "torch_dtype"):
        if not isinstance(section.get(key), str | dict | None):  # of a multimodal model, an object by part
            raise CompressError(f"{where}{key}: {brief(section[key])} is not the name of a dtype; correct it")
    names = section.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CompressError(f"{where}architectures: {brief(names)} is not a list of class names; correct it")


def _check_values(value: dict[str, Any], path: Path) -> None:
    """Refuse what a parser lets pass and later readers cannot take, without recursion."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not is_unicode(item):
                raise CompressError(f"{path}: {brief(item)} is no Unicode text")  # JSON can escape half a pair
        if not below:
            return
        level = below
    raise CompressError(f"{path}: nested deeper than {_DEEPEST} levels; no checkpoint's JSON is")
