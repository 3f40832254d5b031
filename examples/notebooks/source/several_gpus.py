# %% [markdown]
# # Several GPUs, as in Dive into Deep Learning
#
# Data parallelism: each device gets a part of the batch, gradients are summed, and every device makes the same update. This
# notebook follows the chapter [Training on Multiple GPUs](https://d2l.ai/chapter_computational-performance/multiple-gpus.html)
# of the book *Dive into Deep Learning*: first by hand, as in the book, then with one call, then exercises. Virtual CPU
# devices stand in for GPUs. They share the cores of this machine, so two of them are no faster than one; two GPUs would be.

# %%
import torch
from IPython.display import Image
from matplotlib import pyplot as plt
from torch import nn

from manyhands import torch as mh
from manyhands.book import torch as book

first, second = mh.virtual_devices(2)

# %% [markdown]
# ## Split a batch over devices, and gather it
#
# `split` cuts along the first axis, one shard per device. Devices that are not equally fast get unequal `shares`. `gather`
# is the inverse.

# %%
shards = mh.split(torch.arange(10), [first, second])
print([shard.tolist() for shard in shards], [str(shard.device) for shard in shards])
unequal = mh.split(torch.arange(10), [first, second], shares=[0.7, 0.3])
print([shard.tolist() for shard in unequal])
print(mh.gather(shards, mh.cpu()))

# %% [markdown]
# ## One step, by hand
#
# With these verbs the book's loop is short: copy the weights to each device, give each a shard of the batch, and send the
# sum of the gradients back to all. Both devices end with the same weights.

# %%
torch.manual_seed(0)
X, y = torch.randn(8, 3), torch.randn(8, 1)
weight = torch.randn(3, 1)
weights = [mh.copy(weight, device).requires_grad_() for device in (first, second)]
for w, (X_shard, y_shard) in zip(weights, mh.split((X, y), [first, second]), strict=True):
    ((X_shard @ w - y_shard) ** 2).sum().backward()
total = sum(mh.to(w.grad, first) for w in weights)  # the all-reduce
with torch.no_grad():
    for w in weights:
        w -= 0.1 * mh.to(total, w.device) / len(X)
torch.equal(mh.to(weights[0], "cpu"), mh.to(weights[1], "cpu"))

# %% [markdown]
# ## All of it in one call
#
# `mh.Trainer` does the same, and sums gradients while the backward pass still runs. Its promise: **N devices give the
# answer of one device, only sooner.** Here it trains on one device and on two, and we compare the weights. In the trainer
# each virtual device is a process.

# %%
train, test = book.load_data_fashion_mnist(batch_size=128)
train, test = train.first(3000), test.first(500)  # a small part: seconds on a CPU


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


# %% [markdown]
# ## One device
#
# A step takes 128 samples, the `batch_size` of the data. The folder `run` gets metrics, checkpoints and a picture of the
# curves. No step waits for a number to print: losses stay on the device and are shown a little later.

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
# Only `devices` changes. The batch is *global*: each device gets 64 of the 128 samples, and the gradients are summed. So you
# need not tune the learning rate, or anything else, again. On a machine with two GPUs write `devices=2`.

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
# Two devices add up the sum in another order, so results may differ by rounding. We computed in float64 to show that nothing
# else differs. With `precision="auto"`, the default, weights agree to the precision of float32. `manyhands parity` makes this
# test with a model of yours: `manyhands parity script.py:make --devices 2`.
#
# ## Stopped, and resumed
#
# A job on a shared machine is stopped sooner or later. `resume="auto"` continues at the batch after the last checkpoint, and
# ends with the same bits as a job that was never stopped. Here the job ends itself after 60 steps, in the middle of an
# epoch. Ctrl-C, `SIGTERM` and SLURM's `SIGUSR1` stop a job in the same way.

# %%
stop_early = mh.Limits(max_steps=60)
mh.Trainer(devices="cpu", run="runs/cut", limits=stop_early, quiet=True, **options).fit(make_net(), train, test)
resumed = make_net()
mh.Trainer(devices="cpu", run="runs/cut", resume="auto", **options).fit(resumed, train, test)
print("difference to the job that was not stopped:", difference(one, resumed))

# %% [markdown]
# ## Use the result
#
# After `fit` the model has the trained weights. Another program loads them from the run. `predict` uses all devices of its
# trainer.

# %%
loaded = mh.load_weights(make_net(), "runs/two")
images, labels = next(iter(test))
scores = mh.Trainer(devices="cpu", quiet=True).predict(loaded, images)
print("right:", int((scores.argmax(1) == labels).sum()), "of", len(labels))

# %% [markdown]
# ## Exercise: k times the devices, k times the batch, which learning rate?
#
# The batch is global, so the number of devices does not change what is learnt. A larger batch does. *Train with a batch of
# 128, of 512, and of 512 with four times the learning rate.*

# %%
curves = {}
for batch_size, lr in ((128, 0.1), (512, 0.1), (512, 0.4)):
    data = book.load_data_fashion_mnist(batch_size=batch_size)[0].first(3000)
    trainer = mh.Trainer(max_epochs=5, devices="cpu", lr=lr, quiet=True)
    rows = trainer.fit(make_net(), data, test).rows
    curves[f"batch {batch_size}, lr {lr}"] = [row["val_acc"] for row in rows]

figure, axes = plt.subplots(figsize=(6, 3))
for label, accuracies in curves.items():
    axes.plot(range(1, 6), accuracies, marker="o", label=label)
axes.set(xlabel="epoch", ylabel="validation accuracy", xticks=range(1, 6))
axes.legend()
plt.show()

# %% [markdown]
# Four times the batch means a quarter of the updates, and the net learns less in five epochs. A higher rate can make up for
# that, but here the curve is already unsteady. Will more devices be faster? That depends on the net, the batch and the link
# between the devices. `manyhands lab run training-scaling` measures it here. `manyhands forecast --devices 1,2,8 --link
# nvlink` computes it for a machine that you do not have.
#
# On several machines this program runs under [torchrun](../torchrun/README.md) or [SLURM](../slurm/README.md).
#
# Next: [automatic parallelism](automatic_parallelism.ipynb).
