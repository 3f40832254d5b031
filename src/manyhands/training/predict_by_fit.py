"""``mh.predict`` in JAX, TensorFlow and MXNet: a step cannot be taken apart, so it is timed as a whole, by short fits.

JAX, TensorFlow and MXNet run a step as one program. So the seconds of its parts are not known (a backward pass counts
as two forward passes), gradients are taken to come evenly, and memory is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from manyhands import machine
from manyhands.errors import BadSettings, ManyhandsError, first_line
from manyhands.predict import prediction
from manyhands.predict.link import Link
from manyhands.predict.link import link as known_link
from manyhands.predict.prediction import Prediction
from manyhands.predict.profile import Profile, StepTime, spread_buckets
from manyhands.predict.scaling import DEVICES, Assumptions, check_devices

_STEPS, _EPOCHS = 8, 3  # of each fit; the first epoch compiles, and does not count
_FORWARD = 1 / 3

Trial = Callable[[Any, Any], AbstractContextManager[Any]]


class PredictByFit:
    """``mh.predict`` of a framework, given its trainer.

    ``trial(model, inputs)`` gives a model to train that may be spoiled; ``gradient_bytes`` the size of its gradients;
    ``built_in(name, seed)`` makes a model of ``manyhands train``, which takes images of ``image_shape``.
    """

    def __init__(
        self,
        framework: str,
        trainer: type[Any],
        trial: Trial,
        gradient_bytes: Callable[[Any], int],
        built_in: Callable[[str, int], Any],
        image_shape: tuple[int, ...],
    ) -> None:
        self._framework, self._trainer, self._trial = framework, trainer, trial
        self._gradient_bytes, self._built_in, self._image_shape = gradient_bytes, built_in, image_shape

    def example(self, name: str, batch_size: int) -> tuple[Any, tuple[Any, Any]]:
        """One of the models of ``manyhands train``, and a batch of noise for it: only shapes count."""
        random = np.random.default_rng(0)
        images = random.random((batch_size, *self._image_shape), np.float32)
        return self._built_in(name, 0), (images, random.integers(0, 10, batch_size, dtype=np.int32))

    def has_gpu(self) -> bool:
        """Whether there is a real GPU; virtual devices stand in for GPUs, and are as fast as the CPU."""
        backend = self._trainer.backend
        return bool(backend.num_gpus() > 0 and backend.neutral(backend.gpu(0)).kind == "gpu")

    def __call__(
        self,
        model: Any,
        batch: Any,
        *,
        devices: Sequence[int] = DEVICES,
        link: str | Link | Path = "pcie",
        loss: Any = None,
        optimizer: Any = None,
        lr: float | None = None,
        precision: Any = "auto",
        per_device: bool = False,
        per_node: int | None = None,
        assumptions: Assumptions = Assumptions(),  # noqa: B008 - frozen
    ) -> Prediction:
        """Predict the time of a training step on N devices, from one device's measured step.

        ``print(mh.predict(net, (X, y), devices=[1, 2, 4], link="nvlink"))``. The model is not changed. The arguments
        are those of PyTorch's ``mh.predict``; memory, and a measured link, are known there only.
        """
        check_devices(devices)
        if link == "measured":
            raise BadSettings(f"link='measured' is measured with PyTorch only: name a link for {self._framework}")
        between = known_link(link, per_node)
        options = {"loss": loss, "optimizer": optimizer, "lr": lr, "precision": precision}
        profile = self._profile(model, _arrays(batch), {k: v for k, v in options.items() if v is not None})
        return prediction.predict(profile, between, devices, per_device=per_device, assumptions=assumptions)

    def _profile(self, model: Any, batch: tuple[Any, Any], options: dict[str, Any]) -> Profile:
        size, on_gpu = len(batch[0]), self.has_gpu()
        options |= {"devices": ["gpu:0" if on_gpu else "cpu"], "quiet": True}
        times = []
        try:
            for shard in sorted({size, -(-size // 2), -(-size // 4)}, reverse=True):
                data = tuple(np.resize(part[:shard], (_STEPS * shard, *part.shape[1:])) for part in batch)
                with self._trial(model, batch[0][:2]) as net:
                    result = self._trainer(_EPOCHS, batch_size=shard, **options).fit(net, data)
                    gradient_bytes = self._gradient_bytes(net)
                seconds = median(row["seconds"] for row in result.rows[1:]) / _STEPS
                times.append(StepTime(shard, seconds * _FORWARD, seconds * (1 - _FORWARD), 0.0, 0 if on_gpu else 1))
        except ManyhandsError:
            raise
        except Exception as error:
            raise BadSettings(f"the model cannot be trained on this batch: {first_line(error)}") from error
        note = f"Memory is not predicted for {self._framework}; a step is timed as a whole."
        return Profile(
            type(model).__name__,
            "GPU" if on_gpu else machine.host_name(),
            size,
            tuple(times),
            spread_buckets(gradient_bytes),
            kind="gpu" if on_gpu else "cpu",
            cores=0 if on_gpu else 1,  # one device has the whole CPU: several take turns
            input_bytes=sum(part.nbytes for part in batch) / size,
            notes=(note,),
        )


def _arrays(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BadSettings(f"a batch of type {type(batch).__name__} cannot be timed here: give arrays (X, y)")
    inputs, target = (np.asarray(part.asnumpy() if hasattr(part, "asnumpy") else part) for part in batch)
    if not inputs.ndim or not len(inputs) or len(inputs) != len(target.reshape(-1, 1) if not target.ndim else target):
        raise BadSettings(f"a batch of shapes {inputs.shape} and {target.shape}: give as many labels as samples")
    return inputs, target


def resized(batch: Any, batch_size: int) -> Any:
    """A batch of ``batch_size`` samples, taken from another batch; they repeat if there are too few."""
    return tuple(part[np.arange(batch_size) % len(part)] for part in _arrays(batch))
