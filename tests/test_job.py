"""A work folder resumes its own run and refuses anything else."""

import json

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import CompressError, UsageError
from compressor.job import Job
from compressor.recipe import Recipe

ENVIRONMENT = {"torch": "2.13.0", "threads": 2}


def recipe(**quantization):
    return Recipe.model_validate({"name": "t", "source": {"uri": "x"}, "quantization": quantization})


def job(folder, resume=False, environment=ENVIRONMENT, **quantization):
    return Job(folder, recipe(**quantization).to_dict(), environment, resume=resume)


def test_stages_and_blocks_are_found_again(tmp_path):
    first = job(tmp_path)
    first.finish("calibration", {"digest": "abc"})
    save_file({"w": torch.ones(2)}, first.block_file(0))
    first.finish_block(0, {"activations": 7})
    first.close()
    again = job(tmp_path, resume=True)
    assert again.stage("calibration") == {"digest": "abc"}
    assert again.block(0)["activations"] == 7
    assert again.block(1) is None
    assert again.created == first.created


def test_an_unfinished_run_is_not_overwritten(tmp_path):
    job(tmp_path).close()
    with pytest.raises(UsageError, match="add --resume"):
        job(tmp_path)


def test_a_changed_recipe_is_refused_and_named(tmp_path):
    job(tmp_path).close()
    with pytest.raises(UsageError, match=r"quantization\.damping: 0\.01 → 0\.05"):
        job(tmp_path, resume=True, damping=0.05)


def test_a_changed_library_is_refused_and_named(tmp_path):
    job(tmp_path).close()
    with pytest.raises(UsageError, match=r"torch: 2\.13\.0 → 2\.14\.0"):
        job(tmp_path, resume=True, environment={"torch": "2.14.0", "threads": 2})


def test_resume_without_a_manifest_starts_from_the_beginning(tmp_path):
    assert job(tmp_path / "new", resume=True).stage("source") is None


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"not a work folder \(thesis\.tex\)"):
        job(tmp_path, resume=True)
    assert (tmp_path / "thesis.tex").exists()


def test_two_runs_cannot_share_a_folder(tmp_path):
    first = job(tmp_path)
    with pytest.raises(CompressError, match="in use by another run"):
        job(tmp_path, resume=True)
    first.close()


def test_a_changed_block_file_is_refused(tmp_path):
    first = job(tmp_path)
    save_file({"w": torch.ones(2)}, first.block_file(0))
    first.finish_block(0, {})
    save_file({"w": torch.zeros(2)}, first.block_file(0))
    with pytest.raises(CompressError, match=r"block-00000\.safetensors: missing or changed"):
        first.block(0)


def test_a_damaged_manifest_is_one_clear_line(tmp_path):
    job(tmp_path).close()
    (tmp_path / "job.json").write_text(json.dumps({"version": 1})[:-3])
    with pytest.raises(CompressError, match=r"job\.json: damaged manifest"):
        job(tmp_path, resume=True)


@pytest.mark.parametrize("section", ["recipe", "environment", "stages", "blocks"])
def test_a_manifest_of_another_shape_is_one_clear_line(tmp_path, section):
    job(tmp_path).close()
    manifest = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(manifest | {section: 5}))
    with pytest.raises(CompressError, match=r"job\.json: damaged manifest"):
        job(tmp_path, resume=True)


def test_a_refused_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(UsageError, match="not a work folder"):
        job(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
