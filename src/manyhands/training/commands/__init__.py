"""What ``manyhands train``, ``parity`` and ``convert`` do in every framework."""
