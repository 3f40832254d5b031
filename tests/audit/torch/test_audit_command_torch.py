"""``manyhands audit`` of PyTorch programs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_command, run_program

pytestmark = pytest.mark.once

PROGRAM = """
import os, torch
assert torch.cuda.is_available() == bool(os.environ.get("AS_IF"))
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(400, 4))
loader = torch.utils.data.DataLoader(data, 4, num_workers=1, pin_memory=True)
total = 0.0
for (x,) in loader:
    x = x.to(device, non_blocking=True)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    loss.tolist()
print("all steps")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_a_prediction_with_its_files_and_exit_codes(program: Path, tmp_path: Path) -> None:
    report, sarif = tmp_path / "report.json", tmp_path / "report.sarif"
    options = ("--as-if-gpu", "--warmup", "2", "--steps", "4", "--fail-over", "0%")
    done = run_command("audit", *options, "--json", str(report), "--sarif", str(sarif), str(program), AS_IF="1")
    assert done.returncode == 3, done.stderr
    assert "all steps" not in done.stdout  # --steps ended it
    assert "predicted for an NVIDIA H200: the GPU is busy" in done.stderr
    assert "cure: total += loss.detach()" in done.stderr
    assert "more than the 0.0% of --fail-over" in done.stderr
    assert "forked 1 process" in done.stderr
    told = json.loads(report.read_text())
    assert (told["schema"], told["predicted"], told["counted_steps"], told["ended"]) == (1, True, 4, "enough")
    lines = {finding["source"]: finding for finding in told["findings"]}
    assert set(lines) == {"total += loss.item()", "loss.tolist()"}
    assert len(json.loads(sarif.read_text())["runs"][0]["results"]) == len(lines)

    known = run_command("audit", *options, "--baseline", str(report), str(program), AS_IF="1")
    assert known.returncode == 0, known.stderr
    assert "no new hidden waits were found" in known.stderr
    assert "known from the baseline and not shown: " in known.stderr


UNCHANGED = """
import sys, warnings, torch
lines = []
sys.settrace(lambda frame, event, arg: lines.append(frame.f_lineno) if frame.f_code.co_name == "traced" else None)
def traced():
    return torch.ones(3).tolist()
warnings.simplefilter("ignore", FutureWarning)
filters = [entry[:3] for entry in warnings.filters]
net = torch.nn.Linear(4, 2)
torch.nn.init.ones_(net.weight); torch.nn.init.zeros_(net.bias)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
@torch.compile(backend="eager")
def forward(x):
    return torch.where(x > 0, net(x)[:, :1], 0.0).sum()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    for step in range(8):
        loss = forward(torch.ones(2, 4))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
sys.settrace(None)
print(traced(), f"{loss:.4f}", loss.item(), net.weight.tolist(), len(profiler.events()) > 0, lines, filters)
"""


def test_a_program_with_a_profiler_a_tracer_and_a_compiler_is_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(UNCHANGED)
    plain, audited = run_program(script), run_command("audit", str(script))
    assert audited.returncode == 0, audited.stderr
    assert audited.stdout == plain.stdout


LISTS = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
value, row = torch.tensor(1.5, device=device), torch.ones(1, device=device)
class Mine(torch.Tensor):
    pass
for made in (torch.tensor([value, 2]), torch.as_tensor([[value]]), torch.tensor([row]), row.new_tensor([value])):
    print(made.tolist())
print(torch.tensor([torch.tensor(1).as_subclass(Mine)]), torch.FloatTensor([torch.tensor(1)]))
try:
    torch.tensor([torch.ones(2, device=device)])
except ValueError as error:
    print(error)
print(row[row > 0].tolist(), [each.item() for each in row], row[0].item())
"""


def test_tensors_in_a_list_are_numbers_as_in_a_plain_run(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(LISTS)
    plain = run_program(script)
    for option in ("--as-if-gpu", "--warmup=1"):
        audited = run_command("audit", option, str(script))
        assert audited.returncode == 0, audited.stderr
        assert audited.stdout == plain.stdout
    assert "no tensor was on a GPU: there was nothing to audit" in audited.stderr
