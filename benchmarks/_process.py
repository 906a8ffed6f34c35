"""Time and peak memory of another program's whole process.

The program is started by a small process of its own (this file, run as a script): a child's peak begins with the
resident set of whoever starts it, so that a benchmark with torch loaded would be counted into what it measures.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class Failed(Exception):
    """A program ended with an error: the last line it wrote that says something."""


def run(command: list[str], *, env: dict[str, str] | None = None) -> dict:
    """`seconds` and `peak_bytes` (largest resident set) of one program, from its start to its end; and `cpu_seconds`,
    of all its threads, which depend less on what else the machine does.

    What it writes goes to stderr. `env`: added to the environment. Raises Failed if it ends with another code than 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        subprocess.run([sys.executable, __file__, str(report), str(log), *command], env={**os.environ, **(env or {})})
        text = log.read_text(errors="replace") if log.exists() else ""
        sys.stderr.write(text)
        found = json.loads(report.read_text()) if report.exists() else {"status": "killed"}
    if found.pop("status"):
        raise Failed(last_line(text))
    return found


def last_line(text: str) -> str:
    """What a program that failed said last, shortened; parts of progress bars and empty lines left out."""
    lines = [part.strip() for part in text.replace("\r", "\n").splitlines()]
    said = [line for line in lines if line and "it/s]" not in line and "s/it]" not in line]
    return said[-1][:300] if said else "no output"


def _launch(report: str, log: str, command: list[str]) -> None:
    started = time.perf_counter()
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = round(time.perf_counter() - started, 1)
    found = {"status": status, "seconds": seconds, "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}
    Path(report).write_text(json.dumps(found | {"peak_bytes": usage.ru_maxrss * 1024}))


if __name__ == "__main__":
    _launch(sys.argv[1], sys.argv[2], sys.argv[3:])
