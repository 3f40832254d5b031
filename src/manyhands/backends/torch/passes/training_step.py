"""The passes that a training step goes through, in order.

Each is one file, with its reason. ``explain`` lists what each of them did. Splitting ``convolution_backward`` and the
optimizer's update (:mod:`.split`) is part of every capture and comes before them.
"""

from __future__ import annotations

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.convolutions import choose_convolutions
from manyhands.backends.torch.passes.fused_norms import fuse_norms
from manyhands.backends.torch.passes.redundant_biases import leave_out_biases
from manyhands.backends.torch.passes.rewriting import Pass, without_detaches
from manyhands.backends.torch.passes.small_together import cast_together, count_together

PASSES = (
    Pass("detaches", to_the_bit=True, apply=without_detaches),
    Pass("redundant biases", to_the_bit=False, apply=leave_out_biases),
    Pass("fused norms", to_the_bit=False, apply=fuse_norms),
    Pass("casts together", to_the_bit=True, apply=cast_together),
    Pass("counters together", to_the_bit=True, apply=count_together),
    Pass("convolutions", to_the_bit=False, apply=choose_convolutions),
)


def rewrite(trace: Trace, passes: tuple[Pass, ...] = PASSES) -> tuple[Trace, list[str]]:
    """The trace after these passes, and what each of them did."""
    done: list[str] = []
    for rewrite_pass in passes:
        trace, summary = rewrite_pass.apply(trace)
        if summary is not None:
            done.append(f"{rewrite_pass.name}: {summary}")
    return trace, done
