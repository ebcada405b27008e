"""Process groups of a plan: all ranks, the ranks of this node, and the ranks with this local rank on every node.

Rank = node * ranks per node + local rank, as torchrun numbers them. The groups are separate from the default group, so that row
exchanges never interleave with the collectives of DDP or FSDP. A `DeviceMesh` over the same groups is available for the dense
part.

NCCL sends device tensors and gloo sends host tensors. Device rows under gloo (for example, several ranks on one GPU, which NCCL
refuses) are staged through pinned host memory, here and nowhere else.

The groups are destroyed before the interpreter exits. A gloo thread that releases a tensor while Python shuts down aborts the
process (pytorch issue 190489).
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from thermocline.errors import BadInput, ThermoclineError
from thermocline.plan.model import LinkClass

from .comm_stream import CommStream, runs_in_launch_order
from .comm_thread import CommThread

CPU = torch.device("cpu")
FAILURE_TIMEOUT = 10.0  # seconds until a rank that has not reported a failed exchange counts as gone
_FAILED_KEY = "thermocline/exchange failed/"


class ExchangeFailed(ThermoclineError):
    """An exchange that failed on `rank`. `unresponsive` are the ranks without a sign of life, if known."""

    def __init__(self, message: str, rank: int, unresponsive: list[int] | None) -> None:
        super().__init__(message, rank, unresponsive)
        self.rank, self.unresponsive = rank, unresponsive

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(eq=False)
class RankGroup:
    """Ranks that exchange with each other, and the link class from this rank to each."""

    ranks: tuple[int, ...]
    index: int  # of this rank in `ranks`
    links: tuple[LinkClass, ...]
    process_group: dist.ProcessGroup | None  # None without torch.distributed
    comm_thread: CommThread | None = None  # runs exchanges in the background; nothing else may be sent meanwhile
    device: torch.device = CPU  # of the rows

    def __post_init__(self) -> None:
        self.gloo, self.sends_from = False, self.device
        if self.process_group is not None:
            _open_groups.add(self)
            self.gloo = self.process_group._get_backend(self.device).name() == "gloo"
            self.sends_from = CPU if self.gloo else self.device

    @property
    def is_single(self) -> bool:
        """Whether this rank is the only member."""
        return len(self.ranks) == 1

    def all_to_all(self, send: Tensor, sent: Sequence[int], received: Sequence[int], per_peer: bool = False) -> Tensor:
        """Send `sent[p]` items of the first dimension to member p, in order, and receive `received[p]` items from it.

        `per_peer`, the same on all members: one message per peer, both directions at once. Gloo's collective alternates between
        sending and receiving, which takes twice as long on a saturated link and half as long otherwise, and it sends empty
        messages (144 bytes each).
        """
        if self.is_single:
            return send
        device, send = send.device, moved(send, self.sends_from)
        result = self._receive_buffer((sum(received), *send.shape[1:]), send.dtype)
        if self.gloo and per_peer:
            self._send_to_peers(send.split(list(sent)), result.split(list(received)))()
        else:
            with self.collective():
                dist.all_to_all_single(result, send, list(received), list(sent), group=self.process_group)
        return moved(result, device)

    def all_to_all_async(
        self, send: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:  # fmt: skip
        """Start an `all_to_all` per peer under gloo: the result, and a function that waits for it.

        Nothing else may be sent in this group before the wait.
        """
        send = moved(send, self.sends_from)
        result = self._receive_buffer((sum(received), *send.shape[1:]), send.dtype)
        return result, self._send_to_peers(send.split(list(sent)), result.split(list(received)))

    def broadcast(self, message: Tensor, received: Sequence[int], large: bool) -> list[Tensor]:
        """Send a message to all other members, and receive `received[p]` items from member p; nothing from this rank."""
        sent = [message.numel() * (p != self.index) for p in range(len(self.ranks))]
        if not self.gloo or not large:
            return list(self.all_to_all(message.repeat(len(sent) - 1), sent, received).split(list(received)))
        device, message = message.device, moved(message, self.sends_from)
        results = [self._receive_buffer((size,), message.dtype) for size in received]
        self._send_to_peers([message[:size] for size in sent], results)()
        return [moved(each, device) for each in results]

    def exchange_counts(self, counts_PJ: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send J numbers below 2**31 to each member, and return the J numbers that each member sent to this rank."""
        if self.is_single:
            return counts_PJ
        ones = [1] * len(self.ranks)
        received: NDArray[np.int64] = self.all_to_all(torch.from_numpy(counts_PJ).int(), ones, ones).long().numpy()
        return received

    def _receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for received items; pinned if they go on to a GPU."""
        return torch.empty(shape, dtype=dtype, device=self.sends_from, pin_memory=self.sends_from != self.device)

    def _send_to_peers(self, send: Sequence[Tensor], results: Sequence[Tensor]) -> Callable[[], None]:
        """Post one message to each peer that receives any items, receives before sends. Returns a function that waits."""
        results[self.index].copy_(send[self.index])
        operations = [(dist.irecv, each) for each in results], [(dist.isend, each) for each in send]
        posted = [
            dist.P2POp(operation, each, self.ranks[p], self.process_group)
            for messages in operations
            for p, (operation, each) in enumerate(messages)
            if p != self.index and each.numel()
        ]
        with self.collective():
            works = dist.batch_isend_irecv(posted) if posted else []

        def wait() -> None:
            with self.collective():
                for work in works:
                    work.wait()

        return wait

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Wait for background exchanges before a collective, and name unresponsive ranks if it fails."""
        if self.comm_thread is not None and not self.comm_thread.is_idle:
            self.comm_thread.wait()
        try:
            with current_device(self.sends_from):
                yield
        except RuntimeError as error:
            rank, gone = self.ranks[self.index], unresponsive_ranks(self.ranks, self.ranks[self.index])
            which = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "one of them"
            raise ExchangeFailed(
                f"rank {rank} could not exchange with ranks {', '.join(map(str, self.ranks))}: {which} ended, or did not "
                f"answer within the timeout of the process group; look for the first error there ({error})",
                rank, gone,
            ) from error  # fmt: skip


