"""Virtual CPU devices, so that PyTorch code for several GPUs runs, and fails, as it would there.

A :class:`VirtualTensor` is a tensor that is on virtual device 1 and holds a plain tensor inside; every operation is
computed on what is inside, and its results are wrapped again. Operands on different devices are refused in PyTorch's
own words, as with GPUs (a scalar of the host is accepted everywhere).

**Two names.** To the dispatcher the device is ``cpu:1``, which PyTorch knows as a name: its backward pass has no thread
for a GPU that is not there. Where virtual devices stand in for GPUs (:mod:`..cuda_stand_in`), Python sees ``cuda:1``:
``x.device``, ``x.is_cuda``, ``repr(x)``, and every call may name it so. :func:`home` and :func:`actual` give the
first name, :func:`shown_device` the second.

Two hooks create tensors on virtual devices: a dispatch mode sees every ``torch.ones(..., device=...)``, ``x.to(...)``
and ``Module.to``, also in a backward pass; a function mode translates names before PyTorch looks for a GPU, and sees
``torch.tensor([...], device=...)``, which never reaches the dispatcher with its device. Modes hold for one thread: they
are set in the thread that asks for virtual devices and in every thread that is started later. :func:`place` works in
every thread, and so does what is done within :func:`hooks`.

``torch.device("cpu:0")`` is then virtual device 0; as a *name* for our verbs, ``"cpu:0"`` is the host, as everywhere.

It is not fast: an operation costs some microseconds more. A tensor cannot grow in place: ``x.resize_(...)`` and
an ``out=`` that would need more memory are refused.
"""

from manyhands.backends.torch.virtual.modes import (
    NameTranslation,
    hooks,
    instead,
    is_hooked,
    is_marked_pinned,
    mark_pinned,
    no_hooks,
    only_hooks,
    only_known_functions,
    start,
    stop,
)
from manyhands.backends.torch.virtual.names import (
    actual,
    count,
    device,
    is_virtual,
    of_thread,
    shown_device,
    stands_in,
)
from manyhands.backends.torch.virtual.tensor import VirtualTensor, home, inside, observers, place
