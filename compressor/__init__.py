"""Quantize a language model, re-measure its speculative acceptance, and ship a signed bundle that engines load.

    from compressor import Recipe, compress, Bundle
    bundle = compress(Recipe.load("recipe.yaml"), out="bundle/")

Nothing heavy is imported until a name is used.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.bundle import Bundle
    from compressor.errors import CompressError, UsageError
    from compressor.recipe import Recipe
    from compressor.ui import UI

__all__ = ["Bundle", "CompressError", "Recipe", "UsageError", "__version__", "compress"]

_HOMES = {
    "Bundle": "compressor.bundle",
    "CompressError": "compressor.errors",
    "Recipe": "compressor.recipe",
    "UsageError": "compressor.errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("compressor")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'compressor' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def compress(
    recipe: "Recipe",
    out: str | os.PathLike | None = None,
    *,
    work: str | os.PathLike | None = None,
    resume: bool = False,
    ui: "UI | None" = None,
    offline: bool = False,
) -> "Bundle":
    """Run one job from source to signed bundle: what the command `compress RECIPE.yaml` does.

    Args:
        recipe: every choice of the job.
        out: the bundle's folder; default ``bundle-<recipe name>`` in the current folder.
        work: folder of the job's state, by which it resumes; default ``<out>.work``.
        resume: continue the job that `work` holds. Refused when the recipe has changed.
        ui: where progress goes; default nowhere.
        offline: use only what is on this machine.

    Nothing that exists is overwritten: raises UsageError for an `out` that is not empty, and for a `work` that holds a
    job unless `resume`. Raises CompressError when the work fails or a check does not hold.
    """
    from compressor.errors import UsageError
    from compressor.ui import NullUI

    out = Path(out) if out is not None else Path(f"bundle-{recipe.name}")
    if not out.name:  # "." and "..": the folder beside it needs a name to be built from
        out = out.resolve()
    work = Path(work) if work is not None else out.parent / f"{out.name}.work"
    ours, theirs = out.resolve(), work.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise UsageError(f"--work {work}: lies in the bundle's folder {out} or around it; choose another")

    from compressor import pipeline  # brings in torch and transformers

    return pipeline.run(recipe, out=out, work=work, resume=resume, ui=ui or NullUI(), offline=offline)
