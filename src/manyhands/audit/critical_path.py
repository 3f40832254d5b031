"""What a step would take without some of its waits: the host and the device, simulated.

A timeline is what the host did: it launched work (:class:`Work`), and it waited (:class:`HostWait`). The device works
off what was launched, in order. Without a wait the host launches earlier; whether that helps depends on what comes
next: a wait whose device work is waited for again in the next line gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """The host computes and launches for ``host`` seconds what keeps the device busy for ``device`` seconds.

    The device's first work is launched after ``lead`` seconds.
    """

    host: float
    device: float = 0.0
    lead: float = 0.0


@dataclass(frozen=True)
class HostWait:
    """The host waits for a finding: ``host`` seconds in any case, and, if it ``drains``, until the device is done.

    ``device`` seconds of the wait are the device's own work (a copy), which stays when the wait goes. ``after`` the
    device is done, the host needs some more seconds (to copy from pageable memory), in which the device has nothing.
    """

    finding: int
    host: float = 0.0
    drains: bool = True
    device: float = 0.0
    after: float = 0.0


@dataclass
class Length:
    """How long a timeline takes: in all, the device busy, and waited for each finding; seconds."""

    total: float = 0.0
    busy: float = 0.0
    waited: dict[int, float] = field(default_factory=dict)


_PIECES = 8  # of a starved device's work, as it is drawn
Drawn = tuple[str, float, float, int | None]  # lane (host or device), begin, end, finding


def simulate(
    timeline: Iterable[Work | HostWait], without: Collection[int] = (), drawn: list[Drawn] | None = None
) -> Length:
    """Run a timeline, leaving out the waits of some findings; ``drawn`` collects what happens when.

    >>> steps = [Work(2.0, 5.0), HostWait(1), Work(1.0, 1.0), HostWait(2)]
    >>> simulate(steps).total, simulate(steps, {1}).total, simulate(steps, {2}).waited
    (6.0, 6.0, {1: 3.0})
    >>> simulate([Work(2.0, 2.0), HostWait(1), Work(3.0, 0.0)] * 2, {1}).total
    10.0
    """
    length = Length()
    host = device = 0.0
    for item in timeline:
        if isinstance(item, Work):
            if item.device:
                begin = max(device, host + item.lead)
                device = max(begin + item.device, host + item.host)
                length.busy += item.device
                _draw_spread(drawn, begin, device, item.device)
            _draw(drawn, "host", host, host + item.host)
            host += item.host
            continue
        if item.device:
            device = max(device, host) + item.device
            length.busy += item.device
            _draw(drawn, "device", device - item.device, device)
        if item.finding in without:
            continue
        begin = host
        host += item.host
        if item.drains:
            host = max(host, device)
        host += item.after
        _draw(drawn, "host", begin, host, item.finding)
        length.waited[item.finding] = length.waited.get(item.finding, 0.0) + host - begin
    length.total = max(host, device)
    return length


def _draw(drawn: list[Drawn] | None, lane: str, begin: float, end: float, finding: int | None = None) -> None:
    if drawn is not None and end > begin:
        drawn.append((lane, begin, end, finding))


def _draw_spread(drawn: list[Drawn] | None, begin: float, end: float, busy: float) -> None:
    """The device's work between two times: if it is starved, in pieces, as the host launches it."""
    pieces = 1 if end - begin <= busy * 1.01 else _PIECES
    width = busy / pieces
    for piece in range(pieces):
        start = end - width - piece * (end - begin - width) / max(1, pieces - 1)
        _draw(drawn, "device", start, start + width)


def gains(timeline: Sequence[Work | HostWait], findings: Collection[int]) -> tuple[Length, dict[int, float]]:
    """The timeline as it is, and the seconds gained by removing each finding alone."""
    whole = simulate(timeline)
    alone = {finding: max(0.0, whole.total - simulate(timeline, {finding}).total) for finding in findings}
    return whole, alone
