"""Rendezvous of hosts: torchrun's variables name this host and the number of hosts, its store holds their addresses.

Only the store of torch.distributed is used. Rejected: a gloo process group, which cannot get a lost member back, and needs two
messages where a socket needs one round trip.
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

_TIMEOUT = timedelta(minutes=10)  # for hosts that start later


@dataclass(frozen=True)
class Rendezvous:
    """This host among all hosts."""

    rank: int
    hosts: int
    store: Any
    address: str  # of this host, for the others
    token: bytes

    def publish(self, address: str) -> None:
        """Publish where this host listens."""
        self.store.set(f"thermocline/{self.rank}", address)

    def address_of(self, rank: int) -> tuple[str, int]:
        """Where a host listens. Waits for a host that has not published it."""
        host, _, port = self.store.get(f"thermocline/{rank}").decode().rpartition(":")
        return host, int(port)


def host_rank_and_count() -> tuple[int, int]:
    """Number of this host, and of all hosts, from torchrun's variables; (0, 1) without torchrun."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise BadInput(
            "one process serves all shards of a host: start torchrun with --nproc-per-node 1", parameter="LOCAL_WORLD_SIZE"
        )
    return rank, size


@cache
def join_rendezvous() -> Rendezvous | None:
    """Meet the other hosts; None if this is the only one."""
    rank, hosts = host_rank_and_count()
    if hosts == 1:
        return None
    from torch.distributed.rendezvous import rendezvous  # deferred: a single host needs no torch here

    store, rank, hosts = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    if rank == 0:
        store.set("thermocline/token", secrets.token_hex(16))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: finds the address that leads to host 0
        probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"])))
        address = probe.getsockname()[0]
    return Rendezvous(rank, hosts, store, address, store.get("thermocline/token"))


def shards_of(host: int, hosts: int, shards: int) -> range:
    """The shards of a host: consecutive, and as many as on any other host, give or take one."""
    return range(host * shards // hosts, (host + 1) * shards // hosts)
