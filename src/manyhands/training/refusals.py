"""What went wrong, and what to write instead: the trainers' errors, in the same words in every framework.

Other trainers call options by other names, and some options belong to a topic: ``Trainer(accumulate=4)`` is an error
that says ``Trainer(step=mh.Step(accumulate=4))``. What PyTorch refuses: :mod:`.torch.preflight.lessons`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings, NotATensor, UnknownOption, type_in_words

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
    "devices": "device ctx context device_ids",
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
    "optimize": "fast compile fused_norms jit jit_compile torch_compile run_eagerly eager",
    # The arguments of fit
    "validation": "validation_data val_data valid_data eval_data val val_dataloaders val_dataloader eval_dataset "
    "val_dataset validation_dataset test_data",
    "data": "train_data train train_dataloaders train_dataloader train_dataset dataloaders datamodule dls x",
}
_MEANT = {name: option for option, names in _CALLED.items() for name in names.split()}

_ADVICE = {
    "it belongs to the optimizer: give optimizer= an optimizer object, or a function that makes one": (
        "weight_decay momentum betas nesterov eps"
    ),
    "data are given to fit: trainer.fit(model, train, validation), each (X, y) arrays, a dataset or a loader": (
        "data validation y"
    ),
    "loggers have it: Trainer(loggers=[mh.loggers.CSVLogger(every=50)])": "log_every_n_steps",
    "the model is given to fit: trainer.fit(model, data)": "model",
    "leave it out: devices= says which, and 'gpu' or nothing means all GPUs": "accelerator",
    "leave it out: gradients are summed over all devices. FSDP is Trainer(step=mh.Step(shard=True))": (
        "strategy distribute_strategy"
    ),
    "write Trainer(step=mh.Step(accumulate=N)), which divides the loader's batch into N: make the batch N times as "
    "large": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    "write Trainer(step=mh.Step(batch_stats='global'))": "sync_batchnorm sync_bn",
    "write Trainer(limits=mh.Limits(evaluate_every='500 steps')), or '2 epochs'": (
        "val_check_interval check_val_every_n_epoch eval_steps validation_freq"
    ),
    "checkpoints are written if there is a folder for them: Trainer(run='runs/mine')": "enable_checkpointing",
    "write Trainer(limits=mh.Limits(max_steps=1))": "fast_dev_run",
    "leave it out: a NaN loss ends the job and names the samples (Step(on_nan=))": "detect_anomaly",
    "leave it out: the trainer divides the loader's batches itself": "use_distributed_sampler replace_sampler_ddp",
    "leave it out: the model is tried on a few samples before the first step": "num_sanity_val_steps",
    "it is PyTorch's: call torch.use_deterministic_algorithms(True), or set torch.backends.cudnn.benchmark": (
        "deterministic benchmark"
    ),
    "put torch.profiler around fit with Limits(max_steps=50), or run manyhands audit": "profiler",
    "workers belong to the loader: DataLoader(dataset, num_workers=...)": "num_workers",
    "(X, y) arrays are shuffled; for another order give a loader": "shuffle",
    "start the script with torchrun, which gives every process its place": "num_nodes",
    "progress is shown; quiet=True shows none": "verbose progress_bar enable_progress_bar",
    "give weights of classes to the loss (torch.nn.CrossEntropyLoss(weight=...)), or weights of samples, in Keras and "
    "Gluon fit(model, (X, y, weights[y]))": "class_weight",
    "weights of samples are a part of the data, in Keras and Gluon fit(model, (X, y, sample_weight))": "sample_weight",
    "it is a callback: Trainer(callbacks=[mh.EarlyStopping('val_loss', patience=3)])": "early_stopping patience",
}
_EXPLAINED = {name: advice for advice, names in _ADVICE.items() for name in names.split()}
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
        options.__init__ = explain_mistakes(too_many=by_name)(options.__init__)  # type: ignore[method-assign]
        return options

    return decorate


def explain_mistakes(*, too_many: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a method: a keyword that it does not have is an error that names the one that is meant.

    ``too_many`` is the message where there are too many arguments without a name.
    """

    def decorate(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        parameters = inspect.signature(method).parameters
        positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())

        @functools.wraps(method)
        def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for name in [name for name in kwargs if name not in parameters]:
                call = type(args[0]).__name__ + ("" if method.__name__ == "__init__" else f".{method.__name__}")
                cure = _cure(name, kwargs[name], list(parameters)[1:])
                raise UnknownOption(f"{call} has no option {name}: {cure}")
            if len(args) > positional:
                raise UnknownOption(too_many)
            return method(*args, **kwargs)

        return wrapper

    return decorate


def _cure(name: str, value: object, known: Collection[str]) -> str:
    """What to write instead of an option that does not exist; ``known`` are those that do."""
    option = option_called(name) or (name if name in _CALLED or name in _PLACES else None)
    if option in known:
        return f"it is called {option} here"
    if (advice := _EXPLAINED.get(name.lower()) or _EXPLAINED.get(option or "")) is not None:
        return advice
    if option is not None:
        is_shown = option == name or (isinstance(value, Real) and not isinstance(value, bool))
        text = repr(value) if is_shown and len(repr(value)) < 60 else "..."
        return f"{'write' if option == name else f'it is called {option} here. Write'} {_as_text(option, text)}"
    options = [option for option in _CALLED if option not in _EXPLAINED]
    close = difflib.get_close_matches(name, [*known, *_PLACES, *options], 1)
    if not close:
        return f"there are {', '.join(known)}"
    return f"did you mean {close[0] if close[0] in known else _as_text(close[0], '...')}?"


