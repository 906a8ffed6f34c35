"""report.html: one self-contained page, without scripts or anything fetched from elsewhere."""

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from compressor.bundle import summary
from compressor.bundle.passport import Passport
from compressor.bundle.records_quantization import Layer

TEMPLATE = "report.html.jinja"
WORST = 5  # layers shown by name


def environment(**options: Any) -> jinja2.Environment:
    """Templates of this package: an undefined name is an error."""
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    made.filters |= {"size": summary.size, "percent": summary.percent, "plain": plain}
    return made


def template(name: str, **options: Any) -> jinja2.Template:
    text = resources.files("compressor.bundle").joinpath(name).read_text(encoding="utf-8")
    return environment(keep_trailing_newline=True, **options).from_string(text)


def render(passport: Passport) -> str:
    """The page for a passport; the same passport and library versions give the same text."""
    from compressor.bundle import plots  # matplotlib is slow to import, and only reports need it

    errors = plots.layer_errors(passport)
    return template(TEMPLATE, autoescape=True).render(
        passport=passport,
        title=title(passport),
        method=summary.METHODS.get(passport.quantization.method, passport.quantization.method),
        rows=summary.rows(passport),
        acceptance=acceptance(passport),
        errors=None if errors is None else Markup(errors),
        error_name=passport.quantization.error_name,
        ledger=Markup(plots.byte_ledger(passport)),
        worst=worst(passport),
        settings=flat(passport.quantization.settings),
        recipe=flat(passport.recipe),
    )


def title(passport: Passport) -> str:
    return str(passport.recipe.get("name") or passport.source.uri)


def acceptance(passport: Passport) -> list[dict[str, Any]]:
    """Per task: k, and the rows of each target."""
    return [
        {
            "task": task,
            "k": k,
            "rows": [
                row
                for target in ("baseline", "quantized")
                if (row := summary.find(passport, task, k, target)) is not None
            ],
        }
        for task, k in summary.tasks(passport)
    ]


def worst(passport: Passport) -> list[Layer]:
    """The layers with the largest relative error, largest first."""
    stated = [layer for layer in passport.quantization.layers if layer.stated_error]
    return sorted(stated, key=lambda layer: -(layer.stated_error or 0))[:WORST]


def flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, plain value) pairs."""
    pairs = []
    for key, value in settings.items():
        if isinstance(value, dict):
            pairs += flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, plain(value)))
    return pairs


def plain(value: Any) -> str:
    """A JSON value for a reader."""
    if value is None:
        return summary.NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value) or summary.NONE
    return str(value)
