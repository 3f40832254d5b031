"""Suggests the option that a misspelt or misplaced one was meant to be.

Other trainers call the same things by other names, and some options belong to a topic: ``Trainer(accumulate=4)`` is an
error that says ``Trainer(step=mh.Step(accumulate=4))``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from numbers import Real
from typing import ParamSpec, TypeVar

from manyhands.errors import UnknownOption

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")

# An option of the trainer, and what Keras, Lightning, Hugging Face, fastai and others call it.
_CALLED = {
    "max_epochs": "epochs num_epochs n_epochs nb_epochs epoch num_train_epochs max_epoch",
    "batch_size": "bs batch train_batch_size per_device_train_batch_size mini_batch_size",
    "lr": "learning_rate lr_max base_lr init_lr rate step_size",
    "metrics": "metric compute_metrics eval_metrics eval_metric val_metrics",
    "optimizer": "optim opt optimizers opt_func",
    "loss": "criterion loss_fn loss_func loss_function objective",
    "schedule": "scheduler lr_scheduler lr_schedule schedulers lr_scheduler_type",
    "num_gpus": "gpus n_gpus ngpus gpu num_devices",
    "devices": "device accelerator strategy ctx context device_ids distribute_strategy",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    "micro_batch_size": "microbatch_size micro_batch microbatch device_microbatch_size",
    "gradient_clip_val": "clip clipnorm global_clipnorm grad_clip max_grad_norm clip_grad_norm gradient_clip clip_norm",
    "precision": "amp fp16 bf16 mixed_precision dtype half",
    "batch_stats": "sync_batchnorm sync_bn",
    "seed": "random_state random_seed manual_seed",
    "run": "default_root_dir output_dir save_dir log_dir logdir run_dir checkpoint_dir ckpt_dir dirpath",
    "resume": "ckpt_path resume_from_checkpoint checkpoint resume_from",
    "every": "checkpoint_every save_every save_steps save_freq checkpoint_interval every_n_train_steps",
    "keep": "keep_checkpoints save_total_limit save_top_k max_to_keep",
    "max_steps": "num_steps steps max_iter max_iters total_steps num_training_steps",
    "max_time": "time_limit max_duration",
    "limit_batches": "steps_per_epoch limit_train_batches max_batches",
    "limit_val_batches": "validation_steps limit_eval_batches val_steps",
    "evaluate_every": "val_check_interval eval_steps validation_freq check_val_every_n_epoch eval_every",
    "per_device": "ranks_per_device num_processes nproc nprocs num_proc world_size n_procs",
    "quiet": "disable_tqdm silent",
    "callbacks": "callback cbs",
    "loggers": "logger report_to",
    "optimize": "run_eagerly eager jit jit_compile torch_compile compile fast",
}
_MEANT = {name: option for option, names in _CALLED.items() for name in names.split()}

_OF_OPTIMIZER = "it belongs to the optimizer: give optimizer= a finished one, or a function that makes it"
_OF_FIT = "data are given to fit: trainer.fit(model, train, validation), each (X, y) arrays, a dataset or a loader"
_EXPLAINED = {
    **dict.fromkeys(("weight_decay", "momentum", "betas", "nesterov", "eps"), _OF_OPTIMIZER),
    **dict.fromkeys(("data", "train_data", "validation_data", "val_data", "train_dataset", "eval_dataset"), _OF_FIT),
    **dict.fromkeys(("dls", "train_dataloaders", "val_dataloaders", "datamodule", "test_data", "x", "y"), _OF_FIT),
    "log_every_n_steps": "loggers have it: Trainer(loggers=[mh.CSVLogger(every=50)])",
    "model": "the model is given to fit: trainer.fit(model, data)",
    "num_workers": "workers belong to the loader: DataLoader(dataset, num_workers=...)",
    "shuffle": "(X, y) arrays are shuffled; for another order give a loader",
    "num_nodes": "start the script with torchrun, which gives every process its place",
    **dict.fromkeys(("verbose", "progress_bar", "enable_progress_bar"), "progress is shown; quiet=True shows none"),
    "class_weight": "give weights of classes to the loss (torch.nn.CrossEntropyLoss(weight=...)), or weights of "
    "samples, in Keras and Gluon fit(model, (X, y, weights[y]))",
    "sample_weight": "weights of samples are a part of the data, in Keras and Gluon fit(model, (X, y, sample_weight))",
    "early_stopping": "it is a callback: Trainer(callbacks=[mh.EarlyStopping('val_loss', patience=3)])",
}
_EXPLAINED["patience"] = _EXPLAINED["early_stopping"]
# The arguments of fit, and what others call them.
_OF_METHOD = {
    "validation": "validation_data val_data valid_data eval_data val val_dataloaders val_dataloader eval_dataset "
    "val_dataset validation_dataset test_data",
    "data": "train_data train train_dataloaders train_dataloader train_dataset dataloaders datamodule dls x X",
}
_ARGUMENTS = {name: argument for argument, names in _OF_METHOD.items() for name in names.split()}
# An option that belongs to a topic: the trainer's argument, and the class of its value.
_PLACES: dict[str, tuple[str, str]] = {}


def option_called(name: str) -> str | None:
    """The option that others call so, if there is one."""
    return _MEANT.get(name.lower())


def topic(argument: str) -> Callable[[type[_Class]], type[_Class]]:
    """Decorates a dataclass of options that is given to the trainer as this argument."""

    def decorate(options: type[_Class]) -> type[_Class]:
        names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
        _PLACES.update(dict.fromkeys(names, (argument, options.__name__)))
        by_name = f"{options.__name__} takes its options by name: {options.__name__}({names[0]}=...)"
        options.__init__ = explained(too_many=by_name)(options.__init__)  # type: ignore[method-assign]
        return options

    return decorate


def explained(*, too_many: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a method: a keyword that it does not have is an error that names the one that is meant.

    ``too_many`` is the message where there are too many arguments without a name.
    """

    def decorate(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        parameters = inspect.signature(method).parameters
        positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())

        @functools.wraps(method)
        def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for name, value in kwargs.items():
                if name not in parameters:
                    owner = type(args[0]).__name__
                    call = owner if method.__name__ == "__init__" else f"{owner}.{method.__name__}"
                    raise UnknownOption(f"{call} has no option {name}: {_meant(name, value, list(parameters)[1:])}")
            if len(args) > positional:
                raise UnknownOption(too_many)
            return method(*args, **kwargs)

        return called

    return decorate


def _meant(name: str, value: object, known: Collection[str]) -> str:
    """What to write instead of an option that does not exist; ``known`` are those that do."""
    if (argument := _ARGUMENTS.get(name)) in known:
        return f"it is called {argument} here"
    option = option_called(name) or (name if name in _CALLED or name in _PLACES else None)
    if option is not None:
        called = "" if option == name else f"it is called {option} here"
        if option in known:
            return called
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        text = repr(value) if option == name or is_number else "..."
        return f"{called + '. Write' if called else 'write'} {_call(option, text if len(text) < 60 else '...')}"
    if (reason := _EXPLAINED.get(name.lower())) is not None:
        return reason
    close = difflib.get_close_matches(name, [*known, *_PLACES, *_CALLED], 1)
    if not close:
        return f"there are {', '.join(known)}"
    return f"did you mean {close[0] if close[0] in known else _call(close[0], '...')}?"


def _call(option: str, value: str) -> str:
    """How the option is given to the trainer."""
    argument, kind = _PLACES.get(option, (None, None))
    return f"Trainer({option}={value})" if argument is None else f"Trainer({argument}=mh.{kind}({option}={value}))"
