"""Errors a user can act on. The command line prints their message as one line and exits with `exit_code`."""


class CompressError(Exception):
    """The work failed or a check did not hold. The message names the file, key, value and remedy."""

    exit_code = 1


class UsageError(CompressError):
    """A bad option, path or recipe: nothing was started."""

    exit_code = 2
