"""What the repository ships trained: whole, small enough, and made by a recipe that is here too."""

import shutil
from pathlib import Path

import pytest

from compressor.errors import CompressError
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


def test_a_shipped_head_that_was_changed_is_found(tmp_path):
    copy = shutil.copytree(HEADS[0], tmp_path / "head")
    (copy / "recipe.yaml").write_text((copy / "recipe.yaml").read_text().replace("1300", "1301"))
    with pytest.raises(CompressError, match=r"recipe\.yaml: is not the file that the passport describes"):
        refuse_changed(copy, HeadPassport.load(copy))


def test_the_quickstart_drafts_with_a_shipped_head():
    proposer = Recipe.load(ROOT / "recipes" / "quickstart.yaml").proposer
    assert proposer.kind == "eagle3" and Path(proposer.path).resolve() in HEADS
