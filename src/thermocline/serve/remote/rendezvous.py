"""Where hosts meet: torchrun's variables say who there is, and its store where each listens.

Only the store of torch.distributed is used. A process group over gloo was tried in thought and left: one that has lost a member
cannot get it back, and asking for rows would be two of its messages where a socket needs one round trip.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from thermocline.errors import BadInput

_WAIT = timedelta(minutes=10)  # for hosts that start later


@dataclass(frozen=True)
class Meeting:
    """Who this host is among how many."""

    rank: int
    hosts: int
    store: Any
    address: str  # of this host, as others reach it
    token: bytes

    def publish(self, where: str) -> None:
        self.store.set(f"thermocline/{self.rank}", where)

    def where(self, rank: int) -> tuple[str, int]:
        """Where a host listens; waits for one that has not said so."""
        host, _, port = self.store.get(f"thermocline/{rank}").decode().rpartition(":")
        return host, int(port)


def hosts_asked_for() -> tuple[int, int]:
    """This host's number, and how many there are: what torchrun set, or else one."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise BadInput("one process serves all cards of a host: start torchrun with --nproc-per-node 1")
    return rank, size


@cache
def meet() -> Meeting | None:
    """Meet the other hosts; None where this is the only one."""
    rank, hosts = hosts_asked_for()
    if hosts == 1:
        return None
    from torch.distributed.rendezvous import rendezvous

    store, rank, hosts = next(iter(rendezvous("env://", timeout=_WAIT)))
    if rank == 0:
        store.set("thermocline/token", secrets.token_hex(16))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: which of our addresses leads there
        probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"])))
        address = probe.getsockname()[0]
    return Meeting(rank, hosts, store, address, store.get("thermocline/token"))


def cards_of(host: int, hosts: int, cards: int) -> range:
    """The cards that a host has: as many as any other, give or take one, in order."""
    return range(host * cards // hosts, (host + 1) * cards // hosts)
