"""From times to a topology file: the part of calibrating that needs no cluster.

An exchange over a link takes its latency, and its bytes at the link's bandwidth. Two sizes tell the two apart: one too small to
count, and one that takes long enough for buffers, bursts and slow starts not to count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .topology import Link, Topology
from .units import show_rate, show_seconds

_SMALL = 8  # bytes to each other card: an exchange of next to nothing
_FIRST = 1 << 16  # bytes of the first exchange that is timed for bandwidth
_LONG = 0.5  # seconds after which the size of an exchange suffices
_SMALL_TIMES, _TIMES = 20, 5

Exchange = Callable[[int], float]  # bytes that every card sends -> seconds until all have got theirs


def measure_link(exchange: Exchange, most: int) -> Link:
    """A link by its exchanges, of at most so many bytes a card."""
    exchange(_SMALL)  # connections are made by the first
    latency = statistics.median(exchange(_SMALL) for _ in range(_SMALL_TIMES))
    size = min(_FIRST, most)
    while exchange(size) < _LONG and size < most:
        size = min(2 * size, most)
    seconds = statistics.median(exchange(size) for _ in range(_TIMES))
    return Link(bandwidth=size / max(seconds - latency, 1e-9), latency=latency)


def to_yaml(topology: Topology) -> str:
    """A topology as a file that people read and change: quantities with their units."""
    links = {"host": topology.links.host, "node": topology.links.node, "cluster": topology.links.cluster}
    lines = [
        "# Measured with every card at work. Bandwidths are of one card, each way; change what you know better.",
        f"version: {topology.version}",
        *(f"{name}: {_quoted(text)}" for name in ("name", "source", "date") if (text := getattr(topology, name))),
        f"nodes: {topology.nodes}",
        f"cards_per_node: {topology.cards_per_node}",
        f"card: {{memory: {_bytes(topology.card.memory)}, bandwidth: {show_rate(topology.card.bandwidth)}}}",
        *([f"host: {{memory: {_bytes(topology.host.memory)}}}"] if topology.host.memory else []),
        "links:",
    ]
    for name, link in links.items():
        if link is not None:
            rate, latency = show_rate(link.bandwidth), show_seconds(link.latency)
            lines.append(f"  {name}: {{bandwidth: {rate}, latency: {latency}}}")
    return "\n".join(lines) + "\n"


def _bytes(count: int) -> str:
    """Rounded down: what is free now, not a byte more."""
    return f"{count // 10**7 / 100:.2f}GB" if count >= 10**9 else f"{count // 10**4 / 100:.2f}MB"


def _quoted(text: str) -> str:
    doubled = text.replace("'", "''")
    return f"'{doubled}'"
