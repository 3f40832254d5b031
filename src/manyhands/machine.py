"""Facts about the machine, read without a framework: the host, and NVIDIA's GPUs.

Facts about the host come from psutil and the kernel, those about GPUs from ``nvidia-ml-py`` (optional). Nothing is read
at import. A machine without a driver is not an error: its list of GPUs is empty.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from manyhands.device import Device, DeviceRecord, Memory
from manyhands.errors import NotMeasured

_Result = TypeVar("_Result")
_BUSY = 30.0  # percent of the CPU that other programs use

# CPU features that make low precision fast, by the kernel's names for x86 and for Arm.
_TELLING_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "sve2", "sve", "asimd")

# Part numbers of Arm's own server cores, from the MIDR_EL1 pages of their reference manuals.
_ARM_CORES = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


@dataclass(frozen=True, slots=True)
class HostFacts:
    name: str
    cores: int
    usable_cores: int
    memory: Memory
    load_percent: float
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as the driver reports it; ``uuid`` identifies the same GPU in a framework."""

    index: int
    uuid: str
    name: str
    memory: Memory | None
    load_percent: float | None
    temperature: int | None
    capability: str | None
    driver: str


def host_memory() -> Memory:
    import psutil

    memory = psutil.virtual_memory()
    return Memory(total=memory.total, free=memory.available)


def may_have_gpus() -> bool:
    """Whether a framework could find a GPU here; looks only at files, and starts no driver or framework."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    folder = Path("/dev")
    if not folder.is_dir():
        return True
    return any(folder.glob("nvidia[0-9]*")) or any((folder / name).exists() for name in ("nvidiactl", "kfd", "dxg"))


@functools.cache
def host_name() -> str:
    """The processor's name as the kernel gives it."""
    fields = _cpuinfo()
    if "model name" in fields:
        return fields["model name"]
    part = fields.get("CPU part", "")
    core = _ARM_CORES.get(part, f"part {part}") if fields.get("CPU implementer") == "0x41" else ""
    return f"{platform.processor() or platform.machine()} {core}".strip()


@functools.cache
def host_features() -> tuple[str, ...]:
    """The processor's instruction sets that make low precision fast."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return tuple(flag for flag in _TELLING_FLAGS if flag in flags)


def describe_cpu(device: Device) -> DeviceRecord:
    """The record of the CPU, or of a virtual device made from it: the same in every framework."""
    return DeviceRecord(device, host_name(), None, host_memory(), next(iter(host_features()), None))


def usable_cores() -> int:
    """Cores that this process may use (a container may have fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host() -> HostFacts:
    import psutil

    return HostFacts(
        name=host_name(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory=host_memory(),
        load_percent=psutil.cpu_percent(interval=0.1),
        features=host_features(),
    )


def check_load() -> None:
    """Raise if other programs use the CPU; call it while this process computes nothing."""
    import psutil

    load = psutil.cpu_percent(interval=0.5)
    if load > _BUSY:
        raise NotMeasured(f"other programs use {load:.0f}% of the CPU, and {_BUSY:.0f}% is the most: try again later")


def undisturbed(measure: Callable[[], _Result]) -> _Result:
    """What was measured while no other program used the CPU; measured a second time if need be, then refused."""

    def measure_once() -> _Result:
        check_load()
        result = measure()
        check_load()
        return result

    try:
        return measure_once()
    except NotMeasured:
        return measure_once()


def gpus() -> list[GpuFacts]:
    """Every GPU that the driver knows; empty without a driver or without ``nvidia-ml-py``."""
    return _gpus_or_why()[0]


def why_no_gpus() -> str | None:
    """A sentence that says why :func:`gpus` is empty, or None if it is not."""
    return _gpus_or_why()[1]


def _gpus_or_why() -> tuple[list[GpuFacts], str | None]:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return [], "GPU facts need nvidia-ml-py: pip install 'manyhands[gpu]'"
    except Exception as error:  # report any problem of the driver with its own message
        return [], f"no NVIDIA driver found ({error})"
    try:
        driver = _text(_optional(nvml, nvml.nvmlSystemGetDriverVersion) or "unknown")
        count = _optional(nvml, nvml.nvmlDeviceGetCount) or 0
        readings = [_optional(nvml, lambda index=index: _gpu(nvml, index, driver)) for index in range(count)]
    finally:
        nvml.nvmlShutdown()
    known = [gpu for gpu in readings if gpu is not None]
    return known, None if known else "the NVIDIA driver sees no GPU that it can describe"


def visible_uuid(ordinal: int) -> str | None:
    """The UUID of the GPU that CUDA numbers ``ordinal`` in this process.

    ``CUDA_VISIBLE_DEVICES`` renumbers GPUs, so the driver's numbers are not CUDA's. If GPUs differ, CUDA also puts the
    fastest first unless configured otherwise. Then the UUID cannot be determined, and the result is None.
    """
    facts = gpus()
    if len({gpu.name for gpu in facts}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return facts[ordinal].uuid if ordinal < len(facts) else None
    chosen = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if ordinal >= len(chosen):
        return None
    entry = chosen[ordinal]
    if entry.isdecimal():
        return facts[int(entry)].uuid if int(entry) < len(facts) else None
    return next((gpu.uuid for gpu in facts if gpu.uuid.startswith(entry)), None)


def _gpu(nvml: Any, index: int, driver: str) -> GpuFacts:
    """The facts about one GPU; raises if the driver has lost the GPU, so that it has no name."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = _optional(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    capability = _optional(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return GpuFacts(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory=None if memory is None else Memory(total=memory.total, free=memory.free),
        load_percent=None if utilization is None else float(utilization),
        temperature=_optional(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        capability=None if capability is None else "{}.{}".format(*capability),
        driver=driver,
    )


def _optional(nvml: Any, ask: Any) -> Any:
    """A fact that some GPUs (MIG slices, old cards) do not report."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's fields of ``/proc/cpuinfo``; empty if there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
