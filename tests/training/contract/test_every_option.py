"""Every option of the trainer and of its topics changes what a job does, or is refused with what to write instead."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import numpy as np
import pytest
from training_bench import Bench, counting

from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training.options import TOPICS
from manyhands.training.trainer import BaseTrainer

EARLIER = "the folder of an earlier run"


@dataclasses.dataclass
class Case:
    """Values of an option; ``beside``: how the job differs from the usual one, with and without the option."""

    values: tuple[Any, ...]
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


def cases(bench: Bench) -> dict[str, Case]:
    two = {"devices": "cpu:2"}
    return {
        "max_epochs": Case((1,)),
        "num_gpus": Case((2,)),
        "gradient_clip_val": Case((1e-3,)),
        "devices": Case(("cpu:2",)),
        "batch_size": Case((4,)),
        "lr": Case((0.01,)),
        "loss": Case((bench.own.loss,)),
        "metrics": Case(({"seven": lambda outputs, targets: 7.0},)),
        "optimizer": Case(("adam",)),
        "schedule": Case((lambda done: 0.5,)),
        # Keras's weights are in double precision where the model was made so.
        "precision": Case(("bf16", "fp16", *(["fp64"] if bench.framework != "tensorflow" else []))),
        "seed": Case((1,)),
        "run": Case((None,)),
        "resume": Case((EARLIER,)),
        "quiet": Case((False,)),
        "callbacks": Case(([noting(bench)],)),
        "loggers": Case(([bench.mh.loggers.CSVLogger(every=1)],)),
        "shares": Case(((3, 1), "measured"), two),
        "accumulate": Case((2,)),
        "micro_batch_size": Case((2,)),
        "batch_stats": Case(("global", "per_device"), two),
        "on_nan": Case(("continue",), {"with_nan": True}),
        "activation_checkpointing": Case((True,)),
        "shard": Case((True,)),
        "wrt": Case((bench.own.last_layer,)),
        "optimize": Case(("off", "max")),
        "every": Case((1,)),
        "keep": Case((1,)),
        "per_device": Case((2,)),
        "hang_seconds": Case((300.0,)),
        "max_steps": Case((1,)),
        "max_time": Case((1e-9,)),
        "limit_batches": Case((1, 0.5)),
        "limit_val_batches": Case((1, 0.5)),
        "evaluate_every": Case(("1 steps",)),
        "overfit_batches": Case((1,)),
    }


def noting(bench: Bench) -> Any:
    class Noting(bench.mh.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, training: Any, row: Any) -> None:
            print("an epoch has ended")

    return Noting()


def net(bench: Bench) -> tuple[Any, list[str]]:
    """A model with statistics over its batch, and a list that grows with every call of its code."""
    made = bench.own.normalising()
    if bench.framework == "mxnet":
        made.initialize()
    if bench.framework != "jax":
        importlib.import_module(f"manyhands.book.{bench.framework}").initialise(made, 0)
    return counting(bench.framework, made)


@dataclasses.dataclass
class Jobs:
    """Small jobs, and all that a user can see of them."""

    bench: Bench
    capsys: pytest.CaptureFixture[str]
    plain: dict[str, Any]  # outcomes that several tests compare with

    def fit(self, model: Any, labels: int = 1, with_nan: bool = False, **options: Any) -> Any:
        random = np.random.RandomState(0)
        X, y = random.normal(size=(24, 4)).astype(np.float32), random.randint(0, 3, 24)
        validation = X[:20].copy(), y[:20]
        if with_nan:
            X[3] = np.nan
        how = {"max_epochs": 2, "batch_size": 8, "lr": 0.1, "quiet": True, **options}
        return self.bench.mh.Trainer(**how).fit(model, (X, y * labels), validation)

    def earlier(self) -> str:
        """A run of one epoch, with other labels."""
        return str(self.fit(net(self.bench)[0], labels=0, max_epochs=1, run=self.bench.new_run()).run)

    def outcome(self, **options: Any) -> Any:
        """Weights, rows, notes, devices, files, the calls of the model's code, and what was shown."""
        model, calls = net(self.bench)
        folder = self.bench.new_run()
        self.capsys.readouterr()
        try:
            result = self.fit(model, **{"run": folder, **options})
        except LossIsNotANumber:
            return "NaN"
        kept = [{name: row[name] for name in row if name not in ("seconds", "whole")} for row in result.rows]
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        numbers = [array.tobytes() for array in self.bench.own.tensors(model)]
        return numbers, kept, result.notes, result.devices, files, calls, self.capsys.readouterr()

    def without(self, beside: dict[str, Any]) -> Any:
        if repr(beside) not in self.plain:
            self.plain[repr(beside)] = self.outcome(**beside)
        return self.plain[repr(beside)]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {}


@pytest.fixture
def jobs(bench: Bench, capsys: pytest.CaptureFixture[str], plain: dict[str, Any]) -> Jobs:
    if bench.framework == "torch":
        pytest.skip("PyTorch has all options but wrt, and tests of its own for each")
    return Jobs(bench, capsys, plain)


def test_the_same_job_twice_is_the_same(jobs: Jobs) -> None:
    """Otherwise an option without an effect would seem to have one."""
    assert jobs.outcome() == jobs.without({})


PLACES = {name: None for name in inspect.signature(BaseTrainer).parameters if name not in TOPICS}
PLACES |= {field.name: topic for topic, kind in TOPICS.items() for field in dataclasses.fields(kind)}


# Where a job ends and what it saves is one code for all frameworks.
SHARED = [name for name, topic in PLACES.items() if topic in ("limits", "checkpoints")]


@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=pytest.mark.neutral if name in SHARED else ()) for name in PLACES]
)
def test_it_has_an_effect_or_is_refused(jobs: Jobs, option: str) -> None:
    """Also an option that will be added: without a case for it here there is a KeyError."""
    case, kind, topic = cases(jobs.bench)[option], jobs.bench.mh.Trainer, PLACES[option]
    for value in case.values if case.values != (EARLIER,) else (jobs.earlier(),):
        given = {option: value} if topic is None else {topic: TOPICS[topic](**{option: value})}
        reason = kind.refused.get(option) or kind.refused.get(f"{option}={value!r}")
        if reason is not None:
            with pytest.raises(BadSettings) as raised:
                kind(**given)
            written = f"{option}={value!r}"
            written = written if topic is None else f"{TOPICS[topic].__name__}({written})"
            assert str(raised.value) == f"{written}: {reason}"
        elif value != kind.default_batch_stats:
            assert jobs.outcome(**case.beside, **given) != jobs.without(case.beside)
