"""In the run with virtual devices, files that name no device would prove the same of the same CPU tensors again."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

if importlib.util.find_spec("torch"):
    importlib.import_module("manyhands.torch")  # makes the virtual devices, before a file asks whether there are any

# test_guards_changes.py stays: what a trace stands on is noticed also while virtual devices listen to every operation.
collect_ignore = (
    [
        "capture/test_capture_leaves_nothing.py",
        "capture/test_fast_match.py",
        "capture/test_reasons.py",
        "capture/test_trace.py",
        "dynamo/test_dynamo.py",
        "guards/test_guards.py",
        "guards/test_guards_by_dynamo.py",
        "passes/test_batched_casts.py",
        "passes/test_fused_regions.py",
        "passes/test_fused_regions_random.py",
        "run/test_float64.py",
        "run/test_float64_updates.py",
        "run/test_result_copies.py",
        "run/test_reuse_memory.py",
        "run/test_streams.py",
        "test_code_names.py",
        "test_newcomers.py",
        "test_parallel_decorator.py",
    ]
    if os.environ.get("MANYHANDS_VIRTUAL_DEVICES")
    else []
)
missing = [name for name in collect_ignore if not (Path(__file__).parent / name).exists()]
assert not missing, f"moved: {missing}"
