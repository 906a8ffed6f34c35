"""Records of benchmarks on disk."""

import json
import os
from pathlib import Path


def replace_json(path: Path, data: dict) -> None:
    """Write `data` to `path` in one step, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
