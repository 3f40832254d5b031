"""Sites, comments, steps, findings, verdicts: the auditor without a framework."""

from __future__ import annotations

import functools
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.audit import recorder, sites, speeds, watch
from manyhands.audit.critical_path import Work, gains
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind
from manyhands.audit.recorder import Recorder
from manyhands.audit.reports import report, sarif, table
from manyhands.audit.sites import Line, Site
from manyhands.audit.watch import WaitEvent
from manyhands.errors import BadSettings

HERE = __file__


def _wait(sink: Recorder, line: int, kind: Kind = Kind.READ, seconds: float = 0.001, file: str = HERE) -> None:
    stall = Stall(kind, "Tensor.item", Site(Line(file, line)))
    sink.before(stall)
    sink.after(watch.WaitEvent(stall, 0.0, seconds))


def _recorder(steps: int, waits: int = 1) -> Recorder:
    made = Recorder(speeds=speeds.h200())
    made.frameworks.add("torch")
    for _ in range(steps):
        _step(made, *[1] * waits, launches=10)
    return made


def _step(made: Recorder, *lines: int, launches: int = 1, **how: Any) -> None:
    """So many operations, then a wait at each of these lines."""
    for _ in range(launches):
        made.launch(1e-5)
    for line in lines:
        _wait(made, line, **how)
    made.step("optimizer")


def test_a_line_is_counted_per_step_and_in_all_without_the_warmup() -> None:
    made = report.make(_recorder(12, waits=2), program="p", warmup=5)
    (finding,) = made.findings
    assert (finding.file, finding.line, finding.kind) == (sites.shown_path(HERE), 1, "read")
    assert (finding.count, finding.per_step, made.counted_steps) == (14, 2.0, 7)
    assert finding.waited > 0
    assert finding.gained is not None
    assert made.busy is not None
    assert made.verdict.startswith("predicted for an NVIDIA H200: the GPU is busy")
    assert "1 line costs" in made.verdict


def test_small_operations_of_a_loop_between_some_steps_are_no_fault_of_the_step() -> None:
    """An evaluation after an epoch, for example; the same loop in every step is one."""
    for every, found in ((1, 1), (5, 0)):
        made = _recorder(0)
        for step in range(20):
            for _ in range(50 if step % every == 0 else 1):
                made.launch(1e-6, (1, Line(HERE, 1)))
            made.step("optimizer")
        assert len(report.make(made, program="p", warmup=5).findings) == found


def test_waits_after_the_last_step_are_no_part_of_a_step() -> None:
    made = _recorder(8, waits=0)
    _wait(made, 1)
    assert not report.make(made, program="p", warmup=2).findings


def test_without_steps_lines_of_loops_count_and_that_is_said() -> None:
    made = Recorder(speeds=speeds.h200())
    made.frameworks.add("torch")
    for _ in range(3):
        _wait(made, 1)
    _wait(made, 2)
    audited = report.make(made, program="p", warmup=5)
    assert [finding.line for finding in audited.findings] == [1]
    assert audited.findings[0].per_step is None
    assert "no optimizer step was seen" in audited.notes[0]


def test_two_optimizers_make_one_step() -> None:
    made = Recorder()
    for _ in range(4):
        made.step("generator")
        made.step("critic")
    assert made.steps == 4


def test_without_steps_the_main_threads_waits_are_on_the_path() -> None:
    made = Recorder(speeds=speeds.h200())
    made.frameworks.add("torch")
    thread = threading.Thread(target=lambda: [_wait(made, 1) for _ in range(4)])
    thread.start()
    thread.join()
    for line in (2, 2, 2, 3):  # line 3 is in no loop: it is not listed, and its gain is not counted
        made.launch(1e-5)
        _wait(made, line)
    audited = report.make(made, program="p", warmup=5)
    assert {finding.line: finding.gained is None for finding in audited.findings} == {2: False, 1: True}
    assert audited.gain <= audited.cost
    assert max(finding.waited for finding in audited.findings) < 1e-3  # predicted for other threads, too


def test_a_device_that_idles_without_waits_is_told() -> None:
    assert not report.make(_recorder(12, waits=0), program="p", warmup=5).notes
    idle = Recorder(speeds=speeds.h200())
    idle.frameworks.add("torch")
    for _ in range(8):
        idle.launch(0.0)
        idle.step("optimizer")
    assert "the GPU idles 75% of a step, because the host" in report.make(idle, program="p", warmup=2).notes[-1]


