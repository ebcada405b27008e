"""The cluster that a plan is for: nodes, GPUs, memory, and the speed of every class of links (docs/planning_files.md).

The file says `card` where the code says `gpu`; the aliases below are the only place that knows both names.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field

from thermocline.errors import BadInput, did_you_mean

from .fields import Bytes, Count, PositiveBytes, Rate, Seconds
from .io import FileModel, Location, Problems, read_model, read_text

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")
OVERLAPPING: tuple[Backend, ...] = ("gloo",)  # backends under which exchanges run behind the dense part

PRESETS = files(__package__) / "presets"

_SMALLEST = 1 << 20  # bytes, or bytes per second: a smaller number lacks its unit


class Link(FileModel):
    """One class of links: bytes per second, and seconds.

    Example::

        link = Link(bandwidth="450GB/s", latency="10us")
    """

    bandwidth: Rate = Field(description="bytes per second of one GPU and direction, such as 450GB/s")
    latency: Seconds = Field(default=0.0, description="fixed time of one exchange, such as 10us")
    alone: Rate | None = Field(
        default=None,
        description="bytes per second of one GPU while the others of its node are idle; default: bandwidth, as with a network "
        "card for each GPU. GPUs that share one have more alone",
    )

    def peak(self, gpus_per_node: int) -> float:
        """Bytes per second of one GPU while the others of its node are idle, at most what they have together."""
        return min(max(self.alone or 0.0, self.bandwidth), self.bandwidth * gpus_per_node)


class GpuSpec(FileModel):
    """Memory of one GPU for tables, in bytes, and its read bandwidth, in bytes per second.

    Example::

        gpu = GpuSpec(memory="141GB", bandwidth="4.0TB/s")
    """

    memory: PositiveBytes = Field(description="bytes of GPU memory that tables may fill, such as 141GB")
    bandwidth: Rate = Field(description="bytes per second that a GPU reads from its own memory, such as 4.0TB/s")


class HostSpec(FileModel):
    """Host memory of a node, in bytes, shared by its GPUs.

    Example::

        host = HostSpec(memory="2TB")
    """

    memory: Bytes = Field(default=0, description="bytes of host memory of a node, shared by its GPUs, such as 2TB")


class Links(FileModel):
    """The classes of links of a cluster.

    Example::

        links = Links(node=Link(bandwidth="450GB/s"), cluster=Link(bandwidth="50GB/s", latency="10us"))
    """

    node: Link = Field(description="between GPUs of one node")
    cluster: Link | None = Field(default=None, description="between GPUs of different nodes; required with several nodes")
    host: Link | None = Field(default=None, description="between a GPU and the memory of its node")


class Topology(FileModel):
    """A cluster of nodes with as many GPUs each.

    Attributes:
        gpu: a GPU of the cluster.
        other_gpus: a GPU of nodes with other GPUs, by the number of the node.
        host: host memory of a node.
        links: the links between GPUs.
        backend: the backend of torch.distributed. Under gloo, exchanges overlap computing; under NCCL they do not.

    Example::

        topology = Topology.load("hgx-h200", nodes=4)
        topology.world_size  # 32
    """

    version: Literal[1] = Field(default=1, description="version of this file format; 1")
    name: str = Field(default="", description="a name for people")
    source: str = Field(default="", description="where the numbers come from")
    date: str = Field(default="", description="when the numbers were measured")
    nodes: Count = Field(description="machines, 1 or more")
    gpus_per_node: Count = Field(
        validation_alias="cards_per_node", serialization_alias="cards_per_node", description="GPUs in each machine, 1 or more"
    )
    gpu: GpuSpec = Field(validation_alias="card", serialization_alias="card")
    other_gpus: dict[int, GpuSpec] = Field(
        default={}, validation_alias="other_cards", serialization_alias="other_cards",
        description="a GPU of nodes that have others than `card`, by number of the node from 0",
    )  # fmt: skip
    host: HostSpec = HostSpec()
    links: Links
    backend: Backend = Field(
        default="nccl", description="backend of torch.distributed: gloo overlaps exchanges with computing, nccl does not"
    )

    def _contradictions(self) -> Problems:
        if self.nodes > 1 and self.links.cluster is None:
            out = "name its bandwidth, such as cluster: {bandwidth: 50GB/s, latency: 20us}, or plan for nodes: 1"
            yield ("links",), f"nodes is {self.nodes}, but there is no link 'cluster' between them; {out}"
        if beyond := [node for node in self.other_gpus if not 0 <= node < self.nodes]:
            yield ("other_cards", beyond[0]), f"there is no node {beyond[0]}: nodes is {self.nodes}, and the first has number 0"

    @property
    def world_size(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> tuple[GpuSpec, ...]:
        """A GPU of each node."""
        return tuple(self.other_gpus.get(node, self.gpu) for node in range(self.nodes))

    def room_of_nodes(self, budget: int) -> list[int]:
        """The bytes that tables may fill on a GPU of each node, with this budget per GPU."""
        return [min(budget, gpu.memory) for gpu in self.gpus]

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run behind the dense part."""
        return self.backend in OVERLAPPING

    @classmethod
    def load(cls, path_or_preset: str | Path, nodes: int | None = None) -> Topology:
        """Load a topology file or a preset.

        Args:
            path_or_preset: A YAML or JSON file, or the name of a preset such as "hgx-h200".
            nodes: Number of nodes, in place of the number in the file.

        Raises:
            BadInput: Neither a file nor a preset has this name.
            FormatError: The file has wrong fields; the error names each with its line.
        """
        text, name = _find(path_or_preset)
        return read_model(cls, text, name, {} if nodes is None else {"nodes": nodes}, _without_units)


def presets() -> dict[str, Topology]:
    """Load the topologies that are shipped with this package.

    Returns:
        The topologies by name.

    Example::

        presets()["hgx-h200"].gpu.memory  # bytes
    """
    return {name: Topology.load(name) for name in _preset_names()}


def _preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in PRESETS.iterdir() if entry.name.endswith(".yaml"))


def _find(path_or_preset: str | Path) -> tuple[str, str]:
    """The text of a file or preset, and its name for error messages."""
    given = str(path_or_preset)
    if Path(given).exists():
        return read_text(given), given
    names = _preset_names()
    if given in names:
        return (PRESETS / f"{given}.yaml").read_text(encoding="utf-8"), f"preset {given}"
    message = f"{given!r} is neither a file nor a preset{did_you_mean(given, names)}; presets are {', '.join(names)}"
    raise BadInput(message, parameter="topology", value=given, available=names)


def _without_units(given: Topology) -> Iterator[tuple[Location, str]]:
    """Numbers that are too small to be meant: 141 in place of 141GB."""
    numbers: dict[Location, float] = {("card", "memory"): given.gpu.memory, ("card", "bandwidth"): given.gpu.bandwidth}
    for node, gpu in given.other_gpus.items():
        numbers |= {("other_cards", node, "memory"): gpu.memory, ("other_cards", node, "bandwidth"): gpu.bandwidth}
    for name in Links.model_fields:
        link: Link | None = getattr(given.links, name)
        if link is not None:
            numbers["links", name, "bandwidth"] = link.bandwidth
            if link.latency > 1:
                yield ("links", name, "latency"), f"{link.latency:g} seconds is longer than 1 s; add a unit, such as 10us"
    for location, number in numbers.items():
        if 0 < number < _SMALLEST:
            unit = "GB" if location[-1] == "memory" else "GB/s"
            yield location, f"{number:g} bytes is less than {_SMALLEST:,}; add a unit, such as {number:g}{unit}"
