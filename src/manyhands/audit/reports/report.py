"""The result of an audit: findings, most expensive first, with a verdict above them."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from manyhands.amounts import count_of, seconds
from manyhands.audit.critical_path import Drawn, HostWait, Length, Work, gains, simulate
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind
from manyhands.audit.recorder import Entry, Recorder
from manyhands.audit.sites import shown_path

SCHEMA = 1
_DRAWN = 3  # steps of the timeline
_MOST_SPANS = 2000
_FEWEST = 3  # waits of a line in a program without steps: fewer are not a loop
_IDLE = 0.3  # of a step: less is no sign of a host that is too slow
_RARE = 0.1  # waits per step: once an epoch, or every tenth step


@dataclass
class Finding:
    """One hidden wait or copy of a program; times in seconds over all counted steps."""

    kind: str
    file: str
    line: int
    source: str
    what: str
    call: str
    library: str | None  # file:line of the library's code that waited, where that is not the user's line
    count: int
    per_step: float | None
    waited: float
    gained: float | None  # if it alone is removed; None: not on the path of the steps (another thread)
    moves: bool  # removing it only moves the wait elsewhere
    cure: str
    framework: str = "torch"

    def figures(self, steps: int) -> dict[str, str]:
        """Its times a step and its counts, as a table shows them."""
        gained = "moves on" if self.moves else "-" if self.gained is None else seconds(self.gained / steps)
        per_step = "-" if self.per_step is None else f"{self.per_step:.3g}"
        waited = seconds(self.waited / steps)
        return {"waited": waited, "gained": gained, "per step": per_step, "in all": str(self.count)}


@dataclass
class TimelinePart:
    """A piece of the timeline: what the host or the device does, and the finding (file:line) that it waits for."""

    lane: str
    begin: float
    end: float
    finding: str | None


@dataclass
class Report:
    """What an audit found; its fields are the keys of ``--json`` (docs/audit.md)."""

    schema: int = SCHEMA
    program: str = ""
    ended: str = "normally"  # or: exit <code>, exception <type>, syntax-error, no-module, enough
    frameworks: list[str] = field(default_factory=list)
    predicted: bool = False
    device: str | None = None
    steps: int = 0
    counted_steps: int = 0
    step_seconds: float | None = None
    busy: float | None = None  # the part of a step that the device works, 0 to 1
    cost: float | None = None  # the part of a step that is spent in findings
    gain: float | None = None  # the part of a step that removing all findings gains
    silenced: int = 0
    known: int = 0  # findings that the baseline has already
    findings: list[Finding] = field(default_factory=list)
    loaders: dict[str, float] = field(default_factory=dict)  # if predicted: a batch's seconds by this machine's clock
    timeline: list[TimelinePart] = field(default_factory=list)  # of the first counted steps, simulated
    notes: list[str] = field(default_factory=list)
    verdict: str = ""

    def remarks(self) -> list[str]:
        """What was left out of the findings."""
        step = f" ({seconds(self.step_seconds)})" if self.step_seconds else ""
        loaders = [
            f"{line}: the data loader takes {seconds(each)} a batch by this machine's clock, which is no part of the "
            f"prediction: if that is more than a step{step}, give it more workers"
            for line, each in self.loaders.items()
        ]
        silenced = f"silenced by comments (manyhands: wait-ok): {count_of(self.silenced, 'wait')}"
        known = f"known from the baseline and not shown: {self.known}"
        return loaders + [silenced] * bool(self.silenced) + [known] * bool(self.known)

    def as_data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Report:
        """A report from its JSON; keys that another version wrote are ignored."""
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        findings = [Finding(**finding) for finding in data["findings"]]
        timeline = [TimelinePart(**span) for span in data.get("timeline", [])]
        return cls(**{**known, "findings": findings, "timeline": timeline})


def make(recorder: Recorder, *, program: str, warmup: int) -> Report:
    """Turn what was recorded into a report."""
    report = Report(
        program=program,
        frameworks=sorted(recorder.frameworks),
        predicted=recorder.speeds is not None,
        device=recorder.speeds.name if recorder.speeds is not None else None,
        steps=recorder.steps,
        loaders={
            key.line: statistics.median(each)
            for key, each in recorder.loaders.items()
            if recorder.launched and key.site.allowed is None
        },
    )
    first = _first_step(recorder, warmup, report)
    last = recorder.steps if recorder.steps else 1
    entries = [entry for entry in recorder.entries if first <= entry.step < last]
    report.counted_steps = recorder.steps - first if recorder.steps else 0
    keys, silenced = _open_keys(entries)
    others = [(key, seconds) for step, key, seconds in recorder.others if first <= step < last]
    report.silenced = silenced + sum(key.site.allowed is not None for key, _ in others)
    timeline = _timeline(entries, keys, recorder)
    length, alone = gains(timeline, keys.values())
    if recorder.steps and (recorder.launched or not report.predicted):
        report.timeline = _drawn([entry for entry in entries if entry.step < first + _DRAWN], keys, recorder)
    listed: set[int] = set()
    for key, number in keys.items():
        same_line = [entry for entry in entries if entry.key == key]
        if not recorder.used_device or not _is_loop(sum(entry.times for entry in same_line), recorder):
            continue
        waited = length.waited.get(number, 0.0) if report.predicted else sum(entry.seconds for entry in same_line)
        if key.kind is Kind.LOADER and not _is_slow_loader(waited, alone[number], length.total):
            continue
        if key.kind is Kind.LAUNCHES and 2 * len({entry.step for entry in same_line}) < report.counted_steps:
            continue  # a loop between some steps, as an evaluation: no fault of the step
        listed.add(number)
        report.findings.append(_finding(key, sum(entry.times for entry in same_line), waited, alone[number], report))
    total = _fill_times(report, recorder, first, length, length.total - simulate(timeline, listed).total)
    for key in dict.fromkeys(key for key, _ in others if key.site.allowed is None):
        waits = [seconds for other, seconds in others if other == key]
        if _is_loop(len(waits), recorder):
            report.findings.append(_finding(key, len(waits), sum(waits), None, report))
    report.findings.sort(key=lambda finding: (finding.gained or 0.0, finding.waited), reverse=True)
    if total:
        report.cost = min(1.0, sum(finding.waited for finding in report.findings if finding.gained is not None) / total)
    _summarise(report, recorder)
    return report


def _is_loop(count: int, recorder: Recorder) -> bool:
    """Whether a line waited so often that it counts: in a program without steps, a few waits are not a loop."""
    return recorder.steps > 0 or count >= _FEWEST


def _drawn(entries: list[Entry], keys: dict[Stall, int], recorder: Recorder) -> list[TimelinePart]:
    """What the host and the device do in a few steps."""
    names = {number: f"{shown_path(key.site.user.file)}:{key.site.user.number}" for key, number in keys.items()}
    drawn: list[Drawn] = []
    simulate(_timeline(entries, keys, recorder), drawn=drawn)
    return [
        TimelinePart(lane, begin, end, names.get(finding) if finding is not None else None)
        for lane, begin, end, finding in drawn[:_MOST_SPANS]
    ]


def _is_slow_loader(waited: float, gained: float, total: float) -> bool:
    """Whether a loader is slower than the device: every loader takes some time, but most of it beside the device's."""
    return gained > 0.05 * total and waited > 0.5 * (total - waited)


