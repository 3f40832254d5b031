# %% [markdown]
# # Your own model and data
#
# The trainer takes any `nn.Module`, any loss and any `Dataset`. This notebook trains a regression on a data set of its own,
# with a metric, early stopping and the best checkpoint, on two virtual CPU devices.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands import torch as mh
from manyhands.errors import ManyhandsError

# %% [markdown]
# ## Data
#
# A `Dataset` makes each sample when it is asked for. Random numbers that it draws from `torch`, `numpy.random` or `random`
# depend on the seed, the epoch and the sample alone. So they are the same on any number of devices, and in a resumed job.


# %%
class NoisySine(Dataset):
    """Points of a sine with noise that is new in every epoch."""

    def __init__(self, count):
        self.x = torch.linspace(-3, 3, count)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index : index + 1]
        return x, torch.sin(2 * x) + 0.1 * torch.randn(1)


# %% [markdown]
# ## Model, loss, metric
#
# Nothing here is special to manyhands. The metric sees every validation sample exactly once, on any number of devices.


# %%
class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.inner(x))


def largest_error(outputs, targets):
    return (outputs - targets).abs().max()


# %% [markdown]
# ## Train
#
# Callbacks stop the job when the validation loss no longer falls, and keep the best checkpoint in addition to the newest.

# %%
best = mh.BestCheckpoint("val_loss")
trainer = mh.Trainer(
    max_epochs=30,
    batch_size=32,
    devices="cpu:2",
    loss="mse",
    optimizer="adam",
    lr=0.02,
    metrics={"largest_error": largest_error},
    callbacks=[mh.EarlyStopping("val_loss", patience=6), best],
    run="runs/sine",
    quiet=True,
)
torch.manual_seed(0)
net = Net()
grid = torch.linspace(-3, 3, 100).reshape(-1, 1)
result = trainer.fit(net, NoisySine(512), (grid, torch.sin(2 * grid)))
print(result)
print("best validation loss:", round(best.best_value, 4))
print("largest error in the last epoch:", round(result.rows[-1]["val_largest_error"], 3))

# %%
model = mh.load_weights(Net(), best.best_path)
outputs = trainer.predict(model, grid)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot([row["val_loss"] for row in result.rows])
left.set(xlabel="epoch", ylabel="validation loss", yscale="log")
right.plot(grid, torch.sin(2 * grid), label="sine")
right.plot(grid, outputs, "--", label="best checkpoint")
right.set(ylim=(-1.2, 1.6))
right.legend(loc="upper center", ncols=2, fontsize="small")
plt.show()

# %% [markdown]
# ## A loss that is not a mean over samples
#
# A batch is divided over devices, so the losses of its parts have to add up to its loss. The trainer tries your loss before
# the job begins. A mean over samples passes. This one is refused: it divides by the number of *valid* targets, which differs
# from shard to shard.


# %%
def masked_mean(outputs, targets):
    valid = targets > 0
    return ((outputs - targets) ** 2 * valid).sum() / valid.sum()


data = (torch.rand(64, 1), torch.randn(64, 1))
try:
    mh.Trainer(1, devices="cpu:2", loss=masked_mean, lr=0.01, batch_size=32, quiet=True).fit(Net(), data)
except ManyhandsError as error:
    print(error)


# %% [markdown]
# The message has the cure: return the sum and the divisor separately. Both are then added up over all devices.


# %%
def masked_sum(outputs, targets):
    valid = targets > 0
    return mh.LossSum(((outputs - targets) ** 2 * valid).sum(), valid.sum())


print(mh.Trainer(1, devices="cpu:2", loss=masked_sum, lr=0.01, batch_size=32, quiet=True).fit(Net(), data, data))

# %% [markdown]
# More models of this kind are scripts: [a model whose batches are dicts](../scripts/dict_model.py), as those of
# `transformers`, [a GAN](../scripts/gan.py) with two optimizers, and [images from files](../scripts/custom_dataset.py).
#
# Next: [why is it slow?](audit.ipynb)
