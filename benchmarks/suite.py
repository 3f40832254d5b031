"""Programs that nobody tuned anything for, each run in five ways: what `parallel` gains over what people have.

    python benchmarks/suite.py                                  all programs, one after the other
    python benchmarks/suite.py --programs gpt,resnet50,lstm     some of them; a beginning is enough
    python benchmarks/suite.py --together 6 --budget 300        six compile side by side, timed one by one; 5 minutes
    python benchmarks/suite.py --quick                          small sizes: a try on a CPU, no figures to quote

The ways: eager; the same in one CUDA graph on one stream; `torch.compile(mode="reduce-overhead")` (of a training
program: of its model, in the loop that people write); `parallel(fn)`; `parallel(fn, compile=True)`. Inference is in
bfloat16, training under bfloat16 autocast. Where there is no GPU, the graph is left out and all is in float32.

Results are compared with eager's first: equal to the bit, or no further from the same program in float64 than eager is
(`benchmarks/exact`); of a training program the losses and all weights after three steps. Then all ways are timed
in turns in one process: milliseconds of a call, back to back; in brackets the same with a wait after every call.

Every program has a process of its own and a limit of time: one that fails is a row that says so. With `--together N`
that many prepare at once (compilers fill their caches on disk), wait for each other, and are then timed alone, one by
one; their plans are made then, too, because planning measures. What does not fit into `--budget` is named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 7
WAYS = ("eager", "graph", "compile", "manyhands", "manyhands compile")
OURS = WAYS[3:]
STEPS = 3  # of a training program, before its weights are compared
MARK = "suite result: "


# --- one program, in a process of its own


def prepare(program: Any, device: Any, dtype: Any, ways: Sequence[str]) -> None:
    """Let compilers fill their caches; what is measured while others run is not remembered."""
    os.environ["MANYHANDS_CACHE"] = "off"
    for way in ways:
        if way in ("compile", "manyhands compile"):
            with contextlib.suppress(Exception):
                run = callable_for(way, program, device, dtype)
                for _ in range(2):
                    run()
            tidy(device)


def callable_for(way: str, program: Any, device: Any, dtype: Any) -> Callable[[], Any]:
    """The program ready to be called in this way."""
    return ready(way, program, device, dtype)[0]


def ready(way: str, program: Any, device: Any, dtype: Any) -> tuple[Callable[[], Any], Any, Any]:
    """What calls it, the program as it runs, and what `parallel` made of it."""
    import torch
    from suite_programs import Running

    from manyhands import torch as mh

    running = Running(program, device, dtype)
    arguments, fast = running.arguments, None
    if way == "graph":
        return _captured(running, device), running, None
    if way == "compile":
        torch._dynamo.reset()
        if program.trains:
            running.compiled = torch.compile(running.net, mode="reduce-overhead")
            return lambda: running.call(*arguments), running, None
        compiled = torch.compile(running.call, mode="reduce-overhead")
        return lambda: compiled(*arguments), running, None
    if way in OURS:
        whole = program.trains  # a training step is one graph only if it is traced whole
        fast = mh.parallel(running.call, pure=whole, compile=way == "manyhands compile")
        return lambda: fast(*arguments), running, fast
    return lambda: running.call(*arguments), running, None


def _captured(running: Any, device: Any) -> Callable[[], Any]:
    """One CUDA graph on one stream, as PyTorch's documentation has it.

    But for its stream: `torch.compile(mode="reduce-overhead")` frees the workspaces of cuBLAS when it records a graph,
    and a graph of the same process that was captured earlier may still write to them.
    """
    import torch

    from manyhands.backends.torch.run.own_streams import new_stream, reserve_workspaces

    side = new_stream(device)
    reserve_workspaces([side], device)
    side.wait_stream(torch.cuda.current_stream(device))
    before = [tensor.clone() for tensor in running.state()]
    with torch.cuda.stream(side):
        for _ in range(3):
            running.call(*running.arguments)
    torch.cuda.current_stream(device).wait_stream(side)
    running.put_back(before)
    reserve_workspaces([side], device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = running.call(*running.arguments)

    def replay(alive: Any = running) -> Any:  # its weights and arguments: the graph knows no more than addresses
        graph.replay()
        return result

    return replay


def observed(run: Callable[[], Any], running: Any, trains: bool) -> list[Any]:
    """The results of one call, or losses and weights after some steps."""
    from suite_programs import copied

    if not trains:
        return copied(run())
    losses = [copied(run())[0] for _ in range(STEPS)]
    return [*losses, *copied(running.weights())]


def comparison(program: Any, device: Any, dtype: Any) -> Callable[[list[Any]], str]:
    """What says of results how they stand to eager's, and raises where they are wrong."""
    import torch
    from exact import float64
    from exact.exactness import CannotBeExact
    from suite_programs import Running, copied

    def of(running: Any) -> list[Any]:
        return observed(lambda: running.call(*running.arguments), running, program.trains)

    eager = Running(program, device, dtype)
    before = copied(eager.weights()) if program.trains else []
    plain = of(eager)
    exactly = of(Running(program, device, dtype, exact=True))

    def verdict_of(results: list[Any]) -> str:
        if all(torch.equal(a, b) for a, b in zip(results, plain, strict=True)):
            return "bits"
        try:
            verdict = float64.verdict(results, plain, exactly, torch.finfo(dtype).eps, before=before)
        except CannotBeExact as error:
            return f"not comparable: {error}"
        if not verdict.accepted:
            raise AssertionError(f"wrong: {verdict.words}")
        return f"{verdict.error:.2f} of eager's error"

    return verdict_of


