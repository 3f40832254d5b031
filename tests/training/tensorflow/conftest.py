"""Three virtual CPU devices, before anything starts TensorFlow."""

from __future__ import annotations

from manyhands.backends.tensorflow import devices as backend

backend.virtual_devices(3)
