"""The commands ``manyhands train``, ``parity`` and ``convert``, in every framework."""
