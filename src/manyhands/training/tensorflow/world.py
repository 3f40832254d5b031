"""The replicas of a job, as one process sees them: TensorFlow's strategy, and what processes exchange.

One process with several devices is a ``MirroredStrategy``. Several processes, started by a launcher, are a
``MultiWorkerMirroredStrategy``. TensorFlow sets up such a job before its first tensor or never: the trainer is then
created before the model.

TensorFlow wants to know the address of every process. On one machine they are the ports behind the launcher's own
(``MASTER_PORT``), which belongs to the job; of several machines ``TF_CONFIG`` has all addresses.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.errors import BadSettings
from manyhands.training import launcher
from manyhands.training.data.sources import Array

_joined: World | None = None


@dataclass(frozen=True)
class World:
    """A job's strategy, and which of its processes this is."""

    strategy: Any
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def devices(self) -> list[Any]:
        """The devices of this process."""
        return [backend.TensorFlowDevice(device) for device in self.strategy.extended.worker_devices]

    @property
    def replicas(self) -> int:
        """Of the whole job."""
        return int(self.strategy.num_replicas_in_sync)

    def from_first(self, data: bytes) -> bytes:
        """The bytes of the first process; those of the others are ignored."""
        if self.size == 1:
            return data
        length = int(self._sum(np.array([len(data) if self.first else 0]))[0])
        words = np.zeros(-(-length // 8) * 8, np.uint8)
        if self.first:
            words[:length] = np.frombuffer(data, np.uint8)
        return self._sum(words.view(np.int64)).view(np.uint8)[:length].tobytes()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of each process; all give equally many."""
        if self.size == 1:
            return [list(numbers)]
        table = np.zeros((self.size, len(numbers)))
        table[self.rank] = numbers
        rows: list[list[float]] = self._sum(table).tolist()
        return rows

    def all_have(self, number: int) -> bool:
        return all(row == [number] for row in self.gather([number]))

    def _sum(self, addends: Array) -> Array:
        summed = _sums(self.strategy)(tf.convert_to_tensor(addends.ravel()))
        values: Array = self.strategy.experimental_local_results(summed)[0].numpy()
        return values.reshape(addends.shape)


@functools.cache
def _sums(strategy: Any) -> Any:
    """A function that adds up the values of the processes; only the first replica of each process counts."""
    local = len(strategy.extended.worker_devices)

    def replica(values: Any) -> Any:
        here = tf.distribute.get_replica_context()
        counts = here.replica_id_in_sync_group % local == 0
        return here.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(counts, values, tf.zeros_like(values)))

    return tf.function(lambda values: strategy.run(replica, args=(values,)), autograph=False, reduce_retracing=True)


def of_devices(devices: Sequence[Any]) -> World:
    """A job of this process alone."""
    if len(devices) == 1:
        return World(tf.distribute.OneDeviceStrategy(devices[0]))
    # The default way to sum aborts the process in the second job with another model.
    sums = tf.distribute.ReductionToOneDevice()
    return World(tf.distribute.MirroredStrategy(devices, cross_device_ops=sums))


def join(*, on_cpu: bool = False) -> World:
    """Join the processes that a launcher has started; every call in a process returns the same world."""
    global _joined
    if _joined is None:
        place = launcher.place()
        _choose_gpu(place, on_cpu=on_cpu)
        try:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(_resolver(place))
            _joined = World(strategy, place.rank, place.size)
        except RuntimeError as error:
            if "startup" not in str(error):
                raise
            raise BadSettings(
                "a job of several processes has to be set up before TensorFlow makes its first tensor: make the "
                "Trainer first, and the model and the data after it"
            ) from error
    return _joined


def _choose_gpu(place: launcher.LaunchedProcess, *, on_cpu: bool) -> None:
    """One GPU for each process of a machine where there are enough; a process alone has all of them."""
    gpus = tf.config.get_visible_devices("GPU")
    if on_cpu and gpus:
        tf.config.set_visible_devices([], "GPU")
    elif place.local_size > 1 and len(gpus) >= place.local_size and not place.sees_own_gpus:
        tf.config.set_visible_devices(gpus[place.local_rank], "GPU")


def from_first(make: Callable[[], Any]) -> Any:
    """The value (JSON) that ``make`` returns in the first process of a launched job; every process gets it."""
    if launcher.size() < 2:
        return make()
    here = join()  # before anything is made: that may start TensorFlow
    return json.loads(here.from_first(json.dumps(make()).encode() if here.first else b""))


# Who takes part


def read_tf_config() -> None:
    """Set a launcher's environment variables from ``TF_CONFIG`` (:mod:`manyhands.training.launcher`)."""
    if "TF_CONFIG" not in os.environ or launcher.is_launched():
        return
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, task = config["cluster"]["worker"], config["task"]
        rank, (host, _, port) = int(task["index"]), workers[0].rpartition(":")
        others = task.get("type") != "worker" or set(config["cluster"]) != {"worker"}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadSettings(
            f"TF_CONFIG in the environment cannot be read ({error}): it looks like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if others:
        raise BadSettings("TF_CONFIG has tasks other than workers: here every process is a worker, the first too")
    environment = {"RANK": rank, "WORLD_SIZE": len(workers), "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})


def _resolver(place: launcher.LaunchedProcess) -> Any:
    """Who takes part in the job, as TensorFlow wants to know it."""
    if "TF_CONFIG" in os.environ:
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if place.local_size < place.size:
        raise BadSettings(
            f"{place.local_size} of {place.size} processes are on this machine, and TensorFlow wants to know the "
            'addresses of all: set TF_CONFIG in each, {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}'
        )
    workers = [f"{place.address}:{place.port + 1 + rank}" for rank in range(place.size)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=place.rank, rpc_layer="grpc"
    )
