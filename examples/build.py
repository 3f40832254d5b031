"""Make the notebooks from their sources: ``python examples/build.py [NAME ...]``.

The source of ``notebooks/gpus.ipynb`` is ``notebooks/source/gpus.py``: plain Python that can be linted and
reviewed. A line ``# %%`` begins a cell::

    # %% [markdown]
    # # Text, each line behind a comment sign

    # %%
    print("code")

    # %% [bash]
    # manyhands devices

    # %% [writefile train.py]
    print("code that goes to a file")

``bash`` and ``writefile`` are IPython's cell magics. Every notebook is run from its first cell to its last in an
empty folder. It is written with its outputs only if no cell fails, warns or shows a path of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"
SOURCES = NOTEBOOKS / "source"
REPOSITORY = NOTEBOOKS.parent.parent
REPORTS = REPOSITORY / "docs" / "reports"  # pages that a notebook writes: *-report.html
SMALL_DATA = REPOSITORY / "src" / "manyhands" / "training" / "data" / "fashion-mnist-small"

_HEADER = re.compile(r"^# %%(?: \[(?P<kind>[^\]]+)\])?$", flags=re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def names() -> list[str]:
    """Every notebook, by the name of its source."""
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def from_source(name: str) -> nbformat.NotebookNode:
    """The notebook that a source describes, without outputs."""
    _, *parts = _HEADER.split((SOURCES / f"{name}.py").read_text())
    cells = [_cell(kind, text.strip("\n")) for kind, text in zip(parts[::2], parts[1::2], strict=True)]
    for number, cell in enumerate(cells, 1):
        cell["id"] = f"cell-{number}"  # not random: the same source is the same notebook
    return new_notebook(cells=cells, metadata={**_KERNEL, "language_info": {"name": "python"}})


def _cell(kind: str | None, text: str) -> nbformat.NotebookNode:
    if kind in ("markdown", "bash"):
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
    if kind == "markdown":
        return new_markdown_cell(text)
    return new_code_cell(text if kind is None else f"%%{kind}\n{text}")


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run all cells in a folder, in a kernel of their own; a cell that fails raises ``CellExecutionError``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {"TERM": "dumb", "COLUMNS": "100", "PYTHONWARNINGS": "default::UserWarning"}
    quiet["IPYKERNEL_CELL_NAME"] = "notebook"  # in messages, instead of a temporary file
    ours = {"PATH": path, "MANYHANDS_DATA": str(SMALL_DATA), "MANYHANDS_CACHE": str(folder / "cache")}
    environment = {**os.environ, **quiet, **ours}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.pop("MANYHANDS_VIRTUAL_DEVICES", None)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    client.extra_arguments = ["--log-level=ERROR"]
    client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell["outputs"] = [_tidy(output) for output in _joined(cell.outputs)]
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """A stream's pieces as one output: how they arrived is chance."""
    result: list[Any] = []
    for output in outputs:
        if result and output.output_type == "stream" == result[-1].output_type and output.name == result[-1].name:
            result[-1]["text"] += output["text"]
        else:
            result.append(output)
    return result


def _tidy(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if output.output_type == "stream":
        lines = _COLOURS.sub("", output["text"]).replace("\r\n", "\n").splitlines()
        output["text"] = "\n".join(line.rstrip() for line in lines) + "\n"
    return output


def complaints(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """What a reader should not see in the outputs: errors, warnings, paths of this machine."""
    private = {str(folder), str(REPOSITORY), str(Path.home()), str(Path(sys.executable).parent), tempfile.gettempdir()}
    result = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
            found = {word for word in ("Traceback", "Warning:", "⠋") if word in text}  # the last is a spinner's
            found |= {path for path in private if len(path) > 1 and path in text}
            if output.output_type == "error" or found:
                result.append(f"{cell.id}: {', '.join(sorted(found)) or 'an error'} in\n{text}")
    return result


def build(name: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="examples-") as folder:
        notebook = execute(from_source(name), Path(folder))
        if problems := complaints(notebook, Path(folder)):
            raise SystemExit(f"{name} is not written:\n" + "\n".join(problems))
        for report in Path(folder).glob("*-report.html"):
            shutil.copy(report, REPORTS)
    nbformat.validate(notebook)
    path = NOTEBOOKS / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        path = build(name)
        print(f"{path.relative_to(REPOSITORY)}: {path.stat().st_size / 1000:.0f} kB")
