"""``mh.forecast``: time and memory of a step on N devices, before they are bought, rented or waited for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings, ManyhandsError, first_line
from manyhands.forecast.forecast import Forecast
from manyhands.forecast.links import Link
from manyhands.forecast.links import link as known_link
from manyhands.forecast.scaling import DEVICES, Assumptions, check_devices
from manyhands.placement.moves import require
from manyhands.training.options import Settings

_FRAMEWORKS = {"torch": "torch", "flax": "jax"}  # by the package that a model's class comes from
_OTHERS = (
    "forecast measures models of PyTorch and JAX. For others time a step, and give Profile.of(seconds, gradient_bytes, "
    "batch_size=...) to Forecast.of"
)


def forecast(
    model: Any,
    batch: Any,
    *,
    devices: Sequence[int] = DEVICES,
    link: str | Link | Path = "pcie",
    loss: Any = None,
    optimizer: Any = None,
    lr: float | None = None,
    precision: Any = "auto",
    device: Any = None,
    per_device: bool = False,
    per_node: int | None = None,
    assumptions: Assumptions = Assumptions(),  # noqa: B008 - frozen
) -> Forecast:
    """Forecast time and memory of a training step on N devices, from one device's measured step.

    ``print(mh.forecast(net, (X, y), devices=[1, 2, 4], link="nvlink"))``. The model, of PyTorch or of JAX, is not
    changed. Memory is forecast in PyTorch.

    Args:
        model: The model to be trained.
        batch: One batch as the trainer takes it, ``(X, y)``; its size is the batch size.
        devices: The numbers of devices to forecast. Default: 1, 2, 4, 8, 16, 64, 1024.
        link: What is between the devices: a name (``"nvlink"``, ``"pcie"``, ``"ethernet-100g"``,
            ``"nvlink+ethernet-100g"``) or a JSON file. Default: ``"pcie"``.
        loss: As for the ``Trainer``. Default: None, cross-entropy, or the model's own step.
        optimizer: As for the ``Trainer``. Default: None, plain SGD, or the model's own.
        lr: The learning rate. Default: None, the optimizer's own.
        precision: As for the ``Trainer``. Default: ``"auto"``.
        device: Where the step is measured. Default: None, the first GPU, else the CPU.
        per_device: The batch is each device's (weak scaling). Default: False, it is divided over them, as the trainer
            does.
        per_node: Devices in one machine. Default: None, what is usual for the link.
        assumptions: What is taken for granted where nothing was measured.
    """
    check_devices(devices)
    between, settings = known_link(link, per_node), Settings(lr=lr, precision=precision)
    method = of(framework_of(model))
    try:
        profile = method.profile(model, batch, loss=loss, optimizer=optimizer, settings=settings, device=device)
    except ManyhandsError:
        raise
    except Exception as error:
        raise BadSettings(
            f"the model cannot be run on this batch: {first_line(error)}. A step is loss(model(*inputs), target) "
            "of a batch (inputs, target), or the model's own training_step(batch)"
        ) from error
    return Forecast.of(profile, between, devices, per_device=per_device, assumptions=assumptions)


def of(framework: str) -> Any:
    """The module that measures in a framework: ``profile``, ``resize``, ``noise`` and ``has_gpu``."""
    require(framework)
    if framework not in _FRAMEWORKS.values():
        raise BadSettings(f"{framework}: {_OTHERS}")
    return importlib.import_module(f"manyhands.forecast.{framework}")


def framework_of(model: Any) -> str:
    kind = model if isinstance(model, type) else type(model)
    packages = [cls.__module__.partition(".")[0] for cls in kind.__mro__]
    framework = next((_FRAMEWORKS[name] for name in packages if name in _FRAMEWORKS), None)
    if framework is None:
        raise BadSettings(f"a model of type {kind.__name__}: {_OTHERS}")
    return framework
