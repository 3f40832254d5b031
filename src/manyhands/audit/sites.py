"""Whose line a wait is: the user's line that led to it, and the library's line where it happened."""

from __future__ import annotations

import functools
import linecache
import os
import re
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from types import CodeType, FrameType

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
try:
    _STARTED_IN = os.getcwd()  # a program may change its working folder; its files stay where the user looks for them
except OSError:
    _STARTED_IN = ""
_WAIT_OK = re.compile(r"#\s*manyhands:\s*wait-ok\b[ \t]*(.*)")


@dataclass(frozen=True)
class Line:
    """A line of a program."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """Its source text, without indentation; empty where there is none."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def code(self) -> str:
        """Its source text without a comment at its end."""
        return self.text.partition("  #")[0].rstrip()

    def __str__(self) -> str:
        return f"{shown_path(self.file)}:{self.number}"


@dataclass(frozen=True)
class Site:
    """Where a wait happened: the user's line, and the library's line beside it where that is another one."""

    user: Line
    library: Line | None = None

    @property
    def allowed(self) -> str | None:
        """The reason of a comment ``# manyhands: wait-ok <reason>`` on one of the lines; None: there is none."""
        reason = wait_ok(self.user.text)
        return wait_ok(self.library.text) if reason is None and self.library is not None else reason


def wait_ok(text: str) -> str | None:
    """The reason why a line may wait.

    >>> wait_ok("total += loss.item()  # manyhands: wait-ok once an epoch")
    'once an epoch'
    >>> wait_ok("total += loss.item()")
    """
    match = _WAIT_OK.search(text)
    return None if match is None else match[1].strip()


def shown_path(file: str) -> str:
    """A path as a user would write it: of an installed package, or relative to where the process was started.

    >>> shown_path("/usr/lib/python3/site-packages/torch/nn/utils/clip_grad.py")
    'torch/nn/utils/clip_grad.py'
    """
    if file.startswith("<"):
        return file
    if "/site-packages/" in file:
        return file.rpartition("/site-packages/")[2]
    try:
        relative = os.path.relpath(file, _STARTED_IN)
    except (ValueError, OSError):  # another drive, or a working folder that is gone
        return file
    return file if relative.startswith("..") else relative


class _Owner(Enum):
    USER = auto()
    LIBRARY = auto()
    AUDITOR = auto()
    ASKED_FOR = auto()  # our own verbs: a wait in them was asked for by name


_owners: dict[CodeType, _Owner] = {}
_user_roots: tuple[str, ...] = ()
_libraries = tuple(
    {
        os.path.join(os.path.abspath(path), "")
        for path in (
            *(sysconfig.get_paths().get(name, "") for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *(site.getsitepackages() if hasattr(site, "getsitepackages") else ()),
        )
        if path
    }
)
# The end of an epoch is not part of a step: there the trainer reads figures, evaluates and saves.
_OUTSIDE_STEPS = {"_end_epoch", "_read_sums", "_begin", "_close"}
# Files of PyTorch that an operation passes on its way to a virtual device.
PLUMBING = ("torch/utils/_pytree.py", "torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
# A virtual device only does what a line asks of PyTorch.
_PASSED_THROUGH = ("audit/", "backends/torch/virtual/", "backends/torch/compat/dynamo.py")
_VERBS_THAT_WAIT = {"synchronize", "waitall"}


def set_user_roots(*folders: str) -> None:
    """Count code in these folders as the user's, also where they are installed: ``-m module``."""
    global _user_roots
    _user_roots = tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)
    _owners.clear()


def current(depth: int = 1) -> Site | None:
    """The site of a wait that happens now, ``depth`` calls above.

    None: nothing is reported. The wait was asked for by name, or no line of the user's led to it (a library's thread).
    """
    frame: FrameType | None = sys._getframe(depth)
    library: Line | None = None
    while frame is not None:
        owner = _owners.get(frame.f_code) or _owner(frame.f_code)
        if owner is _Owner.ASKED_FOR:
            return None
        if owner is _Owner.USER:
            return Site(_line(frame), library)
        if owner is _Owner.LIBRARY and library is None:
            library = _line(frame)
        frame = frame.f_back
    return None


def name_callers_in_warnings() -> None:
    """Let a warning of a wrapped call name the line that called it, as without the wrapper."""
    show: Callable[[warnings.WarningMessage], None] | None = getattr(warnings, "_showwarnmsg", None)
    if show is None or hasattr(show, "__wrapped__"):
        return

    @functools.wraps(show)
    def show_warning(message: warnings.WarningMessage) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None and message.filename.startswith(os.path.join(PACKAGE, "audit", "")):
            message.filename, message.lineno = frame.f_code.co_filename, frame.f_lineno
        show(message)

    warnings._showwarnmsg = show_warning  # type: ignore[attr-defined]


def of_lines(lines: Iterable[tuple[str, int]]) -> Site | None:
    """The site of a traceback, outermost line first: the innermost line that is in no library."""
    users = [Line(file, number) for file, number in lines if _owner_of_file(file) is _Owner.USER]
    return Site(users[-1]) if users else None


def is_users(code: CodeType) -> bool:
    """Whether it is the user's code."""
    return (_owners.get(code) or _owner(code)) is _Owner.USER


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno)


def _owner(code: CodeType) -> _Owner:
    owner = _owners[code] = _owner_of_file(code.co_filename, code.co_name)
    return owner


def _owner_of_file(file: str, function: str = "") -> _Owner:
    path = file if file.startswith("<") else os.path.abspath(file)
    if path.startswith(("<frozen", "<eval_with_key", "<manyhands", "<generated", "<__array_function__")):
        return _Owner.LIBRARY
    if path.endswith(PLUMBING):
        return _Owner.AUDITOR
    if path.startswith(PACKAGE):
        return _of_manyhands(path[len(PACKAGE) :].replace(os.sep, "/"), function)
    if _user_roots and path.startswith(_user_roots):
        return _Owner.USER
    in_library = "/site-packages/" in path or "/dist-packages/" in path or "__autograph_generated_file" in path
    return _Owner.LIBRARY if in_library or path.startswith(_libraries) else _Owner.USER


def _of_manyhands(path: str, function: str) -> _Owner:
    """Who is responsible for a wait in manyhands itself.

    >>> _of_manyhands("placement/verbs.py", "to").name, _of_manyhands("training/loop.py", "_train_epoch").name
    ('ASKED_FOR', 'LIBRARY')
    """
    if path.startswith(_PASSED_THROUGH):
        return _Owner.AUDITOR
    if path.startswith(("placement/", "backends/")):
        return _Owner.LIBRARY if function in _VERBS_THAT_WAIT else _Owner.ASKED_FOR
    if path == "training/loop.py" and function in _OUTSIDE_STEPS:
        return _Owner.ASKED_FOR
    if path == "training/checkpoints/saving.py":  # checkpoints within an epoch were asked for
        return _Owner.ASKED_FOR
    return _Owner.LIBRARY
