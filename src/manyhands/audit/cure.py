"""A hidden wait, and its cure: one line of code, made from the user's own line, where that is sure; else a sentence.

Such a line is valid Python of its framework, and does not wait. Where a value stays on the device, it says what to read
after the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.audit.kinds import NUMBER, Kind
from manyhands.audit.sites import Site
from manyhands.audit.statement import Statement, ValueUse, name_of

# The suffix of a value that stays on its device, and int() of such a value.
_KEPT = {"torch": ".detach()", "jax": "", "tensorflow": "", "mxnet": ".detach()"}
_INTEGER = {
    "torch": "{}.detach().long()",
    "jax": "{}.astype(int)",
    "tensorflow": "tf.cast({}, tf.int64)",
    "mxnet": '{}.detach().astype("int64")',
}
_RARE = "none needed: it waits in a few steps only; the comment '# manyhands: wait-ok <reason>' silences it"
_INDEX = (
    "the host reads an index that is a tensor without dimensions: use gather, index_select or a Python number, or give "
    "the index a dimension (i.view(1))"
)
_NUMBER = (
    "PyTorch reads a number of a tensor: give a size that Python knows, or fill on the device "
    "(torch.empty(n, device=x.device).fill_(x))"
)
_NEEDED = "{}() needs the value on the host: call it every 100 steps only, or once, with the values of many steps"
_COPY_ONCE = (
    "keep it on the device (.detach()) and copy it once, after the loop; or copy with non_blocking=True, and make one "
    "torch.cuda.synchronize() before it is read"
)
_SIZES = {
    "unique": "labels that are known in advance need no unique; or call it every 100 steps only",
    "unique_consecutive": "call it every 100 steps only, or on the host, a step later",
    "bincount": "give a fixed size: torch.zeros(n, device=x.device).scatter_add_(0, x, torch.ones_like(x, dtype=...))",
    "repeat_interleave": "give output_size=..., where the sum of the repeats is known",
    "one_hot": "give the number of classes: one_hot(..., num_classes=...)",
}
_BARRIER = "remove this line: collectives wait for each other anyway"
_UNCHECKED = ("cholesky", "inv", "solve")
_REPORTS = ("print", "log", "log_dict", "log_metrics", "info", "debug", "write", "add_scalar", "add_scalars")
_READS = ("item", "tolist", "asscalar")
_FACTORIES = {"zeros", "ones", "full", "arange", "eye", "linspace", "empty"}

# What to set so that a library does not wait: part of its file, the kinds of its waits, and the setting.
_SETTINGS: tuple[tuple[str, tuple[Kind, ...], str], ...] = (
    (
        "grad_scaler.py",
        tuple(Kind),
        "make the optimizer with fused=True: the scaler then looks for infinities on the device; or compute in "
        "bfloat16, which needs no scaler",
    ),
    (
        "torch/distributions/",
        tuple(Kind),
        "make the distribution with validate_args=False, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    (
        "accelerate/utils/operations.py",
        (Kind.TO_DEVICE, Kind.BLOCKING),
        "Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True)), or in transformers "
        'TrainingArguments(accelerator_config={"non_blocking": True}); and DataLoader(pin_memory=True)',
    ),
    (
        "transformers/trainer.py",
        (Kind.CONTROL_FLOW,),
        "TrainingArguments(logging_nan_inf_filter=False): the Trainer then does not look for NaN in each step",
    ),
    (
        "transformers/trainer.py",
        (Kind.READ,),
        "TrainingArguments(logging_steps=...): a larger number reads less often",
    ),
    (
        "transformers/cache_utils.py",
        (Kind.DATA,),
        "model.config.use_cache = False: training needs no cache of keys and values",
    ),
    (
        "safetensors/",
        (Kind.TO_HOST,),
        "weights are saved here: save less often (in transformers: TrainingArguments(save_steps=...))",
    ),
)


@dataclass(frozen=True)
class Stall:
    """A hidden wait; two waits are the same if their call and their lines are."""

    kind: Kind
    call: str
    site: Site
    framework: str = "torch"

    @property
    def line(self) -> str:
        """``file:line`` of the user's code."""
        return str(self.site.user)

    @property
    def cure(self) -> str:
        return self.cure_if(rare=False)

    def cure_if(self, *, rare: bool) -> str:
        """The cure; ``rare``: the wait happens in a few steps only."""
        library = self.site.library.file if self.site.library is not None else ""
        line = self.site.user
        place = line.file, line.number
        return cure(self.kind, self.call, line.code, library, framework=self.framework, place=place, rare=rare)

    def __str__(self) -> str:
        beside = f" (in {self.site.library})" if self.site.library is not None else ""
        code = f": {self.site.user.code}" if self.site.user.code else ""
        return f"{self.line}{beside}: {self.kind.title} ({self.call}){code}. Cure: {self.cure}"


class _CurableWait(NamedTuple):
    kind: Kind
    call: str
    framework: str
    rare: bool

    @property
    def in_words(self) -> str:
        return self.kind.cure_in(self.framework)

    @property
    def name(self) -> str:
        return self.call.rpartition(".")[2]


