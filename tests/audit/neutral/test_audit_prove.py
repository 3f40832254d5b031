"""``--prove`` without a framework: values that are read late, rewritten lines, what is kept, and what is compared."""

from __future__ import annotations

import builtins
import copy
import doctest
import json
import operator
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from manyhands.audit.kinds import Kind
from manyhands.audit.prove import compare, deferred, plan, rewrite, second_pass
from manyhands.audit.prove.deferred import Deferred
from manyhands.audit.prove.plan import Way
from manyhands.audit.prove.rewrite import Change
from manyhands.audit.reports import html, proof, table
from manyhands.audit.reports.report import Finding, Report


@pytest.mark.parametrize("module", [deferred, plan, second_pass])
def test_the_examples_in_the_text(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def _late(value: Any, line: int = 0) -> Deferred:
    return Deferred(lambda kept: kept, (value,), line)


_operators = st.sampled_from([operator.add, operator.mul, operator.truediv])


@given(st.lists(st.tuples(_operators, st.floats(0.5, 3), st.booleans()), max_size=20))
def test_arithmetic_waits_and_gives_the_same_bits(steps: list[tuple[Any, float, bool]]) -> None:
    plain: Any = 100.5
    late: Any = 100.5
    for function, number, swapped in steps:
        plain = function(number, plain) if swapped else function(plain, number)
        late = function(_late(number), late) if swapped else function(late, _late(number))
        assert not late.is_known
    assert deferred.known(late) == plain


def test_arithmetic_with_numpy_keeps_its_precision() -> None:
    array = np.array([0.1, 0.7], dtype=np.float32)
    assert (0.9 * array + 0.1 * (_late(1) - 0.5)).tobytes() == (0.9 * array + 0.1 * (1 - 0.5)).tobytes()
    late = np.float32(0.1) + _late(0.2)
    assert not late.is_known  # two numbers: that can wait
    assert late.value().tobytes() == (np.float32(0.1) + 0.2).tobytes()
    out = np.zeros(2, dtype=np.float32)
    np.multiply(array, _late(3.0), out=out)
    assert out.tobytes() == (array * 3.0).tobytes()


def test_a_long_sum_needs_no_stack() -> None:
    total: Any = 0.0
    for number in range(20_000):
        total += _late(float(number))
    assert float(total) == sum(float(number) for number in range(20_000))


def test_whoever_needs_a_value_gets_it_and_is_noticed() -> None:
    lines: list[int] = []
    Deferred.needed = lines.append
    try:
        value = _late(2.0, line=7) * 3
        assert not lines
        if value > 5:
            assert lines == [7]
        assert f"{_late(0.25, 1):.1f} {_late(1, 2)}" == "0.2 1"
        assert [10, 20, 30][_late(1, 3)] == 20
        assert max(1.0, _late(4.0, 4)) == 4.0
        assert np.asarray([_late(1.0, 5), 2.0]).tolist() == [1.0, 2.0]
        assert pickle.loads(pickle.dumps(_late(1.5, 6))) == copy.deepcopy(_late(1.5, 6)) == 1.5
        assert set(lines) == {1, 2, 3, 4, 5, 6, 7}
    finally:
        Deferred.needed = None


def test_an_array_is_not_computed_with_before_it_is_read() -> None:
    late = Deferred(lambda kept: kept, (np.ones(3),), 0, number=False)
    total = late + 1  # at once: somebody may hold the array and change it
    assert isinstance(total, np.ndarray)
    assert late.is_known


PROGRAM = """
class Logger:
    def log(self, value):
        self.kept = value.item()  # 4
def run(value, name, log=print):
    Logger().log(value)
    log(
        f"{name!r:>5} {value.item():.1f}",  # 8
        value.item(),
    )
    value[0] = 1.0  # 11
    return value.item() + value.item(), float(value[0]), value.item()
"""


class _Asked:
    """Stands where the second pass stands, and remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def call(self, place: Any, name: str, owner: Any, *args: Any) -> Any:
        self.asked.append((place, name))
        return getattr(owner, name)(*args)

    def function(self, place: Any, function: Any, *args: Any) -> Any:
        self.asked.append((place, function.__name__))
        return function(*args)

    def text(self, place: Any, *parts: Any) -> str:
        self.asked.append((place, "text"))
        return "|".join(part if isinstance(part, str) else f"{part[1]}{part[2]}" for part in parts)


def test_only_the_lines_that_were_found_are_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "train.py")
    changes = [
        Change(file, 4, (Way.LATE,)),
        Change(file, 8, (Way.LATE,)),
        Change(file, 11, (Way.REWRITTEN,), "value[0] = 5.0"),
        Change(file, 12, (Way.LATE,)),
        Change(str(tmp_path / "other.py"), 12, (Way.REMOVED,)),
    ]
    for cured, first in ((False, 1.0), (True, 5.0)):
        asked = _Asked()
        said: list[Any] = []
        monkeypatch.setattr(builtins, rewrite.NAME, asked, raising=False)
        names: dict[str, Any] = {}
        exec(rewrite.rewritten(PROGRAM, file, changes, cured=cured), names)
        array = np.full(1, 3.0)
        assert names["run"](array, "n", lambda *args, said=said: said.append(args)) == (2 * first, first, first)
        assert said == [("114>5| |-1.1f", 3.0)]
        assert [ask for ask in asked.asked if ask[0][0] == 0] == [((0, True), "item")]
        assert [ask for ask in asked.asked if ask[0][0] == 1] == [((1, True), "item"), ((1, False), "text")]
        assert [name for place, name in asked.asked if place[0] == 3] == ["item", "item", "float", "item"]
    lines = {code.co_name: code.co_firstlineno for code in names["run"].__code__.co_consts if hasattr(code, "co_name")}
    assert names["run"].__code__.co_firstlineno == 5, lines


def _finding(kind: Kind, source: str = "total += loss.item()", **more: Any) -> Finding:
    file = more.pop("file", __file__)
    fields = {"what": "", "call": "Tensor.item", "library": None, "gained": 0.1, "cure": kind.cure_in("torch"), **more}
    return Finding(kind.value, file, 3, source, count=10, per_step=1.0, waited=0.1, moves=False, **fields)


@pytest.mark.parametrize(
    ("finding", "way", "why"),
    [
        (_finding(Kind.READ), Way.LATE, "read when the steps are over"),
        (_finding(Kind.READ, "if loss.item() > 3:"), Way.KEPT, "a decision in Python"),
        (_finding(Kind.READ, library="torch/x.py:3"), Way.KEPT, "inside a library"),
        (_finding(Kind.READ, gained=None), Way.KEPT, "another thread"),
        (_finding(Kind.READ, file="none.py"), Way.KEPT, "source file was not found"),
        (_finding(Kind.READ, call="Tensor.__index__"), Way.KEPT, "needed at once"),
        (_finding(Kind.TO_DEVICE, call="Tensor.to"), Way.COPY, "pinned"),
        (_finding(Kind.TO_DEVICE, call="torch.as_tensor"), Way.KEPT, "in one call"),
        (_finding(Kind.SYNCHRONIZE), Way.REMOVED, "left out"),
        (_finding(Kind.DATA, cure="x[0].fill_(1.0)"), Way.REWRITTEN, "its cure"),
        (_finding(Kind.DATA), Way.KEPT, "not a rewriting"),
        (_finding(Kind.CONTROL_FLOW), Way.KEPT, "a decision in Python"),
    ],
)
def test_every_finding_has_a_way_or_a_reason(finding: Finding, way: Way, why: str) -> None:
    choice = plan.choose(finding)
    assert choice.way is way
    assert why in choice.why


def _prove(report: Report, results: dict[str, list[dict[str, Any]]], folder: Path) -> tuple[proof.Proof, list[str]]:
    """Prove with these results of the passes; a missing one is a pass that was killed."""
    modes: list[str] = []

    def start(settings: dict[str, Any]) -> str:
        mode = settings["proof"]["mode"]
        modes.append(mode)
        data = {"ended": "enough", "seconds": 1.0, "ticks": 0, "values": [[3, "a"]], "parameters": ["p"]}
        more = results[mode][modes.count(mode) - 1]
        if more:
            data |= {"asked": [10], "needed": [{}], **more}
            Path(settings["result"]).write_text(json.dumps(data))
        return "OSError: no"

    record = {"timeline": [[8.0, 6.0, 0.0], [0, 2.0, True, 0.0]], "total": 10.0}
    finding = report.findings[0]
    keys = [[0, finding.kind, finding.call, finding.file, finding.line, finding.library]] if report.findings else []
    return compare.prove(report, {**record, "keys": keys}, 5, folder, start), modes


SAME: dict[str, Any] = {"seconds": 0.8}


def _report(**more: Any) -> Report:
    findings = [_finding(Kind.READ), _finding(Kind.CONTROL_FLOW, "if loss > 3:")]
    return Report(findings=findings, steps=30, counted_steps=25, gain=0.2, frameworks=["torch"], **more)


def test_gains_are_measured_in_turns_and_shown_beside_the_estimate(tmp_path: Path) -> None:
    results = {"plain": [{"seconds": 1.0}, {"seconds": 1.2}], "cured": [SAME, {"seconds": 0.9}]}
    made, modes = _prove(_report(), results, tmp_path)
    assert modes == ["plain", "cured", "cured", "plain"]
    assert made.measured == pytest.approx(1 - 0.85 / 1.1)
    assert made.estimated == pytest.approx(0.2)
    assert (made.results, made.values, made.parameters, made.steps) == ("equal", 3, 1, 25)
    report = _report(proof=made)
    text = table.text(report)
    assert "1 line cured for 25 steps; a step took 1.1 s, cured 850 ms" in text
    assert "gain measured: 22.7% of a step, estimated: 20.0% of a step" in text
    assert "3 values that were read and 1 array of weights are equal to the bit" in text
    assert "unchanged: a decision in Python needs the value at once" in text
    assert "not certain" not in text
    assert 'id="proof"' in html.page(report)
    assert Report.from_data(json.loads(json.dumps(report.as_data()))) == report


def test_a_gain_that_is_smaller_than_the_noise_is_said_to_be_uncertain(tmp_path: Path) -> None:
    results = {"plain": [{"seconds": 1.0}, {"seconds": 1.2}], "cured": [SAME, {"seconds": 1.19}]}
    made, _ = _prove(_report(), results, tmp_path)
    assert "runs of the same program differ by 35.5% of a step" in made.remarks[0]


@pytest.mark.parametrize(
    ("plain", "results"), [({}, "differ"), ({"parameters": ["q"]}, "not-comparable")], ids=["differ", "unseeded"]
)
def test_results_that_differ_are_said_to_differ(tmp_path: Path, plain: dict[str, Any], results: str) -> None:
    cured = {"values": [[3, "b"]]}
    arguments = {"plain": [SAME, {**SAME, **plain}], "cured": [cured, cured]}
    made, modes = _prove(_report(predicted=True), arguments, tmp_path)
    assert modes == ["plain", "cured", "plain"]  # the second plain run only says whether runs can be compared
    assert made.results == results
    assert made.measured is None
    assert "PyTorch computes synchronously" in made.remarks[0]


def test_a_value_that_is_needed_now_and_then_is_cured_and_its_waits_are_counted(tmp_path: Path) -> None:
    needed = {**SAME, "needed": [{"train.py:9": 2}]}
    made, _ = _prove(_report(predicted=True), {"plain": [SAME], "cured": [needed]}, tmp_path)
    assert made.lines[0].way == "read-late"
    assert made.lines[0].why == "read late, at train.py:9: the host waits 2 times instead of 10"


def test_a_value_that_is_needed_at_once_is_kept_and_its_place_is_named(tmp_path: Path) -> None:
    needed = {**SAME, "needed": [{"train.py:9": 8, "train.py:10": 1}]}
    made, _ = _prove(_report(predicted=True), {"plain": [SAME], "cured": [needed]}, tmp_path)
    assert [line.way for line in made.lines] == ["kept", "kept"]
    assert "its value is needed at train.py:9" in made.lines[0].why
    assert made.estimated == 0.0


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"plain": [{}]}, "the original program could not be run again: OSError: no"),
        ({"plain": [SAME], "cured": [{"seconds": None}]}, "the cured program ended before its 30 steps"),
    ],
)
def test_a_pass_that_fails_is_said_in_a_line(tmp_path: Path, results: Any, message: str) -> None:
    made, _ = _prove(_report(), results, tmp_path)
    assert message in str(made.failed)
    assert message in table.text(_report(proof=made))


def test_lines_that_make_the_program_fail_are_kept_and_the_others_proven(tmp_path: Path) -> None:
    report = _report(predicted=True)
    report.findings[1] = _finding(Kind.READ, "v = loss.item()")
    report.findings[1].line = 4
    both = {"asked": [10, 10], "needed": [{}, {}], "values": [[3, "a"], [3, "b"]]}
    fails = {**both, "seconds": None, "ended": "exception TypeError", "culprits": [1]}
    results = {"plain": [both], "cured": [fails, {**both, "values": [[3, "a"], [0, "c"]]}]}
    made, modes = _prove(report, results, tmp_path)
    assert modes == ["plain", "cured", "cured"]
    assert (made.results, made.values) == ("equal", 3)
    assert [line.way for line in made.lines] == ["read-late", "kept"]
    assert "fails if its value is read late (OSError: no)" in made.lines[1].why
    unknown = {"plain": [both], "cured": [{**fails, "culprits": []}]}
    made, _ = _prove(report, unknown, tmp_path)
    assert "ended before its 30 steps" in str(made.failed)
    assert "cured: read" not in table.text(_report(proof=made))


def test_who_made_a_cured_program_fail_is_found_and_json_gets_numbers(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("a = late(0)\nb = late(1)\nc = late(2)\nrow = {'b': b + a}\nwant_number(row)\n")
    changes = [Change(str(file), line, (Way.LATE,)) for line in (1, 2, 3)]

    def want_number(row: dict[str, Any]) -> None:
        raise TypeError("want a number")

    names = {"late": lambda line: deferred.Deferred(float, (3.0,), line), "want_number": want_number}
    with pytest.raises(TypeError) as caught:
        exec(compile(file.read_text(), str(file), "exec"), names)
    assert second_pass._culprits(caught.value, changes) == [0, 1]
    assert second_pass._culprits(caught.value, [Change(str(file), 5, (Way.LATE,))]) == [0]
    kept = json.JSONEncoder.default
    try:
        second_pass._let_json_read()
        assert json.dumps({"a": names["late"](0)}) == '{"a": 3.0}'
    finally:
        json.JSONEncoder.default = kept  # type: ignore[method-assign]


def test_nothing_to_cure_is_said_and_nothing_is_run(tmp_path: Path) -> None:
    report = _report()
    report.findings = report.findings[1:]
    made, modes = _prove(report, {}, tmp_path)
    assert "no finding can be cured by rewriting its line" in str(made.failed)
    assert not modes
    report.findings = []
    assert compare.prove(report, None, 5, tmp_path, lambda _: "").failed == "there are no findings to cure"


def test_the_docs_say_what_is_kept() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    for kind, reason in plan.KEPT.items():
        assert f"| `{kind.value}` | {reason} |" in docs
    for way, what in plan.CURED.items():
        assert f"| `{way.value}` | {what} |" in docs
