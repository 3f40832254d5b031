"""A job: what to train, how, and in which format its numbers are held. It is sent to its workers as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from manyhands import tree
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import NO_CALLBACKS, CallbackPlan
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.data.roles import ModelInputs
from manyhands.training.evaluation.metrics import Metrics
from manyhands.training.options import Settings
from manyhands.training.schedules import Schedule
from manyhands.training.torch.data.batches import Batch
from manyhands.training.torch.data.sources import Source
from manyhands.training.torch.objective import SEVERAL, Objective, OwnStep, makes_updates
from manyhands.training.torch.optimizers import Configured, MakeOptimizer, Several, configuration_of

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Job:
    model: torch.nn.Module
    objective: Objective
    train: Source
    test: Source | None
    settings: Settings
    # An optimizer that holds the model's parameters, or what makes one.
    optimizer: torch.optim.Optimizer | MakeOptimizer
    # The learning rate's factor, given how much of the training is done (0 to 1).
    schedule: Schedule | None = None
    run: RunPlan | None = None
    resume: Path | None = None
    callbacks: CallbackPlan = NO_CALLBACKS
    metrics: Metrics = field(default_factory=Metrics)
    # To evaluate and to predict a job computes with ``train`` and trains nothing.
    purpose: Literal["fit", "evaluate", "predict"] = "fit"
    inputs: ModelInputs | None = None  # of a prediction: which parts of a batch are the model's
    # Notes from before the job began, for its result.
    notes: list[str] = field(default_factory=list)

    def make_optimizer(self, model: torch.nn.Module) -> Configured:
        """The optimizer of this model, the user's or a new one, and the schedulers that come with it."""
        result = configuration_of(
            self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else self.optimizer(model)
        )
        if not isinstance(result.optimizer, Several) and makes_updates(model) and isinstance(self.objective, OwnStep):
            result.optimizer = Several({0: result.optimizer})
        if isinstance(result.optimizer, Several):
            self._check_several(result.optimizer)
        if result.schedules and self.schedule is not None:
            raise BadSettings("configure_optimizers gave a scheduler, and the trainer has schedule=: leave out one")
        return result

    def _check_several(self, several: Several) -> None:
        model = self.model
        if not isinstance(self.objective, OwnStep) or not makes_updates(model):
            given = f"configure_optimizers of {type(model).__name__} gave {len(several.optimizers)} optimizers"
            raise BadSettings(f"{given}: then the model makes the updates itself: {SEVERAL}")
        step = self.settings.step
        refused = {
            "Step(accumulate=...)": step.accumulate > 1,
            "Step(on_nan='continue')": step.on_nan == "continue",
            "precision='fp16'": self.settings.precision == "fp16",
        }
        for option in [option for option, is_given in refused.items() if is_given]:
            raise BadSettings(f"{option} with several optimizers, each of which makes updates of its own: leave it out")
        if self.test is not None and not hasattr(model, "validation_step"):
            raise BadSettings(
                f"{type(model).__name__} has several optimizers, each with a loss, and there are data to test with: "
                "give it a validation_step(self, batch) that returns the loss to show"
            )


@contextlib.contextmanager
def placement_preserved(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards the model is on its device, and in its precision and memory format, again."""

    def tensors() -> list[tuple[str, torch.Tensor]]:
        return [*model.named_parameters(), *model.named_buffers()]  # others are not saved, but they move

    device = next((tensor.device for _, tensor in tensors()), torch.device("cpu"))
    dtypes = {name: tensor.dtype for name, tensor in tensors()}
    was_contiguous = all(tensor.is_contiguous() for _, tensor in tensors() if tensor.dim() == 4)
    try:
        yield
    finally:
        model.to(device)
        if was_contiguous:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for name, tensor in tensors():  # buffers are other objects after a move
            tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
            if tensor.grad is not None and tensor.grad.dtype != tensor.dtype:
                tensor.grad = tensor.grad.to(tensor.dtype)


def number_format_for(job: Job, device: torch.device, precision: str | None = None) -> NumberFormat:
    """The format for a precision; None: the user's, where :mod:`.preflight.precision` has not chosen one yet."""
    on_gpu, precision = device.type == "cuda", precision or job.settings.precision
    images = any(isinstance(layer, torch.nn.Conv2d) for layer in job.model.modules())
    autocast = HALVES.get(precision)
    channels_last = images and job.settings.step.optimize != "off" and (on_gpu or autocast is not None)
    return NumberFormat(autocast, channels_last=channels_last, dtype=torch.float64 if precision == "fp64" else None)


def torch_settings() -> dict[str, Any]:
    """How PyTorch computes in this process, for workers to do the same."""
    products = torch.backends
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": products.cudnn.deterministic,
        "cudnn_benchmark": products.cudnn.benchmark,
        # One by one: PyTorch refuses to read its older summary of them once a caller has set one.
        "products": [where.fp32_precision for where in _products()],
    }


def set_torch_settings(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    for where, precision in zip(_products(), settings["products"], strict=True):
        if where.fp32_precision != precision:
            where.fp32_precision = precision


def _products() -> list[Any]:
    """Where PyTorch keeps how exact products of float32 are."""
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul, backends.mkldnn.conv]


@dataclass
class NumberFormat:
    """How numbers are held: the precision of products, and the memory format of images."""

    autocast: torch.dtype | None = None
    channels_last: bool = False
    dtype: torch.dtype | None = None

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        if self.autocast is None:
            yield
        else:
            with torch.autocast(device.type, dtype=self.autocast):
                yield

    def cast(self, batch: Batch) -> Batch:
        """The batch in the model's dtype and memory format; tensors that fit already are not copied."""
        if not self.channels_last and self.dtype is None:
            return batch
        if type(batch) is tuple:  # the usual one, without a tree: the compiler cannot look into those
            return tuple(
                self._cast_part(part) if isinstance(part, torch.Tensor) else self._cast_tree(part) for part in batch
            )
        return self._cast_tree(batch)

    def _cast_tree(self, part: Any) -> Any:
        return tree.map_leaves(self._cast_part, part)

    def _cast_part(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        if self.dtype is not None and part.is_floating_point():
            part = part.to(self.dtype)
        if not self.channels_last or part.dim() != 4:
            return part
        part = part.contiguous(memory_format=torch.channels_last)
        _, channels, height, width = part.shape
        # With one channel both formats are the same memory: only the strides tell a convolution which one to choose.
        return part.as_strided(part.shape, (height * width, 1, width, 1)) if channels == 1 else part
