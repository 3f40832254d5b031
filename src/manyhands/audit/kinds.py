"""The kinds of hidden waits and copies: their stable names, what they say, and the general cure."""

from __future__ import annotations

from enum import Enum

# The call of a READ that PyTorch makes by itself: ``torch.zeros(n)``, ``torch.full((2,), loss)``.
NUMBER = "a tensor given for a number"


class Kind(Enum):
    """What happened. The value is the name in ``--json`` and ``--sarif``, and never changes."""

    READ = "read"
    PRINT = "print"
    CONTROL_FLOW = "control-flow"
    SHAPE = "data-dependent-shape"
    TO_HOST = "copy-to-host"
    TO_DEVICE = "pageable-copy"
    BLOCKING = "blocking-copy"
    DATA = "python-data"
    IMPLICIT = "implicit-copy"
    SYNCHRONIZE = "synchronize"
    CHECK = "error-check"
    COLLECTIVE = "blocking-collective"
    LOADER = "data-loader"
    LAUNCHES = "tiny-launches"
    HOST_OPERATION = "host-operation"

    @property
    def title(self) -> str:
        """What happened, in a few words."""
        return _TITLES[self]

    def cure_in(self, framework: str) -> str:
        """What to do in a framework where no cure can be made from the line itself."""
        return _ELSEWHERE.get(framework, {}).get(self) or _CURES[self]


_TITLES = {
    Kind.READ: "the host waits for a value from the device",
    Kind.PRINT: "printing waits for a value from the device",
    Kind.CONTROL_FLOW: "a decision in Python waits for a value from the device",
    Kind.SHAPE: "the host waits for the size of a result",
    Kind.TO_HOST: "a copy to the host waits for the device",
    Kind.TO_DEVICE: "a copy from or to pageable memory blocks the host",
    Kind.BLOCKING: "a copy from pinned memory blocks, because it lacks non_blocking=True",
    Kind.DATA: "Python numbers are sent to the device, one blocking copy each time",
    Kind.IMPLICIT: "an operand on another device is copied implicitly",
    Kind.SYNCHRONIZE: "the host waits until the device has finished all its work",
    Kind.CHECK: "an operation waits for the device to check for errors",
    Kind.COLLECTIVE: "the host waits for the other processes",
    Kind.LOADER: "the data loader is slower than the device",
    Kind.LAUNCHES: "many tiny operations are launched one by one",
    Kind.HOST_OPERATION: "a graph calls Python: the device waits for the host, and the host for the device",
}
_CURES = {
    Kind.READ: "keep the value on the device (.detach()) and read it every 100 steps, or once at the end",
    Kind.PRINT: "print every 100 steps only, or collect .detach()ed values and print them at the end",
    Kind.CONTROL_FLOW: "decide on the device (torch.where), or look only every 100 steps",
    Kind.SHAPE: "compute with the mask on the whole tensor, whose size is known: torch.where(mask, x, 0)",
    Kind.TO_HOST: "copy with non_blocking=True and synchronize once before it is read, or copy once at the end",
    Kind.TO_DEVICE: "take pinned memory (DataLoader(pin_memory=True) or .pin_memory()) and non_blocking=True",
    Kind.BLOCKING: "add non_blocking=True",
    Kind.DATA: "make the tensor once, before the loop, or with torch.full/torch.arange on the device",
    Kind.IMPLICIT: "move the operand to the device once, before the loop",
    Kind.SYNCHRONIZE: "remove it: the framework keeps the device's work in order",
    Kind.CHECK: "use the variant that skips the check (torch.linalg.cholesky_ex, inv_ex, solve_ex); check rarely",
    Kind.COLLECTIVE: "start it with async_op=True and wait where its result is needed; remove barriers from the loop",
    Kind.LOADER: "give the DataLoader more num_workers, persistent_workers=True, or keep the data on the device",
    Kind.HOST_OPERATION: "write it with operations of the framework, or do it in the input pipeline",
    Kind.LAUNCHES: "work on the whole tensor at once instead of a Python loop over its parts (torch.vmap, batched ops)",
}
_LATER = "keep the {} on the device and read it every 100 steps, or once at the end"
_PRINT_RARELY = "print every 100 steps only, or collect the values and print them at the end"
_ELSEWHERE: dict[str, dict[Kind, str]] = {
    "jax": {
        Kind.READ: _LATER.format("array"),
        Kind.PRINT: _PRINT_RARELY,
        Kind.CONTROL_FLOW: "decide on the device (jnp.where, jax.lax.cond), or look only every 100 steps",
        Kind.TO_HOST: _LATER.format("array") + "; .copy_to_host_async() starts a copy without waiting",
    },
    "tensorflow": {
        Kind.READ: _LATER.format("tensor"),
        Kind.PRINT: _PRINT_RARELY,
        Kind.CONTROL_FLOW: "decide on the device (tf.where, tf.cond), or look only every 100 steps",
        Kind.TO_HOST: _LATER.format("tensor"),
    },
    "mxnet": {
        Kind.READ: _LATER.format("array"),
        Kind.PRINT: _PRINT_RARELY,
        Kind.CONTROL_FLOW: "decide on the device (mx.np.where), or look only every 100 steps",
        Kind.TO_HOST: _LATER.format("array"),
    },
}
