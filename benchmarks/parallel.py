"""Automatic parallelism against everything one could write instead, in the same run.

    python benchmarks/parallel.py                            every row, on the GPU
    python benchmarks/parallel.py --rows chains-256,resnet-256,planning
    python benchmarks/parallel.py --json found.json          all figures
    python benchmarks/parallel.py --tiny                     small sizes: a try on a CPU, no figures to quote

Every way is first checked against eager: equal to the bit, or close, or (where compilers and low precision round at
other places) no further from the same function in float64 than eager is. Only then it is timed: a warm-up apart, then
the median of several trials, each of many calls between two CUDA events (on a CPU: the clock). "manyhands" gives
results that are the caller's to keep; "manyhands, reuse" those of `reuse_outputs=True`, overwritten by the next call as
a CUDA graph's are; "manyhands, compile" is that with the whole graph compiled among the candidates. None of them may be
below 0.98 of eager on any row: after the table it is said whether one is, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import parallel_cases
import parallel_limits
import parallel_rows
import torch
from parallel_ways import COMPILED, OURS, Case, Skipped, Wanted, copied, synchronize, ways, with_manyhands

from manyhands import machine

TRIALS = 11
LEAST = 0.98  # of eager's speed


# --- time


def median_seconds(work: Callable[[], object], device: torch.device, quick: bool) -> tuple[float, float, float]:
    """Median, least and most seconds of one call, over trials of many calls each."""
    for _ in range(3):
        work()
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    once = time.perf_counter() - start
    calls = 1 if quick else max(1, min(200, int(0.03 / max(once, 1e-6))))
    times = [_trial(work, calls, device) for _ in range(3 if quick or once > 1 else TRIALS)]
    return statistics.median(times), min(times), max(times)


def _trial(work: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


# --- rows


def measure(case: Case, device: torch.device, quick: bool, only: Sequence[str] = ("",)) -> dict[str, Any]:
    """All ways of one case whose names begin so; what differs from eager or breaks is told and not timed."""
    with case.around():
        return _measure(case, device, quick, only)


def _measure(case: Case, device: torch.device, quick: bool, only: Sequence[str]) -> dict[str, Any]:
    wanted = Wanted(case)
    row: dict[str, Any] = {
        "name": case.name,
        "seconds": {},
        "spread": {},
        "difference": {},
        "verdict": {},
        "left_out": {},
    }
    row["naive"] = case.naive

    def add(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        if not name.startswith(tuple(only)):
            return
        try:
            work = make()
            right, words, apart = wanted.judge(copied(work()))
            if not right:
                row["left_out"][name] = words
                return
            median, least, most = median_seconds(work, device, quick)
            right, later, _ = wanted.judge(copied(work()))  # after many calls ours reads its arguments in place
            if not right:
                row["left_out"][name] = f"after many calls: {later}"
                return
        except Skipped as error:
            row["left_out"][name] = f"skipped: {error}"
            return
        except Exception as error:
            traceback.print_exc()
            row["left_out"][name] = f"failed: {type(error).__name__}: {error}".splitlines()[0][:160]
            return
        row["seconds"][name], row["spread"][name] = median, (least, most)
        row["difference"][name], row["verdict"][name] = apart, words
        print(f"  {name:<30}{median * 1e3:10.3f} ms  {words}", flush=True)

    print(case.name, flush=True)
    add("eager", lambda: lambda: case.function(*case.arguments))
    for name, make in ways(case, device).items():
        add(name, make)
        tidy(device)
    for name in OURS:
        if name == COMPILED and (device.type != "cuda" or not case.graph):
            continue
        start = time.perf_counter()
        work, fast = with_manyhands(case, name)
        add(name, lambda work=work: work)  # type: ignore[misc]
        row.setdefault("planning", time.perf_counter() - start)
        row.setdefault("explained", {})[name] = fast.explain() if fast._last else ""
        tidy(device)
    row["bounds"] = {
        name: median_seconds(lambda bound=bound: bound(*case.arguments), device, quick)[0]  # type: ignore[misc]
        for name, bound in case.bounds.items()
    }
    for name, seconds in row["bounds"].items():
        print(f"  bound: {name:<23}{seconds * 1e3:10.3f} ms", flush=True)
    return row


def tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


# --- telling


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = f"{'eager':>8}{'graph':>8}{'compile':>9}{'by hand':>9}{'batched':>9}{'bound':>8}"
    print(f"\n{'row':<42}{'ours ms':>10}{'compiled':>10}{columns}")
    for row in rows:
        seconds = row["seconds"]
        unfused, fused_one = _least(seconds, tuple(OURS)[:2]), seconds.get(COMPILED)
        best = _least(seconds, tuple(OURS))
        if "eager" not in seconds or unfused is None or best is None:
            continue
        by_hand = _least(seconds, ("streams in a graph", "copy stream by hand", "streams by hand"))
        batched = _least(seconds, ("bmm in a graph", "vmap in a graph", "bmm"))
        compiled_one = _least(seconds, ("compile, reduce-overhead", "compile in a graph"))
        others = (
            seconds.get(row["naive"], seconds["eager"]),
            seconds.get("one-stream graph"),
            compiled_one,
            by_hand,
            batched,
        )
        cells = [f"{seconds / best:.2f}" if seconds else "-" for seconds in others]
        bound = max(row["bounds"].values(), default=None)
        widths = (8, 8, 9, 9, 9)
        print(
            f"{row['name']:<42}{unfused * 1e3:>10.3f}"
            + (f"{fused_one * 1e3:>10.3f}" if fused_one else f"{'-':>10}")
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            + (f"{best / bound:>8.2f}" if bound else f"{'-':>8}")
        )
    print("ours, and ours compiled as a whole, in ms; then how many times as fast as each other way the better of the")
    print("two is (below 1: the other way wins); bound: our time over the slowest stage alone")


def _least(seconds: dict[str, float], names: tuple[str, ...]) -> float | None:
    return min((seconds[name] for name in names if name in seconds), default=None)


def header(device: torch.device) -> str:
    host = f"{machine.usable_cores()} cores {machine.host_name()}"
    hardware = f"{torch.cuda.get_device_name(device)}, {host}" if device.type == "cuda" else host
    return (
        f"{hardware}; Python {platform.python_version()}, torch {torch.__version__}; {datetime.date.today()}; "
        f"medians of {TRIALS} trials after a warm-up"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="which rows, with commas between; a beginning is enough (resnet)")
    parser.add_argument("--ways", help="only these ways, with commas between; a beginning is enough (manyhands)")
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--explain", action="store_true", help="print what manyhands says of each row")
    flags = parser.parse_args()
    flags.tiny = flags.tiny or not torch.cuda.is_available()
    flags.ways = [way.strip() for way in flags.ways.split(",")] if flags.ways else [""]
    return flags


def main() -> int:
    flags = options()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda make=make: measure(make(), device, flags.tiny, flags.ways)  # type: ignore[misc]
        for name, make in parallel_cases.cases(device, tiny=flags.tiny)
    }
    makers["planning"] = parallel_rows.planning
    makers["overhead-4"] = lambda: parallel_rows.overhead(device, flags.tiny, 4)
    makers["overhead-1"] = lambda: parallel_rows.overhead(device, flags.tiny, 1)
    wanted = flags.rows.split(",") if flags.rows else [""]
    chosen = [name for name in makers if any(name.startswith(prefix.strip()) for prefix in wanted)]
    if not chosen:
        print(f"no such row: {flags.rows}. There are {', '.join(makers)}", file=sys.stderr)
        return 2
    print(header(device) + (" (tiny: no figures to quote)" if flags.tiny else ""))
    rows = []
    for name in chosen:
        rows.append(makers[name]())
        tidy(device)
        for what, why in rows[-1]["left_out"].items():
            print(f"  {what}: {why}")
        for name, words in rows[-1].get("explained", {}).items() if flags.explain else ():
            print(f"{name}: {words}")
        if flags.json:
            with open(flags.json, "w") as file:
                json.dump({"header": header(device), "rows": rows}, file, indent=1)
    print_table(rows)
    slower = parallel_limits.report_below(parallel_limits.against_eager(rows, OURS), LEAST, "eager")
    if any("NOT EQUAL" in why for row in rows for why in row["left_out"].values()):
        return 1
    return 0 if flags.tiny else slower  # times of small sizes are noise


if __name__ == "__main__":
    sys.exit(main())
