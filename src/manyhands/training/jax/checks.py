"""What is looked at before a job begins. No pass is made for it through the model or the loss."""

from __future__ import annotations

from flax import nnx

from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.jax.book.module import cross_entropy
from manyhands.training.jax.objective import Objective, Supervised


def check_labels(model: nnx.Module, objective: Objective, train: Source, test: Source | None) -> ClassLabels | None:
    """Have labels looked at that the model may have no output for: JAX would compute something with them.

    Those of arrays are looked at now; what is given back looks at those of a loader, batch by batch. The objective
    learns from the first answer how many outputs there are.
    """
    if not isinstance(objective, Supervised) or objective.loss_of(model) is not cross_entropy:
        return None
    objective.labels = look = ClassLabels()
    for source in (train, test):
        if isinstance(source, Arrays):
            look(source.arrays)
    return look
