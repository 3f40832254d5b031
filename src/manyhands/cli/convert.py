"""``manyhands convert``: a run's weights for another framework: the same model, other names, another memory layout.

For the models of ``manyhands train`` the names are known; for a model of the user's own a table says them
(:class:`NamesTable`).

Weights go over a common form, PyTorch's names and layouts; each framework's ``layout`` module knows the way there and
back. They are NumPy only, so no framework has to be installed: MXNet cannot even be in one environment with the others.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from manyhands.amounts import counted
from manyhands.book.recipes import MODELS, model_and_weights
from manyhands.cli import flags
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadRunFolder, BadSettings, WrongCheckpoint
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder, named_refusals

_OF_POSITION = ("cursor", "last_row", "batches_before", "seconds_of_row", "seconds", "end")
_KEPT = (*_OF_POSITION, "settings", "samples", "shuffle", "figures", "shares")
Tensors = dict[str, NDArray[Any]]
_FORM = 'a table is {"names": {"new name": "old name", ...}, "unused": ["old name", ...]}'
_ENTRY = (
    'give the old name, ["old name", "transpose"], ["old name", {"permute": [2, 3, 1, 0]}, {"reshape": [32, 3]}], or '
    '{"zeros": [3], "dtype": "int64"}'
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Creates a new run with the same weights in the layout of another framework. Load it there with "
        "mh.load_model(RUN), or continue it with manyhands train --resume RUN. Needs no framework installed."
    )
    option = parser.add_argument
    option("run", type=flags.folder, metavar="RUN", help="the folder of a run")
    option("--to", required=True, choices=FRAMEWORKS, help="the framework that the new run is for")
    option("--out", type=flags.folder, metavar="FOLDER", help="the new run's folder; default: RUN-FRAMEWORK beside RUN")
    option(
        "--names",
        type=Path,
        metavar="TABLE",
        help="a JSON table of weight names, for your own model (docs/training.md); default: those of manyhands' models",
    )
    option(
        "--like",
        type=flags.folder,
        metavar="RUN",
        help="a run of the target model, to check names and shapes against; default: no check",
    )


def run(options: argparse.Namespace) -> int:
    source = framework_of(options.run)
    names = None if options.names is None else NamesTable.read(options.names)
    new_run = convert(options.run, options.to, options.out, names=names, like=options.like)
    print(f"{new_run}: the weights of {options.run}, from {source} to {options.to}")
    return 0


def framework_of(run: Path) -> str:
    """The framework that trained a run."""
    framework: str = store.load(RunFolder.open(run).checkpoints).state.get("framework", "torch")
    return framework


def convert_weights(weights: bytes, model: str, source: str, target: str) -> bytes:
    """Weights in one framework's names and layouts, in another's; safetensors."""
    common = _layout(source).to_common(load(weights), model)
    converted: dict[str, Any] = _layout(target).from_common(common, model)
    return save({name: tensor.copy(order="C") for name, tensor in converted.items()})


def convert(
    run: Path, target: str, out: Path | None = None, *, names: NamesTable | None = None, like: Path | None = None
) -> Path:
    """A new run with the weights of a run's last checkpoint, that the other framework can load and go on with.

    The order of samples is the same in every framework, so the new run goes on at the very batch. The optimizer begins
    anew: what it remembers is not the same in all frameworks. ``names``: the table for a model of the user's own;
    ``like``: a run of the new model, whose names and shapes the result must have.
    """
    if target not in FRAMEWORKS:
        raise BadSettings(f"there is no framework {target!r}: choose one of {', '.join(FRAMEWORKS)}")
    if out is not None and out.resolve() == run.resolve():
        raise BadRunFolder(f"{run} would be overwritten: give another folder")
    blobs = {"model": _converted(run, target, names)}
    if like is not None:
        check_like(load(blobs["model"]), load(store.load(RunFolder.open(like).checkpoints).blobs["model"]))
    before = RunFolder.open(run)
    config, checkpoint = before.config, store.load(before.checkpoints)
    new_run = RunFolder.at(out) if out is not None else RunFolder.create(run.parent, f"{run.name}-{target}")
    if store.latest(new_run.checkpoints) is not None:
        raise BadRunFolder(f"{new_run.path} holds checkpoints already: give another folder")
    with named_refusals(new_run.path):
        train = {"train": {**config["train"], "framework": target}} if "train" in config else {}
        new_run.config = {**config, **train, "converted_from": str(run)}
        for row in before.metrics():
            new_run.append_metrics(row)
    state = {name: checkpoint.state[name] for name in _KEPT} | {"framework": target, "optimizer_type": None}
    store.save(new_run.checkpoints, checkpoint.step, state, blobs)
    return new_run.path


def _converted(run: Path, target: str, names: NamesTable | None) -> bytes:
    if names is not None:
        return save(names.converted(load(store.load(RunFolder.open(run).checkpoints).blobs["model"])))
    source = framework_of(run)
    if RunFolder.open(run).config.get("train", {}).get("model") not in MODELS:
        raise BadRunFolder(
            f"{run} does not say which model it is of: manyhands convert knows the models of manyhands train "
            f"({', '.join(MODELS)}), whose layers have the same names in every framework. For a model of your own give "
            "a table of names, --names table.json"
        )
    model, weights = model_and_weights(run, source)
    return convert_weights(weights, model, source, target)


def _layout(framework: str) -> Any:
    return importlib.import_module("manyhands.book.models").WEIGHT_NAMES[framework]


@dataclass(frozen=True)
class NamesTable:
    """Which weight of the old model each weight of the new one is, and the old ones that have no place there.

    A JSON file. For every weight of the new model it says which weight of the run it is, and what is done to it on
    the way, step by step::

        {
          "names": {
            "conv.kernel": ["conv.weight", {"permute": [2, 3, 1, 0]}],
            "dense.kernel": ["dense.weight", {"reshape": [3, 2, 16]}, "transpose", {"reshape": [32, 3]}],
            "dense.bias": "dense.bias",
            "norm.count": {"zeros": [], "dtype": "int64"}
          },
          "unused": ["norm.num_batches_tracked"]
        }

    ``"transpose"`` turns all axes round. Every weight of the run has to be used or listed under ``unused``: what is
    forgotten is an error that names it.
    """

    names: Mapping[str, Any]
    unused: Sequence[str] = field(default=())

    @classmethod
    def read(cls, path: Path) -> NamesTable:
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise BadSettings(f"--names {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise BadSettings(f"--names {path} is not JSON ({error}): {_FORM}") from error
        return cls.of(content)

    @classmethod
    def of(cls, content: Any) -> NamesTable:
        """A table from parsed JSON."""
        names = content.get("names") if isinstance(content, Mapping) else None
        unused = content.get("unused", []) if isinstance(content, Mapping) else None
        if not isinstance(names, Mapping) or not names or not isinstance(unused, list):
            raise BadSettings(f"this is not a table of names: {_FORM}")
        return cls(names, unused)

    def converted(self, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
        """The weights of the new model; an error names weights that are missing, left over or of another shape."""
        renamed = {name: _weight(name, entry, tensors) for name, entry in self.names.items()}
        used = {_old_name(entry) for entry in self.names.values()} | set(self.unused)
        if left := [name for name in tensors if name not in used]:
            raise WrongCheckpoint(
                f'the table does not map {_listed(left, tensors)}: give each a place under "names", '
                'or list it under "unused"'
            )
        return renamed


def check_like(tensors: Mapping[str, NDArray[Any]], like: Mapping[str, NDArray[Any]]) -> None:
    """Refuse weights that another run's model would not take."""
    if missing := [name for name in like if name not in tensors]:
        raise WrongCheckpoint(f"the table gives nothing for {_listed(missing, like)} of the new model")
    if extra := [name for name in tensors if name not in like]:
        raise WrongCheckpoint(f"the new model has no {_listed(extra, tensors)}{_meant(extra[0], like)}")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            raise WrongCheckpoint(
                f"{name} comes out with shape {list(tensor.shape)}, and the new model has {list(like[name].shape)}: "
                f"add a step, {_ENTRY}"
            )


