"""The benchmarks are scripts beside the package, which import each other by plain names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
