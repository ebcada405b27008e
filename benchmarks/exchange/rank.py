"""One rank of the exchange benchmark with our tables.

The links are set, and measured by `calibrate`, before the first job. A job is a log, an arm, a ratio of links and whether
exchange and computing overlap: the arm's plan is made from heat and measured links, a model is sharded by it, one step warms it
up, the others are measured and held against the plan.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.exchange.arms import BY_NAME, DIM, ExchangeArm, Setting
from benchmarks.exchange.logs import TABLE
from benchmarks.exchange.network import Net
from benchmarks.exchange.step import APART, TIMEOUT, Clock, Dense, Input, Job, Steps, add_line, fork_ranks, load_batches
from thermocline.distributed.calibration import calibrate
from thermocline.distributed.shard import Sharding, shard_
from thermocline.heat.profile import HeatProfile
from thermocline.kernels.cpu.compile import prepare
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.plan.cost.phases import RowKinds, prefetch_latency
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.model import Plan
from thermocline.plan.run_file import MeasuredRun, check_run
from thermocline.plan.topology import Topology
from thermocline.rows.optimizers import RowwiseAdagrad


class ShardedModel(nn.Module):
    """Rows of sequences, or their sums, and what is computed from them."""

    def __init__(self, rows: int, arm: ExchangeArm, dense: Dense) -> None:
        super().__init__()
        table = Table(TABLE, rows, DIM, row_config=RowConfig(arm.precision))
        rows_config = RowConfig(cache=0.0, optimizer=RowwiseAdagrad(lr=0.01))
        mode = "sum" if arm.pooled else "none"
        self.rows: Any = EmbeddingCollection([table], mode=mode, rows=rows_config, device="meta")
        self.dense = dense

    def look_up(self, batch: Input) -> Tensor:
        values_ND: Tensor = self.rows({TABLE: batch}).values()
        return values_ND


class Rank:
    """This process and its process groups."""

    frames = 4  # that may pass a link at once

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.logs = given, Path(given["logs"])
        self.net = Net(*given["net"])
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.clock = Clock()
        self.topologies: dict[str, Topology] = {}
        self.heat: dict[str, HeatProfile] = {}

    def run(self) -> None:
        self.calibrate()
        links = None
        with self.clock.watching():
            for n, job in enumerate(self.given["jobs"]):
                if self.rank == 0 and links != (links := job["links"]):
                    node, cluster = job["rates"]
                    self.net.shape(node, cluster, frames=self.frames)
                # One process group per job, because groups have threads. The rendezvous is a file: any port could be taken.
                meeting = f"file://{self.given['meetings']}/{n}"
                dist.init_process_group("gloo", meeting, TIMEOUT, self.ranks, self.rank)
                result = self.measure(job)
                if self.rank == 0:
                    add_line(self.given["out"], job | result)
                dist.destroy_process_group()

    def calibrate(self) -> None:
        """Measure the links at every rate, each time in a process group of its own, on a port of its own."""
        rates = {job["links"]: job["rates"] for job in self.given["jobs"]}
        if self.given["topology"]:
            self.topologies = dict.fromkeys(rates, Topology.model_validate(self.given["topology"]))
            return
        for n, (links, (node, cluster)) in enumerate(rates.items(), 1):
            os.environ["MASTER_PORT"] = str(self.given["port"] + n)
            if self.rank == 0:
                self.net.shape(node, cluster, frames=self.frames)
            found = calibrate(lambda done, total, what: None)
            if found is not None:
                self.topologies[links] = found

    def measure(self, job: Job) -> dict[str, Any]:
        arm, batch = BY_NAME[job["arm"]], self.given["batch"]
        rows, batches = load_batches(self.logs, job, self.rank, self.ranks, batch)
        if job["log"] not in self.heat:
            self.heat = {job["log"]: HeatProfile.load(self.logs / f"{job['log']}.tc")}
        heat = self.heat[job["log"]]
        dense = Dense(DIM, job["dense"], arm.pooled)
        alone = dense.alone(batches)
        plan = self.plan(job, arm, rows, heat, alone)
        model = ShardedModel(rows, arm, dense)
        sharding = shard_(model, plan, heat)
        model.rows.dedup = not arm.every
        found: dict[str, Any] = {
            "tiers": {str(tier.tier): tier.rows for tier in plan.tables[0].tiers},
            "way": plan.tables[0].exchange,
            "predicted": {"step": plan.step.total, "exposed": plan.step.exposed, "parts": plan.step.parts},
            "topology": plan.topology.model_dump(mode="json"),
        }
        apart = job["mode"] == APART
        model.rows.pipeline.overlap = not apart
        ahead = None if apart else lambda later: model.rows.prefetch({TABLE: later})
        steps = Steps(self.net, self.clock, self.given["meet"], model.look_up, model.dense, ahead)
        steps.warm_up(batches[0])
        sharding.reset_meters()
        measured = steps.run(batches) if apart else steps.flow(batches)
        if apart:
            total = without_overlap(plan, model.rows.state.context.routes.uses)
            plan = plan.model_copy(update={"step": plan.step.model_copy(update={"total": total})})
        run = sharding.run(batch, measured["step"]).model_copy(update={"plan": ""})
        lines = [] if arm.every else check_run(plan, run).to_json()["lines"]
        return found | measured | _result(sharding, run) | {"alone": alone, "exposed": measured["step"] - alone, "check": lines}

    def plan(self, job: Job, arm: ExchangeArm, rows: int, heat: HeatProfile, dense: float) -> Plan:
        """The first rank makes the plan and broadcasts it."""
        told: list[Any] = [None]
        if self.rank == 0:
            setting = Setting(rows, self.given["batch"], dense, job["dense"] / 2, heat, self.topologies[job["links"]])
            told = [setting.plan(arm).model_dump_json()]
        dist.broadcast_object_list(told)
        return Plan.model_validate_json(told[0])


def without_overlap(plan: Plan, uses: RowKinds) -> float:
    """Seconds of a step without overlap, which has no exchanges of prefetched batches."""
    more = prefetch_latency(Cluster.of(plan.topology), uses) if plan.step.overlaps else 0.0
    return sum(plan.step.parts.values()) - more


def _result(sharding: Sharding, run: MeasuredRun) -> dict[str, Any]:
    """Bytes that a rank sends in a step, the mean over ranks, and their balance."""
    sent = sharding.groups.all_gather(_by_link(sharding))
    waited = sharding.waited()
    return {
        "waited": {direction: spent / run.steps for direction, spent in waited.items()},  # of the first rank
        "traffic": {f"{line.link}/{line.direction}": line.bytes for line in run.traffic},
        "messages": {link: sum(line.messages for line in run.traffic if line.link == link) for link in ("node", "cluster")},
        "balance": max(map(sum, sent)) * len(sent) / max(1, sum(map(sum, sent))),
        "balance_between": max(far for _, far in sent) * len(sent) / max(1, sum(far for _, far in sent)),
        "memory": sum(rank.total for rank in run.ranks),
    }


def _by_link(sharding: Sharding) -> tuple[int, int]:
    """Bytes that this rank sent inside its node and between nodes."""
    sent = sharding.sent()
    near, far = (sum(line.bytes for line in sent if line.link == link) for link in ("node", "cluster"))
    return near, far


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()  # kernels, once, before there are ranks that would each load them
    sys.exit(fork_ranks(Path(sys.argv[1]), lambda given: Rank(given).run()))
