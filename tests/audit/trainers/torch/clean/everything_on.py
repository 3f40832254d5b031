"""The trainer with everything on that looks at a training: callbacks, loggers, an average of the weights, metrics."""

import tempfile

import torch

from manyhands import torch as mh

torch.manual_seed(0)
data = (torch.randn(96, 8), torch.randint(3, (96,)))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


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
    trainer = mh.Trainer(
        max_epochs=2, batch_size=8, precision="fp32", quiet=True, step=mh.Step(optimize="off"), **options
    )
    if not torch.backends.cuda.is_built():
        trainer.ranks = [torch.device("cuda", 0)]  # in this process, on the device that is stood in for
    trainer.fit(net, (data, data))
assert remember.seen >= 4, remember.seen
