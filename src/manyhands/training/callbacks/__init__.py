"""What a user adds to a training: callbacks and loggers. They run in the caller's process; see :mod:`.callback`."""
