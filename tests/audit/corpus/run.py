"""Audit every program of a folder in this one process, and print the findings as JSON: ``run.py FOLDER``.

With ``MANYHANDS_AUDIT_REAL`` set, on the GPU that is there; else a virtual device stands in for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from manyhands.audit import program, speeds


def main(folder: Path) -> None:
    found = {}
    target = None if os.environ.get("MANYHANDS_AUDIT_REAL") else dataclasses.asdict(speeds.h200())
    with tempfile.TemporaryDirectory() as results:
        for path in sorted(folder.glob("*/*.py")):
            name = f"{path.parent.name}/{path.stem}"
            result = Path(results) / f"{path.parent.name}-{path.stem}.json"
            settings = {"program": name, "module": False, "warmup": 2, "steps": None, "speeds": target}
            kept = sys.modules["__main__"], sys.argv, sys.path[0]
            with contextlib.redirect_stdout(io.StringIO()):
                code = program.run({**settings, "result": str(result)}, [str(path)])
            sys.modules["__main__"], sys.argv, sys.path[0] = kept
            found[name] = {"code": code, **json.loads(result.read_text())}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
