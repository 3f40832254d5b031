"""``manyhands convert``: a run's weights for another framework: the same model, other names, another memory layout.

The names of the models of ``manyhands train`` are known (``book/models.py``). For a model of the user's own a JSON
table says which weight of the run each weight of the new model is, and what is done to it on the way, step by step::

    {
      "names": {
        "conv.kernel": ["conv.weight", {"permute": [2, 3, 1, 0]}],
        "dense.kernel": ["dense.weight", {"reshape": [3, 2, 16]}, "transpose", {"reshape": [32, 3]}],
        "dense.bias": "dense.bias",
        "norm.count": {"zeros": [], "dtype": "int64"}
      },
      "unused": ["norm.num_batches_tracked"]
    }

``"transpose"`` reverses all axes. Every weight of the run has to be used or listed under ``unused``. The weights are
NumPy's here, so no framework has to be installed: MXNet cannot even be in one environment with the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from manyhands.book.models import WEIGHT_NAMES
from manyhands.book.recipes import MODELS, weights_of
from manyhands.cli.flags import File, Folder, Framework
from manyhands.errors import BadRunFolder, BadSettings, WrongCheckpoint
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder, named_refusals

_POSITION = ("cursor", "last_row", "batches_before", "seconds_of_row", "seconds")
_KEPT = (*_POSITION, "settings", "samples", "shuffle", "totals", "shares")
Tensors = Mapping[str, NDArray[Any]]
_FORM = 'a table is {"names": {"new name": "old name", ...}, "unused": ["old name", ...]}'
_ENTRY = (
    'give the old name, ["old name", "transpose"], ["old name", {"permute": [2, 3, 1, 0]}, {"reshape": [32, 3]}], or '
    '{"zeros": [3], "dtype": "int64"}'
)


def run(run: Folder, *, to: Framework, out: Folder | None = None, names: File | None = None) -> int:
    """Creates a new run with the same weights in the layout of another framework.

    Load it there with mh.load_model(RUN), or continue it with manyhands train --resume RUN. Needs no framework
    installed.

    Args:
        run: The folder of a run.
        to: The framework that the new run is for.
        out: The new run's folder. Default: RUN-FRAMEWORK beside RUN.
        names: A JSON table of weight names, for your own model (docs/training.md). Default: those of manyhands' models.
    """
    source = store.load(RunFolder.open(run).checkpoints).state.get("framework", "torch")
    table = None
    if names is not None:
        try:
            table = json.loads(names.read_text())
        except (OSError, ValueError) as error:
            raise BadSettings(f"--names {names}: {error}: {_FORM}") from error
    new_run = convert(run, to, out, table=table)
    print(f"{new_run}: the weights of {run}, from {source} to {to}")
    return 0


def convert(run: Path, target: str, out: Path | None = None, *, table: Any = None) -> Path:
    """A new run with the weights of a run's last checkpoint, that the other framework can load and go on with.

    The order of samples is the same in every framework, so the new run goes on at the very batch. The optimizer begins
    anew: what it remembers is not the same in all frameworks. ``table``: of names, for a model of the user's own.
    """
    before = RunFolder.open(run)
    config, checkpoint = before.config, store.load(before.checkpoints)
    if table is not None:
        tensors = rename_weights(load(checkpoint.blobs["model"]), table)
    elif (model := config.get("train", {}).get("model")) in MODELS:
        source = checkpoint.state.get("framework", "torch")
        tensors = convert_weights(load(weights_of(run, source)), model, source, target)
    else:
        raise BadRunFolder(
            f"{run} does not say which model it is of: manyhands convert knows the models of manyhands train "
            f"({', '.join(MODELS)}), whose layers have the same names in every framework. For a model of your own give "
            "a table of names, --names table.json"
        )
    new_run = RunFolder.at(out) if out is not None else RunFolder.create(run.parent, f"{run.name}-{target}")
    if store.latest(new_run.checkpoints) is not None:
        raise BadRunFolder(f"{new_run.path} holds checkpoints already: give another folder")
    with named_refusals(new_run.path):
        train = {"train": {**config["train"], "framework": target}} if "train" in config else {}
        new_run.config = {**config, **train, "converted_from": str(run)}
        new_run.write_rows(before.metrics())
    state = {name: checkpoint.state[name] for name in _KEPT} | {"framework": target, "optimizer_type": None}
    store.save(new_run.checkpoints, checkpoint.step, state, {"model": save(dict(tensors))})
    return new_run.path


def convert_weights(tensors: Tensors, model: str, source: str, target: str) -> Tensors:
    """The weights of one of our models, in one framework's names and layouts, in another's."""
    common = WEIGHT_NAMES[source].to_common(tensors, model)
    result = WEIGHT_NAMES[target].from_common(common, model)
    return {name: tensor.copy(order="C") for name, tensor in result.items()}


# A table of names


def rename_weights(tensors: Tensors, table: Any) -> Tensors:
    """The weights of the new model by a table, which has to map or list every weight of the run."""
    try:
        new = {name: _weight(name, entry, tensors) for name, entry in table["names"].items()}
        sources = [entry for entry in table["names"].values() if not isinstance(entry, Mapping)]
        used = {entry if isinstance(entry, str) else entry[0] for entry in sources} | set(table.get("unused", []))
    except (AttributeError, KeyError, TypeError):
        raise BadSettings(f"this is not a table of names: {_FORM}; for an entry {_ENTRY}") from None
    if left := [name for name in tensors if name not in used]:
        raise WrongCheckpoint(
            f'the table does not map {_list(left, tensors)}: give each a place under "names", or list it under "unused"'
        )
    return new


def _weight(name: str, entry: Any, tensors: Tensors) -> NDArray[Any]:
    if isinstance(entry, Mapping):
        return np.zeros(entry["zeros"], entry.get("dtype", "float32"))
    parts: list[Any] = [entry] if isinstance(entry, str) else entry
    old, *steps = parts
    if old not in tensors:
        raise WrongCheckpoint(
            f"the table takes {name!r} from {old!r}, which is not in the run. It holds {_list(tensors, tensors)}"
        )
    tensor = tensors[old]
    for step in steps:
        kind, numbers = ("permute", None) if step == "transpose" else next(iter(step.items()))
        try:
            change: Any = {"permute": tensor.transpose, "reshape": tensor.reshape}[kind]
            tensor = change(numbers)
        except ValueError as error:
            raise WrongCheckpoint(f"{name!r} from {old!r}: {kind} {numbers}: {error}") from error
    return np.ascontiguousarray(tensor)


def _list(names: Iterable[str], tensors: Tensors) -> str:
    return ", ".join(f"{name} {list(tensors[name].shape)}" for name in names)