def _weight(name: str, entry: Any, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    if isinstance(entry, Mapping) and "zeros" in entry:
        return np.zeros(entry["zeros"], entry.get("dtype", "float32"))
    old = _old_name(entry)
    if old is None:
        raise BadSettings(f"the table has {name!r}: {json.dumps(entry)}: {_ENTRY}")
    if old not in tensors:
        raise WrongCheckpoint(
            f"the table takes {name!r} from {old!r}, and the run holds no such weight{_meant(old, tensors)}. It holds "
            f"{_listed(tensors, tensors)}"
        )
    tensor = tensors[old]
    for step in [] if isinstance(entry, str) else entry[1:]:
        tensor = _changed(tensor, step, f"{name!r} from {old!r}")
    return np.ascontiguousarray(tensor)


def _old_name(entry: Any) -> str | None:
    if isinstance(entry, str):
        return entry
    return entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], str) else None


def _changed(tensor: NDArray[Any], step: Any, where: str) -> NDArray[Any]:
    shape = list(tensor.shape)
    if step == "transpose":
        return tensor.T
    kind, numbers = next(iter(step.items())) if isinstance(step, Mapping) and len(step) == 1 else (None, None)
    if kind not in ("permute", "reshape") or not isinstance(numbers, list):
        raise BadSettings(f"{where}: the step {json.dumps(step)} is not known: {_ENTRY}")
    if kind == "permute":
        if sorted(numbers) != list(range(tensor.ndim)):
            raise WrongCheckpoint(
                f"{where}: permute {numbers} does not fit the shape {shape}, which has "
                f"{counted(tensor.ndim, 'axis', 'axes')}"
            )
        return tensor.transpose(numbers)
    if math.prod(numbers) != tensor.size:
        raise WrongCheckpoint(
            f"{where}: reshape {numbers} has {counted(math.prod(numbers), 'number')}, and the shape {shape} has "
            f"{tensor.size:,}"
        )
    return tensor.reshape(numbers)


def _listed(names: Iterable[str], tensors: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name} {list(tensors[name].shape)}" for name in names)


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
