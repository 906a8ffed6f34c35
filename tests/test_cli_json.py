"""--json FILE: a file that could not be written is refused before the work, and a probe leaves nothing behind."""

import json
import os

import pytest
from typer.testing import CliRunner

from compressor import cli, doctor


@pytest.fixture
def worked(monkeypatch):
    """Stands in for the work of `doctor`; says whether it was done."""
    done = []
    monkeypatch.setattr(doctor, "examine", lambda: done.append(True) or {"found": 1})
    monkeypatch.setattr(doctor, "lines", lambda found: ["done"])
    return done


def call(path):
    return CliRunner().invoke(cli.app, ["doctor", "--json", str(path)])


def refusal(path):
    """The one line with which a path is refused, exit code 2."""
    result = call(path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --json {path}: ")
    return line


def test_a_file_that_can_be_written_is(tmp_path, worked):
    path = tmp_path / "out.json"
    assert call(path).exit_code == 0 and worked
    assert json.loads(path.read_text()) == {"found": 1}
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_missing_folder_is_refused_before_the_work(tmp_path, worked):
    assert "does not exist" in refusal(tmp_path / "nowhere/out.json")
    assert not worked


def test_a_folder_is_refused_before_the_work(tmp_path, worked):
    assert "is a folder" in refusal(tmp_path)
    assert not worked


def test_a_place_that_takes_no_files_is_refused_before_the_work(worked):
    assert "cannot be written" in refusal("/proc/out.json")
    assert not worked


def test_a_read_only_place_is_refused_before_the_work(tmp_path, worked, monkeypatch):
    def create(**options):
        raise OSError(30, "Read-only file system", str(options["dir"]))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", create)  # root may write anywhere: permissions show nothing
    assert "Read-only file system" in refusal(tmp_path / "out.json")
    assert not worked


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path, worked):
    assert "ile name too long" in refusal(tmp_path / ("x" * 300))
    assert not worked


def test_a_probe_changes_neither_an_older_result_nor_the_folder(tmp_path, worked, monkeypatch):
    path, neighbour = tmp_path / "out.json", tmp_path / "out.json.tmp"
    path.write_text("older"), neighbour.write_text("mine")
    monkeypatch.setattr(doctor, "examine", lambda: 1 / 0)
    assert isinstance(call(path).exception, ZeroDivisionError)
    assert path.read_text() == "older" and neighbour.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.json.tmp"]


def test_a_device_is_written_to_as_it_is(worked):
    assert call("/dev/null").exit_code == 0 and worked