def _first_step(recorder: Recorder, warmup: int, report: Report) -> int:
    """The first step that counts."""
    if recorder.steps == 0:
        return 0
    if recorder.steps <= warmup:
        first = min(1, recorder.steps - 1)
        report.notes.append(
            f"steps made: {recorder.steps}, no more than the {warmup} of --warmup: "
            f"{'all but the first are counted' if first else 'the only one is counted'}"
        )
        return first
    return warmup


def _open_keys(entries: list[Entry]) -> tuple[dict[Stall, int], int]:
    """The findings that no comment allows, numbered; and how many waits a comment allows."""
    keys: dict[Stall, int] = {}
    silenced = 0
    for entry in entries:
        if entry.key is None:
            continue
        if entry.key.site.allowed is not None:
            silenced += 1
        else:
            keys.setdefault(entry.key, len(keys))
    return keys, silenced


def _timeline(entries: list[Entry], keys: dict[Stall, int], recorder: Recorder) -> list[Work | HostWait]:
    """The record in the form of the simulation.

    What a real device did between two waits is not known, only how long it was busy in a step (if not measured: all the
    time). It works while the host waits for it, and for the rest of its busy time while the host works.
    """
    busy_part, waited_part = _busy_parts(entries, recorder)
    timeline: list[Work | HostWait] = []
    for entry in entries:
        work, wait = entry.work, entry.wait
        after = wait.after if wait is not None else 0.0
        if recorder.speeds is None:
            drained = _drain_seconds(entry)
            work = Work(work.host, busy_part * work.host + waited_part * drained, lead=(1 - busy_part) * work.host)
            after += (1 - waited_part) * drained
        timeline.append(work)
        if wait is not None:
            number = keys.get(entry.key, -1) if entry.key is not None else -1
            timeline.append(HostWait(number, wait.host, wait.drains, wait.device, after))
    return timeline


