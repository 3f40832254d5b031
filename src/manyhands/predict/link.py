"""The link between devices: how fast an all-reduce over it is.

A link has a *bus bandwidth* in the sense of nccl-tests: an all-reduce of S bytes over n devices moves 2 (n-1)/n S
bytes over every device's link, for any n. It may depend on the number of devices: four GPUs of a DGX-1 reach each
other by NVLink, and in 2017 a ring over all eight went through the processors. Beyond ``per_node`` devices, the ring
also crosses a network.

The figures are NCCL's (``src/graph/topo.h``: NVLink 18 to 20.6 GB/s for each of a GPU's links, PCIe 3.0 x16 12, the
link between Broadwell sockets 6, between Skylake's 10, 100 Gbit/s of network 12). If nccl-tests measure less or more,
the measured figures are used: 230 GB/s on eight A100, 370 to 480 on eight H100, 475 on eight H200, 20 on pairs over
PCIe 4.0. No figure comes from a training run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings
from manyhands.predict.files import SCHEMA, read, wrong

GB = 1e9
KINDS = ("nvlink", "pcie", "network", "measured")


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths in bytes a second, for all-reduces over up to this many devices of one node."""

    name: str
    kind: str
    bandwidths: tuple[tuple[int, float], ...]
    per_node: int = 8
    network: Link | None = None
    # Seconds of one hop; None: NCCL's figures for this kind of link.
    hop: float | None = None

    def __post_init__(self) -> None:
        good = self.kind in KINDS and bool(self.bandwidths) and self.per_node >= 1
        good = good and all(devices >= 1 and 0 < speed < math.inf for devices, speed in self.bandwidths)
        if not (good and (self.hop is None or 0 <= self.hop < math.inf)):
            raise BadSettings(
                f"link {self.name!r} is not valid: give one of the kinds {', '.join(KINDS)}, a bandwidth above 0, a "
                "latency of 0 or more, and at least one device per node"
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
        network = None if self.network is None else self.network.as_dict()
        return {"schema": SCHEMA, **asdict(self), "network": network}

    def __str__(self) -> str:
        inside = min(self.per_node, self.bandwidths[-1][0])
        text = f"{self.name}: {self.bandwidth(inside) / GB:.3g} GB/s"
        if self.network is not None:
            beyond = f"{self.network.name}, {self.network.bandwidth(2) / GB:.3g} GB/s a node"
            text += f"; beyond {self.per_node} devices a node {beyond}" if self.per_node > 1 else ""
        return text


def _network(name: str, gigabits: float, count: int = 1) -> Link:
    """NCCL counts 12 GB/s for 100 Gbit/s."""
    name = name if count == 1 else f"{count} x {name}"
    return Link(name, "network", ((1 << 30, count * gigabits * 0.12 * GB),), per_node=1)


def _nvlink(name: str, network: Link, *bandwidths: tuple[int, float]) -> Link:
    return Link(name, "nvlink", tuple((most, speed * GB) for most, speed in bandwidths), bandwidths[-1][0], network)


_EDR, _HDR, _NDR = (_network(f"infiniband-{rate}g", rate, count) for rate, count in ((100, 4), (200, 8), (400, 8)))
_ETHERNET = _network("ethernet-100g", 100)


def _links() -> dict[str, Link]:
    networks = [_network(f"ethernet-{rate}g", rate) for rate in (10, 25, 40, 100, 200, 400)]
    networks += [_network(f"infiniband-{rate}g", rate) for rate in (100, 200, 400)]
    inside = [
        _nvlink("nvlink", _NDR, (8, 370)),  # 18 links of 20.6: an H100 without in-network sums
        _nvlink("nvlink-h200", _NDR, (8, 475)),
        _nvlink("nvlink-h100", _NDR, (8, 370)),
        _nvlink("nvlink-h100-bridge", _ETHERNET, (2, 116)),
        _nvlink("nvlink-a100", _HDR, (8, 230)),
        _nvlink("nvlink-v100", _EDR, (2, 40), (4, 80), (8, 120)),  # DGX-1: 2, 4 and 6 links of 20
        _nvlink("nvlink-v100-dgx2", _EDR, (16, 120)),  # all 6 links through switches
        _nvlink("nvlink-p100", _EDR, (2, 18), (4, 54), (8, 72)),  # NCCL 2: up to 4 links of 18
        # NCCL 1 has only one ring: one NVLink within four GPUs; over eight it crosses the link between the sockets.
        _nvlink("nvlink-p100-nccl1", _EDR, (4, 18), (8, 6)),
        Link("pcie", "pcie", ((4, 20 * GB), (8, 10 * GB)), 8, _ETHERNET),
        Link("pcie3", "pcie", ((4, 12 * GB), (8, 6 * GB)), 8, _ETHERNET),
        Link("pcie4", "pcie", ((4, 20 * GB), (8, 10 * GB)), 8, _ETHERNET),
        Link("pcie5", "pcie", ((4, 40 * GB), (8, 22 * GB)), 8, _NDR),
    ]
    # A network alone: every device is in a separate machine with its own network card.
    alone = [Link(network.name, "network", network.bandwidths, 1, network) for network in networks]
    return {link.name: link for link in (*inside, *alone)}


LINKS: Mapping[str, Link] = _links()


def link(text: str | Link | Path, per_node: int | None = None) -> Link:
    """A link by name (``nvlink``, ``pcie+ethernet-25g``) or from a JSON file; ``measured`` is the framework's.

    ``a+b``: a within a node, the network b between nodes. ``per_node``: this many devices in each node.
    """
    chosen = text if isinstance(text, Link) else _parsed(str(text))
    if per_node is None:
        return chosen
    if chosen.network is not None and chosen.per_node == 1 and per_node > 1:
        raise BadSettings(
            f"link {chosen.name!r} with {per_node} devices per node: say what is inside a node, as 'pcie+{chosen.name}'"
        )
    return replace(chosen, per_node=per_node)


def _parsed(text: str) -> Link:
    if text in LINKS:
        return LINKS[text]
    inside, plus, across = text.partition("+")
    if plus and inside in LINKS and across in LINKS:
        network = LINKS[across].network
        if LINKS[across].kind != "network" or network is None:
            raise BadSettings(f"link {text!r}: {across!r} is not a network; name the network between nodes after '+'")
        return replace(LINKS[inside], name=text, network=network)
    if text.endswith(".json") or Path(text).is_file():
        return from_dict(read(Path(text), "link"), text)
    raise BadSettings(
        f"link {text!r} is not known: give one of {', '.join(LINKS)}, 'measured', two of them as 'pcie+ethernet-25g', "
        "or a JSON file"
    )


def from_dict(fields: Mapping[str, Any], where: str) -> Link:
    """A link from JSON; one ``bandwidth`` (bytes per second) may replace the list of bandwidths."""
    try:
        bandwidth = fields.get("bandwidth")
        bandwidths = fields["bandwidths"] if bandwidth is None else [(1 << 30, bandwidth)]
        pairs = [(int(devices), float(speed)) for devices, speed in bandwidths]
        network = fields.get("network")
        beyond = LINKS[network].network if isinstance(network, str) else None
        if isinstance(network, Mapping):
            beyond = from_dict(network, where)
        hop = fields.get("hop")
        return Link(
            str(fields.get("name", Path(where).stem)),
            str(fields.get("kind", "measured")),
            tuple(sorted(pairs)),
            int(fields.get("per_node", 8)),
            beyond,
            None if hop is None else float(hop),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadSettings):
            raise
        raise wrong(where, "link", f"{type(error).__name__}: {error}") from error
