"""What an option that does not exist was meant to be: other trainers call the same things by other names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from manyhands.errors import UnknownOption

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# An option of the trainer, and what Keras, Lightning, Hugging Face, fastai and others call it.
_CALLED = {
    "max_epochs": "epochs num_epochs n_epochs nb_epochs epoch num_train_epochs max_epoch",
    "batch_size": "bs batch train_batch_size per_device_train_batch_size mini_batch_size",
    "lr": "learning_rate lr_max base_lr init_lr rate step_size",
    "optimizer": "optim opt optimizers opt_func",
    "loss": "criterion loss_fn loss_func loss_function objective",
    "schedule": "scheduler lr_scheduler lr_schedule schedulers lr_scheduler_type",
    "num_gpus": "gpus n_gpus ngpus gpu num_devices",
    "devices": "device accelerator strategy ctx context device_ids distribute_strategy",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    "gradient_clip_val": "clip clipnorm global_clipnorm grad_clip max_grad_norm clip_grad_norm gradient_clip clip_norm",
    "precision": "amp fp16 bf16 mixed_precision dtype half",
    "batch_stats": "sync_batchnorm sync_bn",
    "seed": "random_state random_seed manual_seed",
    "run": "default_root_dir output_dir save_dir log_dir logdir run_dir checkpoint_dir ckpt_dir dirpath",
    "resume": "ckpt_path resume_from_checkpoint checkpoint resume_from",
    "checkpoint_every": "save_every save_steps save_freq checkpoint_interval every_n_train_steps",
    "keep_checkpoints": "save_total_limit save_top_k max_to_keep",
    "ranks_per_device": "num_processes nproc nprocs num_proc world_size n_procs",
    "quiet": "disable_tqdm silent",
    "compile": "jit jit_compile torch_compile",
    "fast": "run_eagerly eager",
}
_MEANT = {name: option for option, names in _CALLED.items() for name in names.split()}

_OF_OPTIMIZER = "it belongs to the optimizer: give optimizer= a finished one, or a function that makes it"
_OF_FIT = "data are given to fit: trainer.fit(model, (train, test)), each (X, y) arrays, a dataset or a loader"
_NO_STEPS = "a training has a number of epochs: give max_epochs"
_NO_CALLBACKS = "there are none. result.rows and metrics.jsonl of the run have the figures of every epoch"
_EXPLAINED = {
    **dict.fromkeys(("weight_decay", "momentum", "betas", "nesterov", "eps"), _OF_OPTIMIZER),
    **dict.fromkeys(("data", "train_data", "validation_data", "val_data", "train_dataset", "eval_dataset"), _OF_FIT),
    **dict.fromkeys(("dls", "train_dataloaders", "val_dataloaders", "datamodule", "test_data", "x", "y"), _OF_FIT),
    **dict.fromkeys(("max_steps", "num_steps", "steps", "steps_per_epoch", "max_iter", "max_time"), _NO_STEPS),
    **dict.fromkeys(("callbacks", "callback", "cbs", "logger", "loggers", "log_every_n_steps"), _NO_CALLBACKS),
    "model": "the model is given to fit: trainer.fit(model, data)",
    "metrics": "the loss and, for classes, the accuracy are computed by default; there are no others",
    "num_workers": "workers belong to the loader: DataLoader(dataset, num_workers=...)",
    "shuffle": "(X, y) arrays are shuffled; for another order give a loader",
    "num_nodes": "start the script with torchrun, which gives every process its place",
    **dict.fromkeys(("verbose", "progress_bar", "enable_progress_bar"), "progress is shown; quiet=True shows none"),
    "early_stopping": "there is none. Train with run=..., and go on with resume='auto' and more epochs",
}
_EXPLAINED["patience"] = _EXPLAINED["early_stopping"]


def option_called(name: str) -> str | None:
    """The trainer's option that others call so, if there is one."""
    return _MEANT.get(name.lower())


def explained(*, too_many: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a method: a keyword that it does not have is an error that names the one that is meant.

    ``too_many`` is said where there are too many arguments without a name.
    """

    def decorate(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        parameters = inspect.signature(method).parameters
        positional = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())

        @functools.wraps(method)
        def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            unknown = [name for name in kwargs if name not in parameters]
            if unknown:
                raise UnknownOption(_meant(type(args[0]).__name__, method.__name__, unknown[0], parameters))
            if len(args) > positional:
                raise UnknownOption(too_many)
            return method(*args, **kwargs)

        return called

    return decorate


def _meant(owner: str, method: str, name: str, known: Iterable[str]) -> str:
    call = owner if method == "__init__" else f"{owner}.{method}"
    wrong = f"{call} has no option {name}"
    options = [*_CALLED, *known] if method != "__init__" else list(known)
    place = "" if method == "__init__" else f" of {owner}"
    if (option := option_called(name)) is not None:
        return f"{wrong}: it is called {option}{place} here"
    if (reason := _EXPLAINED.get(name.lower())) is not None:
        return f"{wrong}: {reason}"
    close = difflib.get_close_matches(name, options, 1)
    there: Any = f"did you mean {close[0]}?" if close else f"there are {', '.join(n for n in known if n != 'self')}"
    return f"{wrong}: {there}"
