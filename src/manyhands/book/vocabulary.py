"""The helper functions and classes of the book "Dive into Deep Learning", for every framework.

Code written for the book finds here what it calls between the formulas: settings that store
themselves, methods added to a class later, running sums, clocks, and a plot that grows. No
framework is imported, and matplotlib and IPython only where a picture is made.
"""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from manyhands.amounts import counted
from manyhands.errors import PackageMissing, type_in_words

Member = TypeVar("Member")


class HyperParameters:
    """A base class whose children keep the arguments they were made with."""

    hparams: dict[str, Any]
    _kept_in: type[dict[str, Any]] = dict  # a framework may want one of its own kind

    def save_hyperparameters(self, ignore: str | Sequence[str] = ()) -> None:
        """Store the arguments of the running ``__init__`` as attributes, and all of them in ``hparams``.

        Positional extras (``*args``) are one tuple under their own name; keyword extras (``**kwargs``)
        are stored one by one, as if each had been written out. Names in ``ignore``, and names that
        start with ``_``, are left out. Where a parent class saved its own arguments before, these
        come to them; the same name takes the newer value.
        """
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        arguments = _arguments(_initialiser(self, sys._getframe(1)), left_out)
        self.hparams = self._kept_in({**self.__dict__.get("hparams", {}), **arguments})
        for name, value in arguments.items():
            setattr(self, name, value)


def _initialiser(owner: object, caller: FrameType) -> FrameType:
    """The nearest ``__init__`` of this object among the running calls, else the caller itself.

    The caller is often not the ``__init__``: ``__post_init__`` of a dataclass, or a method that wraps
    ``save_hyperparameters``.
    """
    frame: FrameType | None = caller
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
            return frame
        frame = frame.f_back
    return caller


def _arguments(frame: FrameType, left_out: set[str]) -> dict[str, Any]:
    """The arguments of a running call by name, without the first (the object itself)."""
    names, extras, keywords, values = inspect.getargvalues(frame)
    wanted = [*names[1:], extras] if extras else names[1:]
    arguments = {name: values[name] for name in wanted if name in values}
    if keywords and keywords not in left_out:
        arguments |= values.get(keywords, {})
    return {name: value for name, value in arguments.items() if name not in left_out and not name.startswith("_")}


