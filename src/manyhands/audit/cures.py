"""The cure in one line of code, made from the user's own line where that is possible."""

from __future__ import annotations

import ast
import re

from manyhands.audit.kinds import Kind

_DECISION = re.compile(r"^(if|elif|while|assert)\b")
_OPTION = "non_blocking=True"


def cure(kind: Kind, call: str, code: str, library: str = "") -> str:
    """What to write instead of a line that waits, perhaps in a library.

    >>> cure(Kind.READ, "Tensor.item", "total += loss.item()")
    'total += loss.detach()'
    >>> cure(Kind.READ, "Tensor.__float__", "losses.append(float(loss))")
    'losses.append(loss.detach())'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "x = x.to(device)")
    'x = x.to(device, non_blocking=True), and pin_memory=True where x comes from (DataLoader, or x.pin_memory())'
    >>> cure(Kind.TO_DEVICE, "Tensor.to", "X[i : i + 32].to(device)").partition(", and ")[2]
    'pin_memory=True where X comes from (DataLoader, or X.pin_memory())'
    >>> cure(Kind.TO_DEVICE, "Tensor.cuda", "batch['x'].cuda()").partition(", and ")[2]
    "pin_memory=True where batch['x'] comes from (DataLoader, or batch['x'].pin_memory())"
    >>> cure(Kind.DATA, "Tensor.__setitem__", "x[0] = 1.0")
    'x[0].fill_(1.0)'
    >>> cure(Kind.SYNCHRONIZE, "torch.cuda.synchronize", "torch.cuda.synchronize()")
    'remove this line: the device keeps the order of its work by itself'
    """
    if library.endswith("grad_scaler.py"):
        return "compute in bfloat16 (torch.autocast(..., dtype=torch.bfloat16)), which needs no scaler"
    if "error_if_nonfinite=True" in code:
        return re.sub(r",?\s*error_if_nonfinite=True", "", code)
    make = _MAKERS.get(kind)
    made = None if make is None or not code else make(call, code)
    return made or kind.general_cure


def _read(call: str, code: str) -> str | None:
    if _DECISION.match(code):
        return Kind.CONTROL_FLOW.general_cure
    if code.startswith("print(") or 'f"' in code or "f'" in code:
        return f"if step % 100 == 0: {code}" if code.startswith("print(") else Kind.PRINT.general_cure
    if call.endswith((".item", ".tolist")):
        name = call.rpartition(".")[2]
        changed = re.sub(rf"\.(detach\(\)\.)?(cpu\(\)\.)?{name}\(\)", ".detach()", code)
    else:
        changed = _without_call(code, {"Tensor.__float__": "float", "Tensor.__int__": "int"}.get(call, ""))
    return changed if changed != code else None


def _without_call(code: str, function: str) -> str:
    """``float(x)`` as ``x.detach()``, where the line can be read on its own."""
    try:
        tree = ast.parse(code.rstrip(":"))
    except SyntaxError:
        return code
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
        if is_call and len(node.args) == 1 and node.lineno == node.end_lineno:  # type: ignore[attr-defined]
            argument = ast.get_source_segment(code, node.args[0]) or ""  # type: ignore[attr-defined]
            if not re.fullmatch(r"[\w.]+(\([^()]*\))?", argument):
                argument = f"({argument})"
            return code[: node.col_offset] + f"{argument}.detach()" + code[node.end_col_offset :]  # type: ignore[attr-defined]
    return code


def _print(call: str, code: str) -> str | None:
    return f"if step % 100 == 0: {code}" if code.startswith("print(") else None


def _to_host(call: str, code: str) -> str | None:
    changed = re.sub(r"\.cpu\(\)(\.numpy\(\))?", f'.to("cpu", {_OPTION})', code)
    changed = re.sub(r"\.to\((device=)?([\"']cpu[\"'])\)", rf".to(\2, {_OPTION})", changed)
    return f"{changed}, read a step later or at the end" if changed != code else None


def _to_device(call: str, code: str) -> str | None:
    changed = code
    if _OPTION not in code:
        changed = re.sub(r"\.(to|cuda|copy_)\(([^()]*)\)", lambda m: f".{m[1]}({_with_option(m[2])})", code)
        if changed == code:
            return None
    match = re.search(r"([A-Za-z_][\w.]*(?:\[[^\[\]:]*\])*)(?:\[[^\[\]]*\])*\.(?:to|cuda)\(", code)  # without slices
    source = match[1] if match else "it"
    return f"{changed}, and pin_memory=True where {source} comes from (DataLoader, or {source}.pin_memory())"


def _blocking(call: str, code: str) -> str | None:
    changed = re.sub(r"\.(to|cuda|copy_)\(([^()]*)\)", lambda m: f".{m[1]}({_with_option(m[2])})", code)
    return changed if changed != code else None


def _with_option(arguments: str) -> str:
    return f"{arguments}, {_OPTION}" if arguments.strip() else _OPTION


def _data(call: str, code: str) -> str | None:
    match = re.fullmatch(r"(.+\]) = (-?[\d.]+(?:e-?\d+)?)", code)
    if match:
        return f"{match[1]}.fill_({match[2]})"
    match = re.search(r"torch\.(?:as_)?tensor\((-?[\w.]+), ((?:dtype=[\w.]+, )?device=[\w.\"':]+)\)", code)
    if match:
        return code.replace(match[0], f"torch.full((), {match[1]}, {match[2]})")
    return None


def _synchronize(call: str, code: str) -> str | None:
    if re.fullmatch(r"[\w.]+\.(synchronize|waitall|block_until_ready|wait_to_read)\([^()]*\)", code):
        return "remove this line: the device keeps the order of its work by itself"
    return None


def _shape(call: str, code: str) -> str | None:
    match = re.search(r"(\w[\w.]*)\[([^\[\]]*[<>=!]=?[^\[\]]*|\w*mask\w*)\]\.(sum|mean)\(\)", code)
    if match:
        tensor, mask, reduction = match[1], match[2], match[3]
        inside = f"torch.where({mask}, {tensor}, 0).sum()"
        return code.replace(match[0], inside if reduction == "sum" else f"{inside} / ({mask}).sum()")
    return None


def _check(call: str, code: str) -> str | None:
    changed = re.sub(r"linalg\.(cholesky|inv|solve)\(([^()]*)\)", r"linalg.\1_ex(\2)[0]", code)
    return changed if changed != code else None


_MAKERS = {
    Kind.READ: _read,
    Kind.PRINT: _print,
    Kind.TO_HOST: _to_host,
    Kind.TO_DEVICE: _to_device,
    Kind.BLOCKING: _blocking,
    Kind.DATA: _data,
    Kind.SYNCHRONIZE: _synchronize,
    Kind.SHAPE: _shape,
    Kind.CHECK: _check,
}
