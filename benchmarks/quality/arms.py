"""The arms of the quality gate, and the plan of each.

    fp32              fp32 rows, row-wise over all cards, gradients in fp32: what all others are compared with
    int8-bf16-tiers   what a cluster would run: int8 rows, gradients in bf16 on the wire, the hottest 5% of the rows on every
                      card, the next 15% once a node
    int8, bf16, tiers each of the three alone; for whoever wants to know which of them it was (--filter)
    zeroed-89%        a control: the fp32 arm, after training, with all but the hottest 11% of the rows set to zero

Every run is two processes over gloo, standing for two nodes of one card, and the runtime is the real one: rows and gradients
travel as they would, copies are synchronized, rounding is that of the wire. The plans are written here and not made by the
planner, which on tables this small would choose no tiers. The control has to be rejected, or the log cannot tell good from bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan, StepPlan, TablePlan, Tier
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

NODES, CARDS_PER_NODE = 2, 1
KEPT = 0.11  # of the rows, in the control that zeroes the others
FIRST, SECOND = 0.05, 0.15  # shares of the rows in tiers 1 and 2


@dataclass(frozen=True)
class QualityArm:
    """One way to keep, to place and to exchange rows."""

    precision: str = "fp32"
    gradients: str = "fp32"
    tiers: bool = False
    zeroed: bool = False  # judged from the fp32 arm's runs

    @property
    def name(self) -> str:
        if self.zeroed:
            return f"zeroed-{1 - KEPT:.0%}"
        changed = [self.precision] * (self.precision != "fp32") + [self.gradients] * (self.gradients != "fp32")
        return "-".join([*changed, *["tiers"] * self.tiers]) or "fp32"


FP32, ZEROED = QualityArm(), QualityArm(zeroed=True)
GATED = QualityArm("int8", "bf16", tiers=True)
ARMS = (FP32, GATED, ZEROED)
ALONE = (QualityArm("int8"), QualityArm(gradients="bf16"), QualityArm(tiers=True))


def arms_of(filter: str | None) -> list[QualityArm]:
    """The gate and its control; with `filter`, those of all arms whose name has it, next to fp32."""
    if filter is None:
        return list(ARMS)
    return [arm for arm in (*ARMS, *ALONE) if arm == FP32 or filter in arm.name]


class Size(NamedTuple):
    """A table to be planned."""

    rows: int
    dim: int
    features: tuple[str, ...]  # names in the heat
    lookups: int  # of a card and step


def plan_of(
    arm: QualityArm, tables: Mapping[str, Size], heat: HeatProfile, nodes: int = NODES, cards: int = CARDS_PER_NODE
) -> Plan:
    """The plan of an arm. What it should cost is nobody's question here, and left at zero."""
    link = Link(bandwidth=1e9, latency=1e-5)
    card = GpuSpec(memory=1 << 30, bandwidth=1e10)
    planned = tuple(_table(arm, name, size) for name, size in tables.items())
    return Plan(
        goal="train", objective="by hand", heat=heat.sha256, budget=1 << 30, batch=1, dense=0.0, optimizer="rowwise_adagrad",
        topology=Topology(nodes=nodes, gpus_per_node=cards, gpu=card, links=Links(node=link, cluster=link)),
        gradients="bf16" if arm.gradients == "bf16" else "fp32", tables=planned, cards=(), traffic=(),
        step=StepPlan(parts={"dense": 0.0}, overlaps=(), hidden=0.0, total=1.0, throughput=1.0), balance=1.0, binding="",
        marginals=(), candidates=(),
    )  # fmt: skip


def _table(arm: QualityArm, name: str, size: Size) -> TablePlan:
    first, second = (int(size.rows * share) if arm.tiers else 0 for share in (FIRST, SECOND))
    counts: dict[Literal[1, 2, 3], int] = {1: first, 2: second, 3: size.rows - first - second}
    tiers = tuple(
        Tier(tier=number, rows=count, threshold=0.0, lookups=0.0, precision=arm.precision)
        for number, count in counts.items()
        if count
    )
    return TablePlan(
        name=name, rows=size.rows, dim=size.dim, pooling="none", features=size.features, lookups=size.lookups,
        precision=arm.precision, cache=0.0, near=0.0, placement="tiers", tiers=tiers, exchange="flat", pooled_by="asker",
        wire_rows=arm.precision, wire_gradients=arm.gradients, bytes={}, traffic=(), time={}, runner_up=None, binding="",
        curve=(),
    )  # fmt: skip
