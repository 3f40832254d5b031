"""The types of the command's options, and the library's errors rewritten in terms of these options."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from manyhands.device import FRAMEWORKS

MODELS = ("resnet18", "lenet", "small-resnet", "mlp")  # copied from training.commands.recipes, which imports NumPy
# Flags whose name differs from the library's option.
_FLAGS = {"max_epochs": "--epochs", "every": "--checkpoint-every", "keep": "--keep-checkpoints"}
LIMITS = ("max_steps", "max_time", "limit_batches", "limit_val_batches", "evaluate_every", "overfit_batches")
_NAMES = ("max_epochs", "micro_batch_size", "batch_size", "batch_stats", "on_nan", *LIMITS)
# These are also plain words: they count as flags only if a value follows.
_OF_STEP = ("shares", "accumulate", "optimize")
_WORDS = ("lr", "seed", "precision", "devices", "run", "resume", "framework", "every", "keep", *_OF_STEP)
_TOPIC = re.compile(r"(?:\b\w+=)?(?:\bmh\.)?\b(?:Step|Checkpoints|Workers|Limits)\(([^()]*)\)")
_GIVEN = re.compile(rf"(?<![-\w/])({'|'.join((*_NAMES, *_WORDS))})=(\[[^\]]*\]|'[^']*'|\w[\w.+-]*\w|\w|-[\w.]*\w)")
_NAMED = re.compile(rf"(?<![-\w/])({'|'.join(_NAMES)})(?![\w=/])")


def of(name: str) -> str:
    """The option for a setting.

    >>> of("batch_size"), of("max_epochs")
    ('--batch-size', '--epochs')
    """
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def changed(name: str, value: Any, before: Any) -> str:
    """Describe an option of a resumed run: its value now, and the value the run was started with.

    >>> changed("lr", 0.2, 0.05), changed("optimize", "off", "auto")
    ('--lr 0.2: the run was started with 0.05', '--optimize off: the run was started with auto')
    >>> changed("data", "b", None), changed("shares", None, "0.7,0.3")
    ('--data b: the run was started without it', 'no --shares: the run was started with 0.7,0.3')
    """
    begun = "without it" if before is None else f"with {before}"
    return f"{_with_value(name, value)}: the run was started {begun}"


def _with_value(name: str, value: Any) -> str:
    return f"no {of(name)}" if value is None else f"{of(name)} {value}"


class Parser(argparse.ArgumentParser):
    """Suggests the choice that the user probably meant.

    ``likely``: suggests a replacement for a refused word, if a command knows more than its choices.
    """

    likely: Callable[[str], str | None] | None = None

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}{_nearest_choice(message, self.likely)}")


def _nearest_choice(message: str, likely: Callable[[str], str | None] | None = None) -> str:
    """
    >>> _nearest_choice("argument COMMAND: invalid choice: 'trian' (choose from 'train', 'parity')")
    '; did you mean train?'
    """
    refused = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if refused is None:
        return ""
    near = likely(refused[1]) if likely is not None else None
    near = near or next(iter(difflib.get_close_matches(refused[1], re.findall(r"[\w-]+", refused[2]), 1)), None)
    return f"; did you mean {near}?" if near else ""


def refuse(top: argparse.ArgumentParser, command: str | None, unknown: Sequence[str]) -> NoReturn:
    """Exit with the usage of the subcommand, and the option that the user probably meant."""
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices[command] if command is not None else top
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    wrong = next((text.partition("=")[0] for text in unknown if text.startswith("-")), None)
    near = None if wrong is None else _near(wrong, known)
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near}?' if near else ''}")


def _near(wrong: str, known: Sequence[str]) -> str | None:
    from manyhands.training import refusals

    option = refusals.option_called(wrong.lstrip("-").replace("-", "_"))
    if option is not None and of(option) in known:
        return of(option)
    return next(iter(difflib.get_close_matches(wrong, known, 1)), None)


def in_command_words(text: str) -> str:
    """Rewrite a message about settings in terms of command-line options.

    >>> in_command_words("batch_size=10 is wrong: give batch_size=16, or resume='auto'")
    '--batch-size 10 is wrong: give --batch-size 16, or --resume RUN'
    >>> in_command_words("seed=3 and shares=[0.7, 0.3], each with max_epochs")
    '--seed 3 and --shares 0.7,0.3, each with --epochs'
    >>> in_command_words("Step(optimize='off'): give step=mh.Step(on_nan='continue')")
    '--optimize off: give --on-nan continue'
    >>> in_command_words("runs/lr=0.1 and runs/batch_size are folders")
    'runs/lr=0.1 and runs/batch_size are folders'
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("[]'").replace(", ", ",")
        return f"{of(name)} {'RUN' if value == 'auto' and name == 'resume' else value}"

    return _NAMED.sub(lambda match: of(match[1]), _GIVEN.sub(flag, _TOPIC.sub(r"\1", text)))


def add_framework(option: Callable[..., Any], words: str = "") -> None:
    """Add ``--framework``, read by :func:`framework`; ``words`` begin its help text."""
    option("--framework", choices=FRAMEWORKS, help=f"{words}{'; ' * bool(words)}default: the first that is installed")


def framework(options: argparse.Namespace) -> str:
    """The chosen framework, or the first that is installed."""
    from manyhands.cli import probe

    return str(options.framework or next(iter(probe.installed()), FRAMEWORKS[0]))


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
        return value

    return parse


# For options that take a count, and for options that take a file.
COUNT: dict[str, Any] = {"type": whole_number(1), "metavar": "N"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}


def misplaced(command: str, script: str, arguments: Sequence[str], options: Collection[str]) -> str | None:
    """A hint if options of a command come after the script's name, so that the script receives them.

    >>> misplaced("simulate", "train.py", ["--devices=4"], ["--devices"])
    'manyhands simulate: --devices went to train.py: options of manyhands simulate go before the script'
    """
    names = [name for text in arguments if (name := text.partition("=")[0]) in options]
    if not names:
        return None
    return f"manyhands {command}: {names[0]} went to {script}: options of manyhands {command} go before the script"


def folder(text: str) -> Path:
    """The type of an option that takes a folder; expands ``~``, because a shell does not in ``--run=~/mine``."""
    return Path(os.path.expanduser(text))


def rate(text: str) -> float:
    """The type of an option that takes a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a learning rate: give a number of zero or more")
    return value
