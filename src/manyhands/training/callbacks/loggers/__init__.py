"""Loggers: callbacks that write figures somewhere, in a thread of their own."""