def _gain(entry: tuple[float, WaitEvent], busy: float, steps: int = 50) -> float:
    """The part of a step that removing one measured wait gains, after so much work of the host."""
    host, event = entry
    made = Recorder()
    made.busy_seconds = busy
    key = event.stall
    wait = recorder.measured_wait(event)
    made.entries = [recorder.Entry(step, Work(host), key, wait, event.seconds) for step in range(steps)]
    whole, alone = gains(report._timeline(made.entries, {key: 0}, made), [0])
    assert whole.total / steps == pytest.approx(host + event.seconds, rel=0.05)
    return alone[0] / whole.total


def test_gains_on_a_real_device() -> None:
    site, megabytes = Site(Line(HERE, 1)), 7_700_000
    # The host launches for 3 ms what the device does in 4; a pageable copy waits for that (1.2 ms), then copies (1 ms):
    # from pinned memory the step takes the device's 4 ms and a copy of 0.14.
    copy = WaitEvent(Stall(Kind.TO_DEVICE, "Tensor.to", site), 0.0, 2.2e-3, megabytes)
    assert _gain((3e-3, copy), busy=5e-3) == pytest.approx(1 - 4.14 / 5.2, abs=0.02)
    # The same copy where the host is the limit: all of it is gained.
    alone = WaitEvent(Stall(Kind.TO_DEVICE, "Tensor.to", site), 0.0, 1.0e-3, megabytes)
    assert _gain((3e-3, alone), busy=1.5e-3) == pytest.approx(1 / 4, abs=0.02)
    # A read that waits for the last of 4 ms of work that takes 3 ms to launch gains what the device idled meanwhile.
    read = WaitEvent(Stall(Kind.READ, "Tensor.item", site), 0.0, 1.2e-3)
    assert _gain((3e-3, read), busy=4e-3) == pytest.approx(1 - 4 / 4.2, abs=0.01)
    # Longer than the device was busy at all: the host itself took the time.
    assert _gain((1e-3, WaitEvent(Stall(Kind.READ, "Tensor.item", site), 0.0, 3e-3)), busy=1e-3) == pytest.approx(
        3 / 4, abs=0.02
    )


def test_no_device_and_no_framework_are_told() -> None:
    assert "none of torch" in report.make(Recorder(), program="p", warmup=5).verdict
    made = Recorder()
    made.frameworks.add("torch")
    for _ in range(4):  # a data loader waits without a device
        made.after(watch.WaitEvent(Stall(Kind.LOADER, "DataLoader", Site(Line(HERE, 1))), 0.0, 1.0))
    audited = report.make(made, program="p", warmup=5)
    assert "no tensor was on a GPU" in audited.verdict
    assert not audited.findings


def test_a_comment_silences_a_line_and_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("a.item()  # manyhands: wait-ok once a day\nb.item()\n")
    made = _recorder(1, waits=0)
    _step(made, 1, 2, launches=0, file=str(script))
    audited = report.make(made, program="p", warmup=1)
    assert [finding.line for finding in audited.findings] == [2]
    assert audited.silenced == 1
    assert "): 1 wait\n" in table.text(audited) + "\n"


def test_a_print_once_an_epoch_needs_no_cure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "for epoch in range(2):\n    for x in data:\n        print(x.item())\n    print(epoch, y.item())\n"
    )
    made = _recorder(0)
    for step in range(20):
        _step(made, *((3, 4) if step % 10 == 9 else (3,)), file=str(script))
    each, rare = sorted(report.make(made, program="p", warmup=0).findings, key=lambda finding: finding.line)
    assert each.cure == "count the steps, and run this line every 100 steps"
    assert rare.cure.startswith("none needed: it waits in a few steps only")


class _Depth(int):
    site = functools.cached_property(sites.current)


def test_a_wait_is_the_users_line_with_the_librarys_beside_it() -> None:
    site = _Depth(1).site
    assert site.user.file == HERE
    assert site.user.text == "site = _Depth(1).site"
    assert site.library.file.endswith("functools.py")


def test_a_report_is_the_same_after_json(tmp_path: Path) -> None:
    made = report.make(_recorder(12), program="p", warmup=5)
    assert report.Report.from_data(json.loads(json.dumps(made.as_data()))) == made
    assert "cure: " in table.text(made)


