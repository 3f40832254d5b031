# %% [markdown]
# # Placing tensors and models
#
# The book says: keep a model and its data on the same device, and move nothing without need. This notebook shows the four
# verbs for that: `to`, `copy`, `split` and `gather`. Two virtual devices stand in for two GPUs.

# %%
import torch

from manyhands import torch as mh
from manyhands.errors import DeviceMismatch

first, second = mh.virtual_devices(2)

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
# ## Split a batch over devices, and gather it
#
# This is the first step of data parallelism in the book. `split` cuts along the first axis, one shard per device; devices
# that are not equally fast get unequal `shares`. `gather` is the inverse.

# %%
shards = mh.split(torch.arange(10), [first, second])
print([shard.tolist() for shard in shards], [str(shard.device) for shard in shards])
unequal = mh.split(torch.arange(10), [first, second], shares=[0.7, 0.3])
print([shard.tolist() for shard in unequal])
print(mh.gather(shards, mh.cpu()))

# %% [markdown]
# ## One step of data parallelism, by hand
#
# With these verbs the book's loop is short: a copy of the weights on each device, a shard of the batch to each, and the sum
# of the gradients back to all of them. Both devices end with the same weights.

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
# You will not often write this loop: [the trainer](training.ipynb) does it, with communication hidden behind the backward
# pass, and gives the same result.
