"""The cost of an explicit task: ``task(fn)(a, b)`` against plain calls and Python's own executor, in one run.

    python benchmarks/tasks.py [--rounds 15]
    python benchmarks/tasks.py --rows chain,products
    python benchmarks/tasks.py --tiny                small numbers: a try, no figures to quote

All rows but the last are tasks that do next to nothing, so that what is left is the cost of a task: independent ones;
each result waited for before the next task is given; a chain of futures; tensors as arguments, read; one tensor written
to by every task (which the executor's tasks keep in order by waiting for the one before). The last row is useful work:
independent tasks of ten products of 200x200 each, one thread for each operation, against plain calls with one thread
and with all.

Every way opens and closes its threads inside the time. Results are compared with those of plain calls before anything
is timed; then each way once a round, in turns, after a warm-up round, so that a load from outside falls on all of them.
The times are medians, the ratios medians of the rounds' ratios: how many times as long as the executor with as many
threads, and as the (better) plain way.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from manyhands import machine
from manyhands import torch as mh

THREADS = (1, 2)

Way = Callable[[], list[Any]]


class Row(NamedTuple):
    """Ways to the same results; those of the executor and ours are asked for with a number of threads."""

    name: str
    count: int
    plain: dict[str, Way]
    executor: Callable[[int], list[Any]]
    with_tasks: Callable[[int], list[Any]]
    threads: tuple[int, ...] = THREADS


def same(value: Any, *_: Any) -> Any:
    return value


def following(value: int) -> int:
    return value + 1


def independent(count: int) -> Row:
    def executor(threads: int) -> list[Any]:
        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(same, number) for number in range(count)]]

    def with_tasks(threads: int) -> list[Any]:
        with mh.parallel(threads=threads):
            return [future.result() for future in [mh.task(same)(number) for number in range(count)]]

    plain = {"plain": lambda: [same(number) for number in range(count)]}
    return Row(f"{count} independent tasks", count, plain, executor, with_tasks)


def one_at_a_time(count: int) -> Row:
    def executor(threads: int) -> list[Any]:
        with ThreadPoolExecutor(threads) as pool:
            return [pool.submit(same, number).result() for number in range(count)]

    def with_tasks(threads: int) -> list[Any]:
        with mh.parallel(threads=threads):
            return [mh.task(same)(number).result() for number in range(count)]

    plain = {"plain": lambda: [same(number) for number in range(count)]}
    return Row(f"{count} tasks, each waited for", count, plain, executor, with_tasks)


def chain(count: int) -> Row:
    def plain() -> list[Any]:
        value = 0
        for _ in range(count):
            value = following(value)
        return [value]

    def after(before: Future[int]) -> int:
        return following(before.result())

    def executor(threads: int) -> list[Any]:
        with ThreadPoolExecutor(threads) as pool:
            future = pool.submit(same, 0)
            for _ in range(count):
                future = pool.submit(after, future)
            return [future.result()]

    def with_tasks(threads: int) -> list[Any]:
        with mh.parallel(threads=threads):
            future = mh.task(same)(0)
            for _ in range(count):
                future = mh.task(following)(future)
            return [future.result()]

    return Row(f"a chain of {count} futures", count, {"plain": plain}, executor, with_tasks)


def tensors_read(count: int) -> Row:
    x, y = torch.ones(4), torch.ones(4)

    def executor(threads: int) -> list[Any]:
        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(same, x, y) for _ in range(count)]]

    def with_tasks(threads: int) -> list[Any]:
        with mh.parallel(threads=threads):
            return [future.result() for future in [mh.task(same)(x, y) for _ in range(count)]]

    plain = {"plain": lambda: [same(x, y) for _ in range(count)]}
    return Row(f"{count} tasks that read two tensors", count, plain, executor, with_tasks)


def tensor_written(count: int) -> Row:
    def write(x: torch.Tensor) -> None:
        x.add_(1)

    def plain() -> list[Any]:
        x = torch.zeros(4)
        for _ in range(count):
            write(x)
        return [x]

    def after(before: Future[None] | None, x: torch.Tensor) -> None:
        if before is not None:
            before.result()
        write(x)

    def executor(threads: int) -> list[Any]:
        x, future = torch.zeros(4), None
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(count):
                future = pool.submit(after, future, x)
        return [x]

    def with_tasks(threads: int) -> list[Any]:
        x = torch.zeros(4)
        with mh.parallel(threads=threads):
            for _ in range(count):
                mh.task(write, writes=(x,))(x)
        return [x]

    return Row(f"{count} tasks that write one tensor", count, {"plain": plain}, executor, with_tasks)


def products(count: int, size: int, threads: int) -> Row:
    inputs = [torch.randn(size, size) / size**0.5 for _ in range(count)]

    def ten(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(10):
            y = y @ x
        return y

    def plain(operation_threads: int) -> list[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(operation_threads)
        try:
            return [ten(x) for x in inputs]
        finally:
            torch.set_num_threads(before)

    def ten_alone(x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(1)  # a thread's own: where several work at once, each operation gets one
        return ten(x)

    def executor(threads: int) -> list[Any]:
        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(ten_alone, x) for x in inputs]]

    def with_tasks(threads: int) -> list[Any]:
        with mh.parallel(threads=threads):
            return [future.result() for future in [mh.task(ten_alone)(x) for x in inputs]]

    ways = {"plain": lambda: plain(1), f"plain, {threads} threads": lambda: plain(threads)}
    return Row(f"{count} tasks of ten products {size}x{size}", count, ways, executor, with_tasks, threads=(threads,))


def measure(row: Row, rounds: int) -> None:
    ways: dict[str, Way] = dict(row.plain)
    for threads in row.threads:
        for name, way in (("executor", row.executor), ("task", row.with_tasks)):
            ways[f"{name} {threads}"] = lambda way=way, threads=threads: way(threads)  # type: ignore[misc]
    expected = row.plain["plain"]()
    for name, way in ways.items():
        difference = furthest(way(), expected)
        assert difference < 1e-5, f"{row.name}, {name}: results differ by {difference:.1e}"
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for place in range(len(ways)):
            name = names[(place + number) % len(ways)]
            start = time.perf_counter()
            ways[name]()
            if number:
                times[name].append(time.perf_counter() - start)
    tell(row, times)


def furthest(results: list[Any], expected: list[Any]) -> float:
    """How far results are from those that are expected; numbers are to be the same."""
    assert len(results) == len(expected)
    apart = 0.0
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            apart = max(apart, float((result - wanted).abs().max()))
        else:
            assert result == wanted
    return apart


def tell(row: Row, times: dict[str, list[float]]) -> None:
    def ratio(mine: str, others: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(times[mine], times[others], strict=True)):.2f}"

    better = min(row.plain, key=lambda name: statistics.median(times[name]))
    print(row.name)
    for name, seconds in times.items():
        quarters = statistics.quantiles(seconds, n=4)
        each = statistics.median(seconds) / row.count * 1e6
        words = f"  {name:<18}{each:10.2f} us a task, spread {quarters[2] / quarters[0]:.2f}"
        if name.startswith("task"):
            words += f"; {ratio(name, name.replace('task', 'executor'))} of the executor"
        if name not in row.plain:
            words += f"; {ratio(name, better)} of {better}"
        print(words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="which rows, with commas between; a beginning is enough")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small numbers: no figures to quote")
    flags = parser.parse_args()
    count, rounds = (20, 3) if flags.tiny else (1000, flags.rounds)
    rows: dict[str, Callable[[], Row]] = {
        "independent": lambda: independent(count),
        "one-at-a-time": lambda: one_at_a_time(count),
        "chain": lambda: chain(count),
        "read": lambda: tensors_read(count),
        "write": lambda: tensor_written(count),
        "products": lambda: products(*((4, 32) if flags.tiny else (64, 200)), machine.usable_cores()),
    }
    print(
        f"{machine.usable_cores()} cores {machine.host_name()}; Python {platform.python_version()}, torch "
        f"{torch.__version__}; {datetime.date.today()}; medians of {rounds} rounds after a warm-up; load before: "
        f"{os.getloadavg()[0]:.1f}" + ("; tiny: no figures to quote" if flags.tiny else "")
    )
    with torch.no_grad():
        for name, make in rows.items():
            if name.startswith(tuple(flags.rows.split(","))):
                measure(make(), rounds)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
