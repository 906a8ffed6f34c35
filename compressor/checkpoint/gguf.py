"""GGUF files: converted once, by transformers, into a dense safetensors folder in the cache."""

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from safetensors import SafetensorError

from compressor.checkpoint.digest import Progress
from compressor.checkpoint.reader import ShardReader
from compressor.checkpoint.writer import ensure_space
from compressor.errors import CompressError, UsageError, naming

CONVERTER_VERSION = 1  # raise it whenever the converted bytes change
_TOKENIZER_BYTES = 50_000_000  # ample for the largest vocabularies
_DTYPES = ("bfloat16", "float16", "float32")

# llama.cpp's pre-tokenizers (src/llama-vocab.cpp) for byte-level vocabularies. The first set cuts every digit off
# before GPT-2's rule; transformers 5.24 has no entry for it and applies GPT-2's rule alone, under which blanks before a
# digit come out as tokens the model never saw in that place ("\n\n1." as three tokens instead of two).
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_RULE = {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}


class Converted(NamedTuple):
    """A converted folder (config.json, safetensors, tokenizer files) and what had to be decided on the way."""

    folder: Path
    notes: list[str]


def cached(sha256: str, *, dtype: str, cache: Path) -> Converted | None:
    """The finished conversion of the GGUF with this SHA-256, if the cache has it."""
    place = _place(sha256, dtype, cache)
    if not place.is_dir():
        return None
    notes = json.loads((place / "conversion.json").read_text(encoding="utf-8"))["notes"]
    return Converted(place / "model", notes)


