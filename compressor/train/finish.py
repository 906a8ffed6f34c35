"""From trained weights to a proposer on disk that was loaded again, checked and described."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from compressor.checkpoint.digest import sha256_file
from compressor.decode.decoder import Decoder
from compressor.errors import naming
from compressor.train import check, curve, passport
from compressor.train.head import Trained, Workplace
from compressor.train.passport import HeadPassport

RECIPE, CURVE = "recipe.yaml", "training.svg"


def describe(decoder: Decoder, name: str, folder: Path) -> dict[str, Any]:
    """The target's row of the passport."""
    wanted = (path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json"))
    return {
        "source": name,
        "model_type": decoder.config.model_type,
        "hidden_size": decoder.config.hidden_size,
        "layers": len(decoder.layers),
        "vocab_size": decoder.vocab_size,
        "files": {path.name: sha256_file(path) for path in wanted if path.name != passport.FILE_NAME},
    }


def finish(
    trained: Trained,
    place: Workplace,
    folder: Path,
    *,
    kind: str,
    target: dict[str, Any],
    recipe: dict[str, Any],
    healed_from: dict[str, str] | None = None,
) -> HeadPassport:
    """Write the proposer into `folder`, in place of what was there, load it again as an engine would, and add what it
    was made from.

    Raises CompressError, and leaves nothing, for one that drafts far worse than it did in training, and for an EAGLE-3
    head that drafts otherwise than what was trained or that the examination finds a fault in.
    """
    place.ui.stage("export")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        trained.export(folder)
        notes = {
            RECIPE: yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
            CURVE: curve.svg(trained.facts["history"]),
        }
        for name, text in notes.items():
            with naming(folder / name):
                (folder / name).write_text(text, encoding="utf-8")
        best = max(trained.facts["history"], key=lambda entry: entry["tau"])
        made = (kind, folder, place.decoder, place.target)
        texts = check.texts_of(place.decoder, place.tokenizer, place.ui) if trained.head is not None else []
        if trained.head is not None and texts:
            check.refuse_other_law(folder, trained.head, place.decoder, texts)
        least = check.least_after(best["conditional"][0])
        found = check.check(*made, trained.prompts, least_first=least, texts=texts, ui=place.ui)
        check.refuse(folder, found)
        usual = check.check(*made, check.usual_prompts(place.tokenizer), least_first=0, ui=place.ui)
        return passport.write(
            folder,
            kind=kind,
            target=target,
            recipe=recipe,
            training=trained.facts,
            check=usual.measured,
            expected_acceptance=None if found.examined is None else found.examined.own.rate,
            healed_from=healed_from,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
