# %% [markdown]
# # What have I got?
#
# This notebook finds the devices of a machine, and makes some where there are too few. Everything here runs without a
# GPU; with one, the same cells show it.
#
# The command first: it asks every installed framework, each in a process of its own, so that asking takes no GPU memory.

# %% [bash]
# manyhands devices

# %% [markdown]
# In a program you import the module of your framework: `torch` here, and `jax`, `tensorflow` and `mxnet` have the same names.
# A device is your framework's own object, in PyTorch a `torch.device`.

# %%
import torch

from manyhands import torch as mh

mh.num_gpus(), mh.try_gpu(), mh.try_all_gpus()

# %% [markdown]
# `try_gpu` is the book's function: GPU 0 if there is one, else the CPU. So the next cell runs anywhere.

# %%
device = mh.try_gpu()
X = torch.ones(2, 3, device=device)
X.device, mh.device_of(X) == device

# %% [markdown]
# ## Several devices without a GPU
#
# `virtual_devices(2)` makes two virtual CPU devices. They stand in for GPUs, and PyTorch's own names mean them too: code
# that was written for two GPUs runs as it is. They show whether such code is *right*; how *fast* it would be they cannot
# show, because all of them share the same cores.

# %%
mh.virtual_devices(2)
print(mh.num_gpus(), torch.cuda.device_count(), mh.try_all_gpus())
for record in mh.devices():
    print(record.device, "|", record.memory.total >> 30, "GiB")

# %% [markdown]
# They refuse what GPUs refuse. An operation whose tensors are on two devices is the most common mistake of programs for several
# GPUs, and here you find it on a laptop:

# %%
A = torch.ones(2, 3, device="cuda:0")
B = torch.ones(2, 3, device="cuda:1")
try:
    A + B
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## How fast is a device really?
#
# Data sheets give peaks. `manyhands devices --measure` times copies to and from each device, and matrix products on it. On a
# machine with GPUs this is the first thing to run: it shows a GPU in the wrong slot, and what page-locked ("pinned") host
# memory gains. An H200 gave this (GB/s and TFLOP/s, PyTorch 2.11, from `docs/how/measurements.md`):
#
# | to device | pinned | to host | pinned | on device | fp32 | bf16 |
# |---|---|---|---|---|---|---|
# | 7.7 | 54.9 | 1.3 | 53.3 | 1930 | 50.9 | 716 |
#
# From pinned memory a copy is seven times as fast; from the device to ordinary memory it is 1,500 times slower than on
# the device. `manyhands devices --json` prints all of this for programs.
#
# Next: [placing tensors and models](placing.ipynb).
