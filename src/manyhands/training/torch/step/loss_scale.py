"""``precision="fp16"``: the loss is scaled, so that small gradients are not lost in float16.

float16 has no numbers below 6e-8. The loss is multiplied by a large scale before the backward pass, and the gradients
are divided by it afterwards. Where one of them is infinite or NaN the scale was too large: the update is taken back and
the scale halved; after 2,000 good steps it is doubled. These are the rules of ``torch.amp.GradScaler``, whose ``step``
makes the host wait to know whether a gradient is infinite. Here the device alone knows it: the update is made in any
case, and taken back as that of a bad batch (:mod:`.update`). For example a scale of 65536 that is too large once::

    step 0   gradients inf   update taken back, scale 32768, skipped 1
    step 1   gradients fine  update stays

On several ranks gradients are checked after they are summed, so all ranks decide alike. A scale that has fallen to
2**-10 falls no further: where 50 steps in a row were skipped and it stands there, nothing is learnt any more, and the
job ends with an error. The device finds that out, too, and the host hears of it with the totals that it reads anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.training.torch.step.part import Part, Turn
from manyhands.training.torch.step.running_sums import RunningSums

_FIRST_SCALE = 65536.0
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
_FLOOR = 2.0**-10
_MOST_SKIPPED = 50  # in a row


class LossScale(Part):
    """The scale, how many steps in a row were good, and how many updates were taken back: numbers on the device."""

    scales_loss = True

    def __init__(self, device: torch.device, metrics: RunningSums) -> None:
        self._metrics = metrics
        self.scale = torch.full((), _FIRST_SCALE, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._infinite = torch.zeros((), dtype=torch.float32, device=device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale.to(loss.dtype)

    @torch.no_grad()
    def after_backward(self, turn: Turn, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradients by the scale, and mark the step if one of them is infinite or NaN."""
        self._infinite.zero_()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        inverse = self.scale.double().reciprocal().float()
        if gradients:
            compat.unscale_(gradients, self._infinite, inverse)
        turn.marks.append(torch.where(self._infinite == 0, 0.0, torch.nan))

    @torch.no_grad()
    def after_update(self, turn: Turn) -> None:
        """The scale of the next step."""
        infinite = self._infinite.long()
        self._skipped += infinite
        self._in_row.add_(1).mul_(infinite)
        compat.update_scale_(self.scale, self._good_steps, self._infinite, _GROWTH, _BACKOFF, _INTERVAL)
        self.scale.clamp_(min=_FLOOR)
        self._metrics.mark(self._collapse_mark(), turn.step)

    def _collapse_mark(self) -> torch.Tensor:
        """NaN where all steps are skipped, however small the scale; else 0. Known on the device."""
        hopeless = (self._in_row >= _MOST_SKIPPED) & (self.scale <= _FLOOR)
        return torch.where(hopeless, torch.nan, 0.0)

    def why_no_numbers(self) -> str | None:
        if bool(self._collapse_mark().isfinite()):
            return None
        return (
            f"precision='fp16': the last {int(self._in_row)} steps were all skipped. Their gradients are too large for "
            f"float16, also with the smallest loss scale ({_FLOOR:g}), so the model learns nothing. Give "
            "precision='bf16' or 'fp32', or a loss that is a mean and not a sum"
        )

    def state_to_save(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        counts = {"good_steps": self._good_steps, "skipped": self._skipped, "in_row": self._in_row}
        numbers = {name: int(count) for name, count in counts.items()}
        return {"loss_scale": {"scale": float(self.scale), **numbers}}, {}

    def restore(self, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        if (saved := state.get("loss_scale")) is not None:
            self.scale.fill_(saved["scale"])
            self._good_steps.fill_(saved["good_steps"])
            self._skipped.fill_(saved["skipped"])
            self._in_row.fill_(saved.get("in_row", 0))

    def close(self) -> str:
        skipped = count_of(int(self._skipped), "step")
        return (
            f"fp16: the loss scale is {float(self.scale):g}; {skipped} skipped because gradients were too large for it"
        )