def _as_text(option: str, value: str) -> str:
    """How the option is given to the trainer."""
    argument, kind = _PLACES.get(option, (None, None))
    return f"Trainer({option}={value})" if argument is None else f"Trainer({argument}=mh.{kind}({option}={value}))"


# Models, data and losses


def not_a_model(model: Any, kind: str) -> BadSettings:
    """The error for an object that is not a model; ``kind``: what the framework trains, as ``a torch.nn.Module``."""
    if isinstance(model, type):
        name = model.__name__
        return BadSettings(f"the class {name} cannot be trained: give {kind} made of it, {name}(...) and not {name}")
    return BadSettings(f"a model of type {type(model).__name__} cannot be trained: give {kind}")


def nothing_to_train(model: Any, cure: str) -> BadSettings:
    """The error for a model without a parameter that is trained."""
    return BadSettings(f"{type_in_words(model)} has no parameters that could be trained: {cure}")


def no_target(batch: Any) -> BadBatch:
    """The error for a batch without a target where the loss needs one."""
    problem = "this one has only one part" if isinstance(batch, (tuple, list)) else f"this is {type_in_words(batch)}"
    return BadBatch(
        f"a batch (inputs, target) is needed, and {problem}: give both, or a model with its own training_step(batch)"
    )


def not_data(data: object, kinds: str) -> NotATensor:
    """The error for an object that is not data; ``kinds``: what the framework reads."""
    return NotATensor(f"a value of type {type(data).__name__} cannot be read as data: give {kinds}")


def not_a_column(name: object, part: object) -> NotATensor:
    """The error for an entry of a dict of arrays that is none."""
    return NotATensor(
        f"{name!r} of the dict is {type_in_words(part)}, which cannot be read as data: give a dict of arrays with one "
        "row per sample, or a DataLoader, whose batches may hold other values, too"
    )


def lists_of_numbers() -> NotATensor:
    return NotATensor("lists of numbers cannot be read as data: make arrays of them, (np.array(X), np.array(y))")


def not_taken(model: object, shapes: Sequence[Sequence[int]], error: Exception) -> BadBatch:
    """The error for samples that the model fails on; ``shapes``: those of a sample's inputs."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    shown = ", ".join(str(tuple(shape)) for shape in shapes)
    return BadBatch(f"a sample of the data has shape {shown}, and {type(model).__name__} does not take it ({reason})")


def other_step(model: object, name: str) -> BadSettings | None:
    """The error for a ``training_step`` that takes other arguments than a batch; None: it takes that."""
    method = getattr(model, name)
    # A Linen module in NNX: a call of the wrapper with the module's function.
    of_module = getattr(method, "keywords", {}).get("method")
    given = ("batch",) if of_module is None else ("self", "batch")
    signature = inspect.signature(of_module or method)
    try:
        signature.bind(*given)
    except TypeError:
        names = [word for word in signature.parameters if word != "self"]
        kind = type(getattr(model, "to_nnx__module", model)).__name__
        hint = ". The model holds its parameters: call self(X)" if "params" in names else ""
        return BadSettings(
            f"{name} of {kind} takes ({', '.join(names)}), and the trainer calls {name}(batch): write "
            f"def {name}(self, batch), and return the mean loss or mh.LossSum(total, count){hint}"
        )
    return None


def unlike_target(output: Sequence[int], target: Sequence[int], *, may_be_classes: bool = False) -> BadBatch:
    """The error for a loss that compares number with number, of a batch's outputs and targets of these shapes."""
    output_shape, target_shape = tuple(output[1:]), tuple(target[1:])
    cure = "give targets of the output's shape"
    if output_shape == (1,) and target_shape == ():
        cure = "give y.reshape(-1, 1)"
    elif output_shape == () and target_shape == (1,):
        cure = "give y.reshape(-1)"
    if may_be_classes and math.prod(output_shape) == math.prod(target_shape):
        cure += ", as floating-point numbers (.float())"
    elif may_be_classes:
        cure += ". If the targets are numbers of classes, give loss='cross_entropy', and a model without sigmoid at "
        cure += "its end"
    return BadBatch(
        f"the model's output for a sample has shape {output_shape}, and its target {target_shape}: the loss compares "
        f"each number of the output with one target; {cure}"
    )


def not_a_loss(name: str, value: object) -> BadSettings:
    """The error for a loss, or a model's own step, that did not return a loss."""
    if value is None:
        cure = "is a `return` missing? Return"
    elif isinstance(value, Real):
        cure = "a plain number has no gradient. Without .item() or float(), return"
    else:
        cure = "return"
    return BadSettings(
        f"{name} returned {in_words(value)}: {cure} the mean loss over the samples, one number per sample, or "
        "mh.LossSum(total, count)"
    )


def in_words(value: object) -> str:
    """A value that a user's code gave, for an error."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if (shape := getattr(value, "shape", None)) is not None:
        return f"an array of shape {tuple(shape)}"
    if isinstance(value, (tuple, list)):
        shapes = ", ".join(str(tuple(part.shape)) if hasattr(part, "shape") else "?" for part in value)
        return f"{type_in_words(value)} of {count_of(len(value), 'part')} ({shapes})"
    return type_in_words(value)
