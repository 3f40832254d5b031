"""JAX's training is tested on three virtual devices: they have to be asked for before JAX starts."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("jax") is None:
    collect_ignore_glob.append("*")
else:
    os.environ["MANYHANDS_VIRTUAL_DEVICES"] = os.environ.get("MANYHANDS_VIRTUAL_DEVICES") or "3"  # empty is none
