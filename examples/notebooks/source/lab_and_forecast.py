# %% [markdown]
# # Will it scale? Will it fit?
#
# Two GPUs rarely train twice as fast as one: they have to add up their gradients, and each gets a smaller part of the
# batch. `manyhands forecast` says what N devices would give, before they are bought, rented or waited for.
#
# ## From published numbers
#
# A forecast needs the time of a step on one device, the size of the gradients and the link between devices. Here is VGG-16 on an NVIDIA
# P100, as TensorFlow's benchmarks of 2017 give it: 32 samples in 0.222 s, 553 MB of gradients.

# %%
import torch
from IPython.display import Image
from torch import nn

from manyhands import torch as mh
from manyhands.forecast.forecast import Forecast
from manyhands.forecast.links import link
from manyhands.forecast.profile import Profile

one = Profile.of(0.222, 553e6, batch_size=32)
forecast = Forecast.of(one, link("nvlink-p100-nccl1"), [1, 2, 4, 8], per_device=True)
print(forecast)

# %% [markdown]
# The first line is the answer. A device *pays* if at least 80% of its time goes into training. The table says why eight
# devices do not, and from which batch size they would. TensorFlow measured an efficiency of 71% for eight devices; the
# forecast is 67%.

# %%
Image(forecast.plot("scaling.png"), width=720)

# %% [markdown]
# ## Another link
#
# The same step over other links. With small shards and gradients as large as these, the link decides.

# %%
for name in ("ethernet-10g", "ethernet-100g", "pcie", "nvlink"):
    row = Forecast.of(one, link(name), [1, 8], per_device=True).rows[-1]
    print(f"{name:14} 8 devices: speed-up {row.speed_up:.1f}, most is lost to {row.worst_term}")

# %% [markdown]
# ## Your own model: will it fit?
#
# `mh.forecast(model, batch)` measures a step of your model on the device that is here, and gives the same table. (Measure
# on a machine that does nothing else.) It also counts memory, byte by byte, by what it holds. So a small batch on a laptop
# tells you what a large one would take on a GPU.

# %%
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
batch = torch.rand(64, 256), torch.randint(10, (64,))
memory = mh.forecast(net, batch, devices=[1, 2], link="nvlink", optimizer="adam").rows[-1].memory
print(f"peak of each of two devices: {memory.total / 1e6:.1f} MB")
for part, size in memory.as_dict().items():
    print(f"  {part:12} {size / 1e6:6.2f} MB")

# %% [markdown]
# The command does the same without a program: `manyhands forecast train.py:make --link nvlink --devices 1,2,8`.
#
# ## The lab
#
# The lab has the experiments and exercises of the book *Dive into Deep Learning* about devices, overlap and training. Each is
# a short file with its question, the code that a reader would write, and what is measured and drawn.

# %% [bash]
# manyhands lab

# %% [markdown]
# One experiment takes some seconds. `manyhands lab run all --quick` runs all of them in some minutes.

# %% [bash]
# manyhands lab run all-busy --quick --html lab-report.html 2>&1 | tail -n 9

# %% [markdown]
# Results are compared before times are believed. [The report](../../docs/reports/lab-report.html) has the tables and the
# plots, and names the machine. Virtual devices are marked as such.
#
# Next: [moving between frameworks](frameworks.ipynb).
