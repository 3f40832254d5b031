"""The wheel that ``pip install .`` makes: small, whole, with metadata that a package index accepts."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import manyhands

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manyhands"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the working tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 5_000_000


def test_an_index_accepts_its_metadata(wheel: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == manyhands.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"torch", "jax", "tensorflow", "mxnet", "gpu"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata.get_all("Classifier")
    # A link has to lead somewhere: names under .example are nobody's.
    assert not [url for url in metadata.get_all("Project-URL", []) if ".example" in url]


def test_every_file_of_the_package_is_inside(wheel: Path) -> None:
    """Modules, py.typed, profiles, CUDA sources, HTML templates and the small data set."""
    wanted = {
        f"manyhands/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == wanted
    assert "manyhands/py.typed" in inside


def test_the_installed_command_says_its_version(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path]
    subprocess.run([*pip, wheel], check=True)
    command = subprocess.run(
        [sys.executable, tmp_path / "bin" / "manyhands", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert command.stdout.strip() == f"manyhands {manyhands.__version__}"
