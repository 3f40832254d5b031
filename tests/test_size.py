"""A budget of lines for each floor: whoever adds some says so here, in the same commit."""

from __future__ import annotations

from pathlib import Path

import pytest

import manyhands

PACKAGE = Path(manyhands.__file__).parent
TESTS = Path(__file__).parent
# By folder: lines that it may have, and the aim for later work. Words are the files beside the folders.
FOLDERS = {
    "audit": (3_525, 3_500),
    "backends": (9_460, 9_500),
    "book": (1_555, 1_200),
    "cli": (1_580, 1_400),
    "forecast": (1_605, 1_500),
    "lab": (1_827, 1_600),
    "parallel": (1_820, 1_900),
    "placement": (700, 900),
    "schedule": (1_380, 1_400),
    "tasks": (1_000, 1_000),
    "training": (25_046, 21_000),
    "words and modules": (1_464, 1_400),
}
FILES = (320, 320)  # of Python
CUDA = (980, 980)  # lines
# Capture and runs of PyTorch: its backend without what stands apart.
ENGINE = (4_985, 5_000)
APART = ("devices.py", "virtual", "cuda_stand_in", "kernels")
TEST_LINES = (37_640, 37_000)  # without the auditor's corpus


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def python(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.py") if "corpus" not in path.parts]


def sizes() -> dict[str, tuple[int, tuple[int, int]]]:
    """What is counted, by name: its size, the most that it may be, and the aim."""
    folders = {name: lines(python(PACKAGE / name)) for name in FOLDERS}
    folders["words and modules"] = lines(list(PACKAGE.glob("*.py")))
    counted = {name: (size, FOLDERS[name]) for name, size in folders.items()}
    counted["all of src"] = (lines(python(PACKAGE)), (sum(most for most, _ in FOLDERS.values()), 46_300))
    torch = PACKAGE / "backends" / "torch"
    engine = [path for path in python(torch) if path.relative_to(torch).parts[0] not in APART]
    counted["capture and runs"] = (lines(engine), ENGINE)
    counted["Python files"] = (len(python(PACKAGE)), FILES)
    counted["CUDA"] = (lines([*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")]), CUDA)
    counted["tests"] = (lines(python(TESTS)), TEST_LINES)
    return counted


def test_the_house_keeps_to_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    table = [f"{'':<18}{'is':>8}{'at most':>9}{'aim':>8}"]
    table += [f"{name:<18}{size:>8,}{most:>9,}{aim:>8,}" for name, (size, (most, aim)) in sizes().items()]
    with capsys.disabled():
        print("", *table, sep="\n")
    assert all(size <= most for size, (most, _) in sizes().values()), "\n" + "\n".join(table)
