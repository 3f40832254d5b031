"""Forecasts time and memory on N devices from a measured step of one device.

``measured.py`` measures a step, ``torch.py`` and ``jax.py`` are its two methods; all else is arithmetic without a
framework: ``profile.py`` (a step as data), ``links.py``, ``scaling.py`` (the model), ``forecast.py`` (the result).
"""
