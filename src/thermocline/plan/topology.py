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

Such a file is measured by `thermocline calibrate`, written by hand, or one of the presets: data files of this package that name
their source and date.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from thermocline.errors import BadInput

from .fields import Bytes, Count, Rate, Seconds, SomeBytes
from .io import Place, Problems, check, nearest, read_model, read_text

STRICT = ConfigDict(extra="forbid", frozen=True)
PRESETS = files(__package__) / "presets"

_FORGOTTEN = 1 << 20  # bytes of a card, or bytes per second: with less, somebody forgot the unit


class Link(BaseModel):
    """One class of links. Numbers are bytes per second and seconds."""

    model_config = STRICT
    bandwidth: Rate = Field(description="bytes per second of one card, each way, such as 450GB/s")
    latency: Seconds = Field(default=0.0, description="of one exchange over the link, before its bytes count, such as 10us")


class Card(BaseModel):
    """One card: bytes of memory that tables may fill, and bytes per second that lookups read from it."""

    model_config = STRICT
    memory: SomeBytes = Field(description="bytes of a card that tables may fill, such as 141GB")
    bandwidth: Rate = Field(description="bytes per second that a card reads from its own memory, such as 4.0TB/s")


class Host(BaseModel):
    """The memory of a node outside its cards, in bytes, for all its cards together."""

    model_config = STRICT
    memory: Bytes = Field(default=0, description="bytes of a node outside its cards, for all of them together, such as 2TB")


class Links(BaseModel):
    """The classes of links, by what they join."""

    model_config = STRICT
    node: Link = Field(description="between the cards of one node")
    cluster: Link | None = Field(default=None, description="between cards of two nodes; needed with more than one node")
    host: Link | None = Field(default=None, description="between a card and the memory of its node")


class Topology(BaseModel):
    """A cluster of equal nodes."""

    model_config = STRICT
    version: Literal[1] = Field(default=1, description="of this file format; 1")
    name: str = Field(default="", description="for people")
    source: str = Field(default="", description="where the numbers come from")
    date: str = Field(default="", description="when they were true")
    nodes: Count = Field(description="machines, 1 or more")
    cards_per_node: Count = Field(description="cards in each machine, 1 or more")
    card: Card
    host: Host = Host()
    links: Links

    @model_validator(mode="after")
    def _agrees(self) -> Topology:
        return check(self, self._contradictions())

    def _contradictions(self) -> Problems:
        if self.nodes > 1 and self.links.cluster is None:
            out = "name its bandwidth, such as cluster: {bandwidth: 50GB/s, latency: 20us}, or plan for nodes: 1"
            yield ("links",), f"nodes is {self.nodes}, and there is no link 'cluster' between them; {out}"

    @property
    def cards(self) -> int:
        return self.nodes * self.cards_per_node

    @classmethod
    def load(cls, path_or_preset: str | Path, nodes: int | None = None) -> Topology:
        """A topology file, or a preset by its name; `nodes` of it, where it is to be another number than the file says."""
        text, name = _find(path_or_preset)
        return read_model(cls, text, name, {} if nodes is None else {"nodes": nodes}, _without_units)


def presets() -> dict[str, Topology]:
    """The machines that come with this package, by name."""
    return {name: Topology.load(name) for name in _preset_names()}


def _preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in PRESETS.iterdir() if entry.name.endswith(".yaml"))


def _find(path_or_preset: str | Path) -> tuple[str, str]:
    """The text of a file, or of a preset where there is no such file, and what errors call it."""
    given = str(path_or_preset)
    names = _preset_names()
    if Path(given).exists():
        return read_text(given), given
    if given in names:
        return (PRESETS / f"{given}.yaml").read_text(encoding="utf-8"), f"preset {given}"
    hint = nearest(given, names)
    raise BadInput(f"{given!r} is neither a file nor a preset{hint}; presets are {', '.join(names)}")


def _without_units(given: Topology) -> Iterator[tuple[Place, str]]:
    """Numbers of a file that are too small to be meant: 141 where 141GB was."""
    numbers: dict[Place, float] = {("card", "memory"): given.card.memory, ("card", "bandwidth"): given.card.bandwidth}
    for name in Links.model_fields:
        link: Link | None = getattr(given.links, name)
        if link is not None:
            numbers["links", name, "bandwidth"] = link.bandwidth
            if link.latency > 1:
                yield ("links", name, "latency"), f"{link.latency:g} seconds is longer than 1 s; add a unit, such as 10us"
    for place, number in numbers.items():
        if 0 < number < _FORGOTTEN:
            unit = "GB" if place[-1] == "memory" else "GB/s"
            yield place, f"{number:g} bytes is less than {_FORGOTTEN:,}; add a unit, such as {number:g}{unit}"
