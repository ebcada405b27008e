"""One rank of `bench exchange`: what it does is in the file it is given, what it measured is a line for each job.

The links are set, and measured by `calibrate`, before the first job that needs them. A job is a log, an arm, a rate and whether
exchange and computing overlap: the arm's plan is made from heat and measured links, a model is sharded by it, one step warms it
up, the others are measured. The dense part is a small network over the mean of each sequence's rows, and a wait that makes it
last as long on every rank as it would on a card of its own: two cores cannot compute for eight.

    exchange    seconds of a step that a rank spends in exchanges, waiting for others included
    exposed     what a step takes beyond the dense part
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thermocline as tc

from ..distributed.calibrate import calibrate
from ..distributed.shard import Sharding
from ..heat.profile import HeatProfile
from ..plan.check import compare
from ..plan.model import Plan
from ..plan.topology import Card, Link, Links, Topology
from . import exchange_logs
from .exchange_arms import BY_NAME, DIM, Arm, Setting
from .exchange_logs import TABLE, Log, Sequences
from .exchange_net import Counted, Net, counted
from .record import brief

HIDDEN = 64  # columns of the dense network
TIMEOUT = timedelta(seconds=120)


class Clock:
    """Seconds in collectives since it was last read, by part of the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.part = "forward"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """All of torch.distributed's exchanges are timed meanwhile."""
        plain = dist.all_to_all_single

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*arguments, **named)
            finally:
                self.seconds[self.part] = self.seconds.get(self.part, 0.0) + time.perf_counter() - begun

        dist.all_to_all_single = timed
        try:
            yield
        finally:
            dist.all_to_all_single = plain


class _Wait(torch.autograd.Function):
    """A third of the dense part's time in forward, the rest in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Dense(nn.Module):
    """The part that is not sharded."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, values_ND: Tensor, offsets: Tensor) -> Tensor:
        sample_N = torch.repeat_interleave(offsets.diff())
        sums_SD = values_ND.new_zeros(len(offsets) - 1, DIM).index_add(0, sample_N, values_ND)
        means_SD = _Wait.apply(sums_SD / offsets.diff()[:, None].clamp(min=1), self.seconds)  # type: ignore[no-untyped-call]
        loss: Tensor = self.layers(means_SD).square().mean()
        return loss


class Rank:
    """This process, and what it knows of the others."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.net = Net(*given["net"])
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.clock = Clock()
        self.topologies: dict[str, Topology] = {}
        self.logs: dict[str, tuple[Log, HeatProfile]] = {}

    def calibrate(self) -> None:
        """Measure the links at every rate, each time in a process group of its own."""
        rates = {rate: pair for job in self.given["jobs"] for rate, pair in [(job["links"], job["rates"])]}
        port = int(os.environ["MASTER_PORT"])
        for n, (name, (node, cluster)) in enumerate(rates.items()):
            os.environ["MASTER_PORT"] = str(port + 1 + n)
            if self.rank == 0:
                self.net.shape(node, cluster)
            found = calibrate(lambda done, total, what: None)
            if found is not None:
                self.topologies[name] = found
        os.environ["MASTER_PORT"] = str(port)

    def run(self) -> None:
        self.calibrate()
        dist.init_process_group("gloo", timeout=TIMEOUT)
        links = None
        with self.clock.watching():
            for job in self.given["jobs"]:
                if self.rank == 0 and links != (links := job["links"]):
                    self.net.shape(*job["rates"])
                result = self.measure(job)
                if self.rank == 0:
                    with open(self.given["out"], "a", encoding="utf-8") as file:
                        file.write(json.dumps(job | result) + "\n")
        dist.destroy_process_group()

    # -- one job ------------------------------------------------------------------------------------------------------------

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        log, heat = self.log(job["log"])
        arm, batch, steps = BY_NAME[job["arm"]], self.given["batch"], job["steps"]
        plan = self.plan(job, arm, log, heat)
        model = Model(log.rows, arm, job["dense"])
        begun = time.perf_counter()
        sharding = tc.shard_(model, plan, heat)
        making = time.perf_counter() - begun
        batches = [_input(log.batch(step, steps, self.rank, self.ranks, batch)) for step in range(steps)]
        _step(model, batches[-1], self.clock)
        sharding.reset_meters()
        dist.barrier()
        before, seconds = self.kernel(), []
        self.clock.seconds.clear()
        for each in batches:
            begun = time.perf_counter()
            _step(model, each, self.clock)
            seconds.append(time.perf_counter() - begun)
        within = {part: time_ / steps for part, time_ in self.clock.seconds.items()}
        dist.barrier()
        after = self.kernel()
        everyone = sharding.world.gather((seconds, within, {n: after[n].since(before[n]) for n in after}, model.memory()))
        run = sharding.run(batch, float(np.mean([each[0] for each in everyone])))
        return _result(job, plan, sharding, run, everyone) | {"making": making}

    def plan(self, job: dict[str, Any], arm: Arm, log: Log, heat: HeatProfile) -> Plan:
        """Made by the first rank, for all."""
        told: list[Any] = [None]
        if self.rank == 0:
            setting = Setting(log.rows, self.given["batch"], job["dense"], heat, self.topologies[job["links"]])
            told = [setting.plan(arm).model_dump_json()]
        dist.broadcast_object_list(told)
        return Plan.model_validate_json(told[0])

    def log(self, name: str) -> tuple[Log, HeatProfile]:
        if name not in self.logs:
            self.logs = {name: load_log(Path(self.given["logs"]), name)}
        return self.logs[name]

    def kernel(self) -> dict[str, Counted]:
        """What the node's interfaces have sent; the first rank of the node tells."""
        if not self.net.owner or self.rank % self.net.cards:
            return {}
        found = counted()
        return {"node": found["lo"], "cluster": found["eth0"]}


