"""The command's options: their types, options that are a library function's parameters, and errors in their words."""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from manyhands.device import FRAMEWORKS


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
        return int(text)

    return parse


# For options that take a count, and for options that take a file.
COUNT: dict[str, Any] = {"type": whole_number(1), "metavar": "N"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}


def number(text: str) -> float:
    """The type of an option that takes a number of zero or more; a whole number stays one."""
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of zero or more")
    return value


def folder(text: str) -> Path:
    """The type of an option that takes a folder; expands ``~``, because a shell does not in ``--run=~/mine``."""
    return Path(os.path.expanduser(text))


def add_framework(option: Callable[..., Any], words: str = "") -> None:
    """Add ``--framework``, read by :func:`framework`; ``words`` begin its help text."""
    option("--framework", choices=FRAMEWORKS, help=f"{words}{'; ' * bool(words)}default: the first that is installed")


def framework(options: argparse.Namespace) -> str:
    """The chosen framework, or the first that is installed."""
    from manyhands.cli import probe

    return str(options.framework or next(iter(probe.installed()), FRAMEWORKS[0]))


# Options from the signature and the docstring of a library function


def add_parameters(
    group: Any,
    function: Any,
    names: Sequence[str],
    called: Mapping[str, str] | None = None,
    **changed: Mapping[str, Any],
) -> dict[str, Any]:
    """Add an option for each of these parameters of a function or class; returns their defaults.

    Type and choices come from the signature, the help text from ``Args`` of the docstring: its first sentence, and what
    it says after "Default:". ``called``: flags with another name; ``changed``: arguments of argparse for a parameter,
    where ``default_text`` replaces what the docstring says of the default.
    """
    signature, texts = inspect.signature(function), _docstring_entries(function)
    defaults = {}
    for name in names:
        keywords = dict(changed.get(name, {}))
        flag = (called or {}).get(name, f"--{name.replace('_', '-')}")
        first, default = texts[name]
        text = f"{first}; default: {keywords.pop('default_text', default)}".replace("%", "%%")
        keywords = {"help": text, "default": None, **_type(signature.parameters[name], function), **keywords}
        action = group.add_argument(flag, **keywords)
        action.setting = name
        defaults[action.dest] = signature.parameters[name].default
    return defaults


def _type(parameter: inspect.Parameter, function: Any) -> dict[str, Any]:
    """How argparse reads a parameter with this annotation; as text if that is not plain."""
    try:
        annotation = eval(parameter.annotation, vars(sys.modules[function.__module__]))
    except NameError:  # imported for type checkers only
        return {}
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(annotation) if union else (annotation,)) if kind is not types.NoneType]
    if kinds == [bool]:
        return {"action": "store_true"}
    if kinds == [int]:
        return COUNT
    if kinds == [int, float]:
        return {"type": number, "metavar": "N"}
    if all(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return {"choices": [value for kind in kinds for value in typing.get_args(kind)]}
    return {}


def _docstring_entries(function: Any) -> dict[str, tuple[str, str]]:
    """The first sentence and the default of each parameter, from the docstring's ``Args``."""
    text = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |^\S|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    documented = {}
    for name, entry in entries:
        plain = re.sub(r"``\"?(.*?)\"?``", r"\1", " ".join(entry.split()))
        first = re.split(r"\.(?: |$)", plain)[0]
        default = plain.partition("Default: ")[2].rstrip(".") or "none"
        default = default.removeprefix("None, ").replace("None", "none").replace("False", "no")
        documented[name] = (first[0].lower() + first[1:], default)
    return documented


def names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flag of each of the library's options that a command has."""
    actions = [action for action in parser._actions if action.option_strings]
    return {getattr(action, "setting", action.dest): action.option_strings[-1] for action in actions}


_TOPIC = re.compile(r"(?:\b\w+=)?(?:\bmh\.)?\b(?:Step|Checkpoints|Workers|Limits)\(([^()]*)\)")


def in_command_words(text: str, names: Mapping[str, str]) -> str:
    """Rewrite options in a message of the library as options of the command.

    >>> flags = {"batch_size": "--batch-size", "on_nan": "--on-nan"}
    >>> in_command_words("batch_size=10 is wrong: give batch_size=16, or step=mh.Step(on_nan='stop')", flags)
    '--batch-size 10 is wrong: give --batch-size 16, or --on-nan stop'
    """
    option = rf"(?<![-\w/])({'|'.join(names)})=('[^']*'|\[[^\]]*\]|-?\w(?:[\w.+-]*\w)?)"

    def as_flag(match: re.Match[str]) -> str:
        return " ".join([names[match[1]], match[2].strip("'")])

    return re.sub(option, as_flag, _TOPIC.sub(r"\1", text))


# What the user probably meant


class Parser(argparse.ArgumentParser):
    """Suggests the choice that the user probably meant."""

    def error(self, message: str) -> NoReturn:
        refused = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = _near(refused[1], re.findall(r"[\w-]+", refused[2])) if refused else None
        super().error(f"{message}; did you mean {near}?" if near else message)


def _near(word: str, known: Collection[str]) -> str | None:
    bare = {name.lstrip("-"): name for name in known}  # two dashes would make all options alike
    return next((bare[name] for name in difflib.get_close_matches(word.lstrip("-"), bare, 1)), None)


def refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with the usage of the subcommand, and the option that the user probably meant."""
    from manyhands.training import refusals

    near = None
    if wrong := next((text.partition("=")[0] for text in unknown if text.startswith("-")), None):
        known = names(parser)
        called = refusals.option_called(wrong.lstrip("-").replace("-", "_"))
        near = known.get(str(called)) or _near(wrong, [flag for flag in known.values() if flag.startswith("--")])
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near}?' if near else ''}")


def hint_misplaced(command: str, program: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print a hint if options of a command come after the program's name, so that the program receives them."""
    given = {text.partition("=")[0] for text in program[1:]}
    for name in given.intersection(names(parser).values()):
        before = f"options of manyhands {command} go before the script"
        print(f"manyhands {command}: {name} went to {program[0]}: {before}", file=sys.stderr)
