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
from typing import Annotated, Any, NoReturn

from manyhands.device import FRAMEWORKS


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
        return int(text)

    return parse


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


class Reads:
    """How argparse reads a parameter, in its annotation: ``Annotated[int, Reads(metavar="N")]``."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


Count = Annotated[int, Reads(type=whole_number(1), metavar="N")]
File = Annotated[Path, Reads(type=Path, metavar="FILE")]
Folder = Annotated[Path, Reads(type=folder, metavar="FOLDER")]
Framework = Annotated[str, Reads(choices=FRAMEWORKS)]
Rest = Annotated[Sequence[str], Reads(nargs=argparse.REMAINDER)]


def framework_or_first(name: str | None) -> str:
    """The chosen framework, or the first that is installed."""
    from manyhands.cli import probe

    return name or next(iter(probe.installed_frameworks()), FRAMEWORKS[0])


# Arguments from the signature and the docstring of a function

_OURS = ("command", "action", "parser", "run_command")  # in a namespace, besides arguments


def add_command(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    """Let a command call a function: its positional parameters are arguments, the others are options.

    Where it takes ``**others``, the command adds the others itself.
    """
    parser.description = " ".join((inspect.getdoc(function) or "").partition("\nArgs:\n")[0].split())
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            add_option(parser, function, name, dest=name)
            parser.set_defaults(**{name: parameter.default})
        elif parameter.kind is not parameter.VAR_KEYWORD:
            optional = {} if parameter.default is parameter.empty else {"nargs": "?"}
            keywords = {"metavar": name.upper(), **_argparse_keywords(parameter, function), **optional}
            parser.add_argument(name, help=_docstring_entries(function)[name][0], **keywords)

    def call(options: argparse.Namespace) -> int:
        return function(**{name: value for name, value in vars(options).items() if name not in _OURS})

    parser.set_defaults(run_command=call)


def add_option(group: Any, function: Any, name: str, **changed: Any) -> argparse.Action:
    """Add an option for a parameter of a function or class.

    Type and choices come from the signature, the help text from ``Args`` of the docstring: its first sentence, and what
    it says after "Default:". ``changed``: other arguments of argparse; ``flag`` replaces the name, and ``default_text``
    what the docstring says of the default.
    """
    parameter = inspect.signature(function).parameters[name]
    first, default = _docstring_entries(function)[name]
    keywords = {**_argparse_keywords(parameter, function), **changed}
    text = f"{first}; default: {keywords.pop('default_text', default)}"
    keywords = {"help": text.replace("%", "%%"), "default": None, **keywords}
    if parameter.default is parameter.empty:
        keywords |= {"help": first, "required": True}
    action: argparse.Action = group.add_argument(keywords.pop("flag", flag_of(name)), **keywords)
    action.setting = name  # type: ignore[attr-defined]
    return action


def add_options(
    group: Any, function: Any, names: Sequence[str], changed: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Add the options of these names; returns the function's defaults, by the command's names."""
    actions = {name: add_option(group, function, name, **changed.get(name, {})) for name in names}
    parameters = inspect.signature(function).parameters
    return {action.dest: parameters[name].default for name, action in actions.items()}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _argparse_keywords(parameter: inspect.Parameter, function: Any) -> dict[str, Any]:
    """How argparse reads a parameter with this annotation; as text if that is not plain."""
    try:
        annotation = eval(parameter.annotation, vars(sys.modules[function.__module__]))
    except NameError:  # imported for type checkers only
        return {}
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(annotation) if union else (annotation,)) if kind is not types.NoneType]
    if typing.get_origin(kinds[0]) is Annotated:
        return dict(kinds[0].__metadata__[-1].keywords)
    if kinds == [bool]:
        return {"action": "store_true"}
    if kinds == [int]:
        return {"type": whole_number(1), "metavar": "N"}
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


_TOPIC = re.compile(r"(?:\b\w+=)?(?:\bmh\.)?\b(?:Step|Checkpoints|Workers|Limits)\(((?:[^()]|\([^()]*\))*)\)")


def in_command_words(text: str, names: Mapping[str, str]) -> str:
    """Rewrite options in a message of the library as options of the command.

    >>> flags = {"batch_size": "--batch-size", "on_nan": "--on-nan", "shares": "--shares"}
    >>> in_command_words("batch_size=10 is wrong: step=mh.Step(on_nan='stop'), Step(shares=(0.7, 0.3))", flags)
    '--batch-size 10 is wrong: --on-nan stop, --shares 0.7, 0.3'
    """
    option = rf"(?<![-\w/])({'|'.join(names)})=('[^']*'|\[[^\]]*\]|\([^)]*\)|-?\w(?:[\w.+-]*\w)?)"

    def as_flag(match: re.Match[str]) -> str:
        return " ".join([names[match[1]], match[2].strip("'()")])

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


def hint_misplaced(command: str, program: Sequence[str], function: Callable[..., int]) -> None:
    """Print a hint if options of a command come after the program's name, so that the program receives them."""
    given = {text.partition("=")[0] for text in program[1:]}
    for name in given.intersection(map(flag_of, inspect.signature(function).parameters)):
        before = f"options of manyhands {command} go before the script"
        print(f"manyhands {command}: {name} went to {program[0]}: {before}", file=sys.stderr)
