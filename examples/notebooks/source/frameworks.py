# %% [markdown]
# # Moving between frameworks
#
# PyTorch, JAX, TensorFlow and MXNet have the same verbs, the same trainer and the same run folder in manyhands. What you hold stays the
# framework's own: its tensors, its devices, its models.
#
# | | PyTorch | JAX | TensorFlow | MXNet |
# |---|---|---|---|---|
# | import | `from manyhands import torch as mh` | `... jax as mh` | `... tensorflow as mh` | `... mxnet as mh` |
# | `mh.gpu(1)` is a | `torch.device` | `jax.Device` | device string, usable in `with` | context |
# | a model is a | `nn.Module` | Flax module (NNX or Linen) | Keras model | Gluon block |
# | an optimizer is one of | `torch.optim` | `optax` | `keras.optimizers` | `mx.optimizer` |
# | several devices by | processes and `torch.distributed` | `jit` over a mesh | `MirroredStrategy` | the dependency engine |
#
# The same tour as a program in each: [JAX](../frameworks/with_jax.py), [TensorFlow](../frameworks/with_tensorflow.py),
# [MXNet](../frameworks/with_mxnet.py). This notebook takes a run of PyTorch to JAX and back.

# %% [bash]
# manyhands train --framework torch --model mlp --devices cpu --epochs 2 --run runs/first --quiet | tail -1

# %% [markdown]
# ## Convert a run
#
# `convert` needs neither framework. It knows how each of them names its weights and orders their axes. For example, a
# kernel in JAX is the transpose of a weight in PyTorch.

# %% [bash]
# manyhands convert runs/first --to jax

# %%
from pathlib import Path

from safetensors.numpy import load_file


def weights(run):
    """The weights in the last checkpoint of a run."""
    return load_file(max(Path(run).glob("checkpoints/step-*/model.safetensors")))


for name, value in weights("runs/first").items():
    print("PyTorch", name, value.shape)
for name, value in weights("runs/first-jax").items():
    print("JAX    ", name, value.shape)

# %% [markdown]
# In an environment with JAX load it with `mh.load_model("runs/first-jax")`, or continue the training with `manyhands train
# --resume runs/first-jax --epochs 4`. The order of samples is the same in all frameworks, so the job continues at the batch
# where it was. Only the optimizer starts afresh.
#
# ## And back
#
# Nothing is lost.

# %% [bash]
# manyhands convert runs/first-jax --to torch --out runs/back

# %%
first, back = weights("runs/first"), weights("runs/back")
print("equal to the bit:", all((first[name] == back[name]).all() for name in first), len(first), len(back))

# %% [markdown]
# ## A model of your own
#
# `convert` knows the models of `manyhands train`. For your own model write a table: which weight of the run becomes which
# weight of the new model, and how its axes change. Every weight needs a place in it; a missing one is an error.

# %%
import json

names = {"first.kernel": ["1.weight", "transpose"], "first.bias": "1.bias"}
written = Path("table.json").write_text(json.dumps({"names": names}))

# %% [bash]
# manyhands convert runs/first --to jax --names table.json --out runs/own 2>&1 || true

# %% [markdown]
# The message names what the table lacks. With all weights in it the run is converted.
# [Your own model in another framework](../../docs/training.md#your-own-model-in-another-framework) has a complete table.
