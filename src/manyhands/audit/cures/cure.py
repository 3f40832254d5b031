"""The cure of a wait in one line of code, made from the user's own line if possible.

Such a line is valid Python of its framework, computes the same numbers and does not wait. If there is none (a decision,
a function that needs a number), the cure is a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NamedTuple

from manyhands.audit.cures.libraries import setting_for
from manyhands.audit.cures.statement import Statement, ValueUse, name_of
from manyhands.audit.kinds import NUMBER, Kind

_OPTION = "non_blocking=True"
_LEAVE = "none needed: it waits in a few steps only; the comment '# manyhands: wait-ok <reason>' silences it"
_REMOVE = "remove this line: the device keeps its work in order"
# The suffix of a value that stays on its device, and int() of such a value.
_KEPT = {"torch": ".detach()", "jax": "", "tensorflow": "", "mxnet": ".detach()"}
_INTEGER = {
    "torch": "{}.detach().long()",
    "jax": "{}.astype(int)",
    "tensorflow": "tf.cast({}, tf.int64)",
    "mxnet": '{}.detach().astype("int64")',
}
_INDEX = (
    "the host reads an index that is a tensor without dimensions: use gather, index_select or a Python number, or give "
    "the index a dimension (i.view(1))"
)
_NUMBER = (
    "PyTorch reads a number of a tensor: give a size that Python knows, or fill on the device "
    "(torch.empty(n, device=x.device).fill_(x))"
)
_READ_LATER = (
    "its value is used as a number later, or where this file does not show: keep the value on the device, and read it "
    "once, after the loop"
)
_COPY_ONCE = (
    "keep it on the device (.detach()) and copy it once, after the loop; or copy with non_blocking=True, and make one "
    "torch.cuda.synchronize() before it is read"
)
_REPORTS = ("print", "log", "log_dict", "log_metrics", "info", "debug", "write", "add_scalar", "add_scalars")
_METHODS = ("item", "tolist", "asscalar")
_FACTORIES = {"zeros", "ones", "full", "arange", "eye", "linspace", "empty"}
_SIZES = {
    "unique": "labels that are known in advance need no unique; or call it every 100 steps only",
    "unique_consecutive": "call it every 100 steps only, or on the host, a step later",
    "bincount": "give a fixed size: torch.zeros(n, device=x.device).scatter_add_(0, x, torch.ones_like(x, dtype=...))",
    "repeat_interleave": "give output_size=..., where the sum of the repeats is known",
    "one_hot": "give the number of classes: one_hot(..., num_classes=...)",
}
_UNCHECKED = ("cholesky", "inv", "solve")


class _Wait(NamedTuple):
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
    place: tuple[str, int] | None = None,
    rare: bool = False,
) -> str:
    r"""What to write instead of a line that waits, perhaps in a library.

    ``place`` is its file and number; ``rare`` says that it waits in a few steps only, once an epoch for example.

    >>> cure(Kind.READ, "Tensor.item", "total += loss.item()").partition(": ")[2]  # the rest of the file is not known
    'keep the value on the device, and read it once, after the loop'
    >>> cure(Kind.READ, "Tensor.__float__", "float(loss)")
    'loss.detach()'
    >>> cure(Kind.READ, "Array.__float__", "float(loss)", framework="jax")
    'loss'
    >>> cure(Kind.READ, "Tensor.item", "print(step, loss.item())")
    'count the steps, and run this line every 100 steps'
    >>> cure(Kind.READ, "Tensor.item", "rate = math.exp(loss.item())")
    'exp() takes numbers and has to wait: call it every 100 steps only, or once, with the values of many steps'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "x = x.to(device)")
    'x = x.to(device, non_blocking=True)\nwith pin_memory=True where x comes from (DataLoader, or x.pin_memory())'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "X[i : i + 32].to(device)").partition("\n")[2]
    'with pin_memory=True where X comes from (DataLoader, or X.pin_memory())'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "x = torch.zeros(4, 8).to(device)")
    'x = torch.zeros(4, 8, device=device)'
    >>> cure(Kind.DATA, "Tensor.__setitem__", "x[0] = 1.0")
    'x[0].fill_(1.0)'
    >>> cure(Kind.SYNCHRONIZE, "torch.cuda.synchronize", "torch.cuda.synchronize()")
    'remove this line: the device keeps its work in order'
    """
    wait = _Wait(kind, call, framework, rare)
    if (setting := setting_for(kind, library)) is not None:
        return setting
    if "error_if_nonfinite=True" in code:
        return re.sub(r",?\s*error_if_nonfinite=True", "", code)
    if library:
        return f"this is the library's code; {wait.in_words}; or call it less often"
    if not code or kind not in _MAKERS:
        return wait.in_words
    statement = Statement.at(*place, code) if place is not None else Statement.alone(code)
    return _MAKERS[kind](wait, statement) or wait.in_words


# Reading


def _read(wait: _Wait, line: Statement) -> str | None:
    if wait.name in ("__getitem__", "__setitem__"):
        return _INDEX
    if wait.call == NUMBER:
        return _NUMBER
    if wait.name in _METHODS:
        reads = [call for call in line.calls(wait.name) if isinstance(call.func, ast.Attribute)]
    else:
        reads = [call for call in line.calls(wait.name.strip("_")) if isinstance(call.func, ast.Name) and call.args]
    return _without_reads(wait, line, reads)


def _without_reads(wait: _Wait, line: Statement, reads: list[ast.Call]) -> str | None:
    """The line with these reads left out, where their values are not needed at once."""
    if not reads:
        return _rarely(wait, line)
    use = max(line.use(call) for call in reads)
    if use is ValueUse.LATER:
        return _READ_LATER
    if use is ValueUse.DECIDES:
        return Kind.CONTROL_FLOW.cure_in(wait.framework)
    if use is ValueUse.NEEDED:
        return _rarely(wait, line) or _needed_by(line, reads)
    return line.edited(*(_without(wait, line, call) for call in reads))


def _without(wait: _Wait, line: Statement, read: ast.Call) -> tuple[int, int, str]:
    """The edit that leaves a value on its device."""
    function = read.func
    if isinstance(function, ast.Attribute) and not read.args:  # x.item()
        inner = function.value
        begin = line.dot(read)
        while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr not in ("detach", "cpu", "numpy") or inner.func.end_lineno != line.number:
                break
            begin, inner = line.dot(inner), inner.func.value
        on_device = ".copy()" if function.attr == "asnumpy" else _KEPT[wait.framework]
        if wait.framework == "torch" and isinstance(inner, (ast.Attribute, ast.Subscript)):
            on_device += ".clone()"  # it may be memory that an optimizer changes
        return begin, line.end(read), on_device
    value = read.args[0]  # float(x), np.asarray(x)
    text = line.text(value)
    if isinstance(function, ast.Name) and function.id == "int":
        return line.start(read), line.end(read), _INTEGER[wait.framework].format(_bracketed(value, text))
    on_device = _KEPT[wait.framework]
    if on_device and _is_element(line, read, value):  # others may be plain numbers
        return line.start(read), line.end(read), f'({text}{on_device} if hasattr({text}, "detach") else {text})'
    is_part = isinstance(line.parent(read), (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript))
    return line.start(read), line.end(read), (_bracketed(value, text) if on_device or is_part else text) + on_device


def _is_element(line: Statement, read: ast.Call, value: ast.expr) -> bool:
    """Whether a value is the variable of a comprehension around a read: one of many."""
    loops = [node for node in line.above(read) if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp))]
    targets = [ast.walk(generator.target) for loop in loops for generator in loop.generators]
    names = {node.id for target in targets for node in target if isinstance(node, ast.Name)}
    return isinstance(value, ast.Name) and value.id in names


def _bracketed(node: ast.expr, text: str) -> str:
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


def _rarely(wait: _Wait, line: Statement) -> str | None:
    """A line that only reports something can be left out in most steps."""
    if line.is_rare():
        return wait.in_words
    whole = line.whole()
    if not isinstance(whole, ast.Expr) or not isinstance(whole.value, ast.Call) or name_of(whole.value) not in _REPORTS:
        return None
    if wait.rare:
        return _LEAVE
    counter = line.counter()
    return f"if {counter} % 100 == 0: {line.code}" if counter else "count the steps, and run this line every 100 steps"


def _needed_by(line: Statement, reads: list[ast.Call]) -> str | None:
    """The cure where another function takes the number."""
    around = next((node for node in line.above(reads[0]) if isinstance(node, (ast.Call, ast.JoinedStr))), None)
    if not isinstance(around, ast.Call) or not name_of(around):
        return None
    return (
        f"{name_of(around)}() takes numbers and has to wait: call it every 100 steps only, or once, with the values "
        "of many steps"
    )


# Copies


def _to_host(wait: _Wait, line: Statement) -> str | None:
    if wait.framework != "torch":
        reads = line.calls("numpy", "asnumpy", "asarray", "array", "device_get")
        return None if any(len(read.args) > 1 or read.keywords for read in reads) else _without_reads(wait, line, reads)
    if wait.name == "__setitem__":
        return "the tensor that is written to is on the host: make it on the device, and copy it once, after the loop"
    copies = [*line.calls("cpu"), *(call for call in line.calls("to") if _names_cpu(call))]
    if not copies:
        return None
    reads = [read for copy in copies if (read := _after(line, copy, *_METHODS)) is not None]
    if reads:
        return _without_reads(wait, line, reads)
    wanted = [_wanted_on_host(line, _after(line, copy, "numpy") or copy) for copy in copies]
    return next((words for words in wanted if words is not None), _COPY_ONCE)


def _wanted_on_host(line: Statement, copy: ast.Call) -> str | None:
    around = next((node for node in line.above(copy) if isinstance(node, ast.Call)), None)
    if around is None or not name_of(around) or line.use(copy) is not ValueUse.NEEDED:
        return None
    return f"{name_of(around)}() takes it on the host: keep a copy there, or call it every 100 steps only"


def _after(line: Statement, call: ast.Call, *names: str) -> ast.Call | None:
    """The call of one of these methods on the result of a call, or None."""
    outer = line.parent(line.parent(call) or call)
    is_one = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute) and outer.func.value is call
    return outer if is_one and isinstance(outer, ast.Call) and outer in line.calls(*names) else None


def _names_cpu(call: ast.Call) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    return any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values)


def _to_device(wait: _Wait, line: Statement) -> str | None:
    copies = [call for call in line.calls("to", "cuda", "copy_") if isinstance(call.func, ast.Attribute)]
    if not copies:
        return None
    copied_there = _create_on_device(line, copies)
    if copied_there is not None:
        return copied_there
    changed = _without_blocking(line, copies)
    inner = copies[0].func
    assert isinstance(inner, ast.Attribute)
    source = inner.value
    while isinstance(source, ast.Subscript) and any(isinstance(part, ast.Slice) for part in ast.walk(source.slice)):
        source = source.value
    is_name = isinstance(source, (ast.Name, ast.Attribute, ast.Subscript)) and _copies_its_owner(copies[0])
    if not is_name:
        return f"{changed}\nfrom pinned memory: DataLoader(pin_memory=True), or .pin_memory() before the copy"
    text = ast.unparse(source)
    if changed == line.code:
        return (
            f"take {text} from pinned memory (DataLoader(pin_memory=True), or {text}.pin_memory()): from pageable "
            f"memory {_OPTION} blocks, too"
        )
    return f"{changed}\nwith pin_memory=True where {text} comes from (DataLoader, or {text}.pin_memory())"


def _copies_its_owner(call: ast.Call) -> bool:
    """Whether a call copies its owner: not so ``target.copy_(source)``."""
    return isinstance(call.func, ast.Attribute) and call.func.attr != "copy_"


def _create_on_device(line: Statement, copies: list[ast.Call]) -> str | None:
    """``torch.zeros(4).to(device)``: made on the device instead."""
    (copy, *others) = copies
    factory = copy.func.value if isinstance(copy.func, ast.Attribute) else None
    if others or not isinstance(factory, ast.Call) or factory not in line.calls(*_FACTORIES):
        return None
    is_plain = len(copy.args) == 1 and not copy.keywords and isinstance(copy.func, ast.Attribute)
    if not is_plain or copy.func.attr != "to" or any(k.arg == "device" for k in factory.keywords):  # type: ignore[attr-defined]
        return None
    between = ", " if factory.args or factory.keywords else ""
    end = line.end(factory)
    return line.edited((end - 1, line.end(copy), f"{between}device={line.text(copy.args[0])})"))


def _without_blocking(line: Statement, copies: list[ast.Call]) -> str:
    edits = []
    for call in copies:
        if any(keyword.arg == "non_blocking" for keyword in call.keywords):
            continue
        end = line.end(call) - 1
        before = line.code.encode()[:end].rstrip()
        between = "" if before.endswith(b"(") else " " if before.endswith(b",") else ", "
        edits.append((end, end, between + _OPTION))
    return line.edited(*edits)


def _blocking(wait: _Wait, line: Statement) -> str | None:
    copies = [call for call in line.calls("to", "cuda", "copy_") if isinstance(call.func, ast.Attribute)]
    return _without_blocking(line, copies) if copies else None


def _data(wait: _Wait, line: Statement) -> str | None:
    statement = line.whole()
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        value = statement.value
        number = value.operand if isinstance(value, ast.UnaryOp) else value
        if isinstance(number, ast.Constant) and len(statement.targets) == 1:
            target, _, text = line.code.rpartition(" = ")
            return f"{target}.fill_({text})"
    for call in line.calls("tensor", "as_tensor"):
        if call.args and isinstance(call.func, ast.Attribute) and _is_number(call.args[0]):
            name = line.end(call.func)
            begin = line.start(call.args[0])
            return line.edited((name - len(call.func.attr), name, "full"), (begin, begin, "(), "))
    return None


def _is_number(node: ast.expr) -> bool:
    """Whether it is a number for sure: a constant, or arithmetic with a fraction."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        parts = (node.left, node.right)
        return any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


