"""How a program ends that does not catch what a signal has raised in ``fit``."""

from __future__ import annotations

import pytest
from support import run_python

PROGRAM = """
import sys
from manyhands.training.stopping import Stopped
from manyhands.training.result import Result

def stopped(name):
    return Stopped.by(Result(signal=name, steps=7))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_the_exit_code_is_that_of_the_signal(name: str, code: int) -> None:
    done = run_python(f"{PROGRAM}\nraise stopped({name!r})")
    assert done.returncode == code, done.stderr
    assert ("after 7 steps of training" in done.stderr) == (name == "SIGINT")


def test_a_hook_of_the_program_is_called_and_other_errors_end_as_ever() -> None:
    hook = "sys.excepthook = lambda kind, error, traceback: print(kind.__name__)"
    done = run_python(f"{PROGRAM}\n{hook}\nraise stopped('SIGINT')")
    assert (done.stdout, done.returncode) == ("Interrupted\n", 130), done.stderr
    done = run_python(f"{PROGRAM}\n{hook}\nstopped('SIGINT')\nraise ValueError")
    assert (done.stdout, done.returncode) == ("ValueError\n", 1), done.stderr
