"""Measures a rank's seconds per sample without making it wait, and derives shares from them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch


class Clock:
    """Seconds of computing and samples computed since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._samples = 0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._begun: torch.cuda.Event | float = 0.0

    def start(self) -> None:
        if self._device.type == "cuda":
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        else:
            self._begun = time.perf_counter()

    def stop(self, samples: int) -> None:
        if isinstance(self._begun, float):
            self._seconds += time.perf_counter() - self._begun
            self._samples += samples
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._open.append((self._begun, ended, samples))

    def per_sample(self) -> float:
        """Seconds per sample, over the steps that are done by now; zero if none are."""
        while self._open and self._open[0][1].query():
            begun, ended, samples = self._open.popleft()
            self._seconds += begun.elapsed_time(ended) / 1000
            self._samples += samples
        result = self._seconds / self._samples if self._samples else 0.0
        self._seconds, self._samples = 0.0, 0
        return result


def shares_from(seconds_per_sample: Sequence[float], before: Sequence[float]) -> list[float]:
    """Shares in which all are ready at the same time: each in proportion to its speed.

    A rank that computed nothing keeps the share it had. Shares move half the way, so that one odd measurement does
    not throw them about, and stay above a hundredth, so that a rank that was slow once is measured again.
    """
    speeds = [1 / seconds if seconds > 0 else 0.0 for seconds in seconds_per_sample]
    known = sum(speeds)
    if not known:
        return list(before)
    unmeasured = sum(share for share, rate in zip(before, speeds, strict=True) if not rate)
    aim = [rate / known * (1 - unmeasured) if rate else share for rate, share in zip(speeds, before, strict=True)]
    moved = [max((a + b) / 2, 0.01) for a, b in zip(aim, before, strict=True)]
    return [share / sum(moved) for share in moved]


def worth(seconds_per_sample: Sequence[float]) -> float:
    """How much faster all together could be than the fastest alone (communication apart)."""
    speeds = [1 / seconds for seconds in seconds_per_sample if seconds > 0]
    return sum(speeds) / max(speeds) if speeds else 1.0
