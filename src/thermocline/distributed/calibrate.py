"""Measure this machine, or under torchrun the cluster: memory, and every class of links, with all cards at work at once.

    card      a copy within the memory of a card, read and write counted
    host      pinned host memory to a card; only with GPUs
    node      every rank sends to every other of its node, all nodes at the same time
    cluster   every rank sends to every rank of other nodes

All cards work at once because in a step they do: what they share (the memory of a host, a network card) is then measured as
each of them gets it. A node is what torchrun starts by one command. Without torchrun there is one process: it measures the link
of a node as a copy from card to card, or, on a machine with one card or none, within memory.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thermocline import __version__
from thermocline.errors import BadInput
from thermocline.plan.calibration import measure_link
from thermocline.plan.topology import GpuSpec, HostSpec, Link, Links, Topology
from thermocline.rows.memory import free_bytes

Progress = Callable[[int, int, str], None]

_MOST = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes that a card sends in one exchange
_COPY = {"cpu": 256 << 20, "cuda": 2 << 30}
_COPIES = 10
_TIMEOUT = datetime.timedelta(seconds=100)  # the whole takes less than two minutes, or fails


@dataclass(frozen=True)
class World:
    """All ranks and this one among them. `nodes` are the ranks of each node; `node` is the process group of this one's."""

    rank: int
    device: torch.device
    nodes: list[list[int]]
    node: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def mine(self) -> list[int]:
        return next(ranks for ranks in self.nodes if self.rank in ranks)


def calibrate(progress: Progress) -> Topology | None:
    """The topology of what this process is part of; None on ranks other than the first, which tell it their part."""
    with _world() as world:
        report = progress if world.rank == 0 else lambda done, total, what: None
        measured: dict[str, Any] = {}
        steps: dict[str, Callable[[World], Any]] = {"card": _card, "host": _host, "node": _node, "cluster": _cluster}
        for done, (name, measure) in enumerate(steps.items()):
            report(done, len(steps), f"measuring {name}")
            measured[name] = measure(world)
        everyone = _gather(world, measured)
        return _topology(world, everyone) if world.rank == 0 else None


def _topology(world: World, everyone: list[dict[str, Any]]) -> Topology:
    """The median card is taken for all."""

    def link(name: str) -> Link | None:
        found = [one[name] for one in everyone if one[name] is not None]
        if not found:
            return None
        middle = {part: statistics.median(getattr(one, part) for one in found) for part in ("bandwidth", "latency")}
        return Link(**middle)

    node, cuda = link("node"), world.device.type == "cuda"
    assert node is not None
    processes = f"{world.size} processes over {dist.get_backend()}" if dist.is_initialized() else "one process"
    per_node = len(world.nodes[0]) if dist.is_initialized() else max(1, torch.cuda.device_count())
    kind = torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine()
    return Topology(
        name=f"{len(world.nodes)} x {per_node} {kind}",
        source=f"measured by thermocline calibrate {__version__}, {processes}",
        date=datetime.date.today().isoformat(),
        nodes=len(world.nodes),
        gpus_per_node=per_node,
        gpu=GpuSpec(
            memory=min(one["card"][0] for one in everyone), bandwidth=statistics.median(one["card"][1] for one in everyone)
        ),
        host=HostSpec(memory=(free_bytes(torch.device("cpu")) or 0) if cuda else 0),
        links=Links(node=node, cluster=link("cluster"), host=link("host")),
    )


# -- what is measured -------------------------------------------------------------------------------------------------------