# Everything else


def _synchronize(wait: _Wait, line: Statement) -> str | None:
    calls = line.calls("synchronize", "waitall", "wait_to_read", "block_until_ready")
    whole = line.whole()
    if isinstance(whole, ast.Expr) and isinstance(whole.value, ast.Call) and calls:
        return _REMOVE
    edits = []
    for call in calls:
        if isinstance(call.func, ast.Attribute) and not call.args and call.func.attr == "block_until_ready":
            edits.append((line.dot(call), line.end(call), ""))
        elif len(call.args) == 1:
            edits.append((line.start(call), line.end(call), line.text(call.args[0])))
    return line.edited(*edits) if edits else None


def _shape(wait: _Wait, line: Statement) -> str | None:
    if wait.name in _SIZES:
        return _SIZES[wait.name]
    for call in line.calls("sum", "mean"):
        chosen = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
        if not isinstance(chosen, ast.Subscript) or not isinstance(chosen.slice, ast.Compare):
            continue
        tensor, mask = line.text(chosen.value), line.text(chosen.slice)
        if ast.unparse(chosen.slice.left) != ast.unparse(chosen.value):  # its mask may have another shape
            continue
        summed = f"torch.where({mask}, {tensor}, 0).sum()"
        replacement = (
            summed
            if isinstance(call.func, ast.Attribute) and call.func.attr == "sum"
            else f"({summed} / ({mask}).sum())"
        )
        return line.edited((line.start(call), line.end(call), replacement))
    return None


def _check(wait: _Wait, line: Statement) -> str | None:
    calls = [call for call in line.calls(*_UNCHECKED) if isinstance(call.func, ast.Attribute)]
    if wait.name not in _UNCHECKED:
        return "there is no variant that skips the check: call it less often"
    edits = [(line.end(call.func), line.end(call.func), "_ex") for call in calls]
    edits += [(line.end(call), line.end(call), "[0]") for call in calls]
    return line.edited(*edits) if edits else None


def _collective(wait: _Wait, line: Statement) -> str | None:
    return "remove this line: collectives wait for each other anyway" if wait.name == "barrier" else None


_MAKERS: dict[Kind, Callable[[_Wait, Statement], str | None]] = {
    Kind.READ: _read,
    Kind.PRINT: _rarely,
    Kind.TO_HOST: _to_host,
    Kind.TO_DEVICE: _to_device,
    Kind.BLOCKING: _blocking,
    Kind.DATA: _data,
    Kind.SYNCHRONIZE: _synchronize,
    Kind.SHAPE: _shape,
    Kind.CHECK: _check,
    Kind.COLLECTIVE: _collective,
}
