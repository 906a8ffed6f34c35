"""Where a command's result goes, and files that are written whole or not at all."""

import errno
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.errors import UsageError, naming

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - is stdout.")]


class Output:
    """Where a command's result goes: JSON to the file of --json, the reader's version to stdout.

    With ``--json -`` stdout holds JSON alone, and the reader's version goes to stderr.
    """

    def __init__(self, json_file: str | None):
        self.json_file = json_file
        if json_file not in (None, "-"):
            if not Path(str(json_file)).name:
                raise UsageError(f"--json '{json_file}': not a file name")
            folder = Path(str(json_file)).absolute().parent
            if not folder.is_dir():  # known now rather than after the work
                raise UsageError(f"--json {json_file}: folder {folder} does not exist")
            _probe(Path(str(json_file)))

    def result(self, value: Any) -> None:
        if self.json_file is None:
            return
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        if self.json_file == "-":
            sys.stdout.write(text)
        else:
            write(Path(self.json_file), text)

    def console(self) -> "Console":
        from compressor import tables

        return tables.console(sys.stderr if self.json_file == "-" else sys.stdout)

    def line(self, text: str) -> None:
        print(text, file=sys.stderr if self.json_file == "-" else sys.stdout)


def _probe(path: Path) -> None:
    """Refuse a --json file that `_write` could not write."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if _is_special(path):  # opening a pipe would wait for its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UsageError(f"--json {path}: cannot be written ({error.strerror}); choose another file") from None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def write(path: Path, text: str) -> None:
    """Write a text file whole or not at all; a pipe or device is written to as it is."""
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(temporary):
            temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
