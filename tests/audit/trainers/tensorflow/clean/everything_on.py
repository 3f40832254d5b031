"""The trainer with everything on that looks at a training: callbacks, loggers, an average of the weights, metrics."""

import tempfile

import keras
import numpy as np

from manyhands import tensorflow as mh

rng = np.random.default_rng(0)
data = (rng.normal(size=(96, 8)).astype("float32"), rng.integers(3, size=96))
net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])


class Remember(mh.Callback):
    every = 4
    seen = 0

    def on_steps(self, training, figures):
        self.seen += 1


def large(outputs, targets):
    return (outputs > 0).sum() / outputs.shape[0]


remember = Remember()
watching = [remember, mh.EMA(0.9), mh.EarlyStopping("val_loss", patience=5), mh.LearningRateMonitor(every=4)]
with tempfile.TemporaryDirectory() as folder:
    loggers = [mh.loggers.CSVLogger(folder, every=4)]
    options = {"callbacks": watching, "loggers": loggers, "metrics": {"large": large}}
    trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True, **options)
    trainer.fit(net, (data, data))
assert remember.seen >= 4, remember.seen
