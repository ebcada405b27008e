"""The arms of the quality benchmark, and the plan of each.

    fp32              fp32 rows, row-wise over all ranks, gradients in fp32: the reference
    int8-bf16-tiers   the setting of a cluster: int8 rows, bf16 gradients on the wire, the hottest 5% of the rows on every rank,
                      the next 15% once in each node
    int8, bf16, tiers each of the three alone (--filter)
    zeroed-89%        a control: fp32 after training, with all but the hottest 11% of the rows set to zero

Every run has two processes over gloo, as two nodes of one GPU, with the real runtime: exchange, synchronization of copies, and
rounding on the wire. Plans are written here, because the planner would choose no tiers for tables this small. The control must
be rejected, or the log cannot tell good from bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan, StepPlan, TablePlan, Tier
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

NODES, CARDS_PER_NODE = 2, 1
KEPT = 0.11  # share of the rows that the zeroing control keeps
FIRST, SECOND = 0.05, 0.15  # shares of the rows in tiers 1 and 2


@dataclass(frozen=True)
class QualityArm:
    """One way to store, place and exchange rows."""

    precision: str = "fp32"
    gradients: str = "fp32"
    tiers: bool = False
    zeroed: bool = False  # evaluated in the runs of fp32

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
    """The required arm and its control; with `filter`, arms whose name contains it, and fp32."""
    if filter is None:
        return list(ARMS)
    return [arm for arm in (*ARMS, *ALONE) if arm == FP32 or filter in arm.name]


class Size(NamedTuple):
    """A table to be planned."""

    rows: int
    dim: int
    features: tuple[str, ...]  # names in the heat profile
    lookups: int  # of a rank and step


def plan_of(
    arm: QualityArm, tables: Mapping[str, Size], heat: HeatProfile, nodes: int = NODES, cards: int = CARDS_PER_NODE
) -> Plan:
    """The plan of an arm, without predicted costs."""
    link = Link(bandwidth=1e9, latency=1e-5)
    card = GpuSpec(memory=1 << 30, bandwidth=1e10)
    planned = tuple(_table(arm, name, size) for name, size in tables.items())
    return Plan(
        goal="train", objective="by hand", heat=heat.sha256, budget=1 << 30, batch=1, dense=0.0, optimizer="rowwise_adagrad",
        topology=Topology(nodes=nodes, gpus_per_node=cards, gpu=card, links=Links(node=link, cluster=link)),
        gradients="bf16" if arm.gradients == "bf16" else "fp32", tables=planned, ranks=(), traffic=(),
        step=StepPlan(parts={"dense": 0.0}, overlaps=(), hidden=0.0, total=1.0, throughput=1.0), balance=1.0, binding="",
        sensitivities=(), candidates=(),
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
