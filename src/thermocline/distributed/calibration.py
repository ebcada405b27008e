"""Calibration: the memory and link bandwidths of this machine, or under torchrun of the cluster, with all ranks busy.

    card      a copy within the memory of a device, read and write counted
    host      pinned host memory to a GPU; only with GPUs
    node      every rank sends to every other rank of its node, all nodes at the same time
    cluster   every rank sends to every rank of other nodes
    alone     the same with one sender per node, the others idle: GPUs that share a link have more alone

All ranks work at once, as in a training step, so that shared resources (host memory, a network interface) are measured as each
rank gets them. A node is what torchrun starts by one command. Without torchrun, one process measures the node link as a copy
between GPUs, or within memory on a machine with one GPU or none.
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

from .process_groups import gather_objects

Progress = Callable[[int, int, str], None]

_MOST = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes that a rank sends in one exchange
_COPY = {"cpu": 256 << 20, "cuda": 2 << 30}
_COPIES = 10
_SHARED = 1.15  # times the bandwidth with all ranks busy, from which on ranks are taken to share a link
_OTHER = 1.25  # times the memory or bandwidth of the usual GPU, from which on a GPU is another
_TIMEOUT = datetime.timedelta(seconds=100)  # calibration takes less than two minutes, or fails


@dataclass(frozen=True)
class CalibrationRanks:
    """All ranks. `nodes` are the ranks of each node; `node` is the process group of this rank's node."""

    rank: int
    device: torch.device
    nodes: list[list[int]]
    node: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def local(self) -> list[int]:
        """The ranks of this node."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)


def calibrate(progress: Progress) -> Topology | None:
    """Measure the topology that this process is part of. Collective under torchrun.

    Args:
        progress: called with (done, total, label).

    Returns:
        The topology on rank 0; None on other ranks.

    Example::

        topology = calibrate(lambda done, total, label: print(label))
    """
    with _ranks() as ranks:
        report = progress if ranks.rank == 0 else lambda done, total, what: None
        measured: dict[str, Any] = {}
        steps: dict[str, Callable[[CalibrationRanks], Any]] = {"card": _card, "host": _host, "node": _node, "cluster": _cluster}
        for done, (name, measure) in enumerate(steps.items()):
            report(done, len(steps), f"measuring {name}")
            measured[name] = measure(ranks)
        everyone = gather_objects(measured)
        return _topology(ranks, everyone) if ranks.rank == 0 else None


def _topology(ranks: CalibrationRanks, everyone: list[dict[str, Any]]) -> Topology:
    """The topology of the median rank."""

    def link(name: str) -> Link | None:
        found = [one[name] for one in everyone if one[name] is not None]
        if not found:
            return None
        middle = {part: statistics.median(getattr(one, part) for one in found) for part in ("bandwidth", "latency")}
        alone = statistics.median(one.alone or one.bandwidth for one in found)
        return Link(**middle, alone=alone if alone > _SHARED * middle["bandwidth"] else None)

    node, cuda = link("node"), ranks.device.type == "cuda"
    assert node is not None
    processes = f"{ranks.size} processes over {dist.get_backend()}" if dist.is_initialized() else "one process"
    per_node = len(ranks.nodes[0]) if dist.is_initialized() else max(1, torch.cuda.device_count())
    kind = torch.cuda.get_device_name(ranks.device) if cuda else platform.processor() or platform.machine()
    gpus = [_slowest_of([everyone[rank]["card"] for rank in node]) for node in ranks.nodes]
    like = statistics.median_low(gpu.memory for gpu in gpus)
    usual = _slowest_of([(g.memory, g.bandwidth) for g in gpus if not _differs(g, GpuSpec(memory=like, bandwidth=g.bandwidth))])
    return Topology(
        name=f"{len(ranks.nodes)} x {per_node} {kind}",
        source=f"measured by thermocline calibrate {__version__}, {processes}",
        date=datetime.date.today().isoformat(),
        nodes=len(ranks.nodes),
        gpus_per_node=per_node,
        gpu=usual,
        other_gpus={node: gpu for node, gpu in enumerate(gpus) if _differs(gpu, usual)},
        host=HostSpec(memory=(free_bytes(torch.device("cpu")) or 0) if cuda else 0),
        links=Links(node=node, cluster=link("cluster"), host=link("host")),
        backend="nccl" if cuda else "gloo",
    )


def _slowest_of(cards: Sequence[tuple[int, float]]) -> GpuSpec:
    """The least memory of some GPUs, and their median bandwidth."""
    memory, bandwidth = zip(*cards, strict=True)
    return GpuSpec(memory=min(memory), bandwidth=statistics.median(bandwidth))


def _differs(gpu: GpuSpec, usual: GpuSpec) -> bool:
    """Whether a GPU is another than usual: what else runs on it, and the clock of the moment, change both numbers a little."""
    return not (1 / _OTHER < gpu.memory / usual.memory < _OTHER and 1 / _OTHER < gpu.bandwidth / usual.bandwidth < _OTHER)


# -- measurements -----------------------------------------------------------------------------------------------------------


def _card(ranks: CalibrationRanks) -> tuple[int, float]:
    """Free bytes, and bytes per second of a copy, read and write counted."""
    free = free_bytes(ranks.device) or 0
    free //= 1 if ranks.device.type == "cuda" else len(ranks.local)
    size = min(_COPY[ranks.device.type], max(1 << 20, free // 8))
    source = torch.ones(size, dtype=torch.uint8, device=ranks.device)
    target = torch.zeros_like(source).fill_(1)  # touches every page
    seconds = [_clocked(ranks, lambda: target.copy_(source)) for _ in range(_COPIES)]
    return free, 2 * size / statistics.median(seconds)


def _host(ranks: CalibrationRanks) -> Link | None:
    if ranks.device.type != "cuda":
        return None
    source = torch.ones(_MOST["cuda"] // 4, dtype=torch.uint8).pin_memory()
    return _copying(ranks, source, torch.empty_like(source, device=ranks.device))


def _node(ranks: CalibrationRanks) -> Link:
    if len(ranks.local) > 1:
        return _shared(ranks, [rank for rank in ranks.local if rank != ranks.rank], ranks.node)
    gpus = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    other = torch.device("cuda", 1) if gpus > 1 and not dist.is_initialized() else ranks.device
    source = torch.ones(_MOST[ranks.device.type], dtype=torch.uint8, device=ranks.device)
    return _copying(ranks, source, torch.ones_like(source, device=other))


def _cluster(ranks: CalibrationRanks) -> Link | None:
    if len(ranks.nodes) == 1:
        return None
    return _shared(ranks, [rank for rank in range(ranks.size) if rank not in ranks.local], None)


def _shared(ranks: CalibrationRanks, peers: list[int], group: dist.ProcessGroup | None) -> Link:
    """A link measured with all ranks busy, and alone with one sender per node."""
    busy = _exchanging(ranks, peers, group, set(range(ranks.size)))
    if len(ranks.local) == 1:
        return busy
    alone = _exchanging(ranks, peers, group, {members[0] for members in ranks.nodes})
    return busy.model_copy(update={"alone": alone.bandwidth})


def _exchanging(ranks: CalibrationRanks, peers: list[int], group: dist.ProcessGroup | None, senders: set[int]) -> Link:
    """A link measured by all-to-alls of a group, in which this rank sends to `peers` if it is a sender."""
    most = _MOST[ranks.device.type] // len(peers)
    sent_PB, got_PB = (torch.zeros(len(peers), most, dtype=torch.uint8, device=ranks.device) for _ in range(2))

    def exchange(size: int) -> float:
        each = max(1, size // len(peers))
        to = peers if ranks.rank in senders else []
        sends = [dist.P2POp(dist.isend, sent_PB[at, :each], rank, group) for at, rank in enumerate(to)]
        receives = [dist.P2POp(dist.irecv, got_PB[at, :each], rank, group) for at, rank in enumerate(peers) if rank in senders]
        if ranks.device.type == "cuda":
            both = [*sends, *receives]
            return _clocked(ranks, lambda: _wait(dist.batch_isend_irecv(both) if both else []), group)
        # Posts receives before sends: gloo's ready signal queues behind data that its process already sends.
        coming = [dist.irecv(one.tensor, one.peer, group) for one in receives]
        return _clocked(ranks, lambda: _wait([*(dist.isend(one.tensor, one.peer, group) for one in sends), *coming]), group)

    return measure_link(exchange, most * len(peers))


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is not in the group"
        work.wait()


def _copying(ranks: CalibrationRanks, source: Tensor, target: Tensor) -> Link:
    """A link measured by copies, while other ranks copy too."""
    return measure_link(
        lambda size: _clocked(ranks, lambda: target[:size].copy_(source[:size], non_blocking=True)), source.numel()
    )


def _clocked(ranks: CalibrationRanks, run: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Seconds until the last rank of the group is done, the same on all ranks."""
    cuda = ranks.device.type == "cuda"
    if dist.is_initialized():
        dist.barrier(group)
    if cuda:
        torch.cuda.synchronize(ranks.device)
    begun = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize(ranks.device)
    seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=ranks.device)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


# -- ranks ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ranks() -> Iterator[CalibrationRanks]:
    """This process alone, or the processes of torchrun."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    own_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if gpus and own_gpu else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield CalibrationRanks(0, device, [[0]], None)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        rank = dist.get_rank()
        nodes = _nodes()
        groups = [dist.new_group(members) for members in nodes]  # every rank makes every group
        group = next(group for group, members in zip(groups, nodes, strict=True) if rank in members)
        yield CalibrationRanks(rank, device, nodes, group)
    finally:
        dist.destroy_process_group()


def _nodes() -> list[list[int]]:
    """The ranks of every node, ordered by first rank."""
    names = gather_objects(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    nodes = [[rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(sizes) > 1:
        words = f"nodes have {sizes[0]} to {sizes[-1]} processes; start the same number on every node"
        raise BadInput(words, parameter="nodes", value=sizes)
    return nodes
