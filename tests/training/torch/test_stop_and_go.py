"""Stopped at any moment and resumed, a job sees every sample once; a worker that fails is named, and nothing hangs."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support import StopAt, Stopped, as_if_killed, eventually
from training_cases import Harm, OneHot, SumsUp, fit, mean_output, mlp, one_hot, rows, same, vectors

from manyhands import files
from manyhands import torch as mh
from manyhands.errors import CheckpointNotWritten, NoCheckpoint, WorkerFailed, WrongCheckpoint
from manyhands.training import stopping
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.order import epoch_order
from manyhands.training.options import Checkpoints, Limits, Workers
from manyhands.training.torch.trainer import Trainer
from manyhands.training.torch.workers import fork_server, pool

COUNT = 40
STEPS = 12  # of 96 samples in batches of 16, in two epochs
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def with_dropout(ranks: int, run: Path, **options: Any) -> Any:
    given = {"run": run, "optimizer": momentum, "checkpoints": Checkpoints(every=1, keep=100), **options}
    return fit(mlp(dropout=0.5, norm=True), (vectors(96), vectors(20)), ranks, **given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_on_as_many_ranks_all_is_the_same(tmp_path: Path, ranks: int) -> None:
    """In the middle of an epoch, exactly at its end, in the next one; dropout and momentum included: bit by bit."""
    whole, expected = with_dropout(ranks, tmp_path / "whole")
    for step in (1, 3, STEPS // 2, 8, STEPS):
        killed = as_if_killed(tmp_path / "whole", step)
        resumed, result = with_dropout(ranks, killed, resume="auto")
        assert same(whole, resumed)
        assert rows(result) == rows(expected)
        assert [row["epoch"] for row in RunFolder.open(killed).metrics()] == [1, 2]


KEPT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("workers", [{}, KEPT], ids=["none", "kept"])
@pytest.mark.parametrize("replacement", [False, True])
def test_a_shuffling_loader(tmp_path: Path, workers: dict[str, Any], replacement: bool) -> None:
    """The order is the same when the job is resumed in its second epoch, also where it is the loader's own."""
    dataset = torch.utils.data.TensorDataset(*vectors(100))

    def train(name: str, schedule: Any = None, resume: str | None = None) -> Any:
        order = {"sampler": torch.utils.data.RandomSampler(dataset, replacement)} if replacement else {"shuffle": True}
        loader = torch.utils.data.DataLoader(dataset, batch_size=16, drop_last=True, **order, **workers)
        options = {"run": tmp_path / name, "checkpoints": Checkpoints(every=4), "schedule": schedule, "resume": resume}
        return fit(mlp(dropout=0.5), loader, 1, **options)

    def stop(_: float) -> float:
        checkpoints = tmp_path / "cut" / "checkpoints"
        if (checkpoints / "step-00000008").exists():
            raise KeyboardInterrupt
        return 1.0

    whole, _ = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", stop)
    assert same(whole, train("cut", resume="auto")[0])


