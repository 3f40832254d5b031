"""The trainer over arrays, with validation after each epoch."""

import numpy as np
from flax import nnx

from manyhands import jax as mh

rng = np.random.default_rng(0)
data = (rng.normal(size=(96, 8)).astype("float32"), rng.integers(3, size=96))
net = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True)
trainer.fit(net, (data, data))
