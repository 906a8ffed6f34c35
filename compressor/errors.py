"""Errors a user can act on. The command line prints their message as one line and exits with `exit_code`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CompressError(Exception):
    """The work failed or a check did not hold. The message names the file, key, value and remedy."""

    exit_code = 1


class UsageError(CompressError):
    """A bad option, path or recipe: nothing was started."""

    exit_code = 2


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give an OSError that names no file this one: write, flush and fsync do not say what they were writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def brief(value: object) -> str:
    """A user's value for a message: as Python writes it, cut where it would make the line unreadable."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
