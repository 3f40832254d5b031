"""Writes every option of a trainer and of each command into ``docs/``, from docstrings and ``--help``.

``python docs/options.py`` after a change of them; ``tests/docs/test_options.py`` compares.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.cli import parser
from manyhands.names import loaded_late
from manyhands.training import options
from manyhands.training.callbacks import loggers
from manyhands.training.trainer import BaseTrainer

PAGE = Path(__file__).with_name("trainer-options.md")
COMMANDS = PAGE.parent / "reference" / "commands.md"
MARK = "## Options of each command\n"
HEAD = """# Every option of a trainer

Made from the docstrings by `python docs/options.py`; `help(mh.Trainer)` shows the same.
[Training in detail](training.md) explains what the options are for. All but the first three of `Trainer` are given by
name. An option that a framework cannot do is refused, with the reason.
"""


def page() -> str:
    parts = [HEAD, section("Trainer", BaseTrainer)]
    parts += [section(kind.__name__, kind, f"`Trainer({name}=mh.{kind.__name__}(...))`") for name, kind in topics()]
    parts += [section(name, kind, "`Trainer(callbacks=[...])`") for name, kind in callbacks()]
    parts += [section(name, kind, "`Trainer(loggers=[...])`") for name, kind in every_logger()]
    return "\n".join(parts)


def topics() -> list[tuple[str, Any]]:
    return list(options.TOPICS.items())


def callbacks() -> list[tuple[str, Any]]:
    """Those that come with manyhands and have options."""
    late = sorted(loaded_late("torch").items())
    modules = [pair for pair in late if pair[1].startswith("manyhands.training.callbacks.") and pair[0] != "loggers"]
    kinds = [(name, getattr(importlib.import_module(module), name)) for name, module in modules]
    return [(name, kind) for name, kind in kinds if described(kind)]


def every_logger() -> list[tuple[str, Any]]:
    kinds = {name: kind for name, kind in vars(loggers).items() if name.endswith("Logger")}
    return [(f"loggers.{name}", kind) for name, kind in sorted(kinds.items())]


def section(name: str, kind: Any, how: str = "") -> str:
    """A heading, the first lines of the docstring, and a table."""
    text = inspect.getdoc(kind) or ""
    about = text.split("\nArgs:")[0].strip()
    rows = [f"| `{option}` | {default(kind, option)} | {meaning} |" for option, meaning in described(kind).items()]
    lines = [f"## {name}", "", plain(about), ""]
    lines += [f"Given as {how}.", ""] if how else []
    return "\n".join([*lines, "| option | default | |", "|---|---|---|", *rows, ""])


def described(kind: Any) -> dict[str, str]:
    """The options in the Args of a docstring, each with its text in one line."""
    _, _, arguments = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n(?:        .*)?)*)", arguments, re.MULTILINE)
    return {name: plain(" ".join(text.split())).replace("|", "\\|") for name, text in entries}


def default(kind: Any, option: str) -> str:
    parameter = inspect.signature(kind).parameters.get(option)
    if parameter is None or parameter.kind is parameter.VAR_KEYWORD:
        return ""
    if parameter.default is parameter.empty:
        return "required"
    return f"`{parameter.default!r}`"


def plain(text: str) -> str:
    """reStructuredText's ``code`` as Markdown's."""
    return re.sub(r":(?:attr|class|func|meth|mod|data):`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def commands_page() -> str:
    """The page of commands with every option behind its mark."""
    before, _, _ = COMMANDS.read_text().partition(MARK)
    return (
        f"{before}{MARK}\nMade from `--help` by `python docs/options.py`.\n{''.join(_commands('manyhands', parser()))}"
    )


def _commands(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """A section for each command below this one."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield f"\n### {name} {word}\n\n{plain(' '.join((below.description or '').split()))}\n"
                if rows := [_row(each) for each in below._actions if each.help and each.dest not in ("help", "action")]:
                    yield "\n".join(["", "| option | |", "|---|---|", *rows, ""])
                yield from _commands(f"{name} {word}", below)


def _row(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or (action.metavar if isinstance(action.metavar, str) else action.dest)
    value = f" {action.metavar or ''}".rstrip() if action.option_strings and action.nargs != 0 else ""
    choices = f" One of `{'`, `'.join(map(str, action.choices))}`." if action.choices else ""
    meaning = plain((action.help or "").replace("%%", "%")).replace("|", "\\|")
    return f"| `{names}{value}` | {meaning[:1].upper()}{meaning[1:]}.{choices} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    COMMANDS.write_text(commands_page())
