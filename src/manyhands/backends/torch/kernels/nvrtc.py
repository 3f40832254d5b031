"""Our own kernels: CUDA source, compiled by NVRTC when it is first needed, and launched on PyTorch's streams.

NVRTC comes with every build of PyTorch for NVIDIA GPUs, and compiles a file of kernels when a job starts. It needs no
toolkit, no C++ compiler and no headers; so the sources include none but ours (``*.cuh``, beside them).

    kernels = compile_file("batch_norm.cu", device, NUMBER="BFloat")
    kernels.launch("apply_relu", (blocks, 1), (32, 16), y, x, None, rows)

A launch can be captured in a CUDA graph like any other. Compiling and loading cannot: they must happen before.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import struct
import sys
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torch

from manyhands.errors import CannotCompile


class Launch(enum.Enum):
    """How a kernel starts; the values are those of the driver's launch attributes.

    ``AFTER``: when everything before it on the stream has ended.
    ``TOGETHER``: all of its blocks run at the same time, so they may wait for each other.
    ``EARLY``: while the kernel before it still runs. Both are ours: the one before says when (``launch_dependents``),
    and this one waits where it needs what that one writes (``griddepcontrol.wait``).
    """

    AFTER = 0
    TOGETHER = 2
    EARLY = 6


_LEAST_CAPABILITY = (8, 0)
_COOPERATIVE = 95  # the device's attribute


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("gap", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Kernels:
    """The kernels of a source file, loaded on one device."""

    def __init__(self, driver: ctypes.CDLL, module: ctypes.c_void_p, device: torch.device) -> None:
        self.driver, self._module, self._device = driver, module, device
        self._functions: dict[str, ctypes.c_void_p] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        block: tuple[int, int],
        *arguments: torch.Tensor | int | None,
        how: Launch = Launch.AFTER,
    ) -> None:
        """Launch a kernel on the device's current stream; None is a null pointer, a number an ``int``."""
        values = [
            ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_void_p(_address(argument))
            for argument in arguments
        ]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.launch_at(name, grid, block, places, how)

    def launch_at(
        self,
        name: str,
        grid: tuple[int, int],
        block: tuple[int, int],
        places: ctypes.Array[ctypes.c_void_p],
        how: Launch = Launch.AFTER,
    ) -> None:
        """The same, with the addresses of its arguments."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        kernel = self.function(name)
        with torch.cuda.device(self._device):
            if how is Launch.AFTER:
                status = self.driver.cuLaunchKernel(kernel, *grid, 1, *block, 1, 0, stream, places, None)
            else:
                attribute = _Attribute(how.value, value=1)
                config = _Config(*grid, 1, *block, 1, 0, stream, ctypes.pointer(attribute), 1)
                status = self.driver.cuLaunchKernelEx(ctypes.byref(config), kernel, places, None)
        _check(self.driver, status, f"the kernel {name} could not be launched")

    @functools.cache  # noqa: B019  there is one for each device and source, for ever
    def can_launch(self, how: Launch) -> bool:
        """Whether device and driver can start kernels this way, also in a CUDA graph."""
        if how is Launch.EARLY:
            return driver_version() >= 12030 and torch.cuda.get_device_capability(self._device) >= (9, 0)
        if how is Launch.TOGETHER:
            able = ctypes.c_int()
            asked = self.driver.cuDeviceGetAttribute(ctypes.byref(able), _COOPERATIVE, self._device.index)
            return driver_version() >= 11080 and asked == 0 and bool(able.value)
        return True

    def function(self, name: str) -> ctypes.c_void_p:
        """The kernel as CUDA's driver knows it."""
        if name not in self._functions:
            function = ctypes.c_void_p()
            status = self.driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            _check(self.driver, status, f"there is no kernel {name}")
            self._functions[name] = function
        return self._functions[name]


def float_bits(number: float) -> int:
    """The bits of a float32 as an integer: a launch passes numbers only as integers."""
    return int(struct.unpack("i", struct.pack("f", number))[0])


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_capability(device: torch.device) -> None:
    """Raise :class:`CannotCompile` if a GPU is too old for our kernels: they convert numbers to bfloat16."""
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise CannotCompile("the GPU is older than these kernels are written for")


def compile_file(file: str, device: torch.device, **definitions: str) -> Kernels:
    """The kernels of a source file beside this one; :class:`CannotCompile` says why there are none.

    ``definitions``: preprocessor macros for the source. Compilation is tried once.
    """
    kernels = _try_to_load(file, device, **definitions)
    if isinstance(kernels, str):
        raise CannotCompile(kernels)
    return kernels


@functools.cache
def _try_to_load(file: str, device: torch.device, **definitions: str) -> Kernels | str:
    """The kernels, or why there are none."""
    try:
        return _load(file, device, **definitions)
    except CannotCompile as error:
        return str(error)


def _load(file: str, device: torch.device, **definitions: str) -> Kernels:
    source = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    binary = _compile(source, file, options + [f"-D{name}={value}" for name, value in definitions.items()])
    driver = cuda_driver()
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # ensures that there is a context
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), binary), "compiled kernels could not be loaded")
    return Kernels(driver, module, device)


def _compile(source: str, file: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    headers = {header.name: header.read_text(encoding="utf-8") for header in _files() if header.name.endswith(".cuh")}
    included = len(headers), _strings(headers.values()), _strings(headers)
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), *included):
        raise CannotCompile("NVRTC cannot create a program")
    encoded = _strings(options)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise CannotCompile(f"NVRTC refuses {file}: {log.decode(errors='replace').strip()[:500]}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _files() -> Iterable[Traversable]:
    return resources.files(__package__).iterdir()


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _read(size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


def _nvrtc() -> ctypes.CDLL:
    """PyTorch's NVRTC: by name, if the loader finds it, or from the folder of its package."""
    if torch.version.cuda is None:
        raise CannotCompile("this PyTorch is not built for NVIDIA GPUs")
    major = torch.version.cuda.partition(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parent.parent
    return _library(name, *(os.fspath(path) for path in packages.glob(f"nvidia/*/lib/{name}")))


@functools.cache
def driver_version() -> int:
    """The CUDA version that the driver supports, such as 13000."""
    version = ctypes.c_int()
    driver = cuda_driver()
    _check(driver, driver.cuDriverGetVersion(ctypes.byref(version)), "the driver does not report its version")
    return version.value


def cuda_driver() -> ctypes.CDLL:
    """CUDA's driver; raises :class:`CannotCompile` if it is missing."""
    return _library("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _library(*names: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CannotCompile(f"the library {names[0]} is not there")


def _check(driver: ctypes.CDLL, status: int, action: str) -> None:
    if status:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(words))
        raise CannotCompile(f"{action}: {words.value.decode() if words.value else f'error {status}'}")
