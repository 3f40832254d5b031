# %% [markdown]
# # The book's chapter on GPUs
#
# Where is a tensor, how does it get somewhere else, and what does waiting for it cost? First the book's way, with its
# names; then what manyhands adds; then exercises. Everything runs without a GPU; with one, the same cells show it.
#
# The command first: it asks every installed framework, each in a process of its own, so that asking takes no GPU memory.

# %% [bash]
# manyhands devices

# %% [markdown]
# ## As in the book
#
# `try_gpu` gives GPU 0 if there is one, else the CPU. So the next cell runs anywhere. A device is your framework's own
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
# PyTorch's own names mean them, too. They show whether code for two GPUs is *right*; how *fast* it would be they cannot
# show, because they share the same cores.

# %%
first, second = mh.virtual_devices(2)
X, Y = torch.ones(2, 3, device="cuda:0"), torch.rand(2, 3, device="cuda:1")
try:
    X + Y
except RuntimeError as error:
    print(error)

# %% [markdown]
# An operation whose tensors are on two devices is the most common mistake of programs for several GPUs. Here you find it
# on a laptop. The book's answer is a copy, which is not made again where it is not needed:

# %%
Z = X.to("cuda:1")
print((Y + Z).device, Z.to("cuda:1") is Z)

# %% [markdown]
# ## Move a whole batch
#
# `mh.to` takes a tensor, a model, or any nesting of lists, tuples, dicts and dataclasses with tensors in it. What is in place
# already is not touched: you get the same object back, so you may call `to` as often as you like.

# %%
batch = {"image": torch.randn(8, 1, 28, 28), "label": torch.arange(8), "name": "a text stays a text"}
on_first = mh.to(batch, first)
print(on_first["image"].device, on_first["label"].device, on_first["name"])
print("moved again:", mh.to(on_first, first) is on_first)

# %% [markdown]
# `mh.copy` always makes new memory. Use it where you are going to write to a tensor that somebody else still reads.

# %%
spare = mh.copy(on_first, first)
spare["label"][0] = 99
on_first["label"][0].item(), spare["label"][0].item()

# %% [markdown]
# ## Find out what is in the wrong place
#
# Ask before you compute: `check_same_device` names everything that is not where the rest is, and the line that mends it.
# Here the batch was moved and the model was forgotten.

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
# wait until the device is done, and the device idle until the host goes on. `mh.guard` counts such waits, also on virtual
# devices, where they cost nothing.

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
# On an H200 one by one takes 53 ms, and recorded once as one plan 2.1 ms (`benchmarks/parallel.py`).
#
# ## Exercise: how fast is a device really?
#
# Data sheets give peaks. `manyhands devices --measure` times copies to and from each device, and matrix products on it. An
# H200 gave this (GB/s and TFLOP/s, PyTorch 2.11, from `docs/how/measurements.md`):
#
# | to device | pinned | to host | pinned | on device | fp32 | bf16 |
# |---|---|---|---|---|---|---|
# | 7.7 | 54.9 | 1.3 | 53.3 | 1930 | 50.9 | 716 |
#
# From page-locked ("pinned") memory a copy is seven times as fast; from the device to ordinary memory it is 1,500 times
# slower than on the device. From which size does a GPU pay, and are two devices twice as fast? `manyhands lab run
# cpu-or-gpu` and `manyhands lab run how-linear` answer these exercises on your machine.
#
# Next: [several GPUs](several_gpus.ipynb).
