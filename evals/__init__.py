"""What a target is measured on: rows for quality (rows.py) and prompts for acceptance (prompts.py)."""

from compressor.evals.rows import EvalRows, build

__all__ = ["EvalRows", "build"]
