"""What an installed package holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_on_disk_is_installed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name: ROOT / place for name, place in setup["package-dir"].items()}
    inside = {f"compressor.{path.name}": path for path in (ROOT / "compressor").iterdir()}
    on_disk = {name for name, path in (folders | inside).items() if (path / "__init__.py").is_file()}
    assert set(setup["packages"]) == {"compressor"} | on_disk
