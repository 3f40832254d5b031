"""Settings of libraries that end a wait in their code: the user's own line has nothing to change there."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.audit.kinds import Kind


class _Setting(NamedTuple):
    path: str  # part of the library's file
    kinds: tuple[Kind, ...]
    cure: str


_SETTINGS = (
    _Setting(
        "grad_scaler.py",
        tuple(Kind),
        "make the optimizer with fused=True: the scaler then looks for infinities on the device; or compute in "
        "bfloat16, which needs no scaler",
    ),
    _Setting(
        "torch/distributions/",
        tuple(Kind),
        "make the distribution with validate_args=False, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    _Setting(
        "accelerate/utils/operations.py",
        (Kind.TO_DEVICE, Kind.BLOCKING),
        "Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True)), or in transformers "
        'TrainingArguments(accelerator_config={"non_blocking": True}); and DataLoader(pin_memory=True)',
    ),
    _Setting(
        "transformers/trainer.py",
        (Kind.CONTROL_FLOW,),
        "TrainingArguments(logging_nan_inf_filter=False): the Trainer then does not look for NaN in each step",
    ),
    _Setting(
        "transformers/trainer.py",
        (Kind.READ,),
        "TrainingArguments(logging_steps=...): a larger number reads less often",
    ),
    _Setting(
        "transformers/cache_utils.py",
        (Kind.DATA,),
        "model.config.use_cache = False: training needs no cache of keys and values",
    ),
    _Setting(
        "safetensors/",
        (Kind.TO_HOST,),
        "weights are saved here: save less often (in transformers: TrainingArguments(save_steps=...))",
    ),
)


def setting_for(kind: Kind, library: str) -> str | None:
    """What to set so that a file of a library does not wait, where that is known.

    >>> setting_for(Kind.DATA, "/site-packages/transformers/cache_utils.py")
    'model.config.use_cache = False: training needs no cache of keys and values'
    """
    path = library.replace("\\", "/")
    return next((setting.cure for setting in _SETTINGS if setting.path in path and kind in setting.kinds), None)
