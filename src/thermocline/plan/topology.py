"""The cluster a plan is for: nodes, the cards in them, their memory, and how fast each class of links is.

    version: 1
    name: two nodes of four H200
    nodes: 2
    cards_per_node: 4
    card: {memory: 141GB, bandwidth: 4.0TB/s}
    host: {memory: 2TB}
    links:
      host: {bandwidth: 55GB/s, latency: 10us}
      node: {bandwidth: 450GB/s, latency: 10us}
      cluster: {bandwidth: 50GB/s, latency: 20us}

Bandwidths are of one card, each way, and what the link reaches in use. `host` is between a card and the memory of its node,
`node` between cards of one node, `cluster` between cards of two nodes. A cluster of one node needs no `cluster` link.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

STRICT = ConfigDict(extra="forbid", frozen=True)


class Link(BaseModel):
    """One class of links. Numbers are bytes per second and seconds."""

    model_config = STRICT
    bandwidth: float
    latency: float = 0.0


class Card(BaseModel):
    """One card: bytes of memory that tables may fill, and bytes per second that lookups read from it."""

    model_config = STRICT
    memory: int
    bandwidth: float


class Host(BaseModel):
    """The memory of a node outside its cards, in bytes, for all its cards together."""

    model_config = STRICT
    memory: int = 0


class Links(BaseModel):
    model_config = STRICT
    node: Link
    cluster: Link | None = None
    host: Link | None = None


class Topology(BaseModel):
    """A cluster of equal nodes."""

    model_config = STRICT
    version: int = 1
    name: str = ""
    source: str = ""
    date: str = ""
    nodes: int
    cards_per_node: int
    card: Card
    host: Host = Host()
    links: Links

    @property
    def cards(self) -> int:
        return self.nodes * self.cards_per_node
