"""``manyhands devices``: every device of every installed framework, and how fast it is."""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from json import dumps
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from manyhands import __version__, machine
from manyhands.amounts import count_of
from manyhands.cli import probe
from manyhands.cli.flags import Reads
from manyhands.device import FRAMEWORKS

SCHEMA = 1

_COLUMNS = {
    "host_to_device": "to",
    "host_to_device_pinned": "to*",
    "device_to_host": "from",
    "device_to_host_pinned": "from*",
    "device_to_device": "on",
    "matmul_float32": "fp32",
    "matmul_bfloat16": "bf16",
}


def run(
    *,
    measure: bool = False,
    json: bool = False,
    framework: Annotated[list[str], Reads(action="append", choices=FRAMEWORKS)] | None = None,
) -> int:
    """Lists every device of every installed framework. Works without a GPU, a driver or a framework.

    Args:
        measure: Measure copy bandwidth and matmul rate. Default: no.
        json: Print JSON (docs/devices-json.md describes it). Default: a table.
        framework: Only this framework (repeat for several). Default: all that are installed.
    """
    facts = collect(framework, measured=measure, quiet=json)
    text = dumps(facts, indent=2) if json else _text(facts, measured=measure)
    print(text.rstrip(), flush=True)
    return 0


def collect(frameworks: list[str] | None, *, measured: bool, quiet: bool) -> dict[str, Any]:
    """Host, driver and frameworks as plain data, as ``--json`` prints it."""
    wanted = frameworks or probe.installed_frameworks()
    host, gpus = machine.host(), machine.gpus()
    # Notebooks set FORCE_COLOR, which makes rich treat a pipe as a terminal.
    console = Console(file=sys.stderr, quiet=quiet or not sys.stderr.isatty())
    at_once = 1 if measured else max(1, len(wanted))  # measurements must not disturb each other
    status = console.status(f"{'measuring' if measured else 'asking'} {', '.join(wanted)}")
    with status, ThreadPoolExecutor(max_workers=at_once) as pool:
        replies = list(pool.map(functools.partial(probe.ask, measured=measured), wanted))
    load = {gpu.uuid: gpu.load_percent for gpu in gpus}
    for reply in replies:
        for row in reply.get("devices", []):
            row["load_percent"] = load.get(row["uuid"]) if row["kind"] == "gpu" else host.load_percent
    return {
        "schema": SCHEMA,
        "manyhands": __version__,
        "host": asdict(host),
        "gpus": [asdict(gpu) for gpu in gpus],
        "why_no_gpus": machine.why_no_gpus(),
        "frameworks": replies,
    }


def _text(facts: dict[str, Any], *, measured: bool) -> str:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    host = facts["host"]
    features = "".join(f", {feature}" for feature in host["features"])
    lines: list[Any] = [
        f"host: {host['name']}{features}, {host['usable_cores']} of {host['cores']} cores usable, "
        f"{_gib(host['memory'], 'free')} of {_gib(host['memory'], 'total')} GiB free, load {host['load_percent']:.0f}%"
    ]
    lines += [
        f"gpu {gpu['index']}: {gpu['name']}, {_gib(gpu['memory'], 'free')} of {_gib(gpu['memory'], 'total')} GiB "
        f"free, load {_percent(gpu['load_percent'])}, driver {gpu['driver']}, {gpu['uuid']}"
        for gpu in facts["gpus"]
    ]
    if facts["why_no_gpus"]:
        lines.append(f"gpus: none; {facts['why_no_gpus']}")
    if rows := [(reply, row) for reply in facts["frameworks"] for row in reply.get("devices", [])]:
        table = _table("framework", "device", "name", "GiB", "free", "load", "cap.")
        for reply, row in rows:
            memory = (_gib(row["memory"], "total"), _gib(row["memory"], "free"), _percent(row["load_percent"]))
            version = f"{reply['framework']} {reply['version']}"
            table.add_row(version, row["device"], row["name"], *memory, row["capability"] or "-")
        lines.append(table)
    if rows and measured:
        table = _table("framework", "device", *_COLUMNS.values())
        table.caption = "copies to, from and on the device in GB/s (*: page-locked host memory); products in TFLOP/s"
        for reply, row in rows:
            table.add_row(reply["framework"], row["device"], *(_figure(row["speed"][name]) for name in _COLUMNS))
        lines.append(table)
    for reply in facts["frameworks"]:
        if "error" in reply:
            lines.append(f"{reply['framework']}: does not start: {reply['error']}")
        elif reply["virtual"]:
            virtual = count_of(reply["virtual"], "virtual CPU device")
            lines.append(f"{reply['framework']}: {virtual} to stand in for GPUs (MANYHANDS_VIRTUAL_DEVICES)")
    if not facts["frameworks"]:
        lines.append("no framework is installed: pip install 'manyhands[torch]' (or jax, tensorflow, mxnet)")
    with console.capture() as shown:
        for line in lines:
            console.print(line, soft_wrap=isinstance(line, str))
    return shown.get()


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in titles:
        # A name may take two lines, a figure never.
        words = title in ("framework", "device", "name", "cap.")
        table.add_column(title, justify="left" if words else "right", no_wrap=title != "name")
    return table


def _gib(memory: dict[str, int] | None, key: str) -> str:
    return "-" if memory is None else f"{memory[key] / 2**30:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.{2 if value < 1 else 3}g}"
