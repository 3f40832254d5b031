"""Callbacks and loggers: code that a user adds to a training. It runs in the caller's process; see :mod:`.callback`."""
