"""Rendezvous of hosts: torchrun's variables name this host and the number of hosts, its store holds their addresses.

The store is open to everyone who reaches it, so it holds no secret. Hosts prove to each other that they know the content of
THERMOCLINE_SECRET_FILE, by an HMAC of random numbers, and never send it. With THERMOCLINE_TLS_CERT, _KEY and _CA they also use
mutual TLS, which protects what follows against someone on the path.

Only the store of torch.distributed is used. Rejected: a gloo process group, which cannot get a lost member back, and needs two
messages where a socket needs one round trip.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

from thermocline.errors import BadInput, read_bytes

_TIMEOUT = timedelta(minutes=10)  # for hosts that start later
_MIN_SECRET, _MAX_SECRET = 16, 1 << 16  # bytes
NUMBER = 32  # bytes of a random number, and of a proof


class HostTls(NamedTuple):
    """Certificate and key of this host, and the CA of all hosts."""

    certificate: str
    key: str
    ca: str

    def wrap(self, connection: socket.socket, server: bool) -> ssl.SSLSocket:
        """Both sides show a certificate of the CA. Names do not matter: hosts have addresses only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        return context.wrap_socket(connection, server_side=server)


@dataclass(frozen=True)
class Rendezvous:
    """This host among all hosts."""

    rank: int
    hosts: int
    store: Any
    address: str  # of this host, for the others
    secret: bytes
    tls: HostTls | None = None

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
    secret, tls = read_secret(), read_tls()
    from torch.distributed.rendezvous import rendezvous  # deferred: a single host needs no torch here

    store, rank, hosts = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: finds the address that leads to host 0
        probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"])))
        address = probe.getsockname()[0]
    return Rendezvous(rank, hosts, store, address, secret, tls)


def read_secret(file: str | os.PathLike[str] | None = None) -> bytes:
    """The secret in a file, by default the one that THERMOCLINE_SECRET_FILE names."""
    name = os.environ.get("THERMOCLINE_SECRET_FILE", "") if file is None else os.fspath(file)
    way_out = "write at least 16 random bytes to a file on every host, readable by you alone, and give --secret-file FILE"
    if not name:
        words = "hosts and trainers prove a secret to each other: " + way_out
        raise BadInput(f"{words}, or set THERMOCLINE_SECRET_FILE", parameter="--secret-file")
    secret = read_bytes(name, _MAX_SECRET).strip()
    if len(secret) < _MIN_SECRET:
        raise BadInput(f"'{name}' has {len(secret)} bytes; {way_out}", parameter="--secret-file", needed=_MIN_SECRET)
    return secret


def read_tls() -> HostTls | None:
    """Certificate, key and CA that THERMOCLINE_TLS_CERT, _KEY and _CA name."""
    files = [os.environ.get(f"THERMOCLINE_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
    if any(files) and not all(files):
        raise BadInput("TLS between hosts needs THERMOCLINE_TLS_CERT, _KEY and _CA", parameter="THERMOCLINE_TLS_CA")
    return HostTls(*files) if all(files) else None


def proof(secret: bytes, side: bytes, *numbers: bytes) -> bytes:
    """What only a host with the secret can answer to random numbers."""
    return hmac.digest(secret, b"thermocline 1 " + side + b"".join(numbers), "sha256")


def shards_of(host: int, hosts: int, shards: int) -> range:
    """The shards of a host: consecutive, and as many as on any other host, give or take one."""
    return range(host * shards // hosts, (host + 1) * shards // hosts)
