"""From measured times to a topology file: the part of `thermocline calibrate` that needs no cluster.

An exchange takes the latency of its link, plus its bytes over the bandwidth. Two sizes separate the two: a tiny exchange, and
one that lasts long enough to outweigh buffers, bursts and slow starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import yaml

from .topology import GpuSpec, Link, Topology
from .units import show_rate, show_seconds

_SMALL = 8  # bytes to each other GPU, to measure latency
_FIRST = 1 << 16  # bytes of the first exchange timed for bandwidth
_LONG = 0.5  # seconds that an exchange must last to measure bandwidth
_SMALL_TIMES, _TIMES = 20, 5

TimedExchange = Callable[[int], float]  # bytes that every GPU sends -> seconds until all have received theirs


def measure_link(exchange: TimedExchange, most: int) -> Link:
    """Bandwidth and latency of a link, by exchanges of at most `most` bytes per GPU."""
    exchange(_SMALL)  # the first exchange opens connections
    latency = statistics.median(exchange(_SMALL) for _ in range(_SMALL_TIMES))
    size = min(_FIRST, most)
    while exchange(size) < _LONG and size < most:
        size = min(2 * size, most)
    seconds = statistics.median(exchange(size) for _ in range(_TIMES))
    return Link(bandwidth=size / max(seconds - latency, 1e-9), latency=latency)


def to_yaml(topology: Topology) -> str:
    """A topology as YAML with units, for people to read and edit."""
    host, links = topology.host, topology.links
    others = {node: _gpu(gpu) for node, gpu in topology.other_gpus.items()}
    data = {
        "version": topology.version,
        **{name: text for name in ("name", "source", "date") if (text := getattr(topology, name))},
        "backend": topology.backend,
        "nodes": topology.nodes,
        "cards_per_node": topology.gpus_per_node,
        "card": _gpu(topology.gpu),
        **({"other_cards": others} if others else {}),
        **({"host": {"memory": _bytes(host.memory)}} if host.memory else {}),
        "links": {
            name: {
                "bandwidth": show_rate(link.bandwidth),
                "latency": show_seconds(link.latency),
                **({"alone": show_rate(link.alone)} if link.alone else {}),
            }
            for name, link in (("host", links.host), ("node", links.node), ("cluster", links.cluster))
            if link is not None
        },
    }
    about = "# Measured with all GPUs busy. Bandwidths are per GPU and direction; edit what you know better.\n"
    return about + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _gpu(gpu: GpuSpec) -> dict[str, str]:
    return {"memory": _bytes(gpu.memory), "bandwidth": show_rate(gpu.bandwidth)}


def _bytes(count: int) -> str:
    """Rounded down, to stay within free memory."""
    return f"{count // 10**7 / 100:.2f}GB" if count >= 10**9 else f"{count // 10**4 / 100:.2f}MB"