def convert(path: Path, *, sha256: str, dtype: str, cache: Path, progress: Progress | None = None) -> Converted:
    """Convert a GGUF file to dense safetensors of `dtype` ("bfloat16", "float16" or "float32"), once.

    transformers rebuilds the config and the tokenizer and dequantizes every tensor in float32 before rounding to
    `dtype`. The whole model passes through memory. The result is moved into the cache in one rename, under a key of the
    file's SHA-256, the dtype and the converter's versions, so a killed conversion leaves nothing that looks complete.

    Raises CompressError for an unreadable or truncated file, an architecture or tensor type transformers does not
    know, and weights that would be lost or left uninitialized; UsageError for another dtype.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one a GGUF can be converted to; use {', '.join(_DTYPES)}")
    ready = cached(sha256, dtype=dtype, cache=cache)
    if ready is not None:
        return ready
    if progress is not None:
        progress(f"converting {path.name} to {dtype} safetensors (once; kept in {cache})")
    reader = _open(path)
    place = _place(sha256, dtype, cache)
    values = sum(int(tensor.n_elements) for tensor in reader.tensors)
    ensure_space(cache, values * (4 if dtype == "float32" else 2) + _TOKENIZER_BYTES)
    place.parent.mkdir(parents=True, exist_ok=True)
    building = place.with_name(f".building-{place.name}")
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = cached(sha256, dtype=dtype, cache=cache)
        if ready is not None:  # another process made it while this one waited
            return ready
        shutil.rmtree(building, ignore_errors=True)  # of a conversion that was killed
        try:
            building.mkdir()
            notes = _convert_into(building / "model", path, reader, dtype)
            record = {"file": path.name, "sha256": sha256, "dtype": dtype, "notes": notes}
            note = building / "conversion.json"
            with naming(note):
                note.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.rename(building, place)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return Converted(place / "model", notes)


def _place(sha256: str, dtype: str, cache: Path) -> Path:
    from transformers import __version__

    return cache / "gguf" / f"{sha256}-{dtype}-v{CONVERTER_VERSION}-transformers-{__version__}"


def _open(path: Path) -> Any:
    """A gguf.GGUFReader over the whole file, with every tensor's span checked against the file's length."""
    import gguf

    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path.name):
        raise CompressError(f"{path}: one part of a split GGUF; join the parts with `llama-gguf-split --merge` first")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CompressError(
            f"{path}: not a readable GGUF file, or truncated ({reason}); fetch the file again"
        ) from None
    if not reader.tensors:
        raise CompressError(f"{path}: the GGUF file holds no tensors")
    # transformers takes the rope type from the metadata alone, and llama.cpp puts these factors into a tensor.
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise CompressError(
            f"{path}: its rotary scaling is stored in rope_freqs.weight, which transformers ignores; use the "
            "safetensors checkpoint of this model"
        )
    return reader


def _convert_into(folder: Path, path: Path, reader: Any, dtype: str) -> list[str]:
    import torch
    import transformers

    with _quiet(), _metadata_read_once(reader):
        try:
            config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            tokenizer = transformers.TokenizersBackend.from_pretrained(path.parent, gguf_file=path.name)
            auto_model: Any = transformers.AutoModelForCausalLM
            model, report = auto_model.from_pretrained(
                path.parent,
                gguf_file=path.name,
                config=config,
                dtype=getattr(torch, dtype),
                quantization_config=transformers.GgufConfig(
                    dequantize=True
                ),  # no packed linears, whatever is installed
                output_loading_info=True,
            )
        except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CompressError(
                f"{path}: transformers {transformers.__version__} cannot convert this GGUF ({reason}); use the "
                "safetensors checkpoint of this model"
            ) from None
        _check_complete(path, reader, model, report)
        notes = _set_pre_tokenizer(tokenizer, reader)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None  # its is_serializable() is False; what it loaded is plain dense tensors
        try:
            model.save_pretrained(folder, max_shard_size="5GB")
        except SafetensorError as error:  # how safetensors reports a failed write
            raise CompressError(f"{folder}: cannot write the converted weights ({error})") from None
        for key in ("is_local", "local_files_only"):  # how it was loaded here, not what it is
            tokenizer.init_kwargs.pop(key, None)
        tokenizer.save_pretrained(folder)
    _check_dense(path, folder, getattr(torch, dtype))
    return notes


def _check_complete(path: Path, reader: Any, model: Any, report: dict[str, Any]) -> None:
    """Every parameter must come from the file, and every value of the file must have become a parameter."""
    missing = sorted(report["missing_keys"]) + sorted(str(item) for item in report["mismatched_keys"])
    if missing:
        raise CompressError(f"{path}: {len(missing)} tensors of the model are not in the GGUF, among them {missing[0]}")
    # transformers skips tensors it has no name for. Conversions permute and split, but keep the number of values.
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    loaded = sum(parameter.numel() for parameter in model.parameters())  # a tied table counts once
    if stored != loaded:
        raise CompressError(
            f"{path}: {stored} values are stored but the {model.config.model_type} model takes {loaded}; transformers "
            "would drop tensors of this file; use the safetensors checkpoint of this model"
        )


def _check_dense(path: Path, folder: Path, dtype: Any) -> None:
    with ShardReader(folder) as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            if tensors.dtype(name) != dtype:
                raise CompressError(f"{path}: tensor {name!r} was converted to {tensors.dtype(name)}, not to {dtype}")


def _set_pre_tokenizer(tokenizer: Any, reader: Any) -> list[str]:
    """Split text as llama.cpp does for the pre-tokenizer the file names; returns notes for the record."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if _string(reader, "tokenizer.ggml.model") != "gpt2":
        return []  # sentencepiece vocabularies have no such rule
    rule = _string(reader, "tokenizer.ggml.pre")
    if rule in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return [f"tokenizer: digits split one by one, as llama.cpp does for pre-tokenizer {rule!r}"]
    if rule in _GPT2_RULE or rule in GGUF_PRE_TOKENIZER_SPLITS:
        return []
    named = f"names the pre-tokenizer {rule!r}, which is not known here" if rule else "names no pre-tokenizer"
    return [f"tokenizer: the GGUF {named}; GPT-2's splitting rule was used and text may be cut differently"]


def _string(reader: Any, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else field.contents()


@contextlib.contextmanager
def _metadata_read_once(reader: Any) -> Iterator[None]:
    """Let transformers share our parsed file and one table of tensor names.

    It parses the file (seconds, in Python, for a vocabulary of 50,000) for the config and again for the tensors, and
    builds the same name table once per submodule: 18 of 26 seconds on a 30-layer model. Both are pure functions.
    """
    import gguf

    with _replaced(
        gguf,
        GGUFReader=lambda *_: reader,
        get_tensor_name_map=functools.cache(gguf.get_tensor_name_map),
    ):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings from transformers; its settings come back afterwards."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bar = functools.partial(modeling_gguf_pytorch_utils.tqdm, disable=True)  # this one ignores the setting
    try:
        with warnings.catch_warnings(), _replaced(modeling_gguf_pytorch_utils, tqdm=bar):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
