"""One folder per framework. Its ``devices.py`` follows ``manyhands.backends.protocol.Backend``."""
