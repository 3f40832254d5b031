"""The helper functions and classes of the book "Dive into Deep Learning", for every framework.

No framework is imported, and matplotlib and IPython only where a picture is made.
"""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from manyhands.device import FRAMEWORKS
from manyhands.errors import type_in_words
from manyhands.files import new_figure

Member = TypeVar("Member")
__all__ = ["Accumulator", "Animator", "Benchmark", "HyperParameters", "Timer", "add_to_class"]


class HyperParameters:
    """A base class whose children keep the arguments they were made with."""

    hparams: dict[str, Any]
    _kept_in: type[dict[str, Any]] = dict  # a framework may want one of its own kind

    def save_hyperparameters(self, ignore: str | Sequence[str] = ()) -> None:
        """Store the arguments of the calling ``__init__`` as attributes, and all of them in ``hparams``.

        Names in ``ignore``, and names that start with ``_``, are left out. What a parent class saved before stays.
        """
        names, extras, keywords, values = inspect.getargvalues(sys._getframe(1))
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        arguments = {name: values[name] for name in (*names[1:], extras) if name in values}  # without self
        if keywords is not None and keywords not in ignored:
            arguments |= values[keywords]
        kept = {name: value for name, value in arguments.items() if name not in ignored and not name.startswith("_")}
        self.hparams = self._kept_in({**self.__dict__.get("hparams", {}), **kept})
        for name, value in kept.items():
            setattr(self, name, value)


def add_to_class(Class: type) -> Callable[[Member], Member]:
    """A decorator that makes a function (or a property) a member of a class, also of its objects.

    Inside, write ``super(Class, self)``: the short ``super()`` only works in the body of a class.
    """
    if not isinstance(Class, type):
        raise TypeError(f"add_to_class wants a class, {Class!r} is {type_in_words(Class)}: write add_to_class(Name)")

    def add(member: Member) -> Member:
        function: Any = member.fget if isinstance(member, property) else member
        setattr(Class, function.__name__, member)
        return member

    return add


class Accumulator:
    """Running sums of ``n`` numbers.

    Adding a tensor reads its value, so the program waits for the device that computes it: add once in
    a while, or keep a sum on the device and add that at the end.
    """

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *values: Any) -> None:
        """Add one value to each sum."""
        self.data = [total + as_number(value) for total, value in zip(self.data, values, strict=True)]

    def reset(self) -> None:
        """All sums are zero again."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index: int) -> float:
        return self.data[index]


class Timer:
    """A stopwatch that keeps every reading. It runs from the moment it is made.

    It reads the clock and nothing else: on a GPU, synchronise before :meth:`stop`, or use ``Benchmark``.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        """Restart the clock."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Record the seconds since the last start, and return them."""
        self.times.append(time.perf_counter() - self._began)
        return self.times[-1]

    def avg(self) -> float:
        """The mean of all readings."""
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        """The sum of all readings."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """After each reading, the sum so far."""
        return list(itertools.accumulate(self.times))


class Benchmark:
    """Time a block of code: ``with Benchmark("text"):`` prints ``text: 0.1234 sec``, and ``seconds`` keeps it.

    It waits for all devices before the clock starts and before it is read: what is timed is the work, not its launch.
    """

    def __init__(self, description: str = "Done") -> None:
        self.description = description
        self.seconds: float | None = None

    def __enter__(self) -> Self:
        _synchronize()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        _synchronize()
        self.seconds = time.perf_counter() - self._began
        print(f"{self.description}: {self.seconds:.4f} sec")


def _synchronize() -> None:
    """Wait for the devices of each framework that the program uses."""
    for framework in FRAMEWORKS:
        if backend := sys.modules.get(f"manyhands.backends.{framework}.devices"):
            backend.synchronize(None)


class Animator:
    """Curves that grow while a program runs.

    In a notebook each :meth:`add` redraws the one picture; in a script the points are kept quietly
    until :meth:`save`. ``X[i]`` and ``Y[i]`` are the points of curve ``i``: ``Y[0][-1]`` is the newest of the first.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        legend: Sequence[str] = (),
        xlim: Sequence[float] | None = None,
        ylim: Sequence[float] | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
        *,
        figsize: tuple[float, float] = (3.5, 2.5),
    ) -> None:
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        axes = {"xlabel": xlabel, "ylabel": ylabel, "xscale": xscale, "yscale": yscale, "xlim": xlim, "ylim": ylim}
        self._axes = {name: value for name, value in axes.items() if value is not None}
        self._legend, self._formats, self._size = legend or (), fmts, figsize
        self._shown: Any = None

    def add(self, x: Any, y: Any) -> None:
        """Add a point to each curve: ``y`` is one value or one per curve; None adds no point."""
        ys = _as_list(y)
        xs = _as_list(x)
        for i, (a, b) in enumerate(zip(xs * len(ys) if len(xs) == 1 else xs, ys, strict=True)):
            if i == len(self.Y):
                self.X.append([])
                self.Y.append([])
            if a is not None and b is not None:
                self.X[i].append(as_number(a))
                self.Y[i].append(as_number(b))
        if (display := _notebook()) is not None:
            image = display.Image(data=self._picture(dpi=100), format="png")
            if self._shown is None:
                self._shown = display.display(image, display_id=True)
            else:
                self._shown.update(image)

    def save(self, path: str | Path) -> Path:
        """Write the picture as a PNG file, and return its path."""
        Path(path).write_bytes(self._picture(dpi=200))
        return Path(path)

    def _picture(self, dpi: int) -> bytes:
        figure = new_figure("the picture", self._size)
        axes = figure.add_subplot()
        for xs, ys, style in zip(self.X, self.Y, itertools.cycle(self._formats), strict=False):
            # A single point makes no line: a marker shows it.
            axes.plot(xs, ys, style, marker="o" if len(xs) == 1 else None, markersize=3)
        axes.set(**self._axes)
        if self._legend and self.Y:
            axes.legend(self._legend[: len(self.Y)])
        axes.grid()
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi)
        return file.getvalue()


def as_number(value: Any) -> float:
    """A number, or a tensor of one element; MXNet's older arrays have their own method for it."""
    return float(value.asnumpy().item() if hasattr(value, "asnumpy") else value)


def _as_list(value: Any) -> list[Any]:
    """A list of values, made of one or of several; a tensor without dimensions is one."""
    try:
        return list(value)
    except TypeError:
        return [value]


def _notebook() -> Any:
    """IPython's display module where a notebook shows this program's output, else None."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it before us
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython in a terminal has a shell too, but no kernel, and shows no pictures.
    return importlib.import_module("IPython.display") if getattr(shell, "kernel", None) is not None else None
