"""The cards of a plan as process groups: all of them, those of this node, and those with this card's number on every node.

Rank = node * cards a node + card, as torchrun numbers them. The groups are our own, so that nothing we send can meet what DDP
or FSDP send; the `DeviceMesh` (nodes x cards) is made of the same groups, for whoever shards the dense part by it.

NCCL sends what lies on cards; gloo, what lies in host memory. Rows that lie on cards under gloo, as where several ranks share a
card, which NCCL refuses, are *staged*: what is sent is copied to pinned host memory first, and what comes is copied back. That
is done here and nowhere else; whoever sends knows nothing of it.

The groups end before the interpreter does. Gloo's threads keep what was sent a moment longer than those who waited for it, and
a thread that lets go of a tensor while Python shuts down aborts the process (pytorch issue 190489).
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thermocline.errors import BadInput, ThermoclineError
from thermocline.plan.model import LinkClass
from thermocline.plan.topology import Topology

from .exchange.comm_thread import Lane
from .exchange.failure_detection import silent_ranks

CPU = torch.device("cpu")


@dataclass(eq=False)
class Group:
    """Cards that exchange with each other: their ranks, this card's place among them, what joins it to each."""

    ranks: tuple[int, ...]
    me: int
    links: tuple[LinkClass, ...]
    process: dist.ProcessGroup | None  # None without torch.distributed
    lane: Lane | None = None  # on which exchanges go on behind the caller; nothing else may be sent meanwhile
    device: torch.device = CPU  # where rows lie

    def __post_init__(self) -> None:
        self.gloo, self._sends_from = False, self.device
        if self.process is not None:
            _open.add(self)
            self.gloo = self.process._get_backend(self.device).name() == "gloo"
            self._sends_from = CPU if self.gloo else self.device

    @property
    def is_one(self) -> bool:
        """Whether this card is alone in it."""
        return len(self.ranks) == 1

    def swap(self, send: Tensor, sent: Sequence[int], got: Sequence[int], apart: bool = False) -> Tensor:
        """Send `sent[p]` items of the first dimension to the p-th card, in order, and receive `got[p]` from it.

        `apart`, the same on all cards: a message to each card that gets anything, and they go both ways at once. One collective
        of gloo sends and receives by turns, which takes twice as long on a link that is full and half as long elsewhere, and it
        sends empty messages too: 144 bytes of gloo's own, and their turns.
        """
        if self.is_one:
            return send
        device, send = send.device, moved(send, self._sends_from)
        received = self._room((sum(got), *send.shape[1:]), send.dtype)
        with self.together():
            if self.gloo and apart:
                self._mail(send.split(list(sent)), received.split(list(got)))
            else:
                dist.all_to_all_single(received, send, list(got), list(sent), group=self.process)
        return moved(received, device)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For what comes; pinned, if it goes on to a card."""
        return torch.empty(shape, dtype=dtype, device=self._sends_from, pin_memory=self._sends_from != self.device)

    def share(self, message: Tensor, got: Sequence[int], large: bool) -> list[Tensor]:
        """Send the same to all others, and receive `got[p]` items from the p-th card; of this card there is nothing."""
        others = [p for p in range(len(self.ranks)) if p != self.me]
        if self.gloo and large:
            device, message = message.device, moved(message, self._sends_from)
            received = [self._room((size,), message.dtype) for size in got]
            with self.together():
                self._mail([message[: message.numel() * (p != self.me)] for p in range(len(self.ranks))], received)
            return [moved(each, device) for each in received]
        sent = [message.numel() * (p in others) for p in range(len(self.ranks))]
        return list(self.swap(message.repeat(len(others)), sent, got).split(list(got)))

    def post(self, send: Tensor, sent: Sequence[int], got: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send under gloo what `swap` would, in a message to each card; what is received is there when it was waited
        for, with what is returned beside it. Meanwhile nothing else may be sent in this group."""
        send = moved(send, self._sends_from)
        received = self._room((sum(got), *send.shape[1:]), send.dtype)
        with self.together():
            works = self._begin(send.split(list(sent)), received.split(list(got)))

        def wait() -> None:
            with self.together():
                for work in works:
                    work.wait()

        return received, wait

    def _mail(self, send: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        for work in self._begin(send, received):
            work.wait()

    def _begin(self, send: Sequence[Tensor], received: Sequence[Tensor]) -> Sequence[dist.Work]:
        """A message to each card that gets one. Who receives is ready before anybody sends."""
        received[self.me].copy_(send[self.me])
        mail = [(dist.irecv, each) for each in received], [(dist.isend, each) for each in send]
        posted = [
            dist.P2POp(way, each, self.ranks[p], self.process)
            for messages in mail
            for p, (way, each) in enumerate(messages)
            if p != self.me and each.numel()
        ]
        return dist.batch_isend_irecv(posted) if posted else []

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Begin when nothing goes on behind the caller, and say what it means if an exchange fails."""
        if self.lane is not None and not self.lane.is_idle:
            self.lane.wait()
        try:
            with on_card(self._sends_from):
                yield
        except RuntimeError as error:
            mine, gone = self.ranks[self.me], silent_ranks(self.ranks, self.ranks[self.me])
            who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "one of them"
            raise ThermoclineError(
                f"rank {mine} could not exchange with ranks {', '.join(map(str, self.ranks))}: {who} did not come within the "
                f"timeout of the process group, or ended; look there for the first error ({error})"
            ) from error

    def tell(self, numbers_PJ: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tell every card of the group a few numbers below 2**31, as many of each; what each of them has told this card."""
        if self.is_one:
            return numbers_PJ
        ones = [1] * len(self.ranks)
        told: NDArray[np.int64] = self.swap(torch.from_numpy(numbers_PJ).int(), ones, ones).long().numpy()
        return told


def on_card(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Objects that travel under NCCL do so from the current card, which need not be that of this rank's rows."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor where it is needed. On the host it is there at once, as others read it; a card waits for it by itself."""
    if tensor.device == device:
        return tensor.contiguous()
    if device != CPU:
        return tensor.to(device, non_blocking=True)  # pinned memory is not used again before it was read
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


_open: weakref.WeakSet[Group] = weakref.WeakSet()  # groups that have threads


@atexit.register
def _end() -> None:
    """Let go of all groups, which ends their threads; not of one in which somebody still waits for other cards."""
    for group in list(_open):
        if group.lane is None or group.lane.end():
            process, group.process = group.process, None
            with contextlib.suppress(Exception):  # whoever made the process group may have ended it
                if group.gloo:  # the end of NCCL's groups is for all ranks to call
                    dist.destroy_process_group(process)


@dataclass(frozen=True)
class World:
    """All cards, and this one among them."""

    rank: int
    nodes: int
    cards: int  # of a node
    everyone: Group
    node: Group  # the cards of this node
    across: Group  # the cards of this number on all nodes
    device: torch.device
    lane: Lane

    @property
    def size(self) -> int:
        return self.nodes * self.cards

    @property
    def mesh(self) -> DeviceMesh | None:
        """Nodes x cards, made of our groups; None for one process. Made anew when asked for, as it keeps the groups."""
        processes = [group.process for group in (self.across, self.node) if group.process is not None]
        if not processes:
            return None
        grid = torch.arange(self.size).view(self.nodes, self.cards)
        return DeviceMesh.from_group(processes, self.device.type, mesh=grid, mesh_dim_names=("node", "card"))

    @classmethod
    def of(cls, topology: Topology, device: torch.device) -> World:
        """The groups of a cluster; every rank calls this. Without torch.distributed: one process."""
        return cls._made(topology.nodes, topology.gpus_per_node, device)

    @classmethod
    def _made(cls, nodes: int, cards: int, device: torch.device) -> World:
        lane = Lane(device)
        if nodes * cards == 1:
            alone = Group((0,), 0, ("card",), None)
            return cls(0, 1, 1, alone, alone, alone, device, lane)
        return cls(dist.get_rank(), nodes, cards, *_all_groups(nodes, cards, device, lane), device, lane)

    def beside(self) -> World:
        """The same cards with groups of their own, so that what goes on in both need not be in step. Every rank calls this."""
        return self if self.size == 1 else self._made(self.nodes, self.cards, self.device)

    def gather(self, mine: Any) -> list[Any]:
        """Something of every rank."""
        if self.everyone.is_one:
            return [mine]
        found: list[Any] = [None] * self.size
        with self.everyone.together():
            dist.all_gather_object(found, mine, group=self.everyone.process)
        return found


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_groups(nodes: int, cards: int, device: torch.device, lane: Lane) -> tuple[Group, Group, Group]:
    """Everyone, the cards of this node, and those of this card's number."""
    grid = torch.arange(nodes * cards).view(nodes, cards)
    everyone, node, across = (_group(each.tolist(), cards, device, lane) for each in (grid.view(1, -1), grid, grid.t()))
    return everyone, node, across


def _group(all_ranks: list[list[int]], cards: int, device: torch.device, lane: Lane) -> Group:
    """Of groups that divide all ranks, the one that this rank is in. Every rank makes every group."""
    rank, made = dist.get_rank(), [dist.new_group(ranks, timeout=_timeout(device)) for ranks in all_ranks]
    at = next(n for n, ranks in enumerate(all_ranks) if rank in ranks)
    ranks = tuple(all_ranks[at])
    links: list[LinkClass] = ["card" if r == rank else "node" if r // cards == rank // cards else "cluster" for r in ranks]
    return Group(ranks, ranks.index(rank), tuple(links), made[at], lane, device)


def _timeout(device: torch.device) -> timedelta | None:
    """Of the default group, as the user chose it: new groups would have that of the backend."""
    assert dist.group.WORLD is not None
    try:
        options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    except RuntimeError:
        raise BadInput(
            f"the rows lie on {device}, and the process group is {dist.get_backend()}, which sends nothing from there; move "
            "the model to its card before shard_, or use gloo"
        ) from None
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def check_alike(everyone: Sequence[dict[str, str]], what: str) -> None:
    """Raise, on every rank alike, where ranks disagree on something: `everyone` has what each rank says, by name."""
    for name in everyone[0]:
        says = [each.get(name, "nothing") for each in everyone]
        if len(set(says)) > 1:
            shown = "; ".join(
                f"rank{'s' if says.count(one) > 1 else ''} {', '.join(str(r) for r, s in enumerate(says) if s == one)}: {one}"
                for one in dict.fromkeys(says)
            )
            raise BadInput(f"{what}: ranks differ in {name} ({shown}); give all of them the same")
