"""Bytes of tables in each precision, and the fewest GPUs that hold them. A sum, not a plan: no heat is needed.

Rows are split evenly over the GPUs. Alternatively, codes lie in host memory and everything else on the GPUs. A GPU also holds
exchange buffers, sized for a batch of distinct ids; the dense layers are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .cost.memory import CODES, PARTS, Precision, exchange_bytes, parse_precision, table_bytes
from .tables import TableConfig, TablesConfig
from .topology import Topology
from .units import show_bytes


@dataclass(frozen=True)
class StorageChoice:
    """A precision and cache for all tables; without a precision, that of each table."""

    name: str
    precision: Precision | None = None
    cache: float = 0.0


CHOICES = (
    StorageChoice("fp32", "fp32"),
    StorageChoice("int8 + 5% cache", "int8", 0.05),
    StorageChoice("int4 + 1% cache", "int4", 0.01),
    StorageChoice("int2 + 1% fp32 + 5% int8", {"fp32": 0.01, "int8": 0.05, "int2": 0.94}),
)
AS_GIVEN = StorageChoice("as given")


@dataclass(frozen=True)
class GpuFit:
    """The GPUs and nodes that hold the tables, and the bytes of each GPU and host."""

    gpus: int
    nodes: int
    gpu_bytes: int
    host_bytes: int

    def to_json(self) -> dict[str, int]:
        return {"cards": self.gpus, "nodes": self.nodes, "card_bytes": self.gpu_bytes, "host_bytes": self.host_bytes}


@dataclass(frozen=True)
class Estimate:
    """All tables in one choice: bytes by part and by table, and the GPUs that hold them."""

    choice: StorageChoice
    parts: dict[str, int]
    tables: dict[str, int]  # bytes of each, all parts
    buffers: int  # bytes per GPU, with several GPUs
    on_gpu: GpuFit | None = None  # everything on GPUs; None without a topology, or if no number of GPUs is enough
    on_host: GpuFit | None = None  # codes in host memory

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def host(self) -> int:
        """Bytes in host memory, if codes lie there."""
        return self.parts[CODES]

    def to_json(self) -> dict[str, Any]:
        """The estimate for `json.dumps`."""
        sums = {"total": self.total, "card_bytes_with_codes_on_host": self.total - self.host, "host_bytes": self.host}
        choice = {"name": self.choice.name, "precision": self.choice.precision, "cache": self.choice.cache}
        fits = {name: fit.to_json() if fit else None for name, fit in (("on_card", self.on_gpu), ("on_host", self.on_host))}
        return choice | {"parts": self.parts} | sums | {"buffers": self.buffers} | fits | {"tables": self.tables}


def estimate_memory(tables: TablesConfig, topology: Topology | None = None, batch: int | None = None) -> list[Estimate]:
    """Estimate the bytes of tables for a few precisions, after the precisions of the tables themselves, if they name any.

    Args:
        tables: The tables of a model.
        topology: The cluster, to count its GPUs.
        batch: Samples per GPU and step, in place of that of the tables; 0 leaves buffers out.

    Returns:
        An estimate for each precision.

    Example::

        estimate_memory(TablesConfig.load("tables.yaml"), Topology.load("hgx-h200"))[0].total  # bytes
    """
    own = [AS_GIVEN] if any(table.precision is not None for table in tables.tables) else []
    samples = tables.batch if batch is None else batch
    return [_one(tables, choice, topology, samples) for choice in (*own, *CHOICES)]


def _one(tables: TablesConfig, choice: StorageChoice, topology: Topology | None, samples: int) -> Estimate:
    parts = dict.fromkeys(PARTS, 0)
    each: dict[str, int] = {}
    buffers = 0.0
    for table in tables.tables:
        precision, cache = _kept(table, choice)
        sizes = table_bytes(table.rows, table.dim, precision, cache, optimizer=tables.optimizer)
        each[table.name] = sum(sizes.values())
        parts = {part: parts[part] + size for part, size in sizes.items()}
        lookups = samples * (len(table.feature_names) if table.lookups is None else table.lookups)
        requested = min(lookups, table.rows)
        buffers += sum(exchange_bytes(requested, requested, table.dim, parse_precision(precision, cache).base).values())
    total, host, held = sum(parts.values()), parts[CODES], round(buffers)
    on_gpu = _fit(total, 0, held, topology) if topology else None
    on_host = _fit(total - host, host, held, topology) if topology and topology.host.memory else None
    return Estimate(choice, parts, each, held, on_gpu, on_host)


def _kept(table: TableConfig, choice: StorageChoice) -> tuple[Precision, float]:
    if choice.precision is not None:
        return choice.precision, choice.cache
    if table.precision is None:
        return "int8", 0.05  # the default of modules
    return table.precision, table.cache or 0.0


def _fit(total: int, host: int, buffers: int, topology: Topology) -> GpuFit | None:
    """The fewest GPUs for `total` bytes on GPUs and `host` bytes on hosts."""
    memory, per_node = topology.gpu.memory, topology.gpus_per_node
    if total <= memory:
        gpus = 1
    elif memory <= buffers:
        return None
    else:
        gpus = max(2, -(-total // (memory - buffers)))
    nodes = -(-gpus // per_node)
    if host:
        hosts = -(-host // topology.host.memory)
        if hosts > nodes:  # further nodes for their host memory; one GPU of the last is enough
            gpus, nodes = (hosts - 1) * per_node + 1, hosts
    share = -(-total // gpus) + (buffers if gpus > 1 else 0)
    return GpuFit(gpus, nodes, share, -(-host // nodes))


def verdict(estimates: Sequence[Estimate], topology: Topology) -> tuple[Estimate | None, str]:
    """The first estimate whose tables the GPUs of a topology hold, and a sentence about it."""
    gpus, memory = topology.world_size, show_bytes(topology.gpu.memory)
    there = f"{gpus:,} {'GPU' if gpus == 1 else 'GPUs'} of {memory}"
    for found in estimates:
        if (fit := found.on_gpu) is not None and fit.gpus <= gpus:
            where = there if gpus == 1 else f"{fit.gpus:,} of {there}"
            part = f"{show_bytes(fit.gpu_bytes)} per GPU, {fit.gpu_bytes / topology.gpu.memory:.0%} of its memory"
            return found, f"{found.choice.name} fits on {where}: {part}"
    least = min(estimates, key=lambda found: found.total)
    needed = "no number of them is enough" if least.on_gpu is None else f"{least.on_gpu.gpus:,} such GPUs are needed"
    return None, f"nothing fits on {there}: {least.choice.name} takes {show_bytes(least.total)}, and {needed}"


def notes(
    tables: TablesConfig, estimates: Sequence[Estimate], topology: Topology | None, batch: int | None = None
) -> Iterator[str]:
    """The assumptions behind the numbers."""
    yield f"optimizer state is that of {tables.optimizer}; dense layers are not counted"
    if batch == 0:
        yield "exchange buffers are not counted, because the batch is not known; a tables file can name it"
    elif any(table.lookups is None for table in tables.tables):
        yield "tables without `lookups` are assumed to have one per feature and sample"
    if topology is not None and any(found.on_gpu is None for found in estimates):
        yield f"a GPU of {topology.name or 'this topology'} is smaller than its exchange buffers; lower the batch"
