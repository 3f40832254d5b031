"""What README.md and docs/ show besides code that runs: commands, files, links, JSON, code that needs more."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import PAGES, ROOT, Block, blocks

from manyhands import names
from manyhands.cli import parser
from manyhands.device import FRAMEWORKS

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"", "python", "console", "bash", "json", "text", "toml", "yaml"}
README = ROOT / "README.md"


def _commands(block: Block) -> Iterator[list[str]]:
    """The words of every command of a shell block: in ``console`` what follows ``$``."""
    text = block.code.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if not line.startswith("#"):
            yield shlex.split(line, comments=True)


COMMANDS = [
    (block, words) for block in BLOCKS if block.language in ("console", "bash") for words in _commands(block) if words
]


def test_every_block_has_a_known_language() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python" and not b.is_run], ids=lambda block: block.place
)
def test_what_is_not_run_is_at_least_python(block: Block) -> None:
    ast.parse(block.code)


def test_the_code_of_recipes_fits_the_page() -> None:
    """On a page of the site 80 columns are not clipped."""
    for block in BLOCKS:
        if block.page.parent in (ROOT / "docs" / "howto", ROOT / "docs" / "tutorials"):
            assert max(map(len, block.code.splitlines())) <= 80, block.place


def test_json_is_json() -> None:
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.code)


def test_commands_of_manyhands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    top = parser()
    seen = 0
    for block, words in COMMANDS:
        if "manyhands" not in words:
            continue
        arguments = words[words.index("manyhands") + 1 :]
        arguments = arguments[: next((i for i, word in enumerate(arguments) if word in ("|", "&&", ">")), None)]
        assert _exit_code(top, arguments) == 0, f"{block.place}: {' '.join(words)}: {capsys.readouterr().err}"
        seen += 1
    assert seen > 10


def _exit_code(top: argparse.ArgumentParser, arguments: list[str]) -> int | str | None:
    try:
        top.parse_args(arguments)
    except SystemExit as end:
        return end.code
    return 0


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name in commands.choices:
        assert f"`manyhands {name}`" in page


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_public_name_is_in_the_reference(framework: str) -> None:
    words = set(re.findall(r"\w+", " ".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))))
    assert set(names.names(framework)) <= words


def test_commands_name_files_targets_and_extras_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for block, words in COMMANDS:
        if words[0] == "make":
            assert set(words[1:]) <= targets, block.place
        for word in words:
            if re.match(r"(benchmarks|docs|tests|examples|requirements)/", word):
                assert (ROOT / word.partition(":")[0]).exists(), f"{block.place}: {word}"
            named = re.search(r"(?:^\.|manyhands)\[([\w,]+)\]$", word)
            if named:
                assert set(named[1].split(",")) <= extras, f"{block.place}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Links, and in the text files of the repository such as `benchmarks/training.py`."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for link in filter(None, (first or second for first, second in links)):
        if "://" not in link and not link.startswith(("#", "mailto:")):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name} links to {link}"
    for name in re.findall(r"`(?:python |pytest )?((?:benchmarks|docs|tests|examples|src/manyhands)/[\w/.-]+)", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", ["architecture.md", "how/decisions.md", "how/dynamo.md"])
def test_pages_about_the_code_name_files_that_exist(page: str) -> None:
    """`training/loop.py` is in the package; where the page is about one folder, it names files from there."""
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "src" / "manyhands").rglob("*")]
    for name in re.findall(r"`([\w<>/-]+(?:\.py|/))[`:]", (ROOT / "docs" / page).read_text()):
        for framework in FRAMEWORKS if "<framework>" in name else ("",):
            path = name.replace("<framework>", framework).rstrip("/")
            assert (ROOT / path).exists() or any(file.endswith(f"/{path}") for file in files), name


def test_the_readme_and_the_map_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 170
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 130
