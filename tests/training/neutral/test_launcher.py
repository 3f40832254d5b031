"""What SLURM's environment says of a job; without a framework."""

from __future__ import annotations

import doctest

import pytest

from manyhands.errors import BadSettings
from manyhands.training import launcher
from manyhands.training.launcher import LaunchedProcess

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_task_of_srun_has_its_place(environment: pytest.MonkeyPatch) -> None:
    assert doctest.testmod(launcher).failed == 0
    assert (launcher.is_launched(), launcher.is_first(), launcher.size()) == (True, False, 7)
    assert launcher.place() == LaunchedProcess(5, 7, 1, 2, "node01", 12000 + 2 * 4711)
    environment.setenv("MASTER_ADDR", "10.0.0.1")
    environment.setenv("MASTER_PORT", "29511")
    environment.setenv("SLURM_GPUS_PER_TASK", "1")
    assert launcher.place() == LaunchedProcess(5, 7, 1, 2, "10.0.0.1", 29511, sees_own_gpus=True)
    environment.setenv("SLURM_LOCALID", "one")
    with pytest.raises(BadSettings, match="SLURM_LOCALID='one'"):
        launcher.place()


@pytest.mark.parametrize("case", ["one task", "a batch script", "torchrun within"])
def test_what_is_no_job_of_slurms(environment: pytest.MonkeyPatch, case: str) -> None:
    if case == "one task":
        environment.setenv("SLURM_STEP_NUM_TASKS", "1")
    elif case == "a batch script":
        environment.delenv("SLURM_STEP_ID")
        environment.delenv("SLURM_STEP_NUM_TASKS")
    else:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
            environment.setenv(name, value)
        assert launcher.place().size == 2
        return
    assert (launcher.is_launched(), launcher.is_first(), launcher.size()) == (False, True, 0)
