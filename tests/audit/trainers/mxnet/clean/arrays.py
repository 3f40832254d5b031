"""The trainer over arrays, with validation after each epoch."""

import mxnet as mx
import numpy as np

from manyhands import mxnet as mh

mx.npx.set_np()
rng = np.random.default_rng(0)
data = (rng.normal(size=(96, 8)).astype("float32"), rng.integers(3, size=96))
net = mx.gluon.nn.Dense(3, in_units=8)
net.initialize()
trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True)
trainer.fit(net, (data, data))
