"""The reference of all options: every one is explained, and the pages say what docstrings and ``--help`` say."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.training import options
from manyhands.training.trainer import BaseTrainer

SCRIPT = Path(__file__).parents[2] / "docs" / "options.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_pages_are_up_to_date(script: Any) -> None:
    assert script.PAGE.read_text() == script.page(), "run: python docs/options.py"
    assert script.COMMANDS.read_text() == script.commands_page(), "run: python docs/options.py"


@pytest.mark.parametrize("kind", [BaseTrainer, *options.TOPICS.values()])
def test_every_option_is_explained(script: Any, kind: Any) -> None:
    assert set(script.described(kind)) == set(inspect.signature(kind).parameters)


def test_every_callback_says_what_it_takes(script: Any) -> None:
    for _, kind in [*script.callbacks(), *script.every_logger()]:
        assert set(script.described(kind)) == set(inspect.signature(kind).parameters)
