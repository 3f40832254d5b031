"""Plain steps over arrays, with validation after each epoch, clipping and a schedule."""

import torch

from manyhands import torch as mh

torch.manual_seed(0)
data = (torch.randn(96, 8), torch.randint(3, (96,)))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
options = {"gradient_clip_val": 1.0, "schedule": mh.one_cycle, "step": mh.Step(optimize="off")}
trainer = mh.Trainer(max_epochs=2, batch_size=8, precision="fp32", quiet=True, **options)
if not torch.backends.cuda.is_built():
    trainer.ranks = [torch.device("cuda", 0)]  # in this process, on the device that is stood in for
trainer.fit(net, (data, data))
