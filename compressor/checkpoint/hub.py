"""Checkpoints of the Hugging Face hub, pinned to a commit."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from compressor.errors import CompressError

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Base class of the hub's HTTP client (httpx or its successor, by version of huggingface_hub): a connection lost during
# a download raises it unwrapped.
_HTTP_ERROR: type[Exception] = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def snapshot(repo: str, *, revision: str | None, patterns: tuple[str, ...], offline: bool) -> tuple[Path, str]:
    """Download (or find in the hub's own cache) the top-level files of `repo` that match `patterns`.

    Returns `(folder, commit hash)`. With `offline` only the cache is looked at.

    Raises CompressError, one line each, for a repository, revision or connection that is not there.
    """
    at = f"{repo}@{revision}" if revision else repo
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=["*/*"],  # variants such as onnx/ or original/ are other copies of the weights
                local_files_only=offline,
            )
        )
    except errors.GatedRepoError:
        raise CompressError(f"{at}: gated; accept its terms on the hub and log in with `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise CompressError(f"{at}: the repository has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise CompressError(
            f"{at}: no such repository on the hub, or it is private and you are not logged in"
        ) from None
    except errors.HFValidationError as error:
        raise CompressError(f"{at}: not a valid repository id ({_first_line(error)})") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise CompressError(
            f"{at}: not in the local hub cache, and the hub cannot be reached; connect, or use a local folder as source"
        ) from None
    except errors.HfHubHTTPError as error:
        raise CompressError(f"{at}: the hub refused the download ({_first_line(error)})") from None
    except _HTTP_ERROR as error:
        raise CompressError(f"{at}: the connection to the hub failed ({_first_line(error)}); try again") from None
    # .../snapshots/<commit>: the documented layout of the hub's cache.
    if not _COMMIT.fullmatch(folder.name):
        raise CompressError(f"{at}: cannot tell which commit {folder} is, so it cannot be pinned")
    return folder, folder.name


def cached_folder(repo: str, *, revision: str | None) -> Path | None:
    """The snapshot in the local hub cache, if its config.json is there; asks nobody."""
    found = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