def cure(
    kind: Kind,
    call: str,
    code: str,
    library: str = "",
    *,
    framework: str = "torch",
    place: tuple[str, int] = ("", 0),
    rare: bool = False,
) -> str:
    r"""What to write instead of a line that waits, perhaps in a library.

    ``place`` is its file and number; ``rare`` says that it waits in a few steps only, once an epoch for example.

    >>> cure(Kind.READ, "Tensor.item", "total += loss.item()")
    'total += loss.detach()\nand read total after the loop, not in it'
    >>> cure(Kind.READ, "Array.__float__", "losses.append(float(loss))", framework="jax")
    'losses.append(loss)\nand read losses after the loop, not in it'
    >>> cure(Kind.READ, "Tensor.item", "print(step, loss.item())")
    'count the steps, and run this line every 100 steps'
    >>> cure(Kind.READ, "Tensor.item", "rate = math.exp(loss.item())")
    'exp() needs the value on the host: call it every 100 steps only, or once, with the values of many steps'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "x = x.to(device)")
    'x = x.to(device, non_blocking=True)\nwith pin_memory=True where x comes from (DataLoader, or x.pin_memory())'
    >>> cure(Kind.DATA, "Tensor.__setitem__", "x[0] = 1.0")
    'x[0].fill_(1.0)'
    >>> cure(Kind.SYNCHRONIZE, "torch.cuda.synchronize", "torch.cuda.synchronize()")
    'remove this line: the device keeps its work in order'
    """
    wait = _CurableWait(kind, call, framework, rare)
    path = library.replace("\\", "/")
    for part, kinds, setting in _SETTINGS:
        if part in path and kind in kinds:
            return setting
    if "error_if_nonfinite=True" in code:
        return re.sub(r",?\s*error_if_nonfinite=True", "", code)
    if library:
        return f"this is the library's code; {wait.in_words}; or call it less often"
    if not code or kind not in _MAKERS:
        return wait.in_words
    return _MAKERS[kind](wait, Statement(code, *place)) or wait.in_words


# Reading


def _read(wait: _CurableWait, line: Statement) -> str | None:
    if wait.name in ("__getitem__", "__setitem__"):
        return _INDEX
    if wait.call == NUMBER:
        return _NUMBER
    if wait.name in _READS:
        reads = [call for call in line.calls(wait.name) if isinstance(call.func, ast.Attribute)]
    else:
        reads = [call for call in line.calls(wait.name.strip("_")) if isinstance(call.func, ast.Name) and call.args]
        if any(isinstance(node, ast.ListComp) for read in reads for node in line.above(read)):
            return None  # others of its values may be plain numbers
    return _without_reads(wait, line, reads)


def _without_reads(wait: _CurableWait, line: Statement, reads: list[ast.Call]) -> str | None:
    """The line with these reads left out, where a tensor does as well."""
    uses = [line.use(read) for read in reads]
    if reads and all(use is ValueUse.KEPT for use in uses):
        changed = line.with_edits(*(_without(wait, line, read) for read in reads))
        return f"{changed}\nand read {line.stored_in()} after the loop, not in it"
    if ValueUse.DECIDES in uses:
        return Kind.CONTROL_FLOW.cure_in(wait.framework)
    return _rarely(wait, line) or (_needed_by(line, reads[0]) if reads else None)


def _without(wait: _CurableWait, line: Statement, read: ast.Call) -> tuple[int, int, str]:
    """The edit that leaves a value on its device."""
    function, kept = read.func, _KEPT[wait.framework]
    if isinstance(function, ast.Attribute) and not read.args:  # x.item()
        begin, value = line.dot(function), function.value
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr not in ("detach", "cpu", "numpy") or value not in line.calls(value.func.attr):
                break
            begin, value = line.dot(value.func), value.func.value
        if function.attr == "asnumpy":
            kept = ".copy()"
        elif wait.framework == "torch" and isinstance(value, (ast.Attribute, ast.Subscript)):
            kept += ".clone()"  # it may be memory that an optimizer changes
        return begin, line.end(read), kept
    value = read.args[0]  # float(x), np.asarray(x)
    text = line.text(value)
    is_int = isinstance(function, ast.Name) and function.id == "int"
    is_part = isinstance(line.parent(read), (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript))
    if (kept or is_int or is_part) and not isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        text = f"({text})"
    return line.start(read), line.end(read), _INTEGER[wait.framework].format(text) if is_int else text + kept


def _rarely(wait: _CurableWait, line: Statement) -> str | None:
    """A line that only reports something can be left out in most steps."""
    if line.is_rare():
        return wait.in_words
    call = line.call()
    if call is None or name_of(call) not in _REPORTS:
        return None
    if wait.rare:
        return _RARE
    counter = line.counter()
    return f"if {counter} % 100 == 0: {line.code}" if counter else "count the steps, and run this line every 100 steps"


