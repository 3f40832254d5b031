"""The site's hook: notebooks and example scripts become pages, and pages link to the examples that they name.

A notebook is shown with its outputs as they are in the repository; ``make examples`` runs and writes it, and the tests
compare the two. Nothing is run here.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
KINDS = {".ipynb", ".py", ".sbatch", ".md"}
SKIPPED = {"source", "__pycache__"}
_LINK = re.compile(r"\]\((?!\w+:)([^)#]+)\.(?:ipynb|py|sbatch)(#[^)]*)?\)")
_NAMED = re.compile(r"(?<!\[)`(examples/[\w/.-]*)`")


def page_of(path: str) -> str:
    """The page that shows a file of examples/."""
    return re.sub(r"\.(ipynb|py|sbatch)$", ".md", path)


def on_files(files: Any, config: Any) -> Any:
    for path in sorted((ROOT / "examples").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in KINDS and not SKIPPED & set(path.parts) and path.name != "build.py":
            file = File.generated(config, page_of(name), content=_markdown(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV  # where the navigation does not name it
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def linked(match: re.Match[str]) -> str:
        name = match[1].rstrip("/")
        target = next((uri for uri in (page_of(name), f"{name}/README.md") if files.get_file_from_path(uri)), None)
        if target is None:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri))})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else _NAMED.sub(linked, part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A trainer's signature has the name that users write, not that of the class behind it."""
    return html.replace(">BaseTrainer<", ">Trainer<")


def _markdown(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return _with_links(text)
    if path.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    language = "python" if path.suffix == ".py" else "bash"
    return f"# {path.name}\n\n```{language}\n{text}```\n"


def _with_links(text: str) -> str:
    return _LINK.sub(r"](\1.md\2)", text).replace("](../docs/", "](../").replace("](../../docs/", "](../../")


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return _with_links(source)
    language = "bash" if source.startswith("%%bash") else "python"
    code = f"```{language}\n{source.removeprefix('%%bash').strip()}\n```"
    return "\n\n".join([code, *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        svg = "".join(data["image/svg+xml"])
        return f'<div class="output picture">{re.sub(r"^.*?<svg", "<svg", svg, flags=re.DOTALL)}</div>'
    if "image/png" in data:
        png = "".join(data["image/png"]).strip()
        return f'<img class="output picture" alt="" src="data:image/png;base64,{png}">'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```{{ .text .output }}\n{text.rstrip()}\n```"
