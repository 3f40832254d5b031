"""A model of the user's that reads a value in every step."""

import torch

from manyhands import torch as mh

torch.manual_seed(0)


class Reading(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def forward(self, x):
        y = self.layer(x)
        self.largest = float(y.max())  # planted: read
        return y


data = (torch.randn(96, 8), torch.randint(3, (96,)))
trainer = mh.Trainer(max_epochs=1, batch_size=8, precision="fp32", quiet=True, step=mh.Step(optimize="off"))
if not torch.backends.cuda.is_built():
    trainer.ranks = [torch.device("cuda", 0)]
trainer.fit(Reading(), data)
