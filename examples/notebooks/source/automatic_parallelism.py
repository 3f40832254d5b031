# %% [markdown]
# # Automatic parallelism, as in Dive into Deep Learning
#
# Two devices can work at the same time, and so can computing and copying, if nothing waits in between. This notebook follows
# the chapter [Automatic Parallelism](https://d2l.ai/chapter_computational-performance/auto-parallelism.html) of the book
# *Dive into Deep Learning*: first as in the book, then with `mh.parallel`, which finds what may run at once in plain code,
# then an exercise. Two virtual devices stand in for two GPUs. The other cells compute on the CPU itself.

# %%
import torch
from IPython.display import SVG, Image
from matplotlib import pyplot as plt

from manyhands import torch as mh
from manyhands.book.torch import Benchmark
from manyhands.errors import UndeclaredWrite
from manyhands.schedule.simulate import simulate

torch.set_num_threads(1)  # a core for each device
with mh.virtual_devices(2):
    X, Y = (torch.rand(400, 400, device=device) for device in mh.try_all_gpus())

    def run(x):
        return [x.mm(x) for _ in range(50)]

    run(X), run(Y)  # warm-up
    with mh.parallel():
        mh.task(run)(X)
    with Benchmark("one after the other"):
        run(X)
        mh.waitall()
        run(Y)
    with Benchmark("at once"), mh.parallel():
        mh.task(run)(X)
        mh.task(run)(Y)

# %% [markdown]
# `Benchmark` waits for all devices before it reads the clock. On two GPUs "at once" should take half as long, and on two
# virtual devices as well, if each of them has a core to itself. `manyhands lab run how-linear` measures it with care:
# alternating rounds, medians, and no result if the machine is busy.
#
# ## Found in plain code
#
# `mh.parallel(fn)` captures code as a graph and spreads the graph over *lanes* (CPU threads here, CUDA streams on a GPU). It
# proves the schedule, and uses it only if it is measured to be faster.

# %%
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
# Call it as before. The first call captures, plans and measures; later calls use what won. The result is equal to that of
# the plain function, to the bit.

# %%
x = torch.randn(160, 160)
result = branches(x)
torch.equal(result, branches.function(x))

# %% [markdown]
# `explain` lists what was measured. It says which lane does what, what bounds the time, and why it is not faster. Plain
# PyTorch divides each product over both cores; two lanes give each core products of its own. Which one wins depends on the
# sizes, and on what else the machine does. A plan that is not clearly faster than plain execution is not used.

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
# What would four devices give? A forecast is a simulation with the measured costs of the operations. Its schedule is proved
# like any other. The four chains were found in the plain code: each device gets one, and the results are copied to the first.

# %%
forecast = branches.forecast(devices=4, lanes=1)
print(forecast)
Image(simulate(forecast.schedule).save("four.png"), width=720)

# %% [markdown]
# ## Tasks given explicitly
#
# A function whose course depends on values cannot be planned as a whole. Give its parts as tasks. Futures are inputs of other
# tasks, and the order that matters is kept. A task that writes says so.

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
# A write that was not declared could be lost, or come too early. So it is an error:

# %%
try:
    with mh.parallel():
        mh.task(note)(log, 0, weights[0])
except UndeclaredWrite as error:
    print(error)

# %% [markdown]
# ## Exercise: how many devices are worth it?
#
# *What do more devices give to these four chains?* Four have work; a fifth would have none.

# %%
counts = [1, 2, 3, 4, 6, 8]
speed_ups = [branches.forecast(devices=count, lanes=1).speed_up for count in counts]
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(counts, counts, color="lightgrey", label="linear")
axes.plot(counts, speed_ups, marker="o", label="four chains (simulated)")
axes.set(xlabel="devices", ylabel="times as fast as one", ylim=(0, 8.5))
axes.legend()
plt.show()

# %% [markdown]
# `torch.compile(model, backend="manyhands")` plans the forward and the backward pass of a model in the same way.
# [What a plan depends on](../../docs/parallel.md) also says what is not noticed.
#
# Next: [your own model and data](own_model.ipynb)
