"""``Trainer.fit`` makes the host wait for nothing in the steady state; what a user's model reads is found."""

from __future__ import annotations

import pytest
from audit_support import TRAINERS, audit, lines_and_kinds, planted

pytestmark = pytest.mark.once


def test_the_trainer_finds_nothing_of_its_own(framework: str) -> None:
    if not (TRAINERS / framework).is_dir():
        pytest.skip(f"{framework} has no hooks")
    for name, report in audit(framework, TRAINERS).items():
        kind, _, stem = name.partition("/")
        assert report["code"] == 0, name
        assert report["counted_steps"] >= 8, name
        assert lines_and_kinds(report) == (planted(framework, stem, TRAINERS) if kind == "planted" else set()), name