def _busy_parts(entries: list[Entry], recorder: Recorder) -> tuple[float, float]:
    """The part of the host's work, and of its waits for what it launched before, in which a real device is busy."""
    if recorder.speeds is not None or recorder.busy_seconds is None or not entries:
        return 1.0, 1.0
    steps = len({entry.step for entry in entries})
    host = sum(entry.work.host for entry in entries) / steps
    copies = sum(entry.wait.after + entry.wait.device for entry in entries if entry.wait is not None) / steps
    drained = sum(map(_drain_seconds, entries)) / steps
    busy = recorder.kernel_seconds
    if busy is None:
        busy = max(0.0, recorder.busy_seconds - copies)
    rest = max(0.0, busy - drained)
    return min(1.0, rest / host) if host else 0.0, min(1.0, busy / drained) if drained else 1.0


def _drain_seconds(entry: Entry) -> float:
    """How long a measured wait was for the work that was launched before it."""
    if entry.wait is None or not entry.wait.drains:
        return 0.0
    return max(0.0, entry.seconds - entry.wait.after - entry.wait.device)


def _fill_times(report: Report, recorder: Recorder, first: int, length: Length, together: float) -> float | None:
    """Fill in the times of a step; returns the seconds of all counted steps, None if they are not known."""
    total = length.total
    if not report.predicted and recorder.steps:
        total = recorder.step_times[recorder.steps] - recorder.step_times[first]
    if total <= 0 or not recorder.used_device or (report.predicted and not recorder.launched):
        return None  # without the operations between the waits there is no step to compare them with
    steps = report.counted_steps or 1
    report.step_seconds = total / steps if report.counted_steps else None
    if report.predicted:
        report.busy = min(1.0, length.busy / total)
    elif recorder.busy_seconds is not None and report.step_seconds:
        report.busy = min(1.0, recorder.busy_seconds / report.step_seconds)
    report.gain = min(1.0, max(0.0, together / total))
    return total


def _finding(key: Stall, count: int, waited: float, gained: float | None, report: Report) -> Finding:
    line = key.site.user
    per_step = count / report.counted_steps if report.counted_steps else None
    return Finding(
        kind=key.kind.value,
        file=shown_path(line.file),
        line=line.number,
        source=line.code,
        what=key.kind.title,
        call=key.call,
        library=str(key.site.library) if key.site.library is not None else None,
        count=count,
        per_step=per_step,
        waited=waited,
        gained=gained,
        moves=gained is not None and waited > 0 and gained < 0.05 * waited,
        cure=key.cure_if(rare=per_step is not None and per_step <= _RARE),
        framework=key.framework,
    )


