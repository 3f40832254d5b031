"""Every planted defect of the corpus is found at its line, and no clean twin gives an alarm."""

from __future__ import annotations

from typing import Any

import pytest
from audit_support import CORPUS, audit, lines_and_kinds, planted, programs

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def reports(framework: str) -> dict[str, Any]:
    if not (CORPUS / framework).is_dir():
        pytest.skip(f"{framework} has no hooks")
    return audit(framework)


def test_every_planted_defect_is_found_and_nothing_else(framework: str, reports: dict[str, Any]) -> None:
    for name in programs(framework, "planted"):
        report = reports[f"planted/{name}"]
        by_the_clock = {(int(place.rpartition(":")[2]), "data-loader") for place in report["loaders"]}
        assert lines_and_kinds(report) == planted(framework, name) - by_the_clock, name


def test_cures_are_of_their_framework(framework: str, reports: dict[str, Any]) -> None:
    foreign = {"torch": (), "mxnet": ("torch",)}.get(framework, ("torch", "detach", "non_blocking"))
    for name, report in reports.items():
        for finding in report["findings"]:
            assert finding["framework"] == framework, name
            assert not [word for word in foreign if word in finding["cure"]], (name, finding["cure"])


def test_no_false_alarm_on_a_clean_twin(framework: str, reports: dict[str, Any]) -> None:
    assert programs(framework, "clean") == programs(framework, "planted")
    for name in programs(framework, "clean"):
        assert not lines_and_kinds(reports[f"clean/{name}"]), name


def test_programs_end_well_and_are_predicted(framework: str, reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        assert report["code"] == 0, name
        assert report["predicted"], name
        assert framework == "jax" or report["counted_steps"] >= 3, name  # whose steps have no optimizer to ask
        expected = ("no optimizer step", "cannot launch fast enough")  # such small programs keep no GPU busy
        assert not [note for note in report["notes"] if not any(word in note for word in expected)], name
