"""The command, as a user runs it."""

from __future__ import annotations

import argparse
import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend, FakeDevice
from support import run_command

from manyhands import machine
from manyhands.cli import devices, flags, main, parser, probe, script
from manyhands.errors import BadSettings
from manyhands.placement import measure


def test_help_and_version() -> None:
    assert "devices" in run_command().stdout
    assert run_command("--help").returncode == 0
    assert run_command("--version").stdout.startswith("manyhands ")


def test_every_option_has_a_help_text_and_its_default() -> None:
    top = parser()
    (commands,) = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.help, f"{name} {action.dest}"
            if action.option_strings and not action.required and action.dest != "help":
                assert "default:" in action.help, f"{name} {action.dest}"


def test_errors_of_the_library_are_put_into_the_words_of_the_command() -> None:
    assert doctest.testmod(flags).failed == 0


def test_a_choice_that_is_misspelt_is_told_what_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in ("divices", "devices"), ("train --model resnet", "resnet18"), ("convert x --to jaxx", "jax"):
        with pytest.raises(SystemExit, match="2"):
            main(given.split())
        assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")
    with pytest.raises(SystemExit):
        main(["train", "--model", "xyz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "command", "meant"),
    [
        (["train", "--learning-rate", "3"], "train", "--learning-rate 3; did you mean --lr?"),
        (["train", "--num-epochs=3"], "train", "--num-epochs=3; did you mean --epochs?"),
        (["train", "--gradient-accumulation-steps", "4"], "train", "did you mean --accumulate?"),
        (["train", "--save-steps", "50"], "train", "did you mean --checkpoint-every?"),
        (["devices", "--jsno"], "devices", "--jsno; did you mean --json?"),
        (["parity", "mlp", "--batchsize", "4"], "parity", "did you mean --batch-size?"),
        (["convert", "x", "--to", "jax", "--xyz"], "convert", "unrecognized arguments: --xyz\n"),
    ],
)
def test_an_unknown_option_is_told_what_it_may_be(
    given: list[str], command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    said = capsys.readouterr().err
    assert said.startswith(f"usage: manyhands {command} ")
    assert meant in said


@pytest.mark.parametrize("command", ["parallel", "parity", "forecast", "train"])
def test_the_first_framework_that_is_installed_is_used(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not always PyTorch, which somebody with JAX alone would be told to install."""
    script = tmp_path / "script.py"
    script.write_text("def make(): ...")
    monkeypatch.setattr(probe, "installed_frameworks", lambda: ["mxnet"])  # not here: the error names it
    assert main([command, *(() if command in ("train", "forecast") else [f"{script}:make"])]) == 1
    assert "manyhands.mxnet needs mxnet" in capsys.readouterr().err


def test_no_framework_is_a_useful_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("manyhands.cli.probe.FRAMEWORKS", ())
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    assert "host: " in shown
    assert "pip install 'manyhands[torch]'" in shown


def test_measuring_gives_every_figure() -> None:
    backend = FakeBackend(gpus=1)
    figures = measure.speed(backend, FakeDevice("gpu", 0), megabytes=1)
    assert list(figures) == list(devices._COLUMNS)
    assert figures["host_to_device"] > 0  # type: ignore[operator]
    assert figures["host_to_device_pinned"] is None
    assert figures["device_to_device"] > 0  # type: ignore[operator]
    assert measure.speed(backend, backend.cpu(), megabytes=1)["host_to_device"] is None


def ask(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command makes of a child that runs this program."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **how: run([sys.executable, "-c", program], **how))
    return probe.ask("torch")


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 1)
    assert "within 1 second" in ask("import time; print('{}', flush=True); time.sleep(60)", monkeypatch)["error"]


def test_a_child_that_is_noisy_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; sys.stderr.write('x' * 1_000_000)\n"
        "sys.stdout.buffer.write(b'\\xff\\n')\n"
        "print('{not json'); print('[1]'); print()\n"
        "print('{\"framework\": \"x\"}'); print('bye')"
    )
    assert ask(program, monkeypatch) == {"framework": "x"}


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit('the driver is broken')", "the driver is broken"),
        ("raise SystemExit(3)", "exit status 3"),
        ("from manyhands.errors import FrameworkMissing as E; raise E('jax is not installed')", "jax is not installed"),
    ],
)
def test_a_child_that_fails_is_quoted(program: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(program, monkeypatch)["error"] == error


def test_files_in_the_current_folder_are_not_taken_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json.py", "rich.py", "no_such_framework.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert "No module named 'manyhands.no_such_framework'" in probe.ask("no_such_framework")["error"]


def test_a_folder_is_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "framework_folder" / "data").mkdir(parents=True)
    (tmp_path / "framework_file.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "FRAMEWORKS", ("framework_folder", "framework_file", "framework_nowhere"))
    assert probe.installed_frameworks() == ["framework_file"]


SPEED = {"host_to_device": 3456.7, "matmul_float32": 0.00012, "device_to_device": 12.34, "matmul_bfloat16": None}


def answer(framework: str, measured: bool) -> dict[str, Any]:
    row = {"device": "virtual:10", "name": "A Processor With Quite A Long Name @ 3.50GHz", "uuid": None, "kind": "gpu"}
    row |= {"memory": {"total": 2**40, "free": 2**40} if framework == "torch" else None, "capability": "12.1"}
    row |= {"speed": {name: SPEED.get(name, 123.4) for name in devices._COLUMNS}, "load_percent": 100.0, "index": 10}
    return {"framework": framework, "version": "2.21.0+cu130", "virtual": 0, "devices": [row, row]}


def test_no_figure_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(probe, "ask", answer)
    assert main(["devices", "--measure", "--framework", "torch", "--framework", "tensorflow"]) == 0
    shown = capsys.readouterr().out
    for figure in ("3457", "0.00012", "12.3", "123", "1024.0", "12.1", "virtual:10", "2.21.0+cu130"):
        assert figure in shown, figure
    assert "…" not in shown.partition("fp32")[2]  # the name of a processor may be cut, a figure never
    assert "page-locked" in shown


def test_a_reader_that_has_enough_is_no_error() -> None:
    program = [sys.executable, "-m", "manyhands", "devices", "--framework", "mxnet"]  # not here: it answers soon
    for options in ([], ["--json"]):
        child = subprocess.Popen([*program, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        child.stdout.close()
        complaint = child.stderr.read()
        assert (child.wait(), "Broken" in complaint) == (0, False), complaint


class Silent:
    """A driver that knows a GPU's name and nothing else of it, and has lost the second GPU."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    answers = ("Init", None), ("Shutdown", None), ("SystemGetDriverVersion", b"580.1"), ("DeviceGetCount", 2)
    answers += ("DeviceGetUUID", "GPU-0"), ("DeviceGetName", "Card")

    def __init__(self, **changed: Any) -> None:
        self.known = {"DeviceGetHandleByIndex": 0, **dict(self.answers), **changed}

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            answer = self.known.get(name.removeprefix("nvml"), self.NVMLError("Not Supported"))
            if isinstance(answer, Exception) or arguments == (1,):
                raise answer if isinstance(answer, Exception) else self.NVMLError("GPU is lost")
            return answer

        return ask


def test_a_driver_that_tells_little_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Silent())
    assert machine.gpus() == [machine.GpuFacts(0, "GPU-0", "Card", None, None, None, None, "580.1")]
    assert machine.why_no_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", Silent(DeviceGetCount=0))
    assert machine.gpus() == []
    assert "sees no GPU" in str(machine.why_no_gpus())
    monkeypatch.setitem(sys.modules, "pynvml", Silent(Init=OSError("no such file")))
    assert machine.gpus() == []
    assert "no NVIDIA driver found" in str(machine.why_no_gpus())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install" in str(machine.why_no_gpus())


def test_visible_devices_renumber_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [machine.GpuFacts(i, f"GPU-{i}aaa", "H", machine.host_memory(), None, None, None, "1") for i in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: facts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_uuid(1) == "GPU-1aaa"
    assert machine.visible_uuid(3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0")
    assert [machine.visible_uuid(i) for i in range(3)] == ["GPU-2aaa", "GPU-0aaa", None]


def test_a_function_of_a_script_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "job.py"
    file.write_text("def make(): ...")
    for text, said in ((f"{file}:other", "no function 'other'"), ("no.py:make", "no file 'no.py'"), ("x", "name a")):
        with pytest.raises(BadSettings, match=said):
            script.maker(text)


def test_a_script_does_not_see_the_arguments_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with argparse would refuse them, and end the command with its own usage."""
    file = tmp_path / "job.py"
    file.write_text("import sys\nloaded = sys.argv[:]\ndef make(): return loaded, sys.argv[:]\n")
    command = ["manyhands", "forecast", f"{file}:make", "--devices", "2"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert script.maker(f"{file}:make")() == ([str(file)], [str(file)], None)
    assert sys.argv is command


def test_run_without_torch_says_what_other_frameworks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    assert main(["simulate", str(script)]) != 0
    assert "In JAX, TensorFlow and MXNet write MANYHANDS_VIRTUAL_DEVICES=2 python" in capsys.readouterr().err
