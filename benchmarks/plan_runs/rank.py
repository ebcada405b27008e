"""One rank of the random runs: the plan of `make_plan`, carried out with real processes over shaped links."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.exchange.rank import Rank, without_overlap
from benchmarks.exchange.step import Job, Steps, Wait, fork_ranks
from benchmarks.plan.baselines import make_baseline_plan
from benchmarks.plan_runs.case import FRAMES, RandomCase
from benchmarks.plan_runs.inputs import tables_of
from thermocline.distributed.shard import shard_
from thermocline.heat.profile import HeatProfile
from thermocline.kernels.cpu.compile import prepare
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.plan.make import make_plan
from thermocline.plan.model import Plan
from thermocline.plan.run_file import check_run
from thermocline.plan.topology import Backend, Topology
from thermocline.rows.optimizers import RowwiseAdagrad

Batch = tuple[dict[str, tuple[Tensor, Tensor]], None]


class PlainDense(nn.Module):
    """The dense part: time that passes before the lookup and after it, and a loss."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.context = seconds / 2, nn.Parameter(torch.zeros(1))

    def below(self) -> Tensor:
        found: Tensor = Wait.apply(self.context, self.seconds)  # type: ignore[no-untyped-call]
        return found

    def forward(self, context: Tensor, values: Tensor, offsets: None) -> Tensor:
        waited: Tensor = Wait.apply(values, self.seconds)  # type: ignore[no-untyped-call]
        return waited.square().mean() + context.sum()

    def alone(self, width: int, times: int = 3) -> float:
        """Seconds of the dense part alone, the slowest rank."""
        seconds = []
        for _ in range(times):
            dist.barrier()
            values, begun = torch.zeros(width, requires_grad=True), time.perf_counter()
            self(self.below(), values, None).backward()
            seconds.append(time.perf_counter() - begun)
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.median())


def batches_of(case: RandomCase, rank: int, steps: int) -> list[Batch]:
    """The batches of a rank, as tensors."""
    found = []
    for step in range(steps):
        bags = case.bags(step, rank)
        found.append(({name: (torch.from_numpy(ids), torch.from_numpy(ends)) for name, (ids, ends) in bags.items()}, None))
    return found


def width_of(batches: Sequence[Batch], case: RandomCase) -> int:
    """Numbers of the vectors of a batch."""
    per_table = [len(batches[0][0][name][0]) if case.pooling == "none" else case.batch for name in case.names]
    return sum(count * table.dim for count, table in zip(per_table, case.tables, strict=True))


class RandomRank(Rank):
    """A rank that makes and runs the plan of a random case."""

    frames = FRAMES

    def measure(self, job: Job) -> dict[str, Any]:
        case = RandomCase.draw(job["seed"])
        batches = batches_of(case, self.rank, job["steps"])
        heat = HeatProfile.load(Path(self.given["logs"]) / f"{case.seed}.tc")
        dense = PlainDense(case.dense)
        alone = dense.alone(width_of(batches, case))
        plan = self.plan_case(case, heat, alone, self.topologies.get(job["links"]))
        tables = [
            Table(n, t.rows, t.dim, row_config=RowConfig(case.precision)) for n, t in zip(case.names, case.tables, strict=True)
        ]
        rows = RowConfig(cache=0.0, optimizer=RowwiseAdagrad(lr=0.01))
        model: Any = nn.ModuleDict(
            {"rows": EmbeddingCollection(tables, mode=case.pooling, rows=rows, device="meta"), "dense": dense}
        )
        sharding = shard_(model, plan, heat)
        collection = model["rows"]
        collection.pipeline.overlap = case.overlap
        ahead = (lambda later: collection.prefetch(later[0])) if case.overlap else None
        steps = Steps(self.net, self.clock, self.given["meet"], lambda batch: collection(batch[0]).values(), dense, ahead)
        steps.run(batches[:1])
        sharding.reset_meters()
        measured = steps.flow(batches) if case.overlap else steps.run(batches)
        run = sharding.run(case.batch, measured["step"]).model_copy(update={"plan": ""})
        collection.pipeline.overlap = not case.overlap
        steps.ahead = None if case.overlap else lambda later: collection.prefetch(later[0])
        if case.overlap:  # counters of the kernel need steps with nothing under way at either end
            measured |= {"kernel": steps.run(batches)["kernel"], "overlapping": measured["step"] - alone}
        else:
            measured |= {"overlapping": steps.flow(batches)["step"] - alone}
        if not case.overlap:
            total = without_overlap(plan, collection.state.context.routes.uses)
            plan = plan.model_copy(update={"step": plan.step.model_copy(update={"total": total})})
        placements = [
            f"{t.placement}/{t.exchange}/{t.pooled_by}/{'+'.join(str(tier.tier) for tier in t.tiers)}" for t in plan.tables
        ]
        return measured | {
            "what": case.describe(), "alone": alone, "exposed": measured["step"] - alone, "placements": placements,
            "predicted": {"step": plan.step.total, "parts": plan.step.parts, "hidden": plan.step.hidden},
            "traffic": {f"{line.link}/{line.direction}": line.bytes for line in run.traffic},
            "candidates": {each.name: each.time for each in plan.candidates[:8]},
            "topology": plan.topology.model_dump(mode="json"), "check": check_run(plan, run).to_json()["lines"],
        }  # fmt: skip

    def plan_case(self, case: RandomCase, heat: HeatProfile, dense: float, topology: Topology | None) -> Plan:
        """The first rank makes the plan and broadcasts it."""
        told: list[Any] = [None]
        if topology is not None:  # on the first rank
            config = tables_of(case, dense)
            budget = None
            if case.room:
                least = make_baseline_plan("row-wise", config, heat, topology, case.gradients).fullest_rank.total
                budget = min(int(case.room * least), topology.gpu.memory)
            backend: Backend = "gloo" if case.overlap else "nccl"
            wire = case.gradients
            told = [make_plan(config, heat, topology, budget, gradients=wire, backend=backend, sums=wire).model_dump_json()]
        dist.broadcast_object_list(told)
        return Plan.model_validate_json(told[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    sys.exit(fork_ranks(Path(sys.argv[1]), lambda given: RandomRank(given).run()))