def _summarise(report: Report, recorder: Recorder) -> None:
    if recorder.forks:
        forks = count_of(recorder.forks, "process", "processes")
        report.notes.append(f"the program forked {forks} (data loader workers, for example): they are not audited")
    report.notes += recorder.remarks
    _note_idle(report)
    if recorder.incomplete:
        report.notes.append("the program waited so often that only the first 500,000 waits were kept")
    if recorder.used_device and recorder.steps == 0:
        report.notes.append(
            "no optimizer step was seen: lines that waited at least "
            f"{_FEWEST} times in the whole program are listed, and times are in all"
        )
    report.verdict = verdict(report, used_device=recorder.used_device)


def _note_idle(report: Report) -> None:
    """Say if the device would idle even without the findings."""
    if report.busy is None or report.gain is None or not report.counted_steps or report.gain >= 1:
        return
    idle = 1 - min(1.0, report.busy / (1 - report.gain))
    if idle > _IDLE:
        without = "without these lines " if report.findings else ""
        report.notes.append(
            f"{without}the GPU {'would idle' if without else 'idles'} {idle:.0%} of a step, because the host cannot "
            "launch fast enough: use larger batches, torch.compile or CUDA graphs"
        )


def verdict(report: Report, *, used_device: bool = True) -> str:
    """The result in one sentence."""
    if not report.frameworks:
        return "the program used none of torch, jax, tensorflow and mxnet: there was nothing to audit"
    if not used_device and report.predicted:
        return "no tensor was on the device that stands in for a GPU: there was nothing to audit"
    if not used_device:
        return "no tensor was on a GPU: there was nothing to audit (--as-if-gpu predicts what would wait on one)"
    lines = len({(finding.file, finding.line) for finding in report.findings})
    new = "new " if report.known else ""
    if not lines:
        summary = f"no {new}hidden waits were found"
    elif report.cost is None or report.gain is None:
        summary = f"{count_of(lines, f'{new}line')} made the host wait"
    else:
        summary = (
            f"{count_of(lines, f'{new}line')} cost{'s' * (lines == 1)} {report.cost:.0%}; "
            f"removing {'them' if lines > 1 else 'it'} gains about {report.gain:.0%}"
        )
    busy = "" if report.busy is None else f"the GPU is busy {report.busy:.0%} of a step; "
    if report.busy is not None and not report.counted_steps:
        busy = f"the GPU is busy {report.busy:.0%} of the time; "
    return f"{_predicted_for(report.device) if report.predicted else ''}{busy}{summary}"


def _predicted_for(device: str | None) -> str:
    """Which device a prediction is for.

    >>> _predicted_for("NVIDIA H200"), _predicted_for("Tesla V100")
    ('predicted for an NVIDIA H200: ', 'predicted for a Tesla V100: ')
    """
    name = device or "unknown device"
    article = "an" if name.startswith(("NVIDIA", *"AEIOUaeiou")) else "a"
    return f"predicted for {article} {name}: "


def new_since(report: Report, baseline: Report) -> Report:
    """The report without what a former one has: the same text of the same file waiting in the same way, as often."""
    before = Counter((finding.file, finding.source, finding.kind) for finding in baseline.findings)
    fresh = []
    for finding in sorted(report.findings, key=lambda finding: finding.line):
        same = finding.file, finding.source, finding.kind
        before[same] -= 1
        if before[same] < 0:
            fresh.append(finding)
    fresh.sort(key=report.findings.index)
    gone = len(report.findings) - len(fresh)
    if not gone:
        return report
    total = report.step_seconds * report.counted_steps if report.step_seconds else 0.0
    changed = dataclasses.replace(report, findings=fresh, known=gone)
    if total:
        changed.cost = min(1.0, sum(finding.waited for finding in fresh if finding.gained is not None) / total)
        changed.gain = min(1.0, sum(finding.gained or 0.0 for finding in fresh) / total)
    changed.verdict = verdict(changed)
    return changed
