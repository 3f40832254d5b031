"""The folder of a run, in every framework: refused jobs leave it alone, and two jobs never share it."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import StopAt, Stopped
from training_bench import Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import BadRunFolder, RunInUse, WorkerFailed, WrongCheckpoint
from manyhands.training.options import Checkpoints, Step


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.neutral
def test_a_refused_job_leaves_every_byte(bench: Bench) -> None:
    run = bench.new_run()
    bench.fit(epochs=1, run=run)
    before = contents(run)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"resume": "auto", "seed": 1}, WrongCheckpoint, "seed=0"),
        ({"resume": "auto", "model": "lenet"}, WrongCheckpoint, "another model"),
        ({"resume": "auto", "data": bench.data(batch_size=10)}, WrongCheckpoint, "batch_size=16"),
        ({"resume": "auto", "data": bench.data(samples=32)}, WrongCheckpoint, "64 samples"),
        ({"resume": "auto", "step": Step(shares=[1, 2, 3])}, ValueError, "3 shares"),
        ({"model": "lenet"}, BadRunFolder, "a run already"),
    ]
    for options, error, said in cases:
        with pytest.raises(error, match=said):
            bench.fit(epochs=2, run=run, **options)
        assert contents(run) == before, options
    assert [row["epoch"] for row in bench.fit(epochs=2, run=run, resume="auto").rows] == [1, 2]


def test_a_refused_job_makes_no_folder(bench: Bench) -> None:
    run = bench.new_run()
    with pytest.raises(ValueError):
        bench.fit(epochs=1, run=run, data=bench.data(label=11))
    assert not run.exists()


HOLD = """
import sys, time
from pathlib import Path
from manyhands.training.checkpoints.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
time.sleep(600)
"""


@pytest.mark.neutral
def test_two_jobs_never_share_a_run(bench: Bench) -> None:
    """The second job's error names the holder; a job that is killed holds nothing."""
    run = bench.new_run()
    bench.fit(epochs=1, run=run)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunInUse, match=f"process {holder.pid} on "):
            bench.fit(2, epochs=2, run=run, resume="auto")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (run / "job.lock").exists(), "a killed job leaves the file, and no lock"
    bench.fit(epochs=2, run=run, resume="auto")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert not (run / "job.lock").exists()


def adam(bench: Bench, beta: float) -> Any:
    make = bench.own.adam
    if bench.framework == "torch":
        return functools.partial(make, lr=0.01, betas=(beta, 0.99))
    if bench.framework == "jax":
        import optax

        return optax.inject_hyperparams(make)(0.01, b1=beta)
    return make(learning_rate=0.01, **{"beta_1" if bench.framework == "tensorflow" else "beta1": beta})


def test_the_optimizer_of_the_resuming_job_counts(bench: Bench) -> None:
    """With other betas the job goes on with those, and says so."""
    run = bench.new_run()
    data = bench.data(samples=64)
    bench.fit(epochs=1, run=run, data=data, optimizer=adam(bench, 0.9))
    results = {}
    for beta in (0.9, 0.5):
        copied = bench.new_run()
        shutil.copytree(run, copied)
        how: dict[str, Any] = {"data": data, "optimizer": adam(bench, beta)}
        results[beta] = bench.fit(epochs=2, run=copied, resume="auto", **how)
    weights = [bench.weights(result.run) for result in results.values()]
    assert largest_difference(*weights) > 1e-4
    assert any("0.5" in note and " instead of " in note for note in results[0.5].notes), results[0.5].notes
    assert not any("0.9 instead of" in note for note in results[0.9].notes)


def test_a_tilde_is_the_home(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(bench.folder))
    assert bench.fit(epochs=1, run="~/mine").run == str(bench.folder / "mine")
    assert len(bench.fit(epochs=2, run="~/mine", resume="~/mine").rows) == 2


def test_a_path_that_cannot_be_a_run(bench: Bench) -> None:
    file = bench.folder / "file"
    file.write_text("dear")
    with pytest.raises(BadRunFolder, match="is a file"):
        bench.fit(epochs=1, run=file)
    with pytest.raises(BadRunFolder, match="cannot be a run's folder"):
        bench.fit(epochs=1, run=file / "below")
    assert file.read_text() == "dear"
    with pytest.raises(BadRunFolder, match="cannot be a run's folder"):
        bench.fit(epochs=1, run=Path("/proc/x"))


@pytest.mark.neutral
def test_a_resumed_job_that_makes_no_step_leaves_every_byte(bench: Bench) -> None:
    """The run was at its end, or the first step failed; also where the job goes on from an earlier checkpoint."""
    run = bench.new_run()
    once = bench.fit(epochs=2, run=run, checkpoints=Checkpoints(every=2))
    assert not any("nothing was trained" in note for note in once.notes)
    before = contents(run)
    result = bench.fit(epochs=1, run=run, resume="auto", gradient_clip_val=7.0, precision="auto")
    assert any("nothing was trained" in note for note in result.notes)
    assert result.rows == once.rows
    assert contents(run) == before
    earlier = sorted((run / "checkpoints").iterdir())[-2]
    for resume, epochs in (("auto", 3), (earlier, 2)):
        with pytest.raises((Stopped, WorkerFailed)):
            bench.fit(epochs=epochs, run=run, resume=resume, precision="auto", schedule=StopAt(0))
        assert contents(run) == before
    bench.fit(epochs=2, run=run, resume=earlier, gradient_clip_val=7.0)
    assert json.loads((run / "config.json").read_text())["settings"]["gradient_clip_val"] == 7.0
    assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
