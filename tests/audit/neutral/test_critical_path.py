"""What removing a wait gains: the host and the device, simulated."""

from __future__ import annotations

import doctest

import hypothesis.strategies as st
import pytest
from hypothesis import given

from manyhands.audit import critical_path, cure, sites
from manyhands.audit.critical_path import HostWait, Work, gains, simulate
from manyhands.audit.reports import report, table
from manyhands.cli import audit


@pytest.mark.parametrize("module", [critical_path, cure, sites, table, report, audit])
def test_the_examples_in_the_text(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_a_wait_of_a_step_that_the_host_limits_gains_all_of_itself() -> None:
    step = [Work(8.0, 6.0), HostWait(0, host=2.0)]
    whole, alone = gains(step * 10, [0])
    assert whole.waited[0] == pytest.approx(20.0)
    assert alone[0] == pytest.approx(20.0)


def test_a_wait_of_a_step_that_the_device_limits_gains_little() -> None:
    step = [Work(1.0, 10.0), HostWait(0)]
    whole, alone = gains(step * 10, [0])
    assert whole.waited[0] == pytest.approx(90.0)
    assert alone[0] == pytest.approx(0.0)


def test_a_wait_that_only_moves_to_the_next_line_gains_nothing_alone() -> None:
    step = [Work(4.0, 8.0), HostWait(0), HostWait(1), Work(4.0, 0.0)]
    whole, alone = gains(step * 10, [0, 1])
    assert alone[0] == alone[1] == pytest.approx(0.0)
    assert whole.total - simulate(step * 10, {0, 1}).total == pytest.approx(40.0)


_items = st.one_of(
    st.builds(Work, st.floats(0, 5), st.floats(0, 5)),
    st.builds(HostWait, st.integers(0, 3), st.floats(0, 2), st.booleans(), st.floats(0, 2)),
)


@given(st.lists(_items, max_size=30))
def test_removing_waits_never_makes_a_program_slower_nor_the_device_less_busy(timeline: list[Work | HostWait]) -> None:
    whole, alone = gains(timeline, range(4))
    together = whole.total - simulate(timeline, range(4)).total
    for gain in alone.values():
        assert -1e-9 <= gain <= together + 1e-9
    assert simulate(timeline, range(4)).busy == pytest.approx(whole.busy)
    assert whole.busy <= whole.total + 1e-9
    assert sum(whole.waited.values()) <= whole.total + 1e-9
