"""``manyhands audit`` runs a program as Python does: with any input, one clear line says what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import run_command, run_program

from manyhands.cli import main

NOTHING = "the program used none of torch, jax, tensorflow and mxnet"


_audit = partial(run_program, "-m", "manyhands", "audit")


def test_arguments_input_output_and_exit_code_are_the_programs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    script.write_text(
        "import sys, pickle\nimport beside\n"
        "class Thing: pass\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "print(__name__, __file__, sys.argv, sys.path[0], beside.word, input(), Thing.__module__)\n"
        "sys.exit(7)\n"
    )
    plain, audited = (run(script, "--steps", "3", "-m", stdin="hello\n") for run in (run_program, _audit))
    assert audited.stdout == plain.stdout
    assert audited.returncode == plain.returncode == 7
    assert "ended with exit code 7" in audited.stderr
    assert NOTHING in audited.stderr


def test_a_linked_script_finds_what_is_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("word = 'found'\n")
    (tmp_path / "real" / "program.py").write_text("import sys, beside\nprint(beside.word, __file__, sys.path[0])\n")
    script = tmp_path / "link.py"
    script.symlink_to(tmp_path / "real" / "program.py")
    monkeypatch.chdir(tmp_path)
    plain, audited = run_program("link.py"), _audit("link.py")
    assert audited.stdout == plain.stdout
    assert "found" in plain.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f():\n    raise ValueError('no')\n\nf()\n", "an exception: ValueError"),
        ("import sys\nsys.exit('that is it')\n", "that is it\n"),
        ("print('a'\n", "has a syntax error, so nothing was run"),
    ],
    ids=["traceback", "sys.exit", "syntax error"],
)
def test_a_program_that_fails_says_what_python_says(tmp_path: Path, text: str, said: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(text)
    plain, audited = run_program(script), _audit(script)
    assert audited.returncode == plain.returncode == 1
    assert audited.stderr.startswith(plain.stderr)
    assert said in audited.stderr


def test_a_module_runs_with_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nfrom jobs import __name__ as parent\nprint(__name__, parent, sys.argv[1:])\n"
    )
    (package / "__main__.py").write_text("from jobs import train\n")
    done = _audit("-m", "jobs.train", "-x", cwd=tmp_path)
    assert done.stdout == "__main__ jobs ['-x']\n", done.stderr
    missing = run_command("audit", "-m", "no_such_package.module")
    assert missing.returncode == 1
    assert missing.stderr == (
        "manyhands audit: there is no module 'no_such_package.module' to audit, or none that can be run\n"
    )


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "was killed by SIGKILL: no report"),
        ("os._exit(4)", 4, "ended with code 4 without returning to Python"),
    ],
)
def test_a_program_that_ends_without_python_is_named(tmp_path: Path, end: str, code: int, said: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import os, signal\n{end}\n")
    audited = _audit(script)
    assert audited.returncode == code
    assert said in audited.stderr


def test_forks_and_threads_are_the_programs_and_told(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, threading\n"
        "child = os.fork()\n"
        "if child == 0:\n    print('child', flush=True)\n    raise SystemExit(0)\n"
        "os.waitpid(child, 0)\n"
        "threading.Thread(target=print, args=('thread',)).start()\n"
    )
    audited = _audit(script)
    assert audited.returncode == 0
    assert sorted(audited.stdout.split()) == ["child", "thread"]
    assert "forked 1 process" in audited.stderr
    assert audited.stderr.count("manyhands audit:") == 1


def test_an_interrupt_reaches_the_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('saved')\n"
    )
    command = [sys.executable, "-m", "manyhands", "audit", str(script)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "saved\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "audit needs a program"),
        (("none.py",), "there is no file 'none.py' to audit"),
        (("--fail-over", "many", "none.py"), "give a number of zero or more"),
        (("--steps", "0", "none.py"), "a whole number of at least 1"),
        (("--speeds", "p.json", os.devnull), "there is no file"),
        (("--baseline", "none.json", __file__), "No such file"),
        (("--baseline", __file__, __file__), "is not a report of `manyhands audit --json`"),
        (("--json", "/no/such/folder/a.json", __file__), "there is no folder"),
        (("--html", os.curdir, __file__), "it is a folder"),
        (("--speeds", "p.json", __file__), "give --as-if-gpu, too"),
        (("--jsn", "a", __file__), "did you mean --json?"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["audit", *arguments])
    except SystemExit as end:  # argparse's
        code = end.code
    assert code in (1, 2)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_option_behind_the_program_is_said_to_be_the_programs(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = run_command("audit", str(program), "--html=report.html")
    assert done.returncode == 2
    assert f"--html went to {program}: options of manyhands audit go before the script" in done.stderr
    program.write_text("")  # it does not look at its arguments
    assert "--as-if-gpu went to" in run_command("audit", str(program), "--as-if-gpu").stderr
    assert "went to" not in run_command("audit", str(program), "--steps", "9").stderr