def seen(run: Path, ranks: int, *, harm: Any = None, epochs: int = 1, **options: Any) -> torch.Tensor:
    """How often each sample was trained on, as the weights tell; the last batch is as large as the others."""
    given = {
        "max_epochs": epochs,
        "batch_size": 4,
        "lr": 4.0,
        "checkpoints": Checkpoints(every=2),
        "run": run,
        **options,
    }
    weights, _ = fit(SumsUp(COUNT), OneHot(COUNT, harm), ranks, loss=mean_output, **given)
    return weights["seen"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    seen(tmp_path / "run", before, checkpoints=Checkpoints(every=2, keep=100))
    killed = as_if_killed(tmp_path / "run", 6)
    assert store.load(killed / "checkpoints").state["cursor"]["sample"] == 24
    assert seen(killed, after, resume="auto").tolist() == [1.0] * COUNT
    assert [row["samples"] for row in RunFolder.open(killed).metrics()] == [COUNT]


def test_a_worker_that_is_killed_from_outside(tmp_path: Path) -> None:
    fit(mlp(), vectors(), 2)  # so that there is a pool
    workers = pool.pool_for([torch.device("cpu")] * 2).workers
    victim = random.Random(5).randrange(2)
    delay = random.random() * 0.5

    def kill() -> None:
        while not (tmp_path / "run" / "checkpoints" / "step-00000002").exists():
            time.sleep(0.01)
        time.sleep(delay)
        workers[victim].process.send_signal(signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(WorkerFailed, match=f"rank {victim} .* was killed by SIGKILL"):
        seen(tmp_path / "run", 2, epochs=500)
    epochs = int(store.load(tmp_path / "run" / "checkpoints").state["cursor"]["epoch"]) + 1
    assert seen(tmp_path / "run", 2, resume="auto", epochs=epochs).tolist() == [float(epochs)] * COUNT


def slowly(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return mean_output(output, y)


def test_a_worker_that_hangs_is_named_with_its_stack() -> None:
    """At the last sample, when workers have reported steps: the first one may take ten times as long."""
    last = int(epoch_order(0, 0, COUNT, shuffle=True)[-1])
    with pytest.raises(WorkerFailed, match=r"rank [01] \(cpu\) made no step") as caught:
        fit(
            SumsUp(COUNT), OneHot(COUNT, Harm("hang", last)), batch_size=4, max_epochs=1, loss=slowly,
            workers=Workers(per_device=2, hang_seconds=2),
        )  # fmt: skip
    text = str(caught.value)
    assert text.count("made no step") == 1
    assert "rank 0 (cpu), rank 1" not in text
    assert "training_cases.py" in text
    assert "__call__" in text


def prints(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    print("a word from the first rank")
    return output.mean()


def test_workers_after_one_with_an_error_are_forked_from_the_same_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error has rank and traceback; they load nothing again, and the first rank prints where the caller does."""
    fit(mlp(), vectors(), 2, max_epochs=1)
    before = fork_server._server
    with pytest.raises(WorkerFailed, match=r"(?s)rank [01] \(cpu\).*Traceback.*sample 17 is spoilt"):
        fit(SumsUp(COUNT), OneHot(COUNT, Harm("raise", 17)), 2, loss=mean_output)
    fit(SumsUp(COUNT), OneHot(COUNT), 2, loss=prints, max_epochs=1)
    assert "a word from the first rank" in capfd.readouterr().out
    workers = pool.pool_for([torch.device("cpu")] * 2).workers
    assert {psutil.Process(worker.process.pid).ppid() for worker in workers} == {before.process.pid}
    assert fork_server.current(before.environment) is before


def test_a_fork_of_the_caller_leaves_its_workers_alone() -> None:
    """A child that ends as usual calls what was registered for the end; the workers are its parent's."""
    fit(mlp(), vectors(), 2, max_epochs=1)
    workers = pool.pool_for([torch.device("cpu")] * 2).workers
    child = os.fork()
    if child == 0:
        pool.stop_all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [worker.process.poll() for worker in workers] == [None, None]
    fit(mlp(), vectors(), 2, max_epochs=1)
    assert pool.pool_for([torch.device("cpu")] * 2).workers is workers


def test_workers_go_when_the_caller_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves the caller no time to say goodbye: the workers notice."""
    code = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from training_cases import *
        from manyhands.training.options import Checkpoints
        fit(mlp(), vectors(), 2, run={str(tmp_path / "run")!r}, max_epochs=100000, checkpoints=Checkpoints(every=5))
    """
    caller = subprocess.Popen([sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())])
    try:
        assert eventually(lambda: store.latest(tmp_path / "run" / "checkpoints") is not None)
        workers = psutil.Process(caller.pid).children(recursive=True)
        assert len(workers) == 3  # two, and the process that forked them
    finally:
        caller.kill()
        caller.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert store.load(tmp_path / "run" / "checkpoints").step > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_job_brings_its_weights_home(tmp_path: Path, ranks: int) -> None:
    """Those after a whole step; the interruption is raised, and no worker stays."""
    net = SumsUp(COUNT)
    optimizer = torch.optim.SGD(net.parameters(), lr=4.0, momentum=1e-9)

    def interrupt() -> None:
        while store.latest(tmp_path / "run" / "checkpoints") is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    how: Any = {"max_epochs": 10**6, "batch_size": 4, "loss": mean_output, "optimizer": optimizer}
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(net, one_hot(COUNT), ranks, **how, run=tmp_path / "run", checkpoints=Checkpoints(every=7))
    seen = net.seen.detach().round()
    assert float(seen.sum()) >= 7 * 4
    assert float(seen.max() - seen.min()) <= 1
    assert optimizer.state[net.seen]["momentum_buffer"].norm() > 0
    if ranks == 2:
        assert f"after {int(seen.sum()) // 4} steps" in caught.value.__notes__[0]
        below = [child.as_dict(["pid", "ppid", "cmdline", "status"]) for child in psutil.Process().children(True)]
        alive = [child for child in below if child["status"] != psutil.STATUS_ZOMBIE]  # ended, and not yet waited for
        forks = [child for child in alive if "torch.workers.fork_server" in " ".join(child["cmdline"])]
        assert not [child for child in forks if child["ppid"] != os.getpid()]  # the server itself may stay


def test_no_space_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on and says so; the checkpoint before stays."""
    written = files.write_new

    def full(path: Path, data: bytes) -> None:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, data)

    monkeypatch.setattr(files, "write_new", full)
    with pytest.warns(UserWarning, match="No space left on device.*continues"):
        seen(tmp_path / "run", 1, checkpoints=Checkpoints(every=2, keep=10))
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == [f"step-{step:08}" for step in (2, 6, 8, 10)]
    assert issubclass(CheckpointNotWritten, OSError)


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(mlp(), vectors(), 1, run=run, max_epochs=1)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("weights of another model", {"model": mlp(norm=True)}),
        ("shuffled", {"data": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*vectors()), batch_size=16)}),
        ("optimizer SGD", {"optimizer": torch.optim.AdamW}),
    ]
    for ranks in (1, 2):
        for words, options in cases:
            given = {"model": mlp(), "data": vectors(), "resume": run, **options}
            with pytest.raises(WrongCheckpoint, match=words):
                fit(given.pop("model"), given.pop("data"), ranks, max_epochs=2, **given)
            if ranks == 2:
                break  # one is enough: each failure ends the workers
    with pytest.raises(NoCheckpoint):
        fit(mlp(), vectors(), 1, resume=tmp_path / "nowhere")


def test_a_signal_is_not_put_off_by_steps_that_were_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    learner: Any = SimpleNamespace(size=2, all_have=lambda _: True, from_first=lambda data: data)
    ending, step = stopping.Ending(learner, Limits()), 0
    ending.requests = stopping.Requests()
    while not ending.check(step):
        step, now = step + 1, now + (0.001 if step < 20 else 0.5)
        ending.requests.asked = "SIGTERM" if step > 20 else None
    assert step == 31


def test_a_sampler_with_a_generator_of_its_own(tmp_path: Path) -> None:
    """It goes on from epoch to epoch, and a new one begins anew: a resume within an epoch says what to leave out."""
    X, y = vectors(32)
    how: dict[str, Any] = {"run": tmp_path / "run", "lr": 0.1, "quiet": True}

    def loader() -> Any:
        own = torch.Generator().manual_seed(5)
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 32, 32, generator=own)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=8, sampler=sampler)

    Trainer(2, limits=Limits(max_steps=6), **how).fit(mlp(), loader())
    with pytest.raises(WrongCheckpoint, match=r"the batches before it.*generator=.*leave it out"):
        Trainer(2, resume="auto", **how).fit(mlp(), loader())


# Evaluations within an epoch: callbacks and loggers see them, and a killed job continues to the same end


def trained(run: Path, killed_at: int | None = None) -> tuple[torch.nn.Module, mh.Result, mh.BestCheckpoint]:
    """Three epochs of six steps, evaluated after every second one; a checkpoint after every third."""
    model, best = mlp(), mh.BestCheckpoint("val_loss", save_top_k=2)
    trainer = mh.Trainer(
        3,
        batch_size=15,
        lr=0.5,
        quiet=True,
        run=run,
        resume="auto",
        schedule=StopAt(killed_at),
        checkpoints=mh.Checkpoints(every=3),
        limits=mh.Limits(evaluate_every="2 steps"),
        callbacks=[best, mh.EMA(0.5), mh.EarlyStopping("val_loss", patience=100)],
        loggers=[mh.loggers.CSVLogger(every=5)],
    )
    return model, trainer.fit(model, vectors(), vectors(40)), best


def tables(run: Path) -> list[Any]:
    """Both tables without the column that is the time."""
    found = [
        [line.split(",") for line in (run / f"{name}.csv").read_text().splitlines()] for name in ("metrics", "steps")
    ]
    place = found[0][0].index("seconds")
    return [[row[:place] + row[place + 1 :] for row in found[0]], found[1]]


@pytest.mark.parametrize("killed_at", [7, 12])
def test_a_killed_job_keeps_the_same_best_checkpoints(tmp_path: Path, killed_at: int) -> None:
    whole, result, best = trained(tmp_path / "whole")
    run = tmp_path / "killed"
    with pytest.raises(Stopped):
        trained(run, killed_at)
    model, again, best_again = trained(run)
    assert same(whole.state_dict(), model.state_dict())
    assert [row["val_loss"] for row in again.rows] == [row["val_loss"] for row in result.rows]
    assert len(again.rows) == 9
    assert {path.name: value for path, value in best_again.best.items()} == {p.name: v for p, v in best.best.items()}
    assert sorted(path.name for path in (run / "best").iterdir()) == sorted(path.name for path in best.best)
    assert tables(run) == tables(tmp_path / "whole")
    assert [row[1] for row in tables(run)[0][1:]] == [str(step) for step in range(2, 19, 2)]