def add_to_class(Class: type) -> Callable[[Member], Member]:
    """A decorator that makes a function (or a property) a member of a class that exists already.

    Objects made before have it too. Inside, write ``super(Class, self)``: the short ``super()`` only
    works in the body of a class.
    """
    if not isinstance(Class, type):
        raise TypeError(f"add_to_class wants a class, {Class!r} is {type_in_words(Class)}: write add_to_class(Name)")

    def add(member: Member) -> Member:
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        name = getattr(function, "__name__", None)
        if name is None:
            raise TypeError(f"{type_in_words(member)} has no name under which it could be added: decorate a function")
        setattr(Class, name, member)
        if hasattr(type(member), "__set_name__"):  # the class body would have called it
            member.__set_name__(Class, name)  # type: ignore[attr-defined]
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
        if len(values) != len(self.data):
            raise ValueError(
                f"{counted(len(values), 'value')} for an Accumulator of {counted(len(self.data), 'sum')}: give one "
                "for each"
            )
        self.data = [total + _number(value) for total, value in zip(self.data, values, strict=True)]

    def reset(self) -> None:
        """All sums are zero again."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index: int) -> float:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[float]:
        return iter(self.data)

    def __repr__(self) -> str:
        return f"Accumulator({', '.join(map(str, self.data))})"


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
        """Write down the seconds since the last start, and give them."""
        self.times.append(time.perf_counter() - self._began)
        return self.times[-1]

    def avg(self) -> float:
        """The mean of all readings."""
        if not self.times:
            raise ValueError("this Timer has no reading yet, so no mean: call stop() first")
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        """All readings together."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """After each reading, the sum so far."""
        return list(itertools.accumulate(self.times))


class Benchmark:
    """Time a block of code: ``with Benchmark("text"):`` prints ``text: 0.1234 sec``.

    Devices work while the program runs on; so ``synchronize`` is called before the clock starts and
    before it is read, and what is timed is the work, not its launch. ``seconds`` keeps the reading (and
    is None until there is one). A block that ends in an exception is not timed.
    """

    _synchronize: Callable[[], object] = staticmethod(lambda: None)  # a door's Benchmark waits for its devices

    def __init__(self, description: str = "Done", *, synchronize: Callable[[], object] | None = None) -> None:
        self.description = description
        self.seconds: float | None = None
        if synchronize is not None:
            self._synchronize = synchronize

    def __enter__(self) -> Self:
        self._synchronize()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # waiting for a device that failed could hide the first error behind a second
            return
        self._synchronize()
        self.seconds = time.perf_counter() - self._began
        print(f"{self.description}: {self.seconds:.4f} sec")


class Animator:
    """Curves that grow while a program runs.

    In a notebook each :meth:`add` redraws the one picture; in a script the points are kept quietly
    until :meth:`save`. ``X[i]`` and ``Y[i]`` are the points of curve ``i``: ``Y[0][-1]`` is the newest of the first.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        legend: Sequence[str] | None = None,
        xlim: tuple[float, float] | Sequence[float] | None = None,
        ylim: tuple[float, float] | Sequence[float] | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
        *,
        figsize: tuple[float, float] = (3.5, 2.5),
    ) -> None:
        self.legend = [legend] if isinstance(legend, str) else list(legend or [])
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        self._axes = {
            "xlabel": xlabel,
            "ylabel": ylabel,
            "xscale": xscale,
            "yscale": yscale,
            "xlim": xlim,
            "ylim": ylim,
        }
        self._formats = fmts
        self._size = figsize
        self._shown: Any = None

    def add(self, x: Any, y: Any) -> None:
        """Add a point to each curve: ``y`` is one value or one per curve; None adds no point."""
        ys = _several(y)
        xs = _several(x)
        if len(xs) == 1:
            xs *= len(ys)
        if len(xs) != len(ys):
            raise ValueError(
                f"{counted(len(xs), 'value')} of x for {len(ys)} of y: give one x for all curves, or one for each"
            )
        while len(self.Y) < len(ys):
            self.X.append([])
            self.Y.append([])
        for i, (a, b) in enumerate(zip(xs, ys, strict=True)):
            if a is not None and b is not None:
                self.X[i].append(_number(a))
                self.Y[i].append(_number(b))
        if (display := _notebook()) is not None:
            self._show(display)

    def save(self, path: str | Path) -> Path:
        """Write the picture as a PNG file, and give its path."""
        target = Path(path)
        target.write_bytes(self._picture(dpi=200))
        return target

    def _show(self, display: Any) -> None:
        image = display.Image(data=self._picture(dpi=100), format="png")
        if self._shown is None:
            self._shown = display.display(image, display_id=True)
        else:
            self._shown.update(image)

    def _picture(self, dpi: int) -> bytes:
        """A PNG, drawn without pyplot: no window is opened and the user's own figures are left alone."""
        try:
            matplotlib = importlib.import_module("matplotlib.figure")
        except ImportError:
            raise PackageMissing(
                "a picture needs matplotlib, which is not installed: pip install matplotlib", name="matplotlib"
            ) from None
        figure = matplotlib.Figure(figsize=self._size, layout="constrained")
        axes = figure.add_subplot()
        formats = itertools.cycle(self._formats)
        for i, (xs, ys) in enumerate(zip(self.X, self.Y, strict=True)):
            # One point makes no line yet: a marker lets it be seen.
            marker = "o" if len(xs) == 1 else None
            label = self.legend[i] if i < len(self.legend) else None
            axes.plot(xs, ys, next(formats), marker=marker, markersize=3, label=label)
        axes.set(**{name: value for name, value in self._axes.items() if value is not None})
        if self.legend and self.Y:
            axes.legend()
        axes.grid()
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi)
        return file.getvalue()


def _number(value: Any) -> float:
    """A number, or a tensor of one element; MXNet's older arrays have their own method for it."""
    return float(value.asnumpy().item() if hasattr(value, "asnumpy") else value)


def _several(value: Any) -> list[Any]:
    """A list of values, made of one or of several; a tensor without dimensions is one."""
    try:
        return list(value)
    except TypeError:
        return [value]


def _notebook() -> Any:
    """IPython's display module where a notebook shows this program's output, else None."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it long before us
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython in a terminal has a shell too, but no kernel, and shows no pictures.
    return importlib.import_module("IPython.display") if getattr(shell, "kernel", None) is not None else None
