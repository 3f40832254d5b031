"""What a guard leaves behind in its process: calls that are wrapped, and do nothing without a listener."""

from __future__ import annotations

import pytest
from support import run_python

pytestmark = pytest.mark.once

STATE = """
import sys, threading
import torch, torch.distributed
from manyhands import torch as mh
from manyhands.audit import watch
from manyhands.audit.torch import hooks
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.cuda_stand_in import streams
from manyhands.training import loop
from manyhands.training.torch.fast import python_state

OWNERS = [torch, torch.Tensor, virtual.VirtualTensor, torch.linalg, torch.nn.functional, torch.cuda, torch.accelerator]
OWNERS += [torch.cuda.Stream, torch.cuda.Event, streams, streams.Stream, streams.Event, torch.distributed]
OWNERS += [torch.optim.Optimizer, torch.nn.Module, torch.profiler.profile, threading.Thread, sys]
OWNERS += [compat.data_loader_iterator()]
of_optimizers = sys.modules["torch.optim.optimizer"]
CHANGING = {"Tensor.__init_subclass__", "sys.path_importer_cache", "sys.last_exc"}


def attributes():
    return {f"{owner.__name__}.{name}": value for owner in OWNERS for name, value in list(vars(owner).items())}


def state():
    return {
        "hooks of optimizers": [dict(of_optimizers._global_optimizer_pre_hooks)]
        + [dict(of_optimizers._global_optimizer_post_hooks)],
        "hooks of modules": [dict(hooks) for hooks in compat.HOOKS_OF_EVERY_MODULE],
        "modes": [*compat.function_mode_stack(), *compat.dispatch_mode_stack()],
        "listeners": [*loop.step_listeners, *hooks.steps.listeners],
        "observers": [observer for observer in virtual.observers if observer is not hooks._number_read],
        "imports": list(sys.meta_path),
        "sinks": watch.listening,
    }


def is_inert(value, before):
    value = getattr(value, "__func__", value)
    return getattr(value, "__wrapped__", None) in (before, getattr(before, "__func__", before))


def check(before, attributes_before):
    assert state() == before, (before, state())
    now = attributes()
    for name in now.keys() & attributes_before.keys() - CHANGING:
        same = now[name] is attributes_before[name] or now[name] == attributes_before[name]
        assert same or is_inert(now[name], attributes_before[name]), name
    net = torch.nn.Linear(2, 2)
    assert python_state.hooks(net, torch.optim.SGD(net.parameters(), lr=0.1)) is None

"""

GUARD = """
before = state(), attributes()
with mh.guard("warn"):
    torch.ones(2).sum().item()
check(*before)
"""


def test_the_process_is_as_before() -> None:
    done = run_python(STATE + GUARD, MANYHANDS_VIRTUAL_DEVICES="")
    assert done.returncode == 0, done.stderr
