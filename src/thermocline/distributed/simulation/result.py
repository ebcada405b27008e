"""The result of a simulation: bytes and messages of all ranks, and the predicted time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thermocline.distributed.exchange.traffic_meter import TrafficRecord, traffic_records
from thermocline.distributed.placement.table_map import Counts
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass, Plan
from thermocline.plan.run_file import fingerprint


@dataclass(frozen=True)
class Simulation:
    """Bytes that all ranks send in some steps, and the predicted time of a step.

    Attributes:
        plan: the simulated plan.
        steps: number of steps.
        parts: table and tier of each part; the last entry, without either, is message counts.
        bytes_CDLK: bytes by rank, direction, link class and part.
        messages_CDL: messages by rank, direction and link class.
        seconds: seconds of a step by part, nothing hidden.
        latency: share of these seconds that is latency, in seconds.

    Example::

        found = simulate(plan, heat, SimulationLog(["clicks.parquet"], plan).steps(plan, 4))
        found.bytes_over("cluster"), found.step
    """

    plan: Plan
    steps: int
    parts: tuple[tuple[str, int], ...]
    bytes_CDLK: Counts
    messages_CDL: Counts
    seconds: dict[str, float]
    latency: float

    @property
    def ranks(self) -> int:
        return len(self.bytes_CDLK)

    @property
    def step(self) -> float:
        """Seconds of a step, of which the dense part hides as much as the plan expects."""
        exchange = sum(self.seconds[part] for part in ("ids", "rows", "gradients", "sync"))
        return sum(self.seconds.values()) - min(self.plan.step.hidden, exchange)

    def sent(self, rank: int) -> list[TrafficRecord]:
        """The records of the traffic meter of a rank."""
        return traffic_records(self.parts, self.bytes_CDLK[rank])

    def all_sent(self) -> list[TrafficRecord]:
        """The records of all ranks, summed."""
        return traffic_records(self.parts, self.bytes_CDLK.sum(axis=0))

    def bytes_over(self, link: LinkClass, direction: Direction | None = None) -> float:
        """Bytes that a rank sends over a link class in a step, the mean of all ranks; in one direction or in all."""
        way = slice(None) if direction is None else slice(DIRECTIONS.index(direction), DIRECTIONS.index(direction) + 1)
        return float(self.bytes_CDLK[:, way, LINK_CLASSES.index(link)].sum()) / self.ranks / self.steps

    def messages_over(self, link: LinkClass) -> float:
        return float(self.messages_CDL[:, :, LINK_CLASSES.index(link)].sum()) / self.ranks / self.steps

    def to_json(self) -> dict[str, Any]:
        """Lines are bytes of all ranks and steps; other values are per rank and step."""
        cluster, links = self.plan.topology, [link for link in LINK_CLASSES if link != "host"]
        return {
            "plan": fingerprint(self.plan),
            "nodes": cluster.nodes,
            "cards_per_node": cluster.gpus_per_node,
            "batch": self.plan.batch,
            "steps": self.steps,
            "lines": [line._asdict() for line in self.all_sent()],
            "bytes": {link: {way: self.bytes_over(link, way) for way in DIRECTIONS} for link in links},
            "messages": {link: self.messages_over(link) for link in links},
            "uneven": self.uneven,
            "seconds": self.seconds,
            "latency": self.latency,
            "step": self.step,
            "planned": {"step": self.plan.step.total, "seconds": self.plan.step.parts},
        }

    @property
    def uneven(self) -> float:
        """The bytes of the busiest rank over those of the mean rank."""
        sent_C = self.bytes_CDLK[:, :, LINK_CLASSES.index("card") + 1 :].sum(axis=(1, 2, 3))
        return float(sent_C.max() / max(sent_C.mean(), 1e-9))
