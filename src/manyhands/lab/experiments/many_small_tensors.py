"""The same bytes over the bus as one tensor and as thousands; and from pinned and from pageable memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Sweep, Table

_PAGEABLE, _PINNED = "pageable, to the GPU", "pinned, to the GPU"


@Experiment(
    "many-small-tensors",
    "Many small tensors or one large one over the bus; pinned or pageable?",
    "Training on several GPUs: a more efficient allreduce. Why is it worth joining tensors?",
    one_core=True,
)
def run(bench: Bench) -> Answer:
    mh, gpu = bench.mh, bench.gpu()
    count = bench.size(gpu=1 << 26, cpu=1 << 24, quick=1 << 22)  # numbers of four bytes
    most, sweep = bench.size(gpu=4096, cpu=4096, quick=1024), Sweep()
    for pieces in (1, most // 64, most // 8, most):
        tensors = [bench.random((count // pieces,), mh.cpu(), seed) for seed in range(pieces)]
        methods = _methods(bench, tensors)
        for name, method in methods.items():
            bench.equal(method()[-1], tensors[-1], compared=name)
        sweep[pieces] = bench.trials(methods, {"tensors": pieces, "bytes": 4 * count})
    one_by_one, in_one_call, *_ = sweep.methods()
    title = f"{4 * count / 1e6:.0f} MB in one tensor and in many"
    loss = sweep[most].median(one_by_one) / sweep[1].median(one_by_one)
    conclusion = (
        f"{one_by_one}, the bytes of one tensor take {loss:.3g} times as long in {most:,}. "
        f"{sweep.in_words(in_one_call, one_by_one)}"
    )
    parts: list[Table | Plot] = [*sweep.shown(title, "tensors", "tensors")]
    notes = [] if gpu else ["There is no GPU here: these are copies within the host's memory."]
    pageable = bench.random((count,), mh.cpu())
    if gpu is not None and (pinned := bench.operations.pin(pageable)) is not None:
        bench.equal(mh.to(pinned, gpu), pageable, compared="pinned and pageable")
        memory = bench.trials({_PAGEABLE: lambda: mh.to(pageable, gpu), _PINNED: lambda: mh.to(pinned, gpu)})
        conclusion += f" From pinned memory the copy {memory.compare(_PINNED, to=_PAGEABLE)}."
        parts += memory.shown("Pageable and pinned memory", _PAGEABLE)
    return Answer.of(conclusion, *parts, notes=notes)


def _methods(bench: Bench, tensors: list[Any]) -> dict[str, Callable[[], list[Any]]]:
    mh, gpu = bench.mh, bench.gpu()
    if gpu is None:
        return {
            "Copied one by one": lambda: [mh.copy(x) for x in tensors],
            "Copied in one call": lambda: mh.copy(tensors),
        }
    on_gpu = mh.copy(tensors, gpu)
    return {
        "To the GPU, one by one": lambda: [mh.to(x, gpu) for x in tensors],
        "To the GPU, in one call": lambda: mh.to(tensors, gpu, wait=False).result(),
        "To the host, one by one": lambda: [mh.to(x, mh.cpu()) for x in on_gpu],
        "To the host, in one call": lambda: mh.to(on_gpu, mh.cpu(), wait=False).result(),
    }
