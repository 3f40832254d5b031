"""The trainer over arrays, with validation after each epoch."""

import keras
import numpy as np

from manyhands import tensorflow as mh

rng = np.random.default_rng(0)
data = (rng.normal(size=(96, 8)).astype("float32"), rng.integers(3, size=96))
net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True)
trainer.fit(net, (data, data))
