"""The trainer with everything on that looks at a training: callbacks, loggers, metrics."""

import tempfile

import mxnet as mx
import numpy as np

from manyhands import mxnet as mh

mx.npx.set_np()
rng = np.random.default_rng(0)
data = (rng.normal(size=(96, 8)).astype("float32"), rng.integers(3, size=96))
net = mx.gluon.nn.Dense(3, in_units=8)
net.initialize()


class Remember(mh.Callback):
    every = 4
    seen = 0

    def on_steps(self, training, figures):
        self.seen += 1


def large(outputs, targets):
    return (outputs > 0).sum() / outputs.shape[0]


remember = Remember()
watching = [remember, mh.EarlyStopping("val_loss", patience=5), mh.LearningRateMonitor(every=4)]
with tempfile.TemporaryDirectory() as folder:
    loggers = [mh.loggers.CSVLogger(folder, every=4)]
    options = {"callbacks": watching, "loggers": loggers, "metrics": {"large": large}}
    trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True, **options)
    trainer.fit(net, (data, data))
assert remember.seen >= 4, remember.seen