def unresponsive_ranks(ranks: Sequence[int], rank: int) -> list[int] | None:
    """The other ranks that do not report a failed exchange within `FAILURE_TIMEOUT`; None if the store is gone.

    A failed exchange does not tell the cause. Every living rank sees its own exchanges fail and reports it in the store of the
    default process group. A rank without a report has ended or hangs.
    """
    until = time.monotonic() + FAILURE_TIMEOUT
    left = [other for other in ranks if other != rank]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_FAILED_KEY}{rank}", "1")
        while left := [other for other in left if not store.check([f"{_FAILED_KEY}{other}"])]:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
    except Exception:  # the process that kept the store has ended
        return None
    return left


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current device: NCCL sends Python objects from the current device, which may not be that of the rows."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous tensor on a device. A copy to the host is complete on return; a copy to a GPU is ordered by its stream."""
    if tensor.device == device:
        return tensor.contiguous()
    if device != CPU:
        return tensor.to(device, non_blocking=True)  # the allocator reuses pinned memory only after the copy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


_open_groups: weakref.WeakSet[RankGroup] = weakref.WeakSet()  # groups with threads


@atexit.register
def _destroy_groups() -> None:
    """Destroy all groups, which ends their threads, except those in which an exchange still waits for other ranks."""
    for group in list(_open_groups):
        if group.comm_thread is None or group.comm_thread.end():
            process_group, group.process_group = group.process_group, None
            with contextlib.suppress(Exception):  # the caller may have destroyed the process group already
                if group.gloo:  # destroying an NCCL group is a collective
                    dist.destroy_process_group(process_group)


@dataclass(frozen=True)
class ProcessGroups:
    """The ranks of a plan, and the groups that this rank belongs to."""

    rank: int
    nodes: int
    local_size: int  # ranks per node
    world: RankGroup
    intra_node: RankGroup
    cross_node: RankGroup  # the ranks with this local rank on all nodes
    device: torch.device
    comm_thread: CommThread
    layout: tuple[tuple[int, ...], ...] = ((0,),)  # the ranks of the job in each replica of these groups
    replicas: RankGroup | None = None  # the ranks with this place in all replicas; None where there is one

    @property
    def size(self) -> int:
        return self.nodes * self.local_size

    @cached_property
    def comm_stream(self) -> CommStream | None:
        """The stream of exchanges under NCCL, where they may overlap."""
        return CommStream(self.device) if self.world.sends_from.type == "cuda" and runs_in_launch_order() else None

    @property
    def mesh(self) -> DeviceMesh | None:
        """A new mesh of nodes x ranks per node over these groups; None for one process."""
        processes = [each.process_group for each in (self.cross_node, self.intra_node) if each.process_group is not None]
        if not processes:
            return None
        grid = torch.tensor(self.world.ranks, dtype=torch.int64).view(self.nodes, self.local_size)
        return DeviceMesh.from_group(processes, self.device.type, mesh=grid, mesh_dim_names=("node", "local_rank"))

    @classmethod
    def make(
        cls, nodes: int, local_size: int, device: torch.device, layout: Sequence[Sequence[int]] | None = None
    ) -> ProcessGroups:
        """The groups of a cluster, or of each of its replicas. Collective; one process needs no torch.distributed."""
        comm_thread = CommThread(device)
        if nodes * local_size == 1:
            single = RankGroup((0,), 0, ("card",), None)
            return cls(0, 1, 1, single, single, single, device, comm_thread)
        ranks = tuple(map(tuple, layout or [range(nodes * local_size)]))
        world, intra_node, cross_node = _make_groups(nodes, local_size, device, comm_thread, ranks)
        replicas: RankGroup | None = None
        if len(ranks) > 1:
            replicas = _make_group([list(peers) for peers in zip(*ranks, strict=True)], 1, device, comm_thread, {})
        given = world, intra_node, cross_node, device, comm_thread, ranks, replicas
        return cls(world.index, nodes, local_size, *given)

    def duplicate(self) -> ProcessGroups:
        """New groups of the same ranks, whose exchanges need no common order with these. Collective."""
        return self if self.size == 1 else self.make(self.nodes, self.local_size, self.device, self.layout)

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank. Collective."""
        if self.world.is_single:
            return [value]
        with self.world.collective():
            return gather_objects(value, self.world.process_group)


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank; without torch.distributed this one. Collective."""
    found = [value] * (world_size() if group is None else group.size())
    if dist.is_available() and dist.is_initialized():
        dist.all_gather_object(found, value, group=group)
    return found


