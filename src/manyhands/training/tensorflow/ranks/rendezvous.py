"""How the processes of a job learn each other's addresses.

TensorFlow wants to know the address of every process; a launcher gives only that of the first (``MASTER_ADDR``,
``MASTER_PORT``). So each takes a free port and reports it to the first, at the port after the launcher's own; the first
answers all of them with the list. A report is one line of JSON: ``{"manyhands": 1, "rank": 2, "address":
"10.0.0.3:41234"}``. What is no such line is not answered, and the job waits on for the real ones. Where ``TF_CONFIG``
is set, it has all addresses, and no connection is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

import tensorflow as tf

from manyhands.amounts import counted
from manyhands.errors import BadSettings, WorkerFailed
from manyhands.training import launcher

_SECONDS = 300.0  # that processes wait for the last one
_LONGEST = 1000  # characters of a report
_HELLO = "manyhands"


def read_tf_config() -> None:
    """Set a launcher's environment variables from ``TF_CONFIG`` (:mod:`manyhands.training.launcher`)."""
    if "TF_CONFIG" not in os.environ or launcher.is_launched():
        return
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, task = config["cluster"]["worker"], config["task"]
        rank, (host, _, port) = int(task["index"]), workers[0].rpartition(":")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadSettings(
            f"TF_CONFIG in the environment cannot be read ({error}): it looks like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if task.get("type") != "worker" or set(config["cluster"]) != {"worker"}:
        raise BadSettings(
            "TF_CONFIG has tasks other than workers: here every process is a worker, the first is worker 0"
        )
    environment = {"RANK": rank, "WORLD_SIZE": len(workers), "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})


def resolver(place: launcher.Place) -> Any:
    """Who takes part in the job, as TensorFlow wants to know it."""
    if "TF_CONFIG" in os.environ:
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses(place)}), task_type="worker", task_id=place.rank, rpc_layer="grpc"
    )


def addresses(place: launcher.Place, seconds: float = _SECONDS) -> list[str]:
    """The address of every process of the job, in order; waits until all have come."""
    if place.rank == 0:
        return _collect(place, seconds)
    return _report(place, seconds)


def _collect(place: launcher.Place, seconds: float) -> list[str]:
    """The first process: collect all addresses, then send the list to every process."""
    end = time.monotonic() + seconds
    addresses_by_rank = {0: f"{place.address}:{_free_port(place.address)}"}
    guests: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as open_ones:
        door = open_ones.enter_context(socket.create_server((place.address, place.port + 1)))
        while len(addresses_by_rank) < place.size:
            try:
                door.settimeout(max(0.01, end - time.monotonic()))
                guest, _ = door.accept()
            except TimeoutError:
                missing = sorted(set(range(place.size)) - set(addresses_by_rank))
                raise WorkerFailed(
                    f"of {place.size} processes {missing} did not come to {place.address}:{place.port + 1} within "
                    f"{counted(seconds, 'second')}: did they start, and can they reach this machine?"
                ) from None
            open_ones.enter_context(guest)
            guest.settimeout(5)
            report = _understood(_line(guest), place.size)
            if report is not None:  # who comes twice has lost the first connection
                addresses_by_rank[report[0]], guests[report[0]] = report[1], guest
        everybody = [addresses_by_rank[rank] for rank in range(place.size)]
        for guest in guests.values():
            guest.sendall(json.dumps(everybody).encode() + b"\n")
    return everybody


def _report(place: launcher.Place, seconds: float) -> list[str]:
    """The other processes: report rank and address, and wait for the list."""
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((place.address, place.port + 1), timeout=5) as host:
                address = host.getsockname()[0]
                report = {_HELLO: 1, "rank": place.rank, "address": f"{_bracketed(address)}:{_free_port(address)}"}
                host.sendall(json.dumps(report).encode() + b"\n")
                host.settimeout(max(0.01, end - time.monotonic()))
                return _all_of(_line(host, _LONGEST * place.size), place.size)
        except OSError as error:
            if time.monotonic() > end:
                raise WorkerFailed(
                    f"process {place.rank} did not reach the first one at {place.address}:{place.port + 1} within "
                    f"{counted(seconds, 'second')} ({error})"
                ) from None
            time.sleep(0.1)


def _line(connection: socket.socket, longest: int = _LONGEST) -> str:
    """One line from the connection; an empty text if it is too long or too slow."""
    said = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while not said.endswith(b"\n") and len(said) <= longest:
            more = connection.recv(longest)
            if not more:
                break
            said += more
    return said.decode(errors="replace") if said.endswith(b"\n") else ""


def _understood(line: str, size: int) -> tuple[int, str] | None:
    try:
        report = json.loads(line)
        rank, address = report["rank"], report["address"]
        fine = report[_HELLO] == 1 and type(rank) is int and 0 < rank < size and _is_address(address)
    except (ValueError, KeyError, TypeError):
        return None
    return (rank, address) if fine else None


def _all_of(line: str, size: int) -> list[str]:
    """The list of the first process; any other answer raises an error."""
    try:
        everybody = json.loads(line)
    except ValueError:
        everybody = None
    if not isinstance(everybody, list) or len(everybody) != size or not all(map(_is_address, everybody)):
        raise ConnectionError("the process that answered is not the first process of this job")
    return everybody


def _is_address(text: object) -> bool:
    if not isinstance(text, str) or len(text) > 300 or any(character.isspace() for character in text):
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _free_port(address: str) -> int:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port: int = server.getsockname()[1]
        return port


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
