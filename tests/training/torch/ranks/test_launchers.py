"""The same script under torchrun: the same weights, also on two machines; a restart goes on from the checkpoint."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import free_port

from manyhands.errors import BadSettings
from manyhands.training.checkpoints import store
from manyhands.training.data.fashion_mnist import SUBSET_DIRECTORY
from manyhands.training.torch.trainer import Trainer

HEAD = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from training_cases import *
from manyhands import torch as mh
from manyhands.training.options import Checkpoints, Step, Workers
"""

SCRIPT = f"""{HEAD}
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

KILLED = f"""{HEAD}
run, out = sys.argv[1:3]
model = SumsUp(40)
data = OneHot(40, Harm("kill", 17, Path(out + "killed")))
trainer = Trainer(1, batch_size=4, lr=4.0, precision="fp64", loss=mean_output, quiet=True, run=run, resume="auto",
                  checkpoints=Checkpoints(every=2), workers=Workers(hang_seconds=5))
trainer.fit(model, data)
Trainer(1, precision="fp64", quiet=True).fit(mlp(), vectors())  # a second job in the same processes
with open(out + os.environ["RANK"], "w") as file:
    file.write(repr(model.seen.tolist()))
"""

CALLBACKS = f"""{HEAD}
class Calls(mh.Callback):
    every = 2
    def __init__(self):
        self.steps, self.pid = [], None
    def on_fit_start(self, training):
        self.pid = os.getpid()
    def on_steps(self, training, metrics):
        self.steps.append([training.step, metrics["train_loss"]])
    def on_evaluation(self, training, metrics):
        if training.epoch == 2:
            training.stop("enough")
    def on_model(self, training, model):
        model[0].requires_grad_(False)
        model[0].weight.data *= 0.5

calls, model = Calls(), mlp()
how = dict(batch_size=30, lr=0.1, precision="fp64", quiet=True, devices=["cpu"])
result = mh.Trainer(5, callbacks=[calls, mh.EMA(0.5)], **how).fit(model, vectors(), vectors(30))
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
with open(sys.argv[2] + os.environ.get("RANK", ""), "w") as file:
    json.dump([len(result.rows), result.stopped, calls.pid is not None, calls.steps, weights], file)
"""

COMMAND = f"""
import sys
from manyhands.cli import main
options = ["--model", "mlp", "--epochs", "1", "--data", {str(SUBSET_DIRECTORY)!r}]
assert main(["train", *options]) == 0
"""

# A group that the script has made is used and stays; all ranks end with the same numbers, running statistics too.
OWN_GROUP = f"""{HEAD}
import torch.distributed as dist

dist.init_process_group("gloo")
model = mlp(norm=True)
Trainer(1, devices=["cpu"], precision="fp64", quiet=True).fit(model, vectors())
mine = torch.cat([value.double().flatten() for value in model.state_dict().values()])
all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all_of_them, mine)  # the group is still there
assert torch.equal(*all_of_them), all_of_them
trainer = Trainer(1, devices=["cpu"], quiet=True, metrics={{"rows": lambda outputs, targets: len(outputs)}})
metrics, outputs = trainer.evaluate(model, vectors()), trainer.predict(model, vectors()[0])
assert metrics["rows"] == len(vectors()[0]), metrics
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


# One launch for all of them: loading PyTorch in three processes takes longer than what they do.
PARTS = {"same": SCRIPT, "callbacks": CALLBACKS, "command": COMMAND, "group": OWN_GROUP}
TOGETHER = """
import os, runpy, sys
os.chdir(sys.argv[1])
for part in sys.argv[2:]:
    sys.argv = [part + ".py", part + "-run", part + "-out"]
    runpy.run_path(part + ".py", run_name="__main__")
    sys.stderr.write("done: " + part + chr(10))  # in one piece: torchrun's processes do not buffer
"""