def broadcast_object(value: Any) -> Any:
    """The value of rank 0. Collective."""
    found = [value]
    if world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _make_groups(
    nodes: int, local_size: int, device: torch.device, comm_thread: CommThread, layout: Sequence[Sequence[int]] = ()
) -> Iterator[RankGroup]:
    """All ranks of this replica, those of this node, and those with this local rank."""
    grids = [torch.tensor(ranks, dtype=torch.int64).view(nodes, local_size) for ranks in layout or [range(nodes * local_size)]]
    place = {rank: n for grid in grids for n, rank in enumerate(grid.flatten().tolist())}
    for partition in ([grid.view(1, -1) for grid in grids], grids, [grid.t() for grid in grids]):
        yield _make_group([ranks for each in partition for ranks in each.tolist()], local_size, device, comm_thread, place)


def _make_group(
    partition: list[list[int]], local_size: int, device: torch.device, comm_thread: CommThread, place: Mapping[int, int]
) -> RankGroup:
    """The group of a partition of all ranks that this rank belongs to. Every rank creates every group.

    `place` is that of each rank in its replica; without places all ranks are on nodes of their own.
    """
    rank, made = dist.get_rank(), [dist.new_group(ranks, timeout=group_timeout(device)) for ranks in partition]
    at = next(n for n, ranks in enumerate(partition) if rank in ranks)
    ranks = tuple(partition[at])
    links: list[LinkClass] = [
        "card" if other == rank else "node" if place.get(other, other) // local_size == place.get(rank, rank) // local_size
        else "cluster" for other in ranks
    ]  # fmt: skip
    return RankGroup(ranks, ranks.index(rank), tuple(links), made[at], comm_thread, device)


def group_timeout(device: torch.device) -> timedelta:
    """The timeout of the default group; new groups would get the default of the backend."""
    assert dist.group.WORLD is not None
    try:
        options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    except RuntimeError:
        raise BadInput(
            f"rows are on {device}, but the process group uses {dist.get_backend()}, which cannot send from there; move the "
            "model to its GPU before shard_, or use gloo",
            parameter="device", value=str(device),
        ) from None  # fmt: skip
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


def check_same(values: Sequence[dict[str, str]], what: str) -> None:
    """Raise on every rank where ranks disagree. `values` has a description by name from each rank."""
    for name in values[0]:
        found = [each.get(name, "nothing") for each in values]
        if len(set(found)) > 1:
            shown = "; ".join(
                f"rank{'s' if found.count(one) > 1 else ''} {', '.join(str(r) for r, s in enumerate(found) if s == one)}: {one}"
                for one in dict.fromkeys(found)
            )
            raise BadInput(f"{what}: ranks differ in {name} ({shown}); give all ranks the same", parameter=name, values=found)


def raise_if_any_failed(groups: ProcessGroups, failed: BaseException | None) -> None:
    """Raise on all ranks if one of them failed. Collective."""
    ones = [1] * groups.size
    flags = groups.world.all_to_all(torch.full((groups.size,), int(failed is not None), dtype=torch.int64), ones, ones)
    if not bool(flags.any()):
        return
    everyone = groups.all_gather("" if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    rank = next(rank for rank, error in enumerate(everyone) if error)
    raise BadInput(f"rank {rank} stopped: {everyone[rank]}; nothing was changed", rank=rank)
