"""A work folder with a manifest, so that a run that was killed goes on where it stopped.

Every stage and every block is recorded only after its files are complete, and the manifest is replaced atomically: at
any moment the folder describes work that is really there. A changed recipe, source or library version refuses to
resume, because the result would be neither the old run's nor the new one's.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from compressor.checkpoint.digest import sha256_file
from compressor.errors import CompressError, UsageError, naming
from compressor.recipe_text import changes

MANIFEST = "job.json"
CHANGED = "missing or changed since it was written; remove the work folder and start again"


def check_file(path: Path, sha256: str) -> None:
    """Raise CompressError unless the file is there with this digest (hex), as when it was recorded."""
    if not path.exists() or sha256_file(path) != sha256:
        raise CompressError(f"{path}: {CHANGED}")


class Job:
    """The work folder of one run.

    Args:
        work: folder for intermediate files; created if missing.
        settings: what the run is to do: a recipe, or another nested dictionary of plain JSON values.
        environment: versions and thread count that the bytes of the result depend on.
        resume: continue what the folder holds instead of refusing it.
        open_until: by stage, the dotted keys of `settings` that may change until it has finished.

    Raises UsageError for a folder that holds something else, an unfinished run without `resume`, or changed settings;
    CompressError for a folder in use by another process or a damaged manifest.
    """

    def __init__(
        self,
        work: Path,
        settings: dict,
        environment: dict,
        *,
        resume: bool,
        open_until: Mapping[str, Sequence[str]] | None = None,
    ):
        self.work = Path(work)
        self.work.mkdir(parents=True, exist_ok=True)
        strangers = [p.name for p in self.work.iterdir() if p.name not in ("lock", MANIFEST + ".tmp")]
        if strangers and MANIFEST not in strangers:
            raise UsageError(f"{self.work}: not empty and not a work folder ({strangers[0]}); choose another --work")
        self._open_until = open_until or {}
        self._lock = self._take_lock()
        try:
            self.manifest = self._open(settings, environment, resume)
        except BaseException:
            self.close()
            raise

    def _open(self, settings: dict, environment: dict, resume: bool) -> dict:
        path = self.work / MANIFEST
        if path.exists():
            if not resume:
                raise UsageError(
                    f"{self.work}: holds an unfinished run; add --resume to continue it or remove the folder"
                )
            manifest = self._read(path)
            self._refuse_changes(manifest, settings, environment)
            manifest["recipe"] = settings
            return manifest
        self.manifest = {
            "version": 1,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": settings,
            "environment": environment,
            "stages": {},
            "blocks": {},
        }
        self._save()
        return self.manifest

    def _take_lock(self):
        lock = open(self.work / "lock", "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompressError(f"{self.work}: in use by another run; wait for it or choose another --work") from None
        return lock

    def close(self) -> None:
        self._lock.close()

    @staticmethod
    def _read(path: Path) -> dict:
        try:
            manifest = json.loads(path.read_text())
            sections = [manifest[key] for key in ("recipe", "environment", "stages", "blocks")]
            if not (all(isinstance(section, dict) for section in sections) and isinstance(manifest["created"], str)):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CompressError(f"{path}: damaged manifest; remove the work folder and start again") from None
        return manifest

    def _refuse_changes(self, manifest: dict, settings: dict, environment: dict) -> None:
        still = {key for stage, keys in self._open_until.items() if stage not in manifest["stages"] for key in keys}
        found = [change for change in changes(manifest["recipe"], settings) if change.split(": ")[0] not in still]
        recorded = manifest["environment"]
        found += [
            f"{key}: {recorded.get(key)} → {environment.get(key)}"
            for key in sorted(recorded.keys() | environment.keys())
            if recorded.get(key) != environment.get(key)
        ]
        if found:
            raise UsageError(f"{self.work}: cannot resume, changed since it started: {'; '.join(found)}")

    def _save(self) -> None:
        temporary = self.work / (MANIFEST + ".tmp")
        with naming(temporary), open(temporary, "w") as file:
            json.dump(self.manifest, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.work / MANIFEST)

    @property
    def created(self) -> str:
        return self.manifest["created"]

    def stage(self, name: str) -> dict | None:
        """What stage `name` recorded, or None if it has not finished."""
        return self.manifest["stages"].get(name)

    def result(self, name: str) -> dict:
        """What the finished stage `name` recorded."""
        return self.manifest["stages"][name]

    def finish(self, name: str, record: dict) -> dict:
        """Record stage `name` as finished. `record` must be JSON."""
        self.manifest["stages"][name] = record
        self._save()
        return record

    def path(self, name: str) -> Path:
        return self.work / name

    def block_file(self, index: int) -> Path:
        return self.work / f"block-{index:05d}.safetensors"

    def block(self, index: int) -> dict | None:
        """What block `index` recorded, or None. Raises CompressError if its file is no longer what was recorded."""
        record = self.manifest["blocks"].get(str(index))
        if record is not None:
            check_file(self.block_file(index), record["sha256"])
        return record

    def finished_block(self, index: int) -> dict:
        """What block `index`, which has finished, recorded."""
        return self.manifest["blocks"][str(index)]

    def finish_block(self, index: int, record: dict) -> None:
        """Record block `index`, whose file is complete, as finished."""
        self.manifest["blocks"][str(index)] = {**record, "sha256": sha256_file(self.block_file(index))}
        self._save()
