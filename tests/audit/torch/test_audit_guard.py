"""Guards in code, on virtual devices; in a process of its own, as these hold for a whole process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_program

pytestmark = pytest.mark.once

CASES = """
import asyncio, warnings
import pytest, torch
from manyhands import torch as mh
from manyhands.audit.guard import HiddenWaitWarning
from manyhands.errors import BadSettings, HiddenWait

mh.virtual_devices(2)
x = torch.ones(4, device="cpu:1")


def test_count():
    with mh.guard("count") as seen:
        x.sum().item()
        x.sum().item()  # manyhands: wait-ok a test
        for _ in range(3):
            float(x[0])
    assert len(seen) == 4
    assert seen.allowed == 1
    stalls = {seen.times(stall): stall for stall in seen}
    assert stalls[3].call == "Tensor.__float__"
    assert "float(x[0])" in str(stalls[3])
    assert stalls[1].cure.startswith("keep the value on the device")
    x.sum().item()
    assert len(seen) == 4


def test_a_number_that_pytorch_reads_by_itself():
    host = torch.zeros(4)
    with mh.guard("forbid"):
        for read in (
            lambda: torch.zeros(x.sum().long()),
            lambda: torch.arange(x.max() + 1),
            lambda: torch.full((2,), x.sum()),
            lambda: x.view(x.sum().long(), 1),
            lambda: host[x.sum().long() - 1],
            lambda: host.__setitem__(0, x[0]),
        ):
            with pytest.raises(HiddenWait, match="test_cases.py"):
                read()
        host[torch.tensor(1)] = 2.0
        assert host[[0, 1]].sum() == 2.0
    with mh.guard("count") as seen:
        torch.zeros(x.sum().long())
        x.sum().item()
    assert [seen.times(stall) for stall in seen] == [1, 1]


def test_warn():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with mh.guard("warn"):
            x.tolist()
    (warning,) = told
    assert warning.category is HiddenWaitWarning
    assert warning.filename == __file__


def test_moves_by_our_verbs_are_silent():
    with mh.guard("forbid"):
        host = mh.to(x, "cpu")
        mh.to(host, mh.gpu(1))
        mh.copy(x, "cpu")
    with mh.guard("count") as seen:
        x.cpu()
        host.to("cpu:1")
    assert [stall.kind.value for stall in seen] == ["copy-to-host", "pageable-copy"]


def test_other_tasks_are_not_charged():
    async def quiet():
        with mh.guard("count") as seen:
            await asyncio.sleep(0.01)
            return len(seen)

    async def noisy():
        with mh.guard("count") as seen:
            x.sum().item()
            await asyncio.sleep(0.02)
            x.sum().item()
            return len(seen)

    async def both():
        return await asyncio.gather(quiet(), noisy())

    assert asyncio.run(both()) == [0, 2]


def test_nested_guards_both_see():
    with mh.guard("count") as outer:
        with mh.guard("count") as inner:
            x.sum().item()
        x.sum().item()
    assert (len(outer), len(inner)) == (2, 1)


def test_an_unknown_mode_is_refused():
    with pytest.raises(BadSettings, match="'forbid', 'warn' or 'count'"), mh.guard("stop"):
        pass


def test_what_does_not_wait_is_not_counted():
    mask = x > 0
    with mh.guard("forbid"):
        x[0]
        x[1:]
        x[:, None]
        x[0].fill_(1.0)
        torch.where(mask, x, 0)
        x[mask] = 0.0
        torch.ones(3).tolist()
        torch.full((), 1.0, device="cpu:1")
        x.to(torch.float64)
        x.to("cpu", non_blocking=True)
        str(torch.ones(2))


def test_errors_are_pytorchs_own():
    with mh.guard("count"):
        with pytest.raises(TypeError):
            x.to(1, 2, 3, 4, 5, 6)
        with pytest.raises(RuntimeError):
            x.item()


def test_compiled_functions_work_in_a_guard():
    @torch.compile(backend="eager")
    def f(y):
        y = torch.unique(y * 2)
        return y[0]

    with mh.guard("count"):
        assert f(torch.ones(4)).tolist() == 2.0


@pytest.mark.no_stalls
def test_the_marker_lets_a_quiet_test_pass():
    x.sum()


@pytest.mark.no_stalls
@pytest.mark.xfail(reason="the marker fails a test that waits", strict=True)
def test_the_marker_fails_a_test_that_waits():
    x.sum().item()
"""


def test_guards(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    options = ["-q", "-p", "manyhands.audit.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers"]
    done = run_program("-m", "pytest", *options, tmp_path, cwd=tmp_path, MANYHANDS_VIRTUAL_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xfailed" in done.stdout
