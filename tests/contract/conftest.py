"""The few things that the contract suite must do in each framework's own way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest


class Native:
    """A framework's own hands: make a tensor, read it, compare memory, build a model."""

    tensor: Callable[[Any], Any]  # of float32 on the host
    values: Callable[[Any], Any]  # nested lists of what it holds
    address: Callable[[Any], int]  # where its memory is
    product: Callable[[Any, Any], Any]  # of two matrices
    model: Callable[[], Any]  # with parameters made, on the host; its first is a weight

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.backend = importlib.import_module(f"manyhands.backends.{framework}.devices")
        getattr(self, f"_{framework}")()

    def _torch(self) -> None:
        import torch

        self.tensor = lambda values: torch.tensor(values, dtype=torch.float32)
        self.values = lambda tensor: tensor.detach().cpu().tolist()
        self.address = lambda tensor: getattr(tensor, "_inner", tensor).data_ptr()
        self.product = torch.matmul
        self.model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def _jax(self) -> None:
        import jax
        import numpy as np
        from flax import nnx

        def model() -> Any:
            with jax.default_device(self.backend.cpu()):  # by default it would be made on a GPU
                return nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        self.tensor = lambda values: jax.device_put(np.asarray(values, dtype=np.float32), self.backend.cpu())
        self.values = lambda tensor: np.asarray(tensor).tolist()
        self.address = lambda tensor: tensor.unsafe_buffer_pointer()
        self.product = jax.numpy.matmul
        self.model = model

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

        self.tensor = tensor
        self.values = lambda tensor: tensor.numpy().tolist()
        self.address = address
        self.product = tf.linalg.matmul
        self.model = model

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

        self.tensor = lambda values: mx.nd.array(values, dtype="float32")
        self.values = lambda tensor: tensor.asnumpy().tolist()
        self.address = address
        self.product = mx.nd.dot
        self.model = model


@pytest.fixture(scope="session")
def native(framework: str, mh: Any) -> Native:
    return Native(framework)