def test_a_baseline_hides_what_it_has() -> None:
    old = report.make(_recorder(12), program="p", warmup=5)
    fresh = _recorder(0)
    for _ in range(12):
        _step(fresh, 1, 3, launches=0)
    audited = report.new_since(report.make(fresh, program="p", warmup=5), old)
    assert [finding.line for finding in audited.findings] == [3]
    assert audited.known == 1
    assert "1 new line" in audited.verdict


def test_a_second_line_with_the_text_of_a_known_one_is_new(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("a.item()\n" * 3)
    reports = []
    for lines in ((1,), (1, 3)):
        made = _recorder(0)
        for _ in range(12):
            _step(made, *lines, file=str(script))
        reports.append(report.make(made, program="p", warmup=5))
    assert [finding.line for finding in report.new_since(reports[1], reports[0]).findings] == [3]


def test_sarif_has_a_rule_for_every_kind_and_a_place_for_every_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form that code hosts ask for; the whole of it was checked against the schema of SARIF 2.1.0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my job.py").write_text("for x in loader:\n    n += x.item()  # each\n")
    audited = report.make(_recorder(12), program="p", warmup=5)
    elsewhere = tmp_path.parent / "other.py"
    places = [("my job.py", 2, "n += x.item()"), (str(elsewhere), 9, "a()"), ("<string>", 1, ""), ("<string>", 2, "")]
    (finding,) = audited.findings
    audited.findings = [replace(finding, file=file, line=line, source=source) for file, line, source in places]
    audited.findings[1].moves = True
    audited.findings[2].library = "transformers/trainer.py:2249"
    (run,) = json.loads(json.dumps(sarif.log(audited)))["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [kind.value for kind in Kind]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "read"
        assert result["message"]["text"].startswith("The host waits for a value from the device: ")
    named = ["in transformers/trainer.py:2249." in result["message"]["text"] for result in run["results"]]
    assert named == [False, False, True, False]
    assert [result["level"] for result in run["results"]] == ["warning", "note", "warning", "warning"]
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"] == f"{tmp_path.as_uri()}/"
    below, absolute, made, _ = (result["locations"][0]["physicalLocation"] for result in run["results"])
    assert below == {
        "artifactLocation": {"uri": "my%20job.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 2, "startColumn": 5, "endColumn": 18, "snippet": {"text": "n += x.item()"}},
    }
    assert absolute["artifactLocation"] == {"uri": elsewhere.as_uri()}
    assert made == {"artifactLocation": {"uri": "%3Cstring%3E"}, "region": {"startLine": 1}}
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]
    assert len(set(prints)) == 4
    assert prints[3] == prints[2].removesuffix(":1") + ":2"  # the same text in the same file, once more
    assert run["invocations"][0]["executionSuccessful"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [("no json", "is not of `manyhands"), ("[]", "devices --measure"), ('{"frameworks": []}', "no measured GPU")],
)
def test_a_bad_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadSettings, match=message):
        speeds.load(path)
    with pytest.raises(BadSettings, match="No such file"):
        speeds.load(tmp_path / "none.json")


@pytest.mark.parametrize("kind", Kind)
def test_a_prediction_has_no_time_of_the_clock(kind: Kind) -> None:
    reports = []
    for clock in (0.001, 5.0):
        made = _recorder(0)
        for _ in range(12):
            _step(made, 1, kind=kind, seconds=clock)
        reports.append(report.make(made, program="p", warmup=5).as_data())
    assert [each.pop("loaders") == {} for each in reports] == [kind is not Kind.LOADER] * 2
    assert reports[0] == reports[1]
    assert bool(reports[0]["findings"]) is (kind is not Kind.LOADER)


def test_a_loaders_time_is_a_line_of_its_own() -> None:
    made = _recorder(0)
    for clock in (9.0, 0.012, 0.012):  # the first batch starts the workers
        _step(made, 1, kind=Kind.LOADER, seconds=clock)
    audited = report.make(made, program="p", warmup=0)
    assert audited.loaders == {f"{sites.shown_path(HERE)}:1": 0.012}
    assert "the data loader takes 12 ms a batch by this machine's clock" in table.text(audited)
    assert "no hidden waits were found" in audited.verdict


def test_the_docs_say_of_every_kind_which_calls_are_seen() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    tables = docs.partition("## What is seen")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", tables, re.MULTILINE)) == {kind.value for kind in Kind}
