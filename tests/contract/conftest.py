"""The few things that the contract suite must do in each framework's own way."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Native:
    """A framework's own hands: make a tensor, read it, compare memory, build a model."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.backend = importlib.import_module(f"manyhands.backends.{framework}.devices")
        getattr(self, f"_{framework}")()

    def tensor(self, values: Any) -> Any:
        """A float32 tensor on the host."""
        return self._tensor(values)

    def values(self, tensor: Any) -> Any:
        """Nested lists of what the tensor holds."""
        return self._values(tensor)

    def address(self, tensor: Any) -> int:
        """Where its memory is."""
        return self._address(tensor)

    def product(self, left: Any, right: Any) -> Any:
        """The product of two matrices."""
        return self._product(left, right)

    def model(self) -> Any:
        """A model of the framework with parameters made, on the host; its first is a weight."""
        return self._model()

    def _torch(self) -> None:
        import torch

        self._tensor = lambda values: torch.tensor(values, dtype=torch.float32)
        self._values = lambda tensor: tensor.detach().cpu().tolist()
        self._address = lambda tensor: getattr(tensor, "_inner", tensor).data_ptr()
        self._product = torch.matmul
        self._model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def _jax(self) -> None:
        import jax
        import numpy as np
        from flax import nnx

        def model() -> Any:
            with jax.default_device(self.backend.cpu()):  # by default it would be made on a GPU
                return nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        self._tensor = lambda values: jax.device_put(np.asarray(values, dtype=np.float32), self.backend.cpu())
        self._values = lambda tensor: np.asarray(tensor).tolist()
        self._address = lambda tensor: tensor.unsafe_buffer_pointer()
        self._product = jax.numpy.matmul
        self._model = model

    def _tensorflow(self) -> None:
        import ctypes

        import keras
        import tensorflow as tf

        unwrap = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )

        def tensor(values: Any) -> Any:
            with tf.device("/device:CPU:0"):
                return tf.constant(values, dtype=tf.float32)

        def model() -> Any:
            with tf.device("/device:CPU:0"):
                made = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
                made.build((None, 3))
            return made

        def address(tensor: Any) -> Any:
            # The first field of DLPack's structure; NumPy would show the address of a copy for some tensors.
            capsule = tf.experimental.dlpack.to_dlpack(tensor)
            return ctypes.c_void_p.from_address(unwrap(capsule, b"dltensor")).value

        self._tensor = tensor
        self._values = lambda tensor: tensor.numpy().tolist()
        self._address = address
        self._product = tf.linalg.matmul
        self._model = model

    def _mxnet(self) -> None:
        import ctypes

        import mxnet as mx

        def address(tensor: Any) -> Any:
            pointer = ctypes.c_void_p()
            tensor.wait_to_read()
            mx.base.check_call(mx.base._LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(pointer)))
            return pointer.value

        def model() -> Any:
            made = mx.gluon.nn.Dense(4, in_units=3)
            made.initialize(ctx=mx.cpu())
            return made

        self._tensor = lambda values: mx.nd.array(values, dtype="float32")
        self._values = lambda tensor: tensor.asnumpy().tolist()
        self._address = address
        self._product = mx.nd.dot
        self._model = model


@pytest.fixture(scope="session")
def native(framework: str, mh: Any) -> Native:
    return Native(framework)


@pytest.fixture
def two(mh: Any) -> list[Any]:
    """Two devices; skipped where there is only one."""
    if mh.num_gpus() < 2:
        pytest.skip("needs two devices: MANYHANDS_VIRTUAL_DEVICES=3")
    return [mh.gpu(0), mh.gpu(1)]
