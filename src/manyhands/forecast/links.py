"""The link between devices, and how long an all-reduce over it takes.

A link has a *bus bandwidth* in the sense of nccl-tests: an all-reduce of S bytes over n devices moves 2 (n-1)/n S
bytes over every device's link, for any n. It may depend on the number of devices: four GPUs of a DGX-1 reach each
other by NVLink, and in 2017 a ring over all eight went through the processors. Beyond ``per_node`` devices, the ring
also crosses a network. The time is bytes over bandwidth, plus the latency of hops.

The bandwidths are NCCL's (``src/graph/topo.h``), or what nccl-tests measure. No number comes from a training run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.errors import BadSettings
from manyhands.forecast.profile import SCHEMA, not_valid, read

GB = 1e9
KINDS = ("nvlink", "pcie", "network", "measured")
_US = 1e-6
_NETWORK_HOP = 14 * _US


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths in bytes a second, for all-reduces over up to this many devices of one node."""

    name: str
    kind: str
    bandwidths: tuple[tuple[int, float], ...]
    per_node: int = 8
    network: Link | None = None
    hop: float | None = None  # seconds of one hop; None: NCCL's model of this kind of link

    def __post_init__(self) -> None:
        good = self.kind in KINDS and bool(self.bandwidths) and self.per_node >= 1
        good = good and all(devices >= 1 and 0 < speed < math.inf for devices, speed in self.bandwidths)
        good = good and (self.kind != "measured" if self.hop is None else 0 <= self.hop < math.inf)
        if not good:
            raise BadSettings(
                f"link {self.name!r} is not valid: give one of the kinds {', '.join(KINDS)}, a bandwidth above 0, a "
                "hop (its latency) of 0 or more where it is measured, and at least one device per node"
            )

    def nodes(self, devices: int) -> int:
        return -(-devices // self.per_node)

    def bandwidth(self, devices: int) -> float:
        """The bandwidth of an all-reduce over this many devices: that of the slowest part of the ring."""
        inside = min(devices, self.per_node)
        inside_node = next((speed for most, speed in self.bandwidths if inside <= most), self.bandwidths[-1][1])
        if self.nodes(devices) == 1 or self.network is None:
            return inside_node
        across = self.network.bandwidth(self.nodes(devices))
        return across if self.per_node == 1 else min(inside_node, across)

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def __str__(self) -> str:
        inside = min(self.per_node, self.bandwidths[-1][0])
        text = f"{self.name}: {self.bandwidth(inside) / GB:.3g} GB/s"
        if self.network is not None and self.per_node > 1:
            beyond = f"{self.network.name}, {self.network.bandwidth(2) / GB:.3g} GB/s a node"
            text += f"; beyond {self.per_node} devices a node {beyond}"
        return text


def _network(name: str, gigabits: float, count: int = 1) -> Link:
    """NCCL counts 12 GB/s for 100 Gbit/s."""
    name = name if count == 1 else f"{count} x {name}"
    return Link(name, "network", ((1 << 30, count * gigabits * 0.12 * GB),), per_node=1)


_EDR, _HDR, _NDR = (_network(f"infiniband-{rate}g", rate, count) for rate, count in ((100, 4), (200, 8), (400, 8)))
_ETHERNET = _network("ethernet-100g", 100)
# Name, kind, GB/s for up to so many devices, and the network between nodes.
_INSIDE: tuple[tuple[str, str, dict[int, float], Link], ...] = (
    ("nvlink", "nvlink", {8: 370}, _NDR),  # 18 links of 20.6: an H100 without in-network sums
    ("nvlink-h200", "nvlink", {8: 475}, _NDR),
    ("nvlink-h100", "nvlink", {8: 370}, _NDR),
    ("nvlink-h100-bridge", "nvlink", {2: 116}, _ETHERNET),
    ("nvlink-a100", "nvlink", {8: 230}, _HDR),
    ("nvlink-v100", "nvlink", {2: 40, 4: 80, 8: 120}, _EDR),  # DGX-1: 2, 4 and 6 links of 20
    ("nvlink-v100-dgx2", "nvlink", {16: 120}, _EDR),  # all 6 links through switches
    ("nvlink-p100", "nvlink", {2: 18, 4: 54, 8: 72}, _EDR),  # NCCL 2: up to 4 links of 18
    # NCCL 1 has only one ring: one NVLink within four GPUs; over eight it crosses the link between the sockets.
    ("nvlink-p100-nccl1", "nvlink", {4: 18, 8: 6}, _EDR),
    ("pcie", "pcie", {4: 20, 8: 10}, _ETHERNET),
    ("pcie3", "pcie", {4: 12, 8: 6}, _ETHERNET),
    ("pcie4", "pcie", {4: 20, 8: 10}, _ETHERNET),
    ("pcie5", "pcie", {4: 40, 8: 22}, _NDR),
)
_ALONE = [_network(f"ethernet-{rate}g", rate) for rate in (10, 25, 40, 100, 200, 400)]
_ALONE += [_network(f"infiniband-{rate}g", rate) for rate in (100, 200, 400)]

LINKS: Mapping[str, Link] = {
    name: Link(name, kind, tuple((most, speed * GB) for most, speed in speeds.items()), max(speeds), network)
    for name, kind, speeds, network in _INSIDE
} | {  # a network alone: every device is in a separate machine with its own network card
    network.name: replace(network, network=network) for network in _ALONE
}


def link(text: str | Link | Path, per_node: int | None = None) -> Link:
    """A link by name (``nvlink``, ``pcie+ethernet-25g``) or from a JSON file.

    ``a+b``: a within a node, the network b between nodes. ``per_node``: this many devices in each node.
    """
    chosen = text if isinstance(text, Link) else _parse(str(text))
    if per_node is None:
        return chosen
    if chosen.network is not None and chosen.per_node == 1 and per_node > 1:
        raise BadSettings(
            f"link {chosen.name!r} with {per_node} devices per node: say what is inside a node, as 'pcie+{chosen.name}'"
        )
    return replace(chosen, per_node=per_node)


def _parse(text: str) -> Link:
    if text in LINKS:
        return LINKS[text]
    inside, plus, across = text.partition("+")
    if plus and inside in LINKS and across in LINKS:
        network = LINKS[across].network
        if LINKS[across].kind != "network" or network is None:
            raise BadSettings(f"link {text!r}: {across!r} is not a network; name the network between nodes after '+'")
        return replace(LINKS[inside], name=text, network=network)
    if text.endswith(".json") or Path(text).is_file():
        return _from_dict(read(Path(text), "link"), text)
    raise BadSettings(
        f"link {text!r} is not known: give one of {', '.join(LINKS)}, two of them as 'pcie+ethernet-25g', or a JSON "
        "file with the bandwidth that nccl-tests show"
    )


def _from_dict(fields: Mapping[str, Any], where: str) -> Link:
    """A link from JSON; one ``bandwidth`` (bytes per second) may replace the list of bandwidths."""
    try:
        bandwidth, network, hop = (fields.get(name) for name in ("bandwidth", "network", "hop"))
        bandwidths = fields["bandwidths"] if bandwidth is None else [(1 << 30, bandwidth)]
        beyond = LINKS[network].network if isinstance(network, str) else None
        return Link(
            str(fields.get("name", Path(where).stem)),
            str(fields.get("kind", "pcie" if hop is None else "measured")),
            tuple(sorted((int(devices), float(speed)) for devices, speed in bandwidths)),
            int(fields.get("per_node", 8)),
            _from_dict(network, where) if isinstance(network, Mapping) else beyond,
            None if hop is None else float(hop),
        )
    except BadSettings:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise not_valid(where, "link", f"{type(error).__name__}: {error}") from error


# All-reduce, as NCCL models it (``src/graph/tuning.cc``): a ring of n devices makes 2 (n-1) hops; a tree goes up and
# down over log2 of the nodes; three protocols trade latency for bandwidth, and the fastest is taken. For example 100 MB
# on eight GPUs at 120 GB/s: 2 * 7/8 * 100 MB / 120 GB/s = 1.46 ms, and 8.4 + 14 * 3.4 us of latency.


class Seconds(NamedTuple):
    """The two parts of a collective's time."""

    moving: float
    latency: float

    @property
    def total(self) -> float:
        return self.moving + self.latency


class _Protocol(NamedTuple):
    """Latencies in microseconds: of the start, and of a hop of a ring and of a tree, by the kind of link."""

    base: float
    ring_hop: dict[str, float]
    tree_hop: dict[str, float]
    ring_share: float  # of the bandwidth
    tree_share: float


_PROTOCOLS = (  # LL, LL128 (which needs NVLink), Simple
    _Protocol(
        6.6, {"nvlink": 0.6, "pcie": 1.0, "network": 2.7}, {"nvlink": 0.52, "pcie": 1.0, "network": 5.0}, 0.5, 0.24
    ),
    _Protocol(14.0, {"nvlink": 1.9, "network": 4.0}, {"nvlink": 1.2, "network": 8.5}, 0.92, 0.7),
    _Protocol(
        8.4, {"nvlink": 3.4, "pcie": 5.7, "network": 14.0}, {"nvlink": 28.0, "pcie": 28.0, "network": 50.0}, 1.0, 0.9
    ),
)


def all_reduce(link: Link, size: float, devices: int) -> Seconds:
    """Seconds to sum this many bytes over this many devices."""
    if devices == 1 or size <= 0:
        return Seconds(0.0, 0.0)
    nodes, bandwidth = link.nodes(devices), link.bandwidth(devices)
    ring = size * 2 * (devices - 1) / devices / bandwidth
    if link.hop is not None:
        across = _NETWORK_HOP if link.network is None or link.network.hop is None else link.network.hop
        return Seconds(ring, 2 * (devices - nodes) * link.hop + 2 * (nodes - 1) * across)
    candidates = []
    for protocol in _PROTOCOLS:
        if link.kind not in protocol.ring_hop:
            continue
        hops = 2 * (devices - nodes) * protocol.ring_hop[link.kind] + 2 * (nodes - 1) * protocol.ring_hop["network"]
        candidates.append(Seconds(ring / protocol.ring_share, (protocol.base + hops) * _US))
        if nodes > 1:
            inside, across = protocol.tree_hop[link.kind], protocol.tree_hop["network"]
            hops = 2 * ((min(devices, link.per_node) - 1) * inside + math.log2(nodes) * across)
            candidates.append(Seconds(2 * size / bandwidth / protocol.tree_share, (protocol.base + hops) * _US))
    return min(candidates, key=lambda seconds: seconds.total)
