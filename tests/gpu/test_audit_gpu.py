"""The auditor on a real GPU: the corpus, PyTorch's own sync warnings as a second opinion, and times."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from audit_support import CORPUS, audit, lines_and_kinds, planted, programs
from support import run_command, run_program

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402
from manyhands.errors import HiddenWait  # noqa: E402

# What only a prediction sees: tiny operations line by line, and numbers that PyTorch reads by itself.
ONLY_PREDICTED = {"tiny_launches", "tensor_for_a_number"}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return audit("torch", MANYHANDS_AUDIT_REAL="1")


def test_every_planted_defect_is_found_on_a_gpu(reports: dict[str, Any]) -> None:
    for name in set(programs("torch", "planted")) - ONLY_PREDICTED:
        assert lines_and_kinds(reports[f"planted/{name}"]) == planted("torch", name), name


def test_no_false_alarm_on_a_gpu(reports: dict[str, Any]) -> None:
    for name in programs("torch", "clean"):
        assert not lines_and_kinds(reports[f"clean/{name}"]), name


SECOND_OPINION = """
import json, runpy, sys, torch, warnings
torch.ones(1, device="cuda").sum().item()
torch.linalg.cholesky(torch.eye(2, device="cuda"))
lines = {}
for path in sys.argv[1:]:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runpy.run_path(path, run_name="__main__")
    torch.cuda.set_sync_debug_mode("default")
    lines[path] = sorted({w.lineno for w in told if "synchronizing" in str(w.message) and w.filename == path})
print(json.dumps(lines))
"""


def test_pytorchs_own_warnings_name_no_line_of_a_loop_that_we_miss(reports: dict[str, Any]) -> None:
    paths = [
        str(CORPUS / "torch" / kind / f"{name}.py")
        for kind in ("planted", "clean")
        for name in sorted({*programs("torch", kind)} - ONLY_PREDICTED)
    ]
    done = run_program("-c", SECOND_OPINION, *paths)
    for path, lines in json.loads(done.stdout.splitlines()[-1]).items():
        text = Path(path).read_text().splitlines()
        in_loop = [line for line in lines if text[line - 1].startswith(" ")]
        report = reports[f"{Path(path).parent.name}/{Path(path).stem}"]
        ours = {finding["line"] for finding in report["findings"]}
        assert set(in_loop) <= ours, path


STEP = """
import torch, time
from manyhands import torch as mh
net = mh.resnet18(10, 1).cuda() if SMALL is False else torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(256, 1, 28, 28, device="cuda") if SMALL is False else torch.randn(64, 64, device="cuda")
y = torch.randint(10, (len(x),), device="cuda")
def step():
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_times_are_measured_and_the_gpu_is_seen_to_be_busy(tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(STEP.replace("SMALL", "False") + "for number in range(30):\n    loss = step()\n    float(loss)\n")
    done = run_command("audit", "--warmup", "10", "--json", str(report), str(script))
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert not told["predicted"]
    assert 0.1 < told["busy"] <= 1
    (finding,) = told["findings"]
    assert finding["source"] == "float(loss)"
    assert 0 < finding["waited"] < told["step_seconds"] * told["counted_steps"]
    assert "cuda" not in done.stderr.lower() or "the GPU is busy" in done.stderr


def test_a_program_with_its_own_profiler_and_sync_debug_mode_works(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        STEP.replace("SMALL", "True") + "torch.cuda.set_sync_debug_mode('warn')\n"
        "schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)\n"
        "traces = []\n"
        "with torch.profiler.profile(schedule=schedule, on_trace_ready=traces.append) as profiler:\n"
        "    for number in range(8):\n        step()\n        profiler.step()\n"
        "print(len(traces) > 0, torch.cuda.get_sync_debug_mode())\n"
    )
    done = run_command("audit", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "1"]


def test_a_guard_raises_before_the_host_waits() -> None:
    x = torch.ones(4, device="cuda")
    with mh.guard("forbid"), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = x * 2
        with pytest.raises(HiddenWait):
            y.sum().item()
        mh.to(y, "cpu")


def test_after_a_guard_a_step_is_captured_as_before(tmp_path: Path) -> None:
    mode = torch.cuda.get_sync_debug_mode()
    with mh.guard("count"):
        torch.ones(4, device="cuda").sum().item()
    assert torch.cuda.get_sync_debug_mode() == mode
    data = (torch.randn(512, 1, 28, 28), torch.randint(10, (512,)))
    trainer = mh.Trainer(max_epochs=1, devices=["gpu:0"], batch_size=64, quiet=True, run=tmp_path / "run")
    result = trainer.fit(mh.lenet(), data)
    assert not [note for note in result.notes if note.startswith("the step: plain")]


@pytest.mark.parametrize("optimize", ["auto", "off"])
def test_the_trainer_waits_for_nothing_in_a_step(tmp_path: Path, optimize: str) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import torch\nfrom manyhands import torch as mh\n"
        "data = (torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))\n"
        f"trainer = mh.Trainer(max_epochs=2, batch_size=64, quiet=True, step=mh.Step(optimize={optimize!r}))\n"
        "trainer.fit(mh.lenet(), data)\n"
    )
    done = run_command("audit", "--warmup", "30", "--json", str(report), str(script))
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert told["steps"] >= 128  # the trainer may try a step before the first
    assert told["findings"] == [], done.stderr
