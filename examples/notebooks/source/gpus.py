# %% [markdown]
# # GPUs, as in Dive into Deep Learning
#
# Where is a tensor, how does it get somewhere else, and what does waiting for it cost? This notebook follows the chapter
# [GPUs](https://d2l.ai/chapter_builders-guide/use-gpu.html) of the book *Dive into Deep Learning*: first the book's
# code, then what manyhands adds, then exercises. Everything runs without a GPU. With one, the same cells use it.
#
# First, see what you have. The command asks each installed framework in a process of its own, so it takes no GPU memory.

# %% [bash]
# manyhands devices

# %% [markdown]
# ## As in the book
#
# `try_gpu` returns GPU 0 if there is one, else the CPU. So the next cell runs anywhere. A device is your framework's own
# object, in PyTorch a `torch.device`; `jax`, `tensorflow` and `mxnet` have the same names.

# %%
import torch
from matplotlib import pyplot as plt

from manyhands import torch as mh
from manyhands.errors import DeviceMismatch

print(mh.num_gpus(), mh.try_gpu(), mh.try_all_gpus())
X = torch.ones(2, 3, device=mh.try_gpu())
X.device

# %% [markdown]
# The chapter goes on with two GPUs. `virtual_devices(2)` makes two virtual CPU devices that stand in for them, and
# PyTorch's own names (`cuda:0`) mean them, too. They show whether code for two GPUs is *right*. They cannot show how *fast*
# it would be, because they share the same cores.

# %%
first, second = mh.virtual_devices(2)
X, Y = torch.ones(2, 3, device="cuda:0"), torch.rand(2, 3, device="cuda:1")
try:
    X + Y
except RuntimeError as error:
    print(error)

# %% [markdown]
# An operation on tensors of two devices is the most common mistake in programs for several GPUs. Here you find it on a
# laptop. The book's answer is a copy to one of the devices. A tensor that is already there is not copied again:

# %%
Z = X.to("cuda:1")
print((Y + Z).device, Z.to("cuda:1") is Z)

# %% [markdown]
# ## Move a whole batch
#
# `mh.to` takes a tensor, a model, or any nesting of lists, tuples, dicts and dataclasses with tensors in it. What is already
# in place is not touched: you get the same object back. So you may call `to` as often as you like.

# %%
batch = {"image": torch.randn(8, 1, 28, 28), "label": torch.arange(8), "name": "a text stays a text"}
on_first = mh.to(batch, first)
print(on_first["image"].device, on_first["label"].device, on_first["name"])
print("moved again:", mh.to(on_first, first) is on_first)

# %% [markdown]
# `mh.copy` always makes new memory. Use it before you write to a tensor that other code still reads.

# %%
spare = mh.copy(on_first, first)
spare["label"][0] = 99
on_first["label"][0].item(), spare["label"][0].item()

# %% [markdown]
# ## Find out what is in the wrong place
#
# Ask before you compute. `check_same_device` names every tensor with its device, and the line to write. Here the batch was
# moved and the model was forgotten.

# %%
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
try:
    mh.check_same_device(net=net, batch=on_first)
except DeviceMismatch as error:
    print(error)

# %%
net = mh.to(net, first)
mh.check_same_device(net=net, batch=on_first)
net(on_first["image"]).shape

# %% [markdown]
# ## Exercise: what does looking at a number cost?
#
# *Compute 1000 products, and log the norm of each: one by one, or all at the end?* On a GPU each `.item()` makes the host
# wait until the device is done; then the device is idle until the host goes on. `mh.guard` counts such waits. It counts
# them on virtual devices, too, where they cost nothing.

# %%
A = torch.randn(100, 100, device="cuda:0") / 10


def one_by_one():
    return [(A @ A).norm().item() for _ in range(1000)]


def at_the_end():
    return torch.stack([(A @ A).norm() for _ in range(1000)]).tolist()


waits = {}
for way in (one_by_one, at_the_end):
    with mh.guard("count") as seen:
        way()
    waits[way.__name__.replace("_", " ")] = len(seen)
waits

# %%
figure, axes = plt.subplots(figsize=(5, 1.6))
axes.barh(list(waits), list(waits.values()), color=["#b35900", "#4051b5"])
axes.set(xscale="log", xlim=(0.8, 5000), xlabel="waits for the device")
axes.bar_label(axes.containers[0], padding=4)
plt.show()

# %% [markdown]
# On an H200 reading the norms one by one takes 53 ms. As one plan of `mh.parallel` the same work takes 2.1 ms
# (`benchmarks/parallel.py`, torch 2.11, 2026-11-15).
#
# ## Exercise: how fast is a device really?
#
# Data sheets give peaks. `manyhands devices --measure` times copies to and from each device, and matrix products on it. An
# H200 gave this (copies in GB/s, products in TFLOP/s; PyTorch 2.11, from
# [the measurements](../../docs/how/measurements.md)):
#
# | to device | pinned | to host | pinned | on device | fp32 | bf16 |
# |---|---|---|---|---|---|---|
# | 7.7 | 54.9 | 1.3 | 53.3 | 1930 | 50.9 | 716 |
#
# A copy from page-locked ("pinned") memory is seven times as fast as one from ordinary memory. A copy from the device to
# ordinary memory is 1,500 times slower than a copy on the device. From which size does a GPU pay, and are two devices twice
# as fast? `manyhands lab run cpu-or-gpu` and `manyhands lab run how-linear` answer these exercises on your machine.
#
# Next: [several GPUs](several_gpus.ipynb).
