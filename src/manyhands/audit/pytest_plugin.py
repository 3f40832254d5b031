"""The pytest plugin: ``@pytest.mark.no_stalls`` fails a test in which the host waited for a device.

It comes with the package, and pytest finds it automatically. Reads for an assertion are allowed by a comment
``# manyhands: wait-ok <reason>``, or go through ``mh.to(x, "cpu")``, which is silent. Where there is neither a GPU nor
a virtual device, such a test runs, and is reported as skipped: it has shown nothing about waits.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from manyhands.amounts import count_of


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_stalls: fail if the host waits for a device in this test (manyhands)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("no_stalls") is None:
        return (yield)
    from manyhands.audit.guard import guard
    from manyhands.errors import NothingWatched

    with guard("count") as seen:
        result = yield
    try:
        waited = len(seen)
    except NothingWatched as nothing:
        pytest.skip(f"no_stalls: {nothing}")
    if waited:
        pytest.fail(f"no_stalls: the host waited {count_of(waited, 'time')}:\n{seen}", pytrace=False)
    return result
