"""The command's own words: values that options take, and the library's errors in terms of options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_FLAGS = {"max_epochs": "--epochs", "batch_size": "--batch-size", "batch_stats": "--batch-stats"}
_FLAGS |= {"checkpoint_every": "--checkpoint-every"}
# These are also plain words: they are flags only where a value follows.
_WORDS = ("lr", "seed", "shares", "precision", "compile", "parallel", "devices", "run", "resume", "framework")
_GIVEN = re.compile(rf"(?<![-\w/])({'|'.join((*_FLAGS, *_WORDS))})=(\[[^\]]*\]|'[^']*'|\w[\w.+-]*\w|\w|-[\w.]*\w)")
_NAMED = re.compile(rf"(?<![-\w/])({'|'.join(_FLAGS)})(?![\w=/])")


def of(name: str) -> str:
    """The option for a setting.

    >>> of("batch_size"), of("max_epochs")
    ('--batch-size', '--epochs')
    """
    return _FLAGS.get(name, f"--{name}")


def in_command_words(text: str) -> str:
    """A message about settings, about options.

    >>> in_command_words("batch_size=10 is wrong: give batch_size=16, or resume='auto'")
    '--batch-size 10 is wrong: give --batch-size 16, or --resume RUN'
    >>> in_command_words("compile=False and shares=[0.7, 0.3], each with max_epochs")
    '--no-compile and --shares 0.7,0.3, each with --epochs'
    >>> in_command_words("runs/lr=0.1 and runs/batch_size are folders")
    'runs/lr=0.1 and runs/batch_size are folders'
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("[]'").replace(", ", ",")
        if value in ("True", "False"):
            return f"--{'no-' if value == 'False' else ''}{name}"
        return f"{of(name)} {'RUN' if value == 'auto' and name == 'resume' else value}"

    return _NAMED.sub(lambda match: of(match[1]), _GIVEN.sub(flag, text))


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


def rate(text: str) -> float:
    """The type of an option that takes a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a learning rate: give a number of zero or more")
    return value
