"""How long an all-reduce takes: bytes over bandwidth, plus the latency of its hops.

The model is NCCL's own (``src/graph/tuning.cc``): a ring of n devices makes 2 (n-1) hops; a tree goes up and down over
log2 of the nodes; three protocols trade latency for bandwidth. NCCL takes the fastest of these, and so does this model.
For example 100 MB on eight GPUs at 120 GB/s: 2 * 7/8 * 100 MB / 120 GB/s = 1.46 ms, and 8.4 + 14 * 3.4 us of latency.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from manyhands.predict.link import Link

_US = 1e-6


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


_PROTOCOLS = {
    "LL": _Protocol(
        6.6, {"nvlink": 0.6, "pcie": 1.0, "network": 2.7}, {"nvlink": 0.52, "pcie": 1.0, "network": 5.0}, 0.5, 0.24
    ),
    "LL128": _Protocol(14.0, {"nvlink": 1.9, "network": 4.0}, {"nvlink": 1.2, "network": 8.5}, 0.92, 0.7),
    "Simple": _Protocol(
        8.4, {"nvlink": 3.4, "pcie": 5.7, "network": 14.0}, {"nvlink": 28.0, "pcie": 28.0, "network": 50.0}, 1.0, 0.9
    ),
}


def all_reduce(link: Link, size: float, devices: int) -> Seconds:
    """Seconds to sum this many bytes over this many devices."""
    if devices == 1 or size <= 0:
        return Seconds(0.0, 0.0)
    bandwidth = link.bandwidth(devices)
    ring = size * 2 * (devices - 1) / devices / bandwidth
    if link.hop is not None:
        return Seconds(ring, _hops(link, devices, link.hop))
    nodes = link.nodes(devices)
    ways = []
    for protocol in _PROTOCOLS.values():
        inside, across = protocol.ring_hop.get(link.kind), protocol.ring_hop["network"]
        if inside is None:  # LL128 needs NVLink
            continue
        hops = 2 * (devices - nodes) * inside + 2 * (nodes - 1) * across
        ways.append(Seconds(ring / protocol.ring_share, (protocol.base + hops) * _US))
        if nodes > 1:
            inside, across = protocol.tree_hop[link.kind], protocol.tree_hop["network"]
            hops = 2 * ((min(devices, link.per_node) - 1) * inside + math.log2(nodes) * across)
            ways.append(Seconds(2 * size / bandwidth / protocol.tree_share, (protocol.base + hops) * _US))
    return min(ways, key=lambda way: way.total)


def _hops(link: Link, devices: int, hop: float) -> float:
    """The latency of a ring whose hop was measured; hops between nodes take the network's latency."""
    nodes = link.nodes(devices)
    across = 14 * _US if link.network is None or link.network.hop is None else link.network.hop
    return 2 * (devices - nodes) * hop + 2 * (nodes - 1) * across
