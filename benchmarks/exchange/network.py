"""Nodes of a cluster on one machine: a network namespace each, joined by a switch, all links held to a rate.

    node 0: lo, eth0 --- port0 \\
                                 br0        in a namespace of its own, so that nothing is left in the machine's
    node 1: lo, eth0 --- port1 /

Processes of one node talk over its `lo`, those of two nodes over their `eth0`. `tc tbf` holds `eth0` in both directions to the
rate of all cards of the node together, and `lo` likewise: on two cores, loopback is faster than the processes that use it, and
what is to be measured are links. Frames are of 9,000 bytes, as in data centres; queues are deep, so nothing is lost. TCP takes
long queueing delays for losses and would retransmit late frames, so its timeouts are raised.

Only root may make namespaces. Their names have the process that made them, so what a killed run left is recognised by the next
one, and removed. Deleting a namespace deletes its links.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MTU = 9000
HEADERS = 66  # bytes of Ethernet, IP and TCP with time stamps around what one frame carries
WITHOUT_ETHERNET = 52  # the same as loopback counts them
_PREFIX = "thermocline"
_NEW_NET = 0x40000000  # CLONE_NEWNET
_QUEUE = 64 << 20  # bytes that may wait at a link
_PATIENCE = "20s"  # until TCP takes a frame for lost
_NETWORK = "10.77.0.0/24"


class Counted(NamedTuple):
    """Bytes and frames that an interface has sent, as the kernel counts them."""

    bytes: int
    frames: int
    header: int = HEADERS  # bytes of it, of one frame

    @property
    def carried(self) -> int:
        """Without the headers."""
        return self.bytes - self.header * self.frames

    def since(self, before: Counted) -> Counted:
        return Counted(self.bytes - before.bytes, self.frames - before.frames, self.header)


class Net(NamedTuple):
    """Namespaces of nodes, named after the process that made them; `owner` 0: no namespaces, loopback instead."""

    owner: int
    nodes: int
    cards: int

    def enter(self, node: int) -> None:
        """Move this process, and its future threads, to a node."""
        if not self.owner:
            return
        with open(f"/run/netns/{self._name(node)}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), f"could not enter network namespace {self._name(node)}")

    def environment(self) -> dict[str, str]:
        """Environment variables of the rendezvous."""
        if not self.owner:
            return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        return {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "eth0"}

    def shape(self, node_rate: float, cluster_rate: float, frames: int = 4) -> None:
        """Limit the links to bytes per second and rank, inside nodes and between them; `frames` may pass at once."""
        for node in range(self.nodes if self.owner else 0):
            for where, device, rate in (
                (self._name(node), "lo", node_rate),
                (self._name(node), "eth0", cluster_rate),
                (self._name("switch"), f"port{node}", cluster_rate),
            ):
                bits = round(8 * rate * self.cards)
                burst = max(frames * MTU + HEADERS, round(rate * self.cards / 500))  # two milliseconds of it
                _tc(where, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{bits}bit", "burst", str(burst),
                    "limit", str(_QUEUE))  # fmt: skip

    def prefix(self, node: int) -> list[str]:
        """The beginning of a command that runs in a node."""
        return ["ip", "netns", "exec", self._name(node)] if self.owner else []

    def set_link(self, node: int, up: bool) -> None:
        """Cut a node off, or let it back. Afterwards TCP has its usual timeouts there."""
        _ip("-n", self._name(node), "link", "set", "eth0", "up" if up else "down")

    def _name(self, node: int | str) -> str:
        return f"{_PREFIX}-{self.owner}-{node}"

    def _build(self) -> None:
        switch = self._name("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "mtu", str(MTU), "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for node in range(self.nodes):
            name, port = self._name(node), f"port{node}"
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "mtu", str(MTU), "type", "veth",
                "peer", "name", port, "netns", switch, "mtu", str(MTU))  # fmt: skip
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{_address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up", "mtu", str(MTU))
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "route", "change", _NETWORK, "dev", "eth0", "rto_min", _PATIENCE)
            _ip("netns", "exec", name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans")


@contextmanager
def cluster(nodes: int, cards: int) -> Iterator[Net]:
    """Context with the nodes of a cluster; over loopback if `why_not` returns a reason."""
    if why_not():
        yield Net(0, nodes, cards)
        return
    sweep()
    net = Net(os.getpid(), nodes, cards)
    try:
        net._build()
        yield net
    finally:
        remove(net.owner)


def why_not() -> str:
    """The reason why namespaces cannot be made, or ""."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} of iproute2 not found" if missing else ""


def sweep() -> None:
    """Remove namespaces of runs that have ended."""
    for owner in {owner for owner, _ in _found() if not Path(f"/proc/{owner}").exists()}:
        remove(owner)


def remove(owner: int) -> None:
    """Remove all namespaces of one run; processes in them have ended."""
    for found, name in _found():
        if found == owner:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def counted() -> dict[str, Counted]:
    """What the interfaces of this process' namespace have sent."""
    found = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, numbers = line.split(":", 1)
        name, fields = name.strip(), numbers.split()
        found[name] = Counted(int(fields[8]), int(fields[9]), WITHOUT_ETHERNET if name == "lo" else HEADERS)
    return found


def sent_again() -> int:
    """Segments of TCP that this process' namespace has sent more than once."""
    lines = [line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*lines, strict=True))["RetransSegs"])


def _found() -> list[tuple[int, str]]:
    """(owner process, name) of every namespace of this benchmark."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [(int(match[1]), name) for name in names if (match := re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name))]


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _tc(namespace: str, *arguments: str) -> None:
    _run(["tc", "-n", namespace, *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