def start(script: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", *options]
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", str(folder / "run"), str(folder / "out")])
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return folder


def check(first: Path, second: Path, plain: Path, prefix: str = "") -> None:
    plainly = json.loads((plain / "out0").read_text())
    for rank, folder in enumerate([first, second]):
        found = json.loads((folder / f"{prefix}out{rank}").read_text())
        for name, value in plainly["weights"].items():
            ours, theirs = torch.tensor(found["weights"][name]).double(), torch.tensor(value).double()
            assert float((ours - theirs).norm()) <= 1e-12 * float(theirs.norm())
        assert not found["patched"]
        for row, other in zip(found["rows"], plainly["rows"], strict=True):
            assert row == pytest.approx(other, rel=1e-12)
    assert len((first / f"{prefix}run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What all scripts leave on two ranks, and what they print."""
    folder = tmp_path_factory.mktemp("launched")
    for name, text in {"together": TOGETHER, **PARTS}.items():
        (folder / f"{name}.py").write_text(text)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launch, str(folder / "together.py"), str(folder), *PARTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [done.stderr.count(f"done: {part}") for part in PARTS] == [2] * len(PARTS)  # also: a group of its own stays
    return folder, done.stdout


def test_the_same_script_on_two_ranks(launched: tuple[Path, str], plain: Path) -> None:
    folder, _ = launched
    check(folder, folder, plain, "same-")


def test_the_first_rank_calls_and_all_stop(
    launched: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics are those over all ranks: the same as on one device."""
    folder, _ = launched
    out = folder / "callbacks-out"
    monkeypatch.setattr(sys, "argv", ["script.py", str(tmp_path / "run"), str(out)])
    exec(compile(CALLBACKS, "script.py", "exec"), {"__name__": "__main__"})
    alone, first, second = (json.loads(Path(f"{out}{rank}").read_text()) for rank in ("", "0", "1"))
    assert [one[:3] for one in (alone, first, second)] == [
        [2, "enough", True],
        [2, "enough", True],
        [2, "enough", False],
    ]
    assert second[3] == []
    assert [step for step, _ in first[3]] == [2, 4, 6]
    for (_, ours), (_, theirs) in zip(first[3], alone[3], strict=True):
        assert abs(ours - theirs) < 1e-12
    assert first[4] == second[4]
    assert max(abs(a - b) for a, b in zip(first[4], alone[4], strict=True)) < 1e-12


def test_the_command_makes_one_run_and_prints_once(launched: tuple[Path, str]) -> None:
    folder, shown = launched
    assert len(list((folder / "runs").iterdir())) == 1
    assert shown.count("sec/epoch on") == shown.count("data: ") == shown.count("run: ") == 1


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


def test_fewer_gpus_than_processes_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: one is made believe, and the first of two processes on its machine is enough."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    data = torch.rand(20, 4), torch.zeros(20, dtype=torch.int64)
    with pytest.raises(BadSettings, match=r"2 processes on a machine with 1 GPU.*--nproc-per-node=1"):
        Trainer(1, quiet=True).fit(torch.nn.Linear(4, 2), data)
    result = Trainer(1, devices=["cpu"], quiet=True).fit(torch.nn.Linear(4, 2), data)
    assert result.devices == ["cpu of rank 0"]


# Tasks of an srun, without torchrun: one job. A signal to one stops all, and the job goes on to the same bits


TASK = f"""{HEAD}
def stop(step):
    time.sleep(0.01)
    if step == 5 and os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0

def train(name, schedule):
    how = dict(batch_size=16, lr=0.1, precision="fp64", quiet=True, devices=["cpu"])
    trainer = mh.Trainer(run=os.path.join(sys.argv[1], name), resume="auto", schedule=mh.by_step(schedule),
                         limits=mh.Limits(max_steps=100), checkpoints=mh.Checkpoints(every=50), **how)
    return trainer.fit(mlp(dropout=0.5), vectors())

train("whole", lambda step: 1.0)
result = train("cut", stop)
assert result.devices == ["cpu of rank 0", "cpu of rank 1"], result.devices
"""


def run_tasks(script: Path, folder: Path) -> list[int]:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    step |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [task.communicate(timeout=200)[1] for task in tasks]
    assert not any("Traceback" in text for text in errors), errors
    return [task.returncode for task in tasks]


def test_tasks_of_srun_and_a_signal_to_one_of_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TASK)
    assert run_tasks(script, tmp_path) == [143, 143]
    stopped = store.load(tmp_path / "cut" / "checkpoints").step
    assert 5 < stopped < 100
    assert run_tasks(script, tmp_path) == [0, 0]
    whole, cut = (store.load(tmp_path / name / "checkpoints") for name in ("whole", "cut"))
    assert whole.step == cut.step == 100
    assert whole.blobs["model"] == cut.blobs["model"]
