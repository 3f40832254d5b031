"""Every Python block of README.md and docs/ runs as it stands, each page in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_blocks import PAGES, ROOT, by_framework
from support import run_program

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
CASES = [(page, name) for page in PAGES for name in by_framework(page)]
SCRIPT = str(Path(__file__).with_name("run_page.py"))
Run = Callable[[Path, Path], tuple[int, str]]


@pytest.fixture(scope="module")
def run_page(framework: str) -> Iterator[Run]:
    """Runs a page in a folder and gives its exit code and output."""
    environment = {"MANYHANDS_VIRTUAL_DEVICES": "", "MPLBACKEND": "agg"}
    if framework != "torch":

        def run(page: Path, folder: Path) -> tuple[int, str]:
            ended = run_program(SCRIPT, framework, page, cwd=folder, timeout=300, **environment)
            return ended.returncode, ended.stdout + ended.stderr

        yield run
        return
    pipe, environment = (
        subprocess.PIPE,
        {**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    )  # two suites share the cores
    with subprocess.Popen([sys.executable, SCRIPT], stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        stdin, stdout = server.stdin, server.stdout

        def ask(page: Path, folder: Path) -> tuple[int, str]:
            print(page, folder, folder / "output.txt", sep="\t", file=stdin, flush=True)
            return int(stdout.readline()), (folder / "output.txt").read_text()

        yield ask
        stdin.close()


@pytest.mark.once
@pytest.mark.parametrize(
    ("page", "name"), CASES, ids=[f"{page.relative_to(ROOT).with_suffix('')}-{name}" for page, name in CASES]
)
def test_the_blocks_of_a_page_run(page: Path, name: str, framework: str, run_page: Run, tmp_path: Path) -> None:
    if name != framework:
        pytest.skip(f"blocks of {name}")
    code, output = run_page(page, tmp_path)
    assert code == 0, output


def test_every_framework_has_examples(framework: str) -> None:
    assert framework in {name for _, name in CASES}
