"""Arms of the exchange benchmark, and their plans.

    P0     row-wise over all ranks, every lookup is exchanged; fp32
    P1     row-wise, a rank requests each row once; fp32
    P2     row-wise, a node requests each row once; fp32
    P1q    as P1, with int8 rows and bf16 gradients
    P1o    as P1q, pooled by owners: one sum and one gradient per sequence and rank are exchanged
    P3     the plan of `make_plan`, with int8 rows and bf16 gradients, in at most the bytes of P1
    P3x    the same with fp32 gradients: exact
    P3f    the same with fp32 rows, too: tiers alone, in at most the bytes of P1
    P3r    as P3 with forced replicas: rows that a node requests in every other step, once a node
    P3c    the same rows on every rank

The same runtime carries out all plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.exchange.logs import TABLE
from benchmarks.plan.baselines import make_baseline_plan
from thermocline.heat.profile import HeatProfile
from thermocline.plan.make import make_plan
from thermocline.plan.model import Plan
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

DIM = 128
BEST = "best"  # of all plans


@dataclass(frozen=True)
class ExchangeArm:
    """A placement and exchange of rows. `every`: exchange every lookup, not every distinct row."""

    name: str
    placement: str  # of `candidates.plain` or `copied`, or BEST
    precision: str = "fp32"
    gradients: str = "fp32"
    every: bool = False
    pooled: bool = False  # sequences come as sums, not row by row


ARMS = (
    ExchangeArm("P0", "row-wise", every=True),
    ExchangeArm("P1", "row-wise"),
    ExchangeArm("P2", "row-wise, per node"),
    ExchangeArm("P1q", "row-wise", "int8", "bf16"),
    ExchangeArm("P1o", "row-wise, summed by owners", "int8", "bf16", pooled=True),
    ExchangeArm("P3", BEST, "int8", "bf16"),
    ExchangeArm("P3x", BEST, "int8"),
    ExchangeArm("P3f", BEST),
    ExchangeArm("P3r", "hot rows once a node", "int8", "bf16"),
    ExchangeArm("P3c", "hot rows on every card", "int8", "bf16"),
)
REPLICAS = ("P3r", "P3c")
BY_NAME = {arm.name: arm for arm in ARMS}


@dataclass(frozen=True)
class Setting:
    """Shared by all arms of a comparison: the table, the batch, the dense part, heat and links."""

    rows: int
    batch: int
    dense: float  # seconds
    below: float  # of these, below the lookup
    heat: HeatProfile
    topology: Topology

    def plan(self, arm: ExchangeArm) -> Plan:
        """The plan of an arm. A plan of `make_plan` takes at most the bytes of fp32 rows stored once."""
        tables = self._tables(arm.precision, "sum" if arm.pooled else "none")
        if arm.placement != BEST:
            return make_baseline_plan(arm.placement, tables, self.heat, self.topology, arm.gradients)
        room = make_baseline_plan("row-wise", self._tables("fp32"), self.heat, self.topology).fullest_rank.total
        return make_plan(tables, self.heat, self.topology, min(room, self.topology.gpu.memory), gradients=arm.gradients)

    def _tables(self, precision: str, pooling: str = "none") -> TablesConfig:
        fields = {"name": TABLE, "rows": self.rows, "dim": DIM, "pooling": pooling, "precision": precision, "cache": 0.0}
        one = TableConfig.model_validate(fields)
        return TablesConfig(batch=self.batch, dense=self.dense, below=self.below, optimizer="rowwise_adagrad", tables=(one,))
