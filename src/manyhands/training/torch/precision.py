"""Whether bfloat16 pays on a CPU, and whether a model bears it at all: it is tried before it is taken.

A CPU with AMX multiplies bfloat16 fast, but a model of small layers may lose more by casting than it wins. So a copy of
the model makes a few forward and backward passes in each precision, in turns; the shortest time of each counts. That
takes about a second, once per job. A job that is resumed goes on in the precision that it had: bits depend on it.

On a GPU it is taken where the user leaves it to us. But some operations refuse it: ``out[rows] = layer(x)`` with an out
of float32, Fourier transforms, binary cross-entropy in a model's own step. What would do in float32 shall not fail by
our choice, so a copy makes one pass with two samples first.
"""

from __future__ import annotations

import copy
import time

import torch

from manyhands import machine
from manyhands.training.torch import batch_norm, randomness, samples
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective
from manyhands.training.torch.sources import Arrays, Batch
from manyhands.training.torch.step import Numbers
from manyhands.training.torch.world import World

_FEW = 32  # samples, where reading them costs something
_TWO = 2
_ROUNDS = 3
_SECONDS = 1.0


def chosen(
    job: Job, model: torch.nn.Module, objective: Objective, world: World, before: bool | None
) -> tuple[bool, str | None]:
    """Whether this rank computes in bfloat16, and a note that says why; all ranks take part and choose alike.

    ``before``: what a resumed job had chosen (None: it is not resumed).
    """
    may = may_pay(job, world.device)
    if before is not None:
        return may and before, None
    size = max(1, job.settings.batch_size // world.size)
    own = tried(job, model, objective, size) if may else (0.0, 0.0)
    single, half = torch.stack(world.gather(torch.tensor(own, dtype=torch.float64))).sum(0).tolist()
    return may and 0 < half < single, in_words(single, half) if may else None


def may_pay(job: Job, device: torch.device) -> bool:
    """Whether bfloat16 is to be tried here: left to us, on a CPU that is made for it, with a model of float32."""
    asked = job.settings.precision == "auto" and job.settings.fast and device.type == "cpu"
    return asked and "amx_bf16" in machine.host_features() and _is_single(job.model)


def _is_single(model: torch.nn.Module) -> bool:
    return all(one.dtype == torch.float32 for one in model.parameters() if one.is_floating_point())


def bf16_numbers(model: torch.nn.Module) -> Numbers:
    images = any(isinstance(layer, torch.nn.Conv2d) for layer in model.modules())
    return Numbers(torch.bfloat16, channels_last=images)


def tried(job: Job, model: torch.nn.Module, objective: Objective, size: int) -> tuple[float, float]:
    """Seconds of a pass in float32 and in bfloat16; zeros where that could not be tried."""
    if not samples.can_be_read(job.train):
        return 0.0, 0.0
    count = size if isinstance(job.train, Arrays) else min(size, _FEW)
    try:
        batch = samples.few_samples(job.train, count)
        ways = [_Way(model, objective, batch, numbers) for numbers in (Numbers(), bf16_numbers(model))]
        with randomness.Own(0):
            shortest = [way.seconds() for way in ways]  # kernels and caches are cold
            begun = time.perf_counter()
            for number in range(_ROUNDS):
                seconds = [way.seconds() for way in ways]
                shortest = [min(pair) for pair in zip(shortest, seconds, strict=True)] if number else seconds
                if time.perf_counter() - begun > _SECONDS:
                    break
    except Exception:  # the first step will say it, with all that belongs to it
        return 0.0, 0.0
    return shortest[0], shortest[1]


def refused(job: Job, model: torch.nn.Module, objective: Objective, world: World, numbers: Numbers) -> str | None:
    """Why bfloat16, which nobody asked for, is not to be taken: a pass fails in it on some rank, and not in float32."""
    own = _refusal(job, model, objective, world.device, numbers) or ""
    told = [one.decode().strip() for one in world.gather_bytes(f"{own}\n".encode())]
    return next((one for one in told if one), None)


def _refusal(
    job: Job, model: torch.nn.Module, objective: Objective, device: torch.device, numbers: Numbers
) -> str | None:
    if numbers.autocast is None or job.settings.precision != "auto" or not samples.can_be_read(job.train):
        return None
    with randomness.kept(device):
        try:
            batch = samples.few_samples(job.train, _TWO)
            _Way(model, objective, batch, numbers).seconds()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            return None
        try:
            _Way(model, objective, batch, Numbers(channels_last=numbers.channels_last)).seconds()
        except Exception:  # not bfloat16 is to blame: the first step will say it, with all that belongs to it
            return None
    return f"fp32: the model cannot compute in bf16 ({why})"


class _Way:
    """A copy of the model that computes in one precision."""

    def __init__(self, model: torch.nn.Module, objective: Objective, batch: Batch, numbers: Numbers) -> None:
        self.model, self.objective, self.numbers = copy.deepcopy(model), objective, numbers
        batch_norm.localise(self.model)  # the other ranks are not asked
        if numbers.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batch = numbers.lay(samples.as_the_model(self.model, batch))

    def seconds(self) -> float:
        start = time.perf_counter()
        with self.numbers.scope(next(self.model.parameters()).device):
            loss, _ = self.objective(self.model, self.batch)
        loss.backward()
        return time.perf_counter() - start


def in_words(single: float, half: float) -> str:
    if not single or not half:
        return "fp32: it could not be tried whether bf16 is faster"
    faster, slower = (("bf16", half), ("fp32", single))[:: 1 if half < single else -1]
    return (
        f"{faster[0]}: a pass takes {faster[1] * 1000:.3g} ms, in {slower[0]} {slower[1] * 1000:.3g} ms; tried because "
        "the CPU has AMX"
    )
