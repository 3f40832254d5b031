"""Three virtual CPU devices, before anything starts TensorFlow; and graphs that run as they are written."""

from __future__ import annotations

from support import leave_graphs_as_they_are

from manyhands.backends.tensorflow import devices as backend

backend.virtual_devices(3)
leave_graphs_as_they_are()
