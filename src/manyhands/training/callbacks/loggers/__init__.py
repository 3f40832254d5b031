"""Loggers: callbacks that write figures somewhere, in a separate thread."""
