"""What tables would take in each precision, and the fewest cards that hold them. A sum, not a plan: no heat is needed.

Rows are taken as split evenly over the cards, which no table is too small or too large for. `host` is the other way to keep
them: codes in host memory, all else on the cards. A card also holds the buffers of its exchange with others, sized for a batch
whose ids are all distinct; the dense part of the model is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cost.memory import CODES, PARTS, STATE, Precision, exchange_bytes, read_store, table_bytes
from .tables import TableFile, Tables
from .topology import Topology


@dataclass(frozen=True)
class Choice:
    """A precision and cache for all tables; without a precision, each table has its own."""

    name: str
    precision: Precision | None = None
    cache: float = 0.0


CHOICES = (
    Choice("fp32", "fp32"),
    Choice("int8 + 5% cache", "int8", 0.05),
    Choice("int4 + 1% cache", "int4", 0.01),
    Choice("int2 + 1% fp32 + 5% int8", {"fp32": 0.01, "int8": 0.05, "int2": 0.94}),
)
AS_GIVEN = Choice("as given")


@dataclass(frozen=True)
class Fit:
    """How many cards hold the tables, and what lies on each of them and on each node's host."""

    cards: int
    nodes: int
    card_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Estimate:
    """All tables in one choice: bytes by part, in all and of each table, and where they fit."""

    choice: Choice
    parts: dict[str, int]
    tables: dict[str, int]  # bytes of each, all parts
    buffers: int  # bytes of each card, where there are several
    on_card: Fit | None = None  # everything on cards; None without a topology, or where no number of cards is enough
    on_host: Fit | None = None  # codes in host memory

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def host(self) -> int:
        """Bytes in host memory where codes lie there."""
        return self.parts[CODES]

    @property
    def rows(self) -> int:
        """Bytes of the rows and their cache, without optimizer state."""
        return self.total - self.parts[STATE]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON writes it."""
        sums = {"total": self.total, "card_bytes_with_codes_on_host": self.total - self.host, "host_bytes": self.host}
        choice = {"name": self.choice.name, "precision": self.choice.precision, "cache": self.choice.cache}
        fits = {name: asdict(fit) if fit else None for name, fit in (("on_card", self.on_card), ("on_host", self.on_host))}
        return choice | {"parts": self.parts} | sums | {"buffers": self.buffers} | fits | {"tables": self.tables}


def estimate(tables: Tables, topology: Topology | None = None, batch: int | None = None) -> list[Estimate]:
    """Every choice for these tables, and, where they say how they are kept, what they say themselves first.

    `batch` replaces that of the tables; 0 leaves the buffers out.
    """
    own = [AS_GIVEN] if any(table.precision is not None for table in tables.tables) else []
    samples = tables.batch if batch is None else batch
    return [_one(tables, choice, topology, samples) for choice in (*own, *CHOICES)]


def _one(tables: Tables, choice: Choice, topology: Topology | None, samples: int) -> Estimate:
    parts = dict.fromkeys(PARTS, 0)
    each: dict[str, int] = {}
    buffers = 0.0
    for table in tables.tables:
        precision, cache = _kept(table, choice)
        sizes = table_bytes(table.rows, table.dim, precision, cache, optimizer=tables.optimizer)
        each[table.name] = sum(sizes.values())
        parts = {part: parts[part] + size for part, size in sizes.items()}
        lookups = samples * (len(table.looked_up_by) if table.lookups is None else table.lookups)
        asked = min(lookups, table.rows)
        buffers += sum(exchange_bytes(asked, asked, table.dim, read_store(precision, cache).base).values())
    found = Estimate(choice, parts, each, round(buffers))
    if topology is None:
        return found
    host = found.host if topology.host.memory else None
    on_host = None if host is None else _fit(found.total - host, host, found.buffers, topology)
    return Estimate(choice, parts, each, found.buffers, _fit(found.total, 0, found.buffers, topology), on_host)


def _kept(table: TableFile, choice: Choice) -> tuple[Precision, float]:
    if choice.precision is not None:
        return choice.precision, choice.cache
    if table.precision is None:
        return "int8", 0.05  # what modules do without being told
    return table.precision, table.cache or 0.0


def _fit(card: int, host: int, buffers: int, topology: Topology) -> Fit | None:
    """The fewest cards for so many bytes on cards and on hosts."""
    memory, per_node = topology.card.memory, topology.cards_per_node
    if card <= memory:
        cards = 1
    elif memory <= buffers:
        return None
    else:
        cards = max(2, -(-card // (memory - buffers)))
    nodes = -(-cards // per_node)
    if host:
        hosts = -(-host // topology.host.memory)
        if hosts > nodes:  # a node more for the memory of its host; one card of it is enough
            cards, nodes = (hosts - 1) * per_node + 1, hosts
    share = -(-card // cards) + (buffers if cards > 1 else 0)
    return Fit(cards, nodes, share, -(-host // nodes))


def notes(tables: Tables, estimates: Sequence[Estimate], topology: Topology | None, batch: int | None = None) -> Iterator[str]:
    """What a reader of the numbers has to know."""
    yield f"optimizer state is that of {tables.optimizer}; the dense part of the model is not counted"
    if batch == 0:
        yield "buffers of the exchange between cards are not counted, for the batch is not known; a tables file can name it"
    elif any(table.lookups is None for table in tables.tables):
        yield "tables without `lookups` are taken to have one for each feature and sample"
    if topology is not None and any(found.on_card is None for found in estimates):
        yield f"a card of {topology.name or 'this kind'} is smaller than the buffers of its exchange; lower the batch"
