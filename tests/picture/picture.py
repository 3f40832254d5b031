"""A picture of what the library does: results, errors and command output of a fixed set of jobs.

``python tests/picture/picture.py write before.json`` in one checkout, then ``compare before.json`` in another (set
``PYTHONPATH`` to its ``src``). Weights and losses are compared with a tolerance, texts without their numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from manyhands import torch as mh

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_CLOSE = 1e-5


def vectors(count: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


class OwnStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.count = mlp(), 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return functional.cross_entropy(self.net(batch["x"]), batch["y"]) * (1 + 0.1 * (batch_idx % 2))


def dicts() -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in zip(*vectors(), strict=True)]


def numbers(model: nn.Module, result: Any) -> dict[str, list[float]]:
    """A few numbers of each weight, and the rows."""
    figures = {name: [float(t.double().sum()), float(t.double().norm())] for name, t in model.state_dict().items()}
    for number, row in enumerate(result.rows):
        figures[f"row {number}"] = [
            float(row[key]) for key in ("step", "train_loss", "val_loss") if row.get(key) is not None
        ]
    return figures


def trained(make: Callable[[], nn.Module], data: Any, **options: Any) -> Any:
    model = make()
    given = {"max_epochs": 2, "devices": "cpu", "precision": "fp32", "quiet": True, "lr": 0.1, **options}
    if not isinstance(data, DataLoader) and not (isinstance(data, tuple) and isinstance(data[0], DataLoader)):
        given.setdefault("batch_size", 16)
    return numbers(model, mh.Trainer(**given).fit(model, data))


def resumed(**options: Any) -> Any:
    """A job that is stopped in its second epoch and goes on."""
    with tempfile.TemporaryDirectory() as folder:
        model = mlp(nn.Dropout(0.3))
        given = {"batch_size": 16, "precision": "fp32", "quiet": True, "optimizer": "adamw", "lr": 1e-2, **options}
        given |= {"run": f"{folder}/run", "resume": "auto", "max_epochs": 3}
        mh.Trainer(**given, limits=mh.Limits(max_steps=7)).fit(model, vectors())
        again = mlp(nn.Dropout(0.3))
        return numbers(again, mh.Trainer(**given).fit(again, vectors()))


def evaluated() -> Any:
    model = mlp()
    trainer = mh.Trainer(devices="cpu:2", batch_size=16, quiet=True, precision="fp32")
    return {
        name: [float(value)] for name, value in trainer.evaluate(model, vectors()).items() if isinstance(value, float)
    }


JOBS: dict[str, Callable[[], Any]] = {
    "plain": lambda: trained(mlp, (vectors(), vectors(30))),
    "two devices": lambda: trained(mlp, (vectors(), vectors(30)), devices="cpu:2"),
    "uneven": lambda: trained(mlp, vectors(), devices="cpu:2", step=mh.Step(shares=[0.7, 0.3])),
    "accumulate": lambda: trained(mlp, vectors(), step=mh.Step(accumulate=3)),
    "clipped": lambda: trained(mlp, vectors(), devices="cpu:2", gradient_clip_val=0.1, optimizer="adamw"),
    "norm": lambda: trained(lambda: mlp(nn.BatchNorm1d(8)), vectors()),
    "global norm": lambda: trained(
        lambda: mlp(nn.BatchNorm1d(8)), vectors(), devices="cpu:2", step=mh.Step(batch_stats="global")
    ),
    "loader": lambda: trained(mlp, DataLoader(TensorDataset(*vectors()), 16)),
    "own step": lambda: trained(OwnStep, dicts()),
    "own step, two devices": lambda: trained(OwnStep, dicts(), devices="cpu:2"),
    "average": lambda: trained(mlp, vectors(), callbacks=[mh.EMA(0.9)]),
    "half": lambda: trained(mlp, vectors(), precision="bf16", schedule=mh.one_cycle),
    "resumed": resumed,
    "resumed, two devices": lambda: resumed(devices="cpu:2"),
    "evaluated": evaluated,
}

MISTAKES: dict[str, Callable[[], Any]] = {
    "no target": lambda: trained(mlp, vectors()[0]),
    "label too large": lambda: trained(mlp, (vectors()[0], vectors()[1] + 5)),
    "no parameters": lambda: trained(nn.Flatten, vectors()),
    "misspelt option": lambda: mh.Trainer(max_epoch=3),
    "misspelt optimizer": lambda: trained(mlp, vectors(), optimizer="adamm"),
    "no such device": lambda: trained(mlp, vectors(), devices="cpu:x"),
    "float labels": lambda: trained(mlp, (vectors()[0], vectors()[1].float())),
    "NaN": lambda: trained(mlp, (vectors()[0] * float("nan"), vectors()[1])),
    "lengths": lambda: trained(mlp, (vectors()[0], vectors()[1][:5])),
    "not a model": lambda: trained(lambda: "net", vectors()),  # type: ignore[arg-type,return-value]
    "LBFGS": lambda: trained(mlp, vectors(), optimizer=torch.optim.LBFGS),
    "shapes": lambda: trained(mlp, (torch.randn(40, 5), vectors()[1][:40])),
    "class, not object": lambda: trained(lambda: nn.Linear, vectors()),  # type: ignore[arg-type,return-value]
    "clip": lambda: trained(mlp, vectors(), gradient_clip_val=-1),
    "placement": lambda: mh.check_same_device(a=torch.ones(1), b=torch.ones(1, device="meta")),
}

COMMANDS = {
    "help": ["--help"],
    **{f"{name} --help": [name, "--help"] for name in ("train", "parity", "convert", "audit", "lab", "devices")},
    "parity": ["parity", "lenet", "--devices", "3"],
    "misspelt": ["tran"],
    "devices": ["devices"],
    "lab list": ["lab", "list"],
}


def _told(work: Callable[[], Any]) -> Any:
    """What a job gives, or the error that it raises."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    words = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", f"{done.returncode}\n{done.stdout}\n{done.stderr}")
    return re.sub(r"[#\s]+", " ", words)


def picture() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for kind, works in (("job", JOBS), ("mistake", MISTAKES)):
        for name, work in works.items():
            seen[f"{kind}: {name}"] = _told(work)
    for name, arguments in COMMANDS.items():
        seen[f"command: {name}"] = _output([sys.executable, "-m", "manyhands", *arguments])
    for script in sorted(EXAMPLES.glob("scripts/*.py")):
        seen[f"example: {script.name}"] = _output([sys.executable, str(script)])
    return seen


def differ(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() != second.keys() or any(differ(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        pairs = list(zip(first, second, strict=False))
        return len(first) != len(second) or not all(
            math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE) for a, b in pairs
        )
    return bool(first != second)


def main() -> int:
    what, path = sys.argv[1], Path(sys.argv[2])
    now = picture()
    if what == "write":
        path.write_text(json.dumps(now, indent=1))
        return 0
    before = json.loads(path.read_text())
    changed = [name for name in sorted(before.keys() | now.keys()) if differ(before.get(name), now.get(name))]
    for name in changed:
        print(f"--- {name}\n    before: {str(before.get(name))[:600]}\n    now:    {str(now.get(name))[:600]}")
    print(f"{len(changed)} of {len(before)} differ")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
