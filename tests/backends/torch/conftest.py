"""In the run with virtual devices, files that name no device would prove the same of the same CPU tensors again."""

from __future__ import annotations

import importlib
import importlib.util
import os

if importlib.util.find_spec("torch"):
    importlib.import_module("manyhands.torch")  # makes the virtual devices, before a file asks whether there are any

# test_guards_changes.py stays: what a trace stands on is noticed also while virtual devices listen to every operation.
collect_ignore = (
    [
        "test_batched_casts.py",
        "test_capture_leaves_nothing.py",
        "test_code_names.py",
        "test_dynamo.py",
        "test_fast_match.py",
        "test_float64.py",
        "test_float64_updates.py",
        "test_fused_regions.py",
        "test_fused_regions_random.py",
        "test_guards.py",
        "test_guards_by_dynamo.py",
        "test_newcomers.py",
        "test_parallel_decorator.py",
        "test_reasons.py",
        "test_result_copies.py",
        "test_reuse_memory.py",
        "test_streams.py",
        "test_trace.py",
    ]
    if os.environ.get("MANYHANDS_VIRTUAL_DEVICES")
    else []
)
