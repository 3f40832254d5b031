"""Plain steps over a DataLoader."""

import torch

from manyhands import torch as mh

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
net = torch.nn.Linear(8, 3)
trainer = mh.Trainer(max_epochs=1, precision="fp32", quiet=True, step=mh.Step(optimize="off"))
if not torch.backends.cuda.is_built():
    trainer.ranks = [torch.device("cuda", 0)]
trainer.fit(net, torch.utils.data.DataLoader(data, 8, shuffle=True))
