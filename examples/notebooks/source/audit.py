# %% [markdown]
# # Why is it slow?
#
# A GPU computes while Python goes on: calls return before their results are there. A line that needs a *value*, such as
# `loss.item()`, makes the host wait, and while it waits it launches nothing. `manyhands audit` runs a program unchanged and lists every
# such line with its cost and its cure.
#
# Here is a loop as it is often written. Three of its lines make the host wait in every step.

# %% [writefile train.py]
import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda:0")
X, y = torch.randn(640, 32), torch.randint(0, 4, (640,))
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for i in range(0, 640, 32):
    X_batch = X[i : i + 32].to(device)
    y_batch = y[i : i + 32].to(device)
    loss = nn.functional.cross_entropy(net(X_batch), y_batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("mean loss:", sum(losses) / len(losses))

# %% [markdown]
# On a machine with a GPU you write `manyhands audit train.py`, and the waits are measured. Without one, `--as-if-gpu` lets a virtual device
# stand in for the GPU and predicts the times from those of an H200.

# %% [bash]
# manyhands audit --as-if-gpu --html audit-report.html train.py 2>&1

# %% [markdown]
# Each row has the line, how often it waited, what it cost and what to write instead. `waited` is the host's time in that
# line. `gained` is what a step would gain without it. That is less if the wait only moves to the next line.
# [The report](../../docs/reports/audit-report.html) has a timeline of the steps with the waits in red.
#
# The cured program copies all data once and keeps the losses on the device. They are read once, after the loop.

# %% [writefile cured.py]
import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda:0")
X, y = torch.randn(640, 32).to(device), torch.randint(0, 4, (640,)).to(device)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for i in range(0, 640, 32):
    loss = nn.functional.cross_entropy(net(X[i : i + 32]), y[i : i + 32])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
print("mean loss:", torch.stack(losses).mean().item())

# %% [bash]
# manyhands audit --as-if-gpu --fail-over 5% cured.py 2>&1

# %% [markdown]
# With `--fail-over 5%` the command fails if removing the findings would gain more than 5% of a step. So one line of CI keeps
# a loop free of waits.
#
# ## In a program, and in tests
#
# A guard watches a block of code. `"count"` collects, `"warn"` warns, and `"forbid"` raises *before* the host waits. In tests the mark
# `@pytest.mark.no_stalls` does it.

# %%
import torch

from manyhands import torch as mh
from manyhands.errors import HiddenWait

device, _ = mh.virtual_devices(2)
loss = torch.ones((), device=device)
with mh.guard("count") as seen:
    print("loss", round(loss.item(), 3))
    kept = loss.detach()
print("waits:", len(seen))

# %%
try:
    with mh.guard("forbid"):
        loss.item()
except HiddenWait as error:
    print(error)

# %% [markdown]
# `mh.to` and `mh.copy` are moves that you asked for, so guards let them pass. The trainer keeps its own steps free of waits.
# Its tests check that with this auditor.
#
# Next: [will it scale?](lab_and_forecast.ipynb)
