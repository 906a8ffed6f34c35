"""SHA-256 of files, with progress for the large ones."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str], None]

_REPORT_BYTES = 1 << 30


class _Counted(io.RawIOBase):
    """Raw file that reports every gibibyte that was read from it."""

    def __init__(self, path: Path, progress: Progress | None):
        self._file = path.open("rb", buffering=0)
        self._name, self._progress = path.name, progress
        self._total = path.stat().st_size
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer) or 0
        before, self._done = self._done, self._done + count
        if self._progress is not None and before // _REPORT_BYTES != self._done // _REPORT_BYTES:
            self._progress(f"sha256 of {self._name}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Hex SHA-256 of a file's bytes. `progress` gets a line for each GiB. OSError propagates."""
    with _Counted(path, progress) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