class Model(nn.Module):
    """Rows of sequences, and what is computed from them."""

    def __init__(self, rows: int, arm: Arm, dense: float) -> None:
        super().__init__()
        table = tc.Table(TABLE, rows, DIM, precision=arm.precision)
        self.rows: Any = tc.EmbeddingCollection([table], mode="none", cache=0, optimizer=tc.RowwiseAdagrad(lr=0.01), device="meta")
        self.dense = Dense(dense)

    def memory(self) -> int:
        return int(self.rows.memory().total)


def _step(model: Model, batch: tuple[Tensor, Tensor], clock: Clock) -> None:
    clock.part = "forward"
    values_ND = model.rows({TABLE: batch}).values()
    loss = model.dense(values_ND, batch[1])
    clock.part = "backward"
    loss.backward()


def _input(samples: Sequences) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.ascontiguousarray(samples.values_N)), torch.from_numpy(np.ascontiguousarray(samples.offsets))


def _result(job: dict[str, Any], plan: Plan, sharding: Sharding, run: Any, everyone: list[Any]) -> dict[str, Any]:
    """What all ranks measured, in numbers of one card and step (the mean of the cards) unless said otherwise."""
    steps = job["steps"]
    totals_S = np.max([each[0] for each in everyone], axis=0)  # a step is as long as the slowest rank takes
    traffic = {f"{line.link}/{line.direction}": line.bytes for line in run.traffic}
    sent = sharding.world.gather(_by_link(sharding))
    kernel = {link: [each[2][link] for each in everyone if link in each[2]] for link in ("node", "cluster")}
    table = plan.tables[0]
    lines = [] if BY_NAME[job["arm"]].every else compare(plan, run).to_json()["lines"]
    return {
        "step": float(np.mean(totals_S)),
        "steps_s": totals_S.tolist(),
        "exposed": float(np.mean(totals_S)) - job["dense"],
        "exchange": {part: float(np.mean([each[1].get(part, 0.0) for each in everyone])) for part in ("forward", "backward")},
        "traffic": traffic,
        "memory": sum(each[3] for each in everyone),
        "balance": {link: _balance([each[link] for each in sent]) for link in ("node", "cluster")},
        "kernel": {
            link: {
                "bytes": sum(each.bytes for each in found) / len(everyone) / steps,
                "carried": sum(each.carried for each in found) / len(everyone) / steps,
            }
            for link, found in kernel.items()
            if found
        },
        "tiers": {f"tier {tier.tier}": tier.rows for tier in table.tiers},
        "exchanged": table.exchange,
        "predicted": {"step": plan.step.total, "exposed": plan.step.exposed, "parts": plan.step.parts},
        "links_measured": plan.topology.links.model_dump(mode="json"),
        "check": lines,
    }


def _by_link(sharding: Sharding) -> dict[str, int]:
    found = {"node": 0, "cluster": 0}
    for line in sharding.sent():
        if line.link in found:
            found[line.link] += line.bytes
    return found


def _balance(sent: list[int]) -> float | None:
    """Maximum over mean of what cards sent."""
    return float(max(sent) / np.mean(sent)) if sum(sent) else None


def save_log(folder: Path, name: str, log: Log, batch: int, cards: int) -> None:
    """Put a log where ranks find it: heat of its first half, and the second half."""
    log.heat(batch, cards).save(folder / f"{name}.tc")
    np.savez(folder / f"{name}.npz", rows=log.rows, values_N=log.second.values_N, offsets=log.second.offsets)


def load_log(folder: Path, name: str) -> tuple[Log, HeatProfile]:
    with np.load(folder / f"{name}.npz") as found:
        second = Sequences(found["values_N"], found["offsets"])
        return Log(int(found["rows"]), second.part(0, 0), second), HeatProfile.load(folder / f"{name}.tc")


def main(arguments: list[str]) -> int:
    """Fork a rank for each card, each on its node: torch is loaded once. Ends when all have ended, or one has failed."""
    torch.set_num_threads(1)
    given = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    net = Net(*given["net"])
    _warm_up()
    ranks = [_forked(rank, net, given) for rank in range(net.nodes * net.cards)]
    left = len(ranks)
    while left:
        _, status = os.wait()
        left -= 1
        if status:
            time.sleep(1)  # for the others to say why
            return 1
    return 0


def _warm_up() -> None:
    """Make the kernels once, before there are ranks that would each make them."""
    card = Card(memory=1 << 30, bandwidth=1e9)
    alone = Topology(nodes=1, cards_per_node=1, card=card, links=Links(node=Link(bandwidth=1e9)))
    log = exchange_logs.read("zipf-1.2", None, 97, 5)
    assert log is not None
    for arm in (BY_NAME["P1"], BY_NAME["P1q"]):
        model, heat = Model(log.rows, arm, 0.0), log.heat(1, 1)
        tc.shard_(model, Setting(log.rows, 1, 0.0, heat, alone).plan(arm), heat)
        _step(model, _input(log.second), Clock())


def _forked(rank: int, net: Net, given: dict[str, Any]) -> int:
    """A process on the node of this rank, with the variables that torchrun sets."""
    if child := os.fork():
        return child
    node, card = divmod(rank, net.cards)
    os.environ |= net.environment() | {
        "RANK": str(rank), "LOCAL_RANK": str(card), "GROUP_RANK": str(node), "MASTER_PORT": str(given["port"]),
        "WORLD_SIZE": str(net.nodes * net.cards), "LOCAL_WORLD_SIZE": str(net.cards),
    }  # fmt: skip
    try:
        net.enter(node)
        Rank(given).run()
    except BaseException as error:
        print(f"rank {rank}: {brief(error)}", file=sys.stderr, flush=True)
        if given.get("debug"):
            traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
