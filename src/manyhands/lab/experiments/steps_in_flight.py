"""Training steps with work on the host before each: wait for every step, or let some be in flight."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy

from manyhands.amounts import count_of
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import EFFICIENCY, Answer

_WAIT, _TWO, _HOST = "wait for every step", "two steps in flight", "the host's work alone"


@Experiment(
    "steps-in-flight",
    "What does it gain to have two steps in flight?",
    "Training on several GPUs, concise: an overlap of up to two steps. Asynchronous computation: waitall.",
    apart=True,
)
def run(bench: Bench) -> Answer:
    mh, operations = bench.mh, bench.operations
    device = bench.devices(1)[0]
    width, batch, steps = bench.size(gpu=2048, cpu=384, quick=256), 512, bench.size(gpu=100, cpu=60, quick=30)
    images = numpy.random.default_rng(0).integers(0, 256, (batch, width), dtype="uint8")
    targets, start = bench.random((batch, width), device, 1), bench.random((width, width), device, 2)

    def prepare(number: int) -> Any:
        """The host's work: images with noise, standardised."""
        noise = numpy.random.default_rng(number).standard_normal(images.shape, dtype="float32")
        x = numpy.roll(images, number, axis=1) + 8 * noise
        x = (x - x.mean(axis=0)) / x.std(axis=0)
        return mh.to(operations.tensor(x), device, wait=False)

    def step(state: dict[str, Any], arrival: Any) -> Any:
        """One step of gradient descent; the loss is copied to the host without a wait."""
        x = arrival.result()
        error = operations.matmul(x, state["weight"]) - targets
        state["weight"] = state["weight"] - operations.matmul(operations.transpose(x), error) * 1e-4
        return mh.to(operations.norm(error), mh.cpu(), wait=False)

    def train(in_flight: int) -> list[Any]:
        state, pending, losses = {"weight": start}, deque[Any](), []
        with mh.parallel():
            for number in range(steps):
                arrival = prepare(number)
                pending.append(mh.task(step, writes=(state,))(state, arrival))
                while len(pending) > in_flight:
                    losses.append(pending.popleft().result().result())
            losses += [future.result().result() for future in pending]
        return losses

    def host_alone() -> None:
        for number in range(steps):
            prepare(number).result()

    methods = {
        _WAIT: lambda: train(0),
        "one step in flight": lambda: train(1),
        _TWO: lambda: train(2),
        "never wait": lambda: train(steps),
    }
    expected = train(0)
    for in_flight in (1, 2, steps):
        bench.equal(train(in_flight), expected, compared=f"losses with {count_of(in_flight, 'step')} in flight")
    times = bench.trials({**methods, _HOST: host_alone}, {"steps": steps, "width": width})
    host = times.median(_HOST)
    times.compare(_TWO, to=_HOST, most=EFFICIENCY)
    del times[_HOST]
    gain, never = times.compare(_TWO, to=_WAIT, most=2), times.compare("never wait", to=_WAIT, most=2)
    conclusion = (
        f"With two steps in flight the loop {gain}, compared with a wait for every step; without any wait it {never}. "
        "The losses are the same to the bit."
    )
    return Answer.of(conclusion, *times.shown(f"{steps} steps", _WAIT, {_HOST: host}))
