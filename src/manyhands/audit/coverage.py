"""What the hooks of each framework see, and what they cannot: the table of docs/audit.md, held by a test."""

from __future__ import annotations

from manyhands.audit.kinds import Kind

# What of a kind a framework's hooks see. A kind that is not listed does not exist there, or is not seen.
SEEN: dict[str, dict[Kind, str]] = {
    "torch": {
        Kind.READ: "`.item()`, `.tolist()`, `float`, `int`, an index that is a tensor",
        Kind.PRINT: "`print(tensor)`, f-strings, `format`, `repr`",
        Kind.CONTROL_FLOW: "`if tensor`, `bool`, `torch.equal`, `torch.allclose`, `in`",
        Kind.SHAPE: "`nonzero`, `argwhere`, `unique`, `masked_select`, `x[mask]`, `torch.where(mask)`, "
        "`bincount`, `repeat_interleave`, `one_hot` without a number of classes",
        Kind.TO_HOST: '`.cpu()`, `.to("cpu")`, `.numpy(force=True)`, `copy_`',
        Kind.TO_DEVICE: "`.to(device)`, `.cuda()`, `copy_`, `torch.as_tensor(array, device=...)`, also with "
        "`non_blocking=True`",
        Kind.BLOCKING: "the same from pinned memory without `non_blocking=True`",
        Kind.DATA: "`torch.tensor(data, device=...)`, `new_tensor`, `x[0] = 1.0`",
        Kind.IMPLICIT: "indices and values on the host in `x[...]` and `x[...] = y`",
        Kind.SYNCHRONIZE: "`torch.cuda.synchronize`, `Stream.synchronize`, `Event.synchronize`",
        Kind.CHECK: "`torch.linalg.cholesky`, `inv`, `solve`, `eigh`, `det`, `slogdet`",
        Kind.COLLECTIVE: "`torch.distributed.barrier`; other collectives on Gloo, without `async_op=True`",
        Kind.LOADER: "`DataLoader`; predicted only from 20 ms a batch on",
        Kind.LAUNCHES: "predicted only (`--as-if-gpu`); in at least every second step",
    },
    "jax": {
        Kind.READ: "`float`, `int`, `.item()`, `.tolist()`, an index that is an array",
        Kind.PRINT: "`print(array)`, f-strings, `format`, `repr`",
        Kind.CONTROL_FLOW: "`if array`, `bool`",
        Kind.TO_HOST: "`np.asarray`, `np.array`, `jax.device_get`",
        Kind.SYNCHRONIZE: "`block_until_ready`",
    },
    "tensorflow": {
        Kind.READ: "`float`, `int`, an index that is a tensor",
        Kind.PRINT: "`print(tensor)`, f-strings, `format`, `repr`",
        Kind.CONTROL_FLOW: "`if tensor`, `bool`",
        Kind.TO_HOST: "`.numpy()`, `np.asarray`, `np.array`",
        Kind.HOST_OPERATION: "`tf.py_function`, `tf.numpy_function` in a `tf.function`",
    },
    "mxnet": {
        Kind.READ: "`float`, `int`, `.item()`, `.tolist()`, `asscalar`",
        Kind.PRINT: "`print(array)`, f-strings, `repr`",
        Kind.CONTROL_FLOW: "`if array`, `bool`",
        Kind.TO_HOST: "`asnumpy`",
        Kind.SYNCHRONIZE: "`wait_to_read`, `waitall`",
    },
}
# Why the gain of --prove cannot be measured where the CPU stands in for a GPU; JAX and MXNet do not wait there either.
NOT_MEASURED_ON_CPU = {
    "torch": "the gain is not measured: PyTorch computes synchronously on a CPU, so nothing waits",
    "tensorflow": "the gain is not measured: TensorFlow computes synchronously on a CPU, so nothing waits",
}
# What waits or copies without being seen.
NOT_SEEN: dict[str, tuple[str, ...]] = {
    "torch": (
        "waits inside C++ that no call of the table leads to (extensions, `torch.save` of a GPU tensor)",
        "other processes: data loader workers, ranks",
        "tiny operations on a real GPU, line by line; how busy it is says whether the host is the limit",
    ),
    "jax": (
        "NumPy arrays that a jitted function is given, which are copied in every call",
        "steps, unless `manyhands.jax.Trainer` or `jax.profiler.StepTraceAnnotation` makes them",
        "how busy the device is",
    ),
    "tensorflow": ("eager copies between devices, which happen in C++", "how busy the device is"),
    "mxnet": ("copies between contexts in one operation, which happen in C++", "how busy the device is"),
}
