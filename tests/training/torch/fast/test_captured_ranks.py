"""Captured steps on two ranks: graphs of passes and updates, and ordinary sums of gradients between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from captured_on_ranks import JOBS
from support import free_port

SCRIPT = Path(__file__).with_name("captured_on_ranks.py")
Found = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each rank found in each job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    done = subprocess.run(
        [*command, SCRIPT], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {(line["job"], line["rank"]): line for line in lines}


@pytest.mark.parametrize("job", JOBS)
def test_captured_ranks_replay_and_compute_what_plain_ones_do(found: Found, job: str) -> None:
    for rank in (0, 1):
        assert found[job, rank]["apart"] < 1e-12, found[job, rank]
        if job == "one rank plain":
            continue
        assert found[job, rank]["replays"] > 10
        (note,) = [note for note in found[job, rank]["notes"] if "the step" in note]
        assert "gradients summed over 2 devices" in note


def test_sums_start_where_the_backward_pass_has_computed_their_gradients(found: Found) -> None:
    steps, buckets = 18, 2
    assert found["arrays", 0]["signals"] >= steps * buckets


def test_a_rank_may_be_plain_while_the_other_replays(found: Found) -> None:
    assert found["one rank plain", 0]["replays"] > 10
    assert found["one rank plain", 1]["replays"] == 0
