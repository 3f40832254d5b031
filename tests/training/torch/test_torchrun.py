"""The same script under torchrun: the same weights, also on two machines; a restart goes on from the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support import free_port

import manyhands.training
from manyhands.training.checkpoints import store
from manyhands.training.torch.trainer import Trainer

SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training_cases import *
from manyhands.training.options import Checkpoints, Step, Workers

run, out = sys.argv[1:3]
model = convnet()
trainer = Trainer(2, batch_size=15, lr=0.1, precision="fp64", quiet=True, run=run, resume="auto",
                  step=Step(batch_stats="global"), checkpoints=Checkpoints(every=2))
result = trainer.fit(model, (images(), images(21)))
weights = {{name: value.tolist() for name, value in model.state_dict().items()}}
rank = os.environ.get("RANK", "0")
with open(out + rank, "w") as file:
    json.dump({{"weights": weights, "rows": rows(result), "patched": "forward" in vars(model[1])}}, file)
"""

KILLED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training_cases import *
from manyhands.training.options import Checkpoints, Step, Workers

run, out = sys.argv[1:3]
model = SumsUp(40)
data = OneHot(40, Harm("kill", 17, Path(out + "killed")))
trainer = Trainer(1, batch_size=4, lr=4.0, precision="fp64", loss=answer_itself, quiet=True, run=run, resume="auto",
                  checkpoints=Checkpoints(every=2), workers=Workers(hang_seconds=5))
trainer.fit(model, data)
Trainer(1, precision="fp64", quiet=True).fit(mlp(), vectors())  # a second job in the same processes
with open(out + os.environ["RANK"], "w") as file:
    file.write(repr(model.seen.tolist()))
"""

OWN_GROUP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training_cases import *
from manyhands.training.options import Checkpoints, Step, Workers
import torch.distributed as dist

dist.init_process_group("gloo")
model = mlp(norm=True)
Trainer(1, devices=["cpu"], precision="fp64", quiet=True).fit(model, vectors())
mine = torch.cat([value.double().flatten() for value in model.state_dict().values()])
all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all_of_them, mine)  # the group is still there
assert torch.equal(*all_of_them), all_of_them
trainer = Trainer(1, devices=["cpu"], quiet=True, metrics={{"rows": lambda outputs, targets: len(outputs)}})
figures, outputs = trainer.evaluate(model, vectors()), trainer.predict(model, vectors()[0])
assert figures["rows"] == len(vectors()[0]), figures
if dist.get_rank() == 0:
    torch.testing.assert_close(outputs, model.eval()(vectors()[0]).detach())
else:
    assert outputs is None
plain, sharded = mlp(), mlp()  # the caller's own model gets the whole weights of a sharded training
for model, shard in ((plain, False), (sharded, True)):
    Trainer(1, devices="cpu", precision="fp64", quiet=True, step=Step(shard=shard)).fit(model, vectors())
assert type(sharded) is type(plain)
assert difference(plain.state_dict(), sharded.state_dict()) <= 1e-12
dist.destroy_process_group()  # who made it ends it: a process that leaves it open may abort when it ends
"""


def start(script: Path, folder: Path, *options: str, launcher: bool = True) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", *options] if launcher else []
    command = [sys.executable, *launch, str(script), str(folder / "run"), str(folder / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        text, _ = process.communicate(timeout=200)
        assert process.returncode == 0, text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script leaves without a launcher, on one device."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "script.py").write_text(SCRIPT)
    finish(start(folder / "script.py", folder, launcher=False))
    return folder


def check(first: Path, second: Path, plain: Path) -> None:
    plainly = json.loads((plain / "out0").read_text())
    for rank, folder in enumerate([first, second]):
        found = json.loads((folder / f"out{rank}").read_text())
        for name, value in plainly["weights"].items():
            ours, theirs = torch.tensor(found["weights"][name]).double(), torch.tensor(value).double()
            assert float((ours - theirs).norm()) <= 1e-12 * float(theirs.norm())
        assert not found["patched"]
        for row, other in zip(found["rows"], plainly["rows"], strict=True):
            assert row == pytest.approx(other, rel=1e-12)
    assert len((first / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_same_script_on_two_ranks(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finish(start(tmp_path / "script.py", tmp_path, "--standalone", "--nproc_per_node", "2"))
    check(tmp_path, tmp_path, plain)


def test_two_machines(tmp_path: Path, plain: Path) -> None:
    """Two launchers that meet on the loopback go on with a job of one device; only the first one's disk has it."""
    script, folders = plain / "script.py", [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    shutil.copytree(plain / "run", folders[0] / "run")
    store.drop_after(folders[0] / "run" / "checkpoints", 6)
    address = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    finish(*[start(script, folders[node], *address, "--node_rank", str(node)) for node in range(2)])
    check(*folders, plain)
    assert not (folders[1] / "run").exists()


def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    options = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
    finish(start(tmp_path / "script.py", tmp_path, *options))
    assert (tmp_path / "outkilled").exists()
    for rank in range(2):
        assert json.loads((tmp_path / f"out{rank}").read_text()) == [1.0] * 40


@pytest.mark.long
def test_a_group_that_the_script_has_made(tmp_path: Path) -> None:
    """It is used and stays; all ranks end with the same numbers, running statistics too."""
    (tmp_path / "script.py").write_text(OWN_GROUP)
    finish(start(tmp_path / "script.py", tmp_path, "--standalone", "--nproc_per_node", "2"))


def test_fewer_gpus_than_processes_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: one is made believe, and the first of two processes on its machine is enough."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    data = torch.rand(20, 4), torch.zeros(20, dtype=torch.int64)
    with pytest.warns(UserWarning, match="2 processes on a machine with 1 GPU.*--nproc-per-node=1"):
        result = Trainer(1, quiet=True).fit(torch.nn.Linear(4, 2), data)
    assert result.devices == ["cpu of rank 0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(1, devices=["cpu"], quiet=True).fit(torch.nn.Linear(4, 2), data)


def test_the_command_makes_one_run_and_prints_once(tmp_path: Path) -> None:
    small = str(Path(manyhands.training.__file__).parent / "data" / "fashion-mnist-small")
    options = ["--model", "mlp", "--epochs", "1", "--data", small]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "manyhands", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launch, *options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert done.stdout.count("sec/epoch on") == done.stdout.count("data: ") == done.stdout.count("run: ") == 1
