# %% [markdown]
# # Make it parallel for me
#
# The book's chapter on automatic parallelism shows that independent operations may run at once, if somebody sees that they are
# independent. `mh.parallel(fn)` sees it: it traces plain code into a graph, spreads the graph over *lanes* (CPU threads here, CUDA
# streams on a GPU), proves the schedule, and uses it only where it is measured to be faster.

# %%
import torch
from IPython.display import SVG, Image

from manyhands import torch as mh
from manyhands.errors import UndeclaredWrite
from manyhands.schedule.simulate import simulate

torch.manual_seed(0)
torch.set_num_threads(2)  # two cores: PyTorch divides each operation over them, lanes share them out
weights = [torch.randn(160, 160) / 12 for _ in range(4)]


@mh.parallel
def branches(x):
    """Four chains of matrix products. Nothing here says what may run at once."""
    results = []
    for weight in weights:
        y = x
        for _ in range(4):
            y = torch.relu(y @ weight)
        results.append(y)
    return sum(results)


# %% [markdown]
# Call it as ever. The first call traces, plans and measures; later calls use what won. The result is the plain function's, to the bit.

# %%
x = torch.randn(160, 160)
result = branches(x)
torch.equal(result, branches.function(x))

# %% [markdown]
# `explain` lists the ways that were measured, and says which lanes do what, what bounds the time, and why it is not faster. PyTorch's own
# way divides each product over both cores; two lanes give each core products of its own. Which one wins depends on the sizes and on what else
# the machine does. What is not clearly faster than plain execution is not used.

# %%
print(branches.explain())

# %% [markdown]
# ## See it
#
# `draw` shows the graph, one colour per lane. `timeline` runs the schedule once more and shows when each task ran.

# %%
SVG(branches.draw("graph.svg"))

# %%
Image(branches.timeline("timeline.png"), width=720)

# %% [markdown]
# What would four devices give? A forecast is a simulation with the measured costs of the operations, and its schedule is proved like
# any other. The four chains were found in the plain code: each device gets one, and the results are copied to the first.

# %%
forecast = branches.forecast(devices=4, lanes=1)
print(forecast)
Image(simulate(forecast.schedule).save("four.png"), width=720)

# %% [markdown]
# ## Tasks given explicitly
#
# A function whose shape depends on values cannot be planned as a whole. Give its parts as tasks: futures are inputs of other tasks, and the
# order that matters is kept. A task that writes says so.

# %%
log = torch.zeros(2)


def note(log, index, value):
    log[index] = value.norm()


with mh.parallel():
    a = mh.task(torch.mm)(weights[0], weights[1])
    b = mh.task(torch.mm)(weights[2], weights[3])
    for index, product in enumerate((a, b)):
        mh.task(note, writes=(log,))(log, index, product)
    total = mh.task(torch.add)(a, b)
print(log, total.result().shape)

# %% [markdown]
# A write that was not declared could be lost or come too early. It is an error instead:

# %%
try:
    with mh.parallel():
        mh.task(note)(log, 0, weights[0])
except UndeclaredWrite as error:
    print(error)

# %% [markdown]
# `torch.compile(model, backend="manyhands")` plans the forward and the backward pass of a model in the same way. What a plan depends on,
# and what is not noticed, is in `docs/parallel.md`.
#
# Next: [why is it slow?](audit.ipynb)