def _needed_by(line: Statement, read: ast.Call) -> str | None:
    """The cure where a function takes the value."""
    child: ast.AST = read
    for parent in line.above(read):
        if isinstance(parent, ast.Call) and child is not parent.func:
            name = name_of(parent)
            return None if name in ("", "append", "appendleft") else _NEEDED.format(name)
        child = parent
    return None


# Copies


def _to_host(wait: _CurableWait, line: Statement) -> str | None:
    if wait.framework != "torch":
        reads = line.calls("numpy", "asnumpy", "asarray", "array", "device_get")
        return None if any(len(read.args) > 1 or read.keywords for read in reads) else _without_reads(wait, line, reads)
    if wait.name == "__setitem__":
        return "the tensor that is written to is on the host: make it on the device, and copy it once, after the loop"
    copies = [*line.calls("cpu"), *(call for call in line.calls("to") if _names_cpu(call))]
    reads = [read for copy in copies if (read := _method_of(line, copy)) is not None and name_of(read) in _READS]
    if reads:
        return _without_reads(wait, line, reads)
    return (_needed_by(line, copies[0]) or _COPY_ONCE) if copies else None


def _method_of(line: Statement, call: ast.Call) -> ast.Call | None:
    """The call of a method of a call's result, as ``.item()`` of ``x.cpu()``."""
    method = line.parent(call)
    outer = line.parent(method) if isinstance(method, ast.Attribute) else None
    return outer if isinstance(outer, ast.Call) and outer.func is method else None


def _names_cpu(call: ast.Call) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    return any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values)


def _to_device(wait: _CurableWait, line: Statement) -> str | None:
    copies = _copies(line)
    if not copies:
        return None
    function = copies[0].func
    assert isinstance(function, ast.Attribute)
    source: ast.expr | None = function.value
    if function.attr == "copy_":
        source = next(iter(copies[0].args), None)
    if isinstance(source, ast.Call) and name_of(source) in _FACTORIES:
        return f"make it on the device: {ast.unparse(source.func)}(..., device=...)"
    changed = _without_blocking(line, copies)
    while isinstance(source, ast.Subscript) and any(isinstance(part, ast.Slice) for part in ast.walk(source.slice)):
        source = source.value
    name = ast.unparse(source) if isinstance(source, (ast.Name, ast.Attribute, ast.Subscript)) else ""
    pinned = (
        f"with pin_memory=True where {name} comes from (DataLoader, or {name}.pin_memory())"
        if name
        else "from pinned memory: DataLoader(pin_memory=True), or .pin_memory() before the copy"
    )
    if changed == line.code:
        return f"copy it {pinned}: from pageable memory non_blocking=True blocks, too"
    return f"{changed}\n{pinned}"


def _copies(line: Statement) -> list[ast.Call]:
    return [call for call in line.calls("to", "cuda", "copy_") if isinstance(call.func, ast.Attribute)]


def _without_blocking(line: Statement, copies: list[ast.Call]) -> str:
    edits = []
    for call in copies:
        if any(keyword.arg == "non_blocking" for keyword in call.keywords):
            continue
        end = line.end(call) - 1
        before = line.code.encode()[:end].rstrip()
        between = "" if before.endswith(b"(") else " " if before.endswith(b",") else ", "
        edits.append((end, end, f"{between}non_blocking=True"))
    return line.with_edits(*edits)


# Everything else


def _data(wait: _CurableWait, line: Statement) -> str | None:
    match line.whole():
        case ast.Assign(
            targets=[ast.Subscript() as target], value=(ast.Constant() | ast.UnaryOp(operand=ast.Constant())) as number
        ):
            return f"{ast.unparse(target)}.fill_({ast.unparse(number)})"
    return None


def _synchronize(wait: _CurableWait, line: Statement) -> str | None:
    calls = line.calls("synchronize", "waitall", "wait_to_read", "block_until_ready")
    if line.call() is not None and calls:
        return "remove this line: the device keeps its work in order"
    edits = []
    for call in calls:
        if isinstance(call.func, ast.Attribute) and not call.args:  # y = f(x).block_until_ready()
            edits.append((line.dot(call.func), line.end(call), ""))
        elif len(call.args) == 1:
            edits.append((line.start(call), line.end(call), line.text(call.args[0])))
    return line.with_edits(*edits) if edits else None


def _check(wait: _CurableWait, line: Statement) -> str | None:
    return None if wait.name in _UNCHECKED else "there is no variant that skips the check: call it less often"


_MAKERS: dict[Kind, Callable[[_CurableWait, Statement], str | None]] = {
    Kind.READ: _read,
    Kind.PRINT: _rarely,
    Kind.TO_HOST: _to_host,
    Kind.TO_DEVICE: _to_device,
    Kind.BLOCKING: lambda wait, line: _without_blocking(line, copies) if (copies := _copies(line)) else None,
    Kind.DATA: _data,
    Kind.SYNCHRONIZE: _synchronize,
    Kind.SHAPE: lambda wait, line: _SIZES.get(wait.name),
    Kind.CHECK: _check,
    Kind.COLLECTIVE: lambda wait, line: _BARRIER if wait.name == "barrier" else None,
}
