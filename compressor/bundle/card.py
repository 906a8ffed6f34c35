"""README.md of a bundle: its model card."""

import json

from compressor import formats
from compressor.bundle import report, summary
from compressor.bundle.passport import Passport
from compressor.bundle.signing import shown

TEMPLATE = "card.md.jinja"


def render(passport: Passport, key: str | None = None) -> str:
    """The card's Markdown.

    Args:
        passport: of the bundle.
        key: fingerprint of the signing key (`signing.fingerprint`), if known.
    """
    source = passport.source
    settings = passport.proposer.settings
    speculation = {"method": "ngram", "num_speculative_tokens": passport.proposer.num_speculative_tokens}
    speculation |= {name: settings[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in settings}
    return report.template(TEMPLATE).render(
        passport=passport,
        title=cell(report.title(passport)),
        base_model=source.uri if source.kind == "hub" else None,
        speculation=json.dumps(speculation) if passport.proposer.kind == "ngram" else None,
        decoded=not formats.get(passport.quantization.format).weights_config()["symmetric"],
        method=summary.METHODS.get(passport.quantization.method, passport.quantization.method),
        rows=[[cell(text) for text in row] for row in summary.rows(passport)],
        key=key,
        cell=cell,
    )


def cell(text: object) -> str:
    """Text that cannot end its table cell, its line or its code span."""
    return shown(" ".join(str(text).split())).replace("|", "\\|").replace("`", "'")