def _card(world: World) -> tuple[int, float]:
    """Bytes that are free for tables, and bytes per second of a copy, read and write counted."""
    free = free_bytes(world.device) or 0
    free //= 1 if world.device.type == "cuda" else len(world.mine)
    size = min(_COPY[world.device.type], max(1 << 20, free // 8))
    source = torch.ones(size, dtype=torch.uint8, device=world.device)
    target = torch.zeros_like(source).fill_(1)  # touched, so that no page of it is new
    seconds = [_clocked(world, lambda: target.copy_(source)) for _ in range(_COPIES)]
    return free, 2 * size / statistics.median(seconds)


def _host(world: World) -> Link | None:
    if world.device.type != "cuda":
        return None
    source = torch.ones(_MOST["cuda"] // 4, dtype=torch.uint8).pin_memory()
    return _copying(world, source, torch.empty_like(source, device=world.device))


def _node(world: World) -> Link:
    if len(world.mine) > 1:
        return _exchanging(world, [rank for rank in world.mine if rank != world.rank], world.node)
    cards = torch.cuda.device_count() if world.device.type == "cuda" else 0
    other = torch.device("cuda", 1) if cards > 1 and not dist.is_initialized() else world.device
    source = torch.ones(_MOST[world.device.type], dtype=torch.uint8, device=world.device)
    return _copying(world, source, torch.ones_like(source, device=other))


def _cluster(world: World) -> Link | None:
    if len(world.nodes) == 1:
        return None
    return _exchanging(world, [rank for rank in range(world.size) if rank not in world.mine], None)


def _exchanging(world: World, peers: list[int], group: dist.ProcessGroup | None) -> Link:
    """The link by exchanges of a group, all to all, in which this rank sends to these others."""
    most = _MOST[world.device.type] // len(peers)
    sent_PB, got_PB = (torch.zeros(len(peers), most, dtype=torch.uint8, device=world.device) for _ in range(2))

    def exchange(size: int) -> float:
        each = max(1, size // len(peers))
        sends = [dist.P2POp(dist.isend, sent_PB[at, :each], rank, group) for at, rank in enumerate(peers)]
        receives = [dist.P2POp(dist.irecv, got_PB[at, :each], rank, group) for at, rank in enumerate(peers)]
        if world.device.type == "cuda":
            return _clocked(world, lambda: _wait(dist.batch_isend_irecv([*sends, *receives])), group)
        # Receives first: gloo's word that one is ready waits behind what its process is sending by then (docs/decisions/).
        coming = [dist.irecv(one.tensor, one.peer, group) for one in receives]
        return _clocked(world, lambda: _wait([*(dist.isend(one.tensor, one.peer, group) for one in sends), *coming]), group)

    return measure_link(exchange, most * len(peers))


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is of the group"
        work.wait()


def _copying(world: World, source: Tensor, target: Tensor) -> Link:
    """The link by copies of this rank, while others do theirs."""

    def copy(size: int) -> float:
        return _clocked(world, lambda: target[:size].copy_(source[:size], non_blocking=True))

    return measure_link(copy, source.numel())


def _clocked(world: World, run: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Seconds until the last rank of the group is done, the same number on all of them."""
    cuda = world.device.type == "cuda"
    if dist.is_initialized():
        dist.barrier(group)
    if cuda:
        torch.cuda.synchronize(world.device)
    begun = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize(world.device)
    seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=world.device)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


# -- ranks ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _world() -> Iterator[World]:
    """This process alone, or what torchrun has started."""
    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cards = torch.cuda.device_count()
    own_card = cards >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if cards and own_card else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks == 1:
        yield World(0, device, [[0]], None)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        rank = dist.get_rank()
        nodes = _nodes()
        groups = [dist.new_group(members) for members in nodes]  # every rank makes every group
        mine = next(group for group, members in zip(groups, nodes, strict=True) if rank in members)
        yield World(rank, device, nodes, mine)
    finally:
        dist.destroy_process_group()


def _nodes() -> list[list[int]]:
    """The ranks of every node, in the order of their first ranks."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    nodes = [[rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(sizes) > 1:
        raise BadInput(
            f"nodes have {sizes[0]} to {sizes[-1]} processes; a topology has equal nodes: start as many on every node"
        )
    return nodes


def _gather(world: World, measured: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [measured]
    everyone: list[dict[str, Any]] = [{}] * world.size
    dist.all_gather_object(everyone, measured)
    return everyone