def measured(runs: dict[str, Callable[[], Any]], device: Any, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a call in turns: back to back, and with a wait after each."""
    calls: dict[str, int] = {}
    for way, run in runs.items():
        for _ in range(40):  # `parallel` reads arguments in place from the 33rd call on
            run()
            if way not in calls and timed(run, 1, device, each=False) > 0.05:
                break
        once = min(timed(run, 3, device, each=False) for _ in range(2))
        calls[way] = max(1, min(100, int(0.03 / max(once, 1e-6))))
    times: dict[bool, dict[str, list[float]]] = {each: {way: [] for way in runs} for each in (False, True)}
    names = list(runs)
    for number in range(rounds):
        turn = number % len(names)
        for way in names[turn:] + names[:turn]:
            for each in (False, True):
                times[each][way].append(timed(runs[way], calls[way], device, each=each))
    return tuple({way: statistics.median(seconds) for way, seconds in times[each].items()} for each in (False, True))  # type: ignore[return-value]


def timed(run: Callable[[], Any], calls: int, device: Any, *, each: bool) -> float:
    wait = _wait(device)
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
        if each:
            wait()
    wait()
    return (time.perf_counter() - start) / calls


def _wait(device: Any) -> Callable[[], Any]:
    import torch

    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def tidy(device: Any) -> None:
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def child(flags: argparse.Namespace) -> None:
    import torch
    from suite_programs import programs

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    program = programs(flags.quick)[flags.child]
    ways = [way for way in flags.ways.split(",") if way != "graph" or device.type == "cuda"]
    if flags.hold:
        cache = os.environ.get("MANYHANDS_CACHE")
        prepare(program, device, dtype, ways)
        _restore("MANYHANDS_CACHE", cache)
        print("ready", flush=True)
        sys.stdin.readline()
    row: dict[str, Any] = {"name": program.name, "verdict": {}, "failed": {}, "first_s": {}, "explained": {}}
    if flags.no_graph:
        row["failed"]["graph"] = flags.no_graph
    compared = comparison(program, device, dtype)
    runs: dict[str, Callable[[], Any]] = {}
    for way in ways:
        start = time.perf_counter()
        try:
            run, running, fast = ready(way, program, device, dtype)
            row["verdict"][way] = compared(observed(run, running, program.trains))
            row["first_s"][way] = time.perf_counter() - start
            if fast is not None:
                row["explained"][way] = fast.explain()
            runs[way] = run
        except Exception as error:
            traceback.print_exc()
            row["failed"][way] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            if way == "graph":
                _begin_again(flags, row["failed"][way])
    if not runs:
        sys.exit(f"no way works: {row['failed']}")
    row["seconds"], row["waited"] = measured(runs, device, 2 if flags.quick else ROUNDS)
    print(MARK + json.dumps(row), flush=True)


def _begin_again(flags: argparse.Namespace, why_no_graph: str) -> None:
    """Start this process anew without the graph: a capture that failed may leave CUDA unusable."""
    ways = ",".join(way for way in flags.ways.split(",") if way != "graph")
    command = [sys.executable, __file__, "--child", flags.child, "--ways", ways, "--no-graph", why_no_graph]
    sys.stderr.flush()
    os.execv(sys.executable, [*command, *(["--quick"] if flags.quick else [])])


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


# --- all of them


class Child:
    """The process of one program."""

    def __init__(self, name: str, flags: argparse.Namespace, *, hold: bool) -> None:
        self.name, self._text = name, ""
        command = [sys.executable, __file__, "--child", name, "--ways", flags.ways]
        command += ["--quick"] if flags.quick else []
        command += ["--hold"] if hold else []
        self._errors = Path(flags.logs, f"{name}.txt")
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def wait_for(self, mark: str, seconds: float) -> str | None:
        """The line that begins so; None where the process ends without it, or takes longer."""
        output = self._process.stdout
        assert output is not None
        end = time.monotonic() + seconds
        while True:
            for line in self._text.splitlines(keepends=True):
                if line.startswith(mark) and line.endswith("\n"):
                    return line.removeprefix(mark)
            left = end - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return None
            data = output.read()
            if not data:
                return None
            self._text += data.decode(errors="replace")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def why_ended(self) -> str | None:
        """The last line of the process's errors, if it has ended by itself."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None
        lines = self._errors.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines[-1:] or ["no message"]
        return f"it ended with {status}: {errors[-1][:160]}"

    def end(self) -> None:
        """End the process and what it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
        self._process.wait()


class Suite:
    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags, self.rows = flags, list[dict[str, Any]]()
        self.left_out: dict[str, str] = {}
        self._start = time.monotonic()

    def left(self) -> float:
        """Seconds of the budget."""
        return float(self._flags.budget) - (time.monotonic() - self._start)

    def run(self, names: Sequence[str]) -> None:
        size = max(1, self._flags.together)
        for begin in range(0, len(names), size):
            batch = names[begin : begin + size]
            if self.left() <= 0:
                self.left_out.update(dict.fromkeys(batch, "no time was left"))
                continue
            self._batch(batch)

    def _batch(self, names: Sequence[str]) -> None:
        hold = self._flags.together > 1
        if not hold:
            (name,) = names
            child = Child(name, self._flags, hold=False)
            self._take(child, min(self.left(), self._flags.timeout))
            return
        children = [Child(name, self._flags, hold=True) for name in names]
        try:
            end = time.monotonic() + min(self.left(), self._flags.timeout)
            waiting = []
            for child in children:
                if child.wait_for("ready", max(0.0, end - time.monotonic())) is None:
                    self.left_out[child.name] = child.why_ended() or "took too long to compile"
                    child.end()
                else:
                    waiting.append(child)
            for child in waiting:
                child.go_on()
                self._take(child, min(self.left(), self._flags.timeout))
        finally:
            for child in children:
                child.end()

    def _take(self, child: Child, seconds: float) -> None:
        text = child.wait_for(MARK, max(0.0, seconds))
        if text is None:
            late = "no time was left" if self.left() <= 0 else f"it took longer than {seconds:.0f} s"
            self.left_out[child.name] = child.why_ended() or late
            child.end()
            print(f"{child.name:<20} {self.left_out[child.name]}", flush=True)
            return
        child.end()
        self.rows.append(json.loads(text))
        show(self.rows[-1])
        self.save()

    def save(self) -> None:
        if self._flags.json:
            whole = {"header": header(), "rows": self.rows, "left out": self.left_out, "means": means(self.rows)}
            fresh = Path(f"{self._flags.json}.new")
            fresh.write_text(json.dumps(whole, indent=1))
            fresh.replace(self._flags.json)


# --- telling


def header() -> str:
    import torch

    from manyhands import machine

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{where}, {machine.usable_cores()} cores {machine.host_name()}, torch {torch.__version__}"


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as others ours is: above 1 ours wins."""
    seconds = row["seconds"]
    by_name = {}
    if "manyhands" in seconds and "graph" in seconds:
        by_name["manyhands/graph"] = seconds["graph"] / seconds["manyhands"]
        by_name["manyhands/graph, waited"] = row["waited"]["graph"] / row["waited"]["manyhands"]
    if "manyhands compile" in seconds and "compile" in seconds:
        by_name["compile/compile"] = seconds["compile"] / seconds["manyhands compile"]
    others = [seconds[way] for way in WAYS if way in seconds and way not in OURS]
    planned = [seconds[way] for way in OURS if way in seconds]
    if others and planned:
        by_name["best/best"] = min(others) / min(planned)
    if "eager" in seconds and planned:
        by_name["best/eager"] = seconds["eager"] / min(planned)
    return by_name


def show(row: dict[str, Any]) -> None:
    cells = [
        f"{row['seconds'][way] * 1e3:9.3f} ({row['waited'][way] * 1e3:8.3f})"
        if way in row["seconds"]
        else f"{'-':>9}{'':11}"
        for way in WAYS
    ]
    gained = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios(row).items())
    print(f"{row['name']:<20}" + "".join(cells) + "  " + gained, flush=True)
    verdicts = ", ".join(f"{way}: {words}" for way, words in row["verdict"].items() if way != "eager")
    first = ", ".join(f"{way} {seconds:.1f}" for way, seconds in row["first_s"].items())
    print(f"{'':<20}results: {verdicts}; first calls, s: {first}", flush=True)
    for way, explained in row["explained"].items():
        print(f"{'':<20}{way}: {explained.partition(': ')[2].splitlines()[0]}", flush=True)
    for way, why in row["failed"].items():
        print(f"{'':<20}{way}: {why}", flush=True)


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of the ratios, and the least of each."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, ratio in ratios(row).items():
            by_name.setdefault(name, []).append(ratio)
    whole = {name: math.exp(statistics.fmean(map(math.log, values))) for name, values in by_name.items()}
    return whole | {f"least {name}": min(values) for name, values in by_name.items()}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="which, with commas between; a beginning is enough")
    parser.add_argument("--ways", default=",".join(WAYS), help="which ways, with commas between")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all; what does not fit is named")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to prepare a program, and to time one")
    parser.add_argument("--together", type=int, default=1, help="programs that compile side by side")
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--logs", help="a folder for what each program writes to stderr (a new one)")
    parser.add_argument("--list", action="store_true", help="print the names of all programs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-graph", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    flags = options()
    if flags.child:
        child(flags)
        return 0
    from suite_programs import programs

    known = list(programs(flags.quick))
    wanted = [prefix.strip() for prefix in flags.programs.split(",") if prefix.strip()]
    names = [name for name in known if not wanted or any(name.startswith(prefix) for prefix in wanted)]
    if flags.list or not names:
        print("\n".join(known))
        return 0 if flags.list else 2
    flags.logs = flags.logs or tempfile.mkdtemp(prefix="manyhands-suite-")
    Path(flags.logs).mkdir(parents=True, exist_ok=True)
    print(f"{header()}{'; quick: no figures to quote' if flags.quick else ''}", flush=True)
    print(f"{'ms (waited for each)':<20}" + "".join(f"{way:>20}" for way in WAYS), flush=True)
    suite = Suite(flags)
    suite.run(names)
    for name, value in means(suite.rows).items():
        print(f"{name:<40}{value:6.3f}")
    for name, why in suite.left_out.items():
        print(f"left out: {name}: {why}")
    suite.save()
    wrong = [row["name"] for row in suite.rows if any("wrong" in why for why in row["failed"].values())]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
