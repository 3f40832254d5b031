"""One adapter module per framework, and a fake one; each follows ``manyhands.backends.protocol.Backend``."""
