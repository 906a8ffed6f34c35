"""What the repository ships trained: whole, small enough, and made by a recipe that is here too."""

from pathlib import Path

import pytest

from compressor.recipe import Recipe
from compressor.train.passport import HeadPassport, refuse_changed

ROOT = Path(__file__).resolve().parents[1]
HEADS = sorted((ROOT / "artifacts" / "heads").iterdir())
RECIPES = {"smollm2-135m-eagle3": "eagle3-smollm2.yaml"}
LARGEST = 20_000_000


def test_every_head_has_its_recipe():
    assert [head.name for head in HEADS] == sorted(RECIPES)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_a_shipped_head_is_what_its_passport_describes(head):
    passport = HeadPassport.load(head)
    refuse_changed(head, passport)
    assert sum(file.stat().st_size for file in head.iterdir()) <= LARGEST
    recipe = Recipe.load(ROOT / "recipes" / RECIPES[head.name])
    assert Recipe.from_dict(passport.recipe) == recipe == Recipe.load(head / "recipe.yaml")
    assert passport.target.source == recipe.source.uri


def test_the_quickstart_drafts_with_a_shipped_head():
    proposer = Recipe.load(ROOT / "recipes" / "quickstart.yaml").proposer
    assert proposer.kind == "eagle3" and Path(proposer.path).resolve() in HEADS
