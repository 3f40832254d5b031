"""``mh.predict``: time and memory of a step on N devices, before they are bought, rented or waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.errors import BadProfile, BadSettings
from manyhands.predict import prediction
from manyhands.predict.link import Link
from manyhands.predict.link import link as known_link
from manyhands.predict.prediction import Prediction
from manyhands.predict.scaling import DEVICES, Assumptions, check_devices
from manyhands.training.settings import Settings
from manyhands.training.torch import command
from manyhands.training.torch.data.batches import pick, rows
from manyhands.training.torch.predict import measure, real_steps
from manyhands.training.torch.predict.measured_link import measure as measured_link


def predict(
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
) -> Prediction:
    """Predict time and memory of a training step on N devices, from one device's measured step.

    ``print(mh.predict(net, (X, y), devices=[1, 2, 4], link="nvlink"))``. The model is not changed.

    Args:
        model: The model to be trained.
        batch: One batch as the trainer takes it, ``(X, y)``; its size is the batch size.
        devices: The numbers of devices to predict. Default: 1, 2, 4, 8, 16, 64, 1024.
        link: What is between the devices: a name (``"nvlink"``, ``"pcie"``, ``"ethernet-100g"``,
            ``"nvlink+ethernet-100g"``), ``"measured"`` (between this machine's devices), or a JSON file.
            Default: ``"pcie"``.
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
    between = None if link == "measured" else known_link(link, per_node)
    settings = Settings(batch_size=rows(batch), lr=lr, precision=precision)
    place = _device(device)
    together = max(devices) if between is None else min(max(devices), between.per_node)
    contentions = sorted({min(count, together, real_steps.MOST) for count in devices} - {1})

    def measured() -> Prediction:
        profile = measure.profile(
            model, batch, loss=loss, optimizer=optimizer, settings=settings, device=place, contentions=contentions
        )
        chosen = between or measured_link(profile.kind, max(devices))
        return prediction.predict(profile, chosen, devices, per_device=per_device, assumptions=assumptions)

    try:
        return measured()
    except BadProfile:  # disturbed, so that it cannot be right
        return measured()


def has_gpu() -> bool:
    return torch.cuda.is_available()


def example(name: str, batch_size: int) -> tuple[torch.nn.Module, Any]:
    """One of the models of ``manyhands train`` and a batch of noise: only shapes count here."""
    model = command.model(name, 0)
    return model, (torch.rand(batch_size, 1, 28, 28), torch.randint(10, (batch_size,)))


def resized(batch: Any, batch_size: int) -> Any:
    """A batch of ``batch_size`` samples, taken from another batch; they repeat if there are too few."""
    count = rows(batch)
    return pick(batch, [number % count for number in range(batch_size)])


def _device(device: Any) -> torch.device | None:
    if device is None:
        return None
    from manyhands.backends.torch import devices as backend
    from manyhands.placement.moves import Placement

    (native,) = Placement(backend).distinct([device])
    if native.type == "cpu" and native.index:
        raise BadSettings(f"device={device!r} is a virtual device. Measure the CPU itself: device='cpu'")
    return native
