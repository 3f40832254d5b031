"""A run's weights for another framework: the same model, under other names and in another memory layout.

For the models of ``manyhands train`` the names are known; for a model of the user's own a table says them
(:mod:`.names_table`).

Weights go over a common form, PyTorch's names and layouts; each framework's ``layout`` module knows the way there and
back. They are NumPy only, so no framework has to be installed: MXNet cannot even be in one environment with the others.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from manyhands.device import FRAMEWORKS
from manyhands.errors import BadRunFolder, BadSettings
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder, named_refusals
from manyhands.training.commands.names_table import NamesTable, check_like
from manyhands.training.commands.recipes import MODELS, model_and_weights

_OF_POSITION = ("cursor", "last_row", "batches_before", "seconds_of_row", "seconds", "end")
_KEPT = (*_OF_POSITION, "settings", "samples", "shuffle", "figures", "shares")


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
