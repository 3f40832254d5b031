"""Run a page's blocks of one framework, one after the other, as one program: ``python run_page.py torch PAGE``.

Tracebacks show the line of the page. Without a page, pages are read from stdin, each with its folder and the file for
its output (tab-separated), and each runs in a fork of this process, which imported PyTorch once for all. The
exit code is printed.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
from pathlib import Path

from page_blocks import by_framework


def run(page: Path, framework: str) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = str(page)
    sys.modules["__main__"] = program
    for block in by_framework(page)[framework]:
        print(f"--- {block.place}", flush=True)
        code = "\n" * (block.line - 1) + block.code
        name = f"<{page.name}, line {block.line}>"  # Dynamo reads the source of what it captures: not of the page
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), program.__dict__)


def serve() -> None:
    from manyhands import torch as mh

    assert mh.Trainer  # its modules are loaded before the first fork
    for request in sys.stdin:
        page, folder, output = map(Path, request.rstrip("\n").split("\t"))
        child = os.fork()
        if child == 0:
            run_and_leave(page, folder, output)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run_and_leave(page: Path, folder: Path, output: Path) -> None:
    """In the forked process, which must not go on with its parent's requests."""
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        run(page, "torch")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(Path(sys.argv[2]), sys.argv[1])
    else:
        serve()
