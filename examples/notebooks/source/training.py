# %% [markdown]
# # Training on all devices
#
# `mh.Trainer` trains on every GPU of a machine, or on the CPU where there is none. Its promise: **N devices give the
# answer of one device, only sooner.** This notebook trains on one device and on two, and compares the weights. The two are
# virtual CPU devices, each a process, so everything runs on a laptop. They share its cores: two GPUs would be
# sooner, two virtual devices are not.

# %%
import torch
from IPython.display import Image
from torch import nn

from manyhands import torch as mh
from manyhands.book.torch import load_data_fashion_mnist

train, test = load_data_fashion_mnist(batch_size=128)
train, test = train.first(3000), test.first(500)  # a small part: seconds on a CPU


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


# %% [markdown]
# ## One device
#
# A step takes 128 samples, the `batch_size` of the data. `run` is the folder that keeps figures, checkpoints and a picture.
# No step waits for a figure: losses stay on the device and are shown late.

# %%
options = {"max_epochs": 5, "lr": 0.1, "precision": "fp64"}
one = make_net()
result = mh.Trainer(devices="cpu", run="runs/one", **options).fit(one, train, test)
print(result)

# %%
Image("runs/one/curves.png", width=480)

# %% [markdown]
# ## Two devices
#
# Only `devices` changes. The batch is *global*: each device gets 64 of the 128 samples, and the gradients are summed. So
# neither the learning rate nor anything else has to be tuned again. On a machine with two GPUs write `devices=2`.

# %%
two = make_net()
result = mh.Trainer(devices="cpu:2", run="runs/two", **options).fit(two, train, test)
print(result)


def difference(one, other):
    """The largest difference of two nets' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


print("largest difference of a weight:", difference(one, two))

# %% [markdown]
# The two sums are added up in another order, so they may differ by rounding. We computed in float64 to show that there is no other
# difference; with `precision="auto"`, the default, weights agree to the precision of float32. `manyhands parity` makes this test
# with any model of yours: `manyhands parity script.py:make --devices 2`.
#
# ## Stopped, and resumed
#
# A job on a shared machine is stopped sooner or later. `resume="auto"` goes on from the last checkpoint, at the very batch, and
# ends with the same bits as a job that was never stopped. Here the job ends itself after 60 steps, in the middle of an epoch;
# Ctrl-C, `SIGTERM` and SLURM's `SIGUSR1` do the same.

# %%
stop_early = mh.Limits(max_steps=60)
mh.Trainer(devices="cpu", run="runs/cut", limits=stop_early, quiet=True, **options).fit(make_net(), train, test)
resumed = make_net()
mh.Trainer(devices="cpu", run="runs/cut", resume="auto", **options).fit(resumed, train, test)
print("difference to the job that was not stopped:", difference(one, resumed))

# %% [markdown]
# ## Use the result
#
# After `fit` the model has the trained weights. Another program loads them from the run; `predict` uses all devices of its
# trainer.

# %%
loaded = mh.load_weights(make_net(), "runs/two")
images, labels = next(iter(test))
scores = mh.Trainer(devices="cpu", quiet=True).predict(loaded, images)
print("right:", int((scores.argmax(1) == labels).sum()), "of", len(labels))

# %% [markdown]
# The command trains without a program: `manyhands train --devices cpu:2 --model lenet`. On several machines this same
# program runs under [torchrun](../torchrun/README.md) or [SLURM](../slurm/README.md).
#
# Next: [your own model and data](own_model.ipynb).
