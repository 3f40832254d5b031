"""``EMA``: an exponential moving average of the weights."""

from __future__ import annotations

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging, Callback
from manyhands.training.options import is_from_zero


class EMA(Callback):
    """Keep an exponential moving average of the weights, evaluate with it, and leave it in the model.

    ``Trainer(callbacks=[mh.EMA(0.999)])``. After each step every device computes
    ``average = decay * average + (1 - decay) * weights``, beginning with the weights at the start. Evaluations use the
    average, and after ``fit`` the model has it. Checkpoints hold both: training continues from the weights, and
    ``mh.load_weights`` gives the average. Where running statistics of BatchNorm are not averaged, they are the
    training's newest ones, as in PyTorch's ``AveragedModel``. To recompute them for the averaged weights, call
    ``torch.optim.swa_utils.update_bn(loader, model)`` after ``fit``.

    Args:
        decay: How much of the average stays in each step, between 0 and 1. Default: 0.999.
        use_buffers: Average the running statistics of BatchNorm, and what else a model keeps in floating point and
            does not train (PyTorch's buffers, Keras's non-trainable weights), in the same way. Default: False, they
            are the training's newest.
    """

    def __init__(self, decay: float = 0.999, use_buffers: bool = False) -> None:
        if not is_from_zero(decay) or not 0 < decay < 1:
            raise BadSettings(f"EMA(decay={decay!r}): give a number between 0 and 1, as 0.999")
        if not isinstance(use_buffers, bool):
            raise BadSettings(f"EMA(use_buffers={use_buffers!r}): give True or False")
        self.averaging = Averaging(float(decay), use_buffers)
