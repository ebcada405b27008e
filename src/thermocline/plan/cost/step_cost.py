"""The cost of one row in one step: expected bytes over every class of links, and through GPU memory.

docs/planner.md, "Cost of a step", has the formulas. Only distinct rows travel, so the cost depends on the probability that a
row is requested by a rank, by a node, and by any rank. Codes in host memory are read over the host link for a lookup, and
read and written for an update, unless the row has a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.model import DIRECTIONS, Exchange
from thermocline.plan.topology import Topology

from .memory import ID_BYTES, RowPrecision, row_bytes

Floats = NDArray[np.float64]

NODE, CLUSTER = range(2)  # link classes as array indices
IDS, ROWS, GRADIENTS, SYNC = range(len(DIRECTIONS))
TOUCHES = 3  # reads and writes of GPU memory for one exchanged row


@dataclass(frozen=True)
class Cluster:
    """The cluster in the cost model: rates in bytes per second and GPU, latencies in seconds."""

    nodes: int
    gpus_per_node: int
    memory_rate: float
    node_rate: float
    cluster_rate: float
    node_latency: float = 0.0
    cluster_latency: float = 0.0
    host_rate: float = 0.0  # 0: no rows in host memory
    id_bytes: int = ID_BYTES  # of an id on the wire
    node_peak: float = 0.0  # rate of one GPU while the others of its node are idle; 0: node_rate
    cluster_peak: float = 0.0
    overlaps: bool = True  # exchanges run behind the dense part
    faster_N: tuple[float, ...] = ()  # memory rates of the GPUs of each node over `memory_rate`, which is the least

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @classmethod
    def of(cls, topology: Topology, id_bytes: int = ID_BYTES) -> Cluster:
        links = topology.links
        far = links.cluster or links.node  # a topology of several nodes has links between them
        rates_N = [gpu.bandwidth for gpu in topology.gpus]
        least = min(rates_N)
        return cls(
            topology.nodes, topology.gpus_per_node, least,
            links.node.bandwidth, far.bandwidth, links.node.latency, far.latency,
            links.host.bandwidth if links.host else 0.0, id_bytes,
            links.node.peak(topology.gpus_per_node), far.peak(topology.gpus_per_node), topology.overlaps,
            tuple(rate / least for rate in rates_N),
        )  # fmt: skip

    @property
    def speed_R(self) -> Floats:
        """The memory rate of every rank over that of the slowest."""
        return np.repeat(self.faster_N or (1.0,) * self.nodes, self.gpus_per_node)

    @property
    def seconds_L(self) -> Floats:
        """Seconds per byte over each class of links."""
        return np.array([1 / self.node_rate, 1 / self.cluster_rate])

    @property
    def peak_seconds_L(self) -> Floats:
        """The same for one GPU while the others of its node are idle."""
        return np.array([1 / max(self.node_peak, self.node_rate), 1 / max(self.cluster_peak, self.cluster_rate)])

    def uneven_seconds(self, sent_LR: Floats) -> Floats:
        """Seconds of an exchange in which ranks send bytes [link, ..., rank]: of the busiest GPU, or of the busiest node, whose
        GPUs may share a link."""
        *shape, ranks = sent_LR.shape
        by_node = sent_LR.reshape(*shape, ranks // self.gpus_per_node, self.gpus_per_node).mean(axis=-1)
        gpu, node = sent_LR.max(axis=-1), by_node.max(axis=-1)
        return np.asarray(np.maximum(_slowest(self.peak_seconds_L, gpu), _slowest(self.seconds_L, node)))

    def even_seconds(self, sent: Floats, at_once: bool = True) -> Floats:
        """Seconds of an exchange in which every rank sends these bytes [link, ...]: over both links `at_once`, as in one
        all-to-all among all ranks, or over one after the other."""
        return _slowest(self.seconds_L, sent) if at_once else np.asarray(np.tensordot(self.seconds_L, sent, axes=1))

    def copies(self, tier: int) -> float:
        """Copies of a row of a tier on one rank, as a mean."""
        return {1: 1.0, 2: 1 / self.gpus_per_node, 3: 1 / self.world_size}[tier]

    def local_share(self, tier: int, exchange: Exchange) -> float:
        """The chance that a requested row of a tier is already on the rank where the request goes first."""
        return {1: 0.0, 2: 1 / self.gpus_per_node, 3: 1 / (self.gpus_per_node if exchange == "node" else self.world_size)}[tier]


def _slowest(seconds_L: Floats, sent: Floats) -> Floats:
    """Seconds of the slower link."""
    return np.asarray(np.maximum(seconds_L[NODE] * sent[NODE], seconds_L[CLUSTER] * sent[CLUSTER]), np.float64)


class RequestProbability(NamedTuple):
    """The probability that a row is requested in a step: by a given rank, by a given node, by any rank."""

    rank: Floats
    node: Floats
    any: Floats


class EffectiveShare(NamedTuple):
    """The share of the lookups of a rank, a node and the cluster that counts as independent (see `AccessStats`)."""

    rank: float | Floats = 1.0
    node: float | Floats = 1.0
    any: float | Floats = 1.0


INDEPENDENT = EffectiveShare()


def request_probability(
    share: Floats, lookups: float | Floats, cluster: Cluster, effective: EffectiveShare = INDEPENDENT
) -> RequestProbability:
    """For rows with these shares of a table's lookups, and `lookups` per rank and step."""
    with np.errstate(divide="ignore", invalid="ignore"):
        none = np.where(share > 0, np.log1p(-np.minimum(share, 1.0)), 0.0) * lookups  # log of the chance of no request
    none = np.where(np.isnan(none), 0.0, none)
    counts = (effective.rank, effective.node * cluster.gpus_per_node, effective.any * cluster.world_size)
    return RequestProbability(*(np.asarray(-np.expm1(none * count), np.float64) for count in counts))


def _summed_bytes(cluster: Cluster, gradient: float | Floats) -> Floats:
    """Bytes of an id with its gradient; 0 where nothing trains."""
    return np.where(np.asarray(gradient) > 0, cluster.id_bytes + np.asarray(gradient), 0.0)


def bytes_sent(requested: RequestProbability, cluster: Cluster, tier: int, exchange: Exchange, wire: Floats,
               gradient: float | Floats) -> Floats:  # fmt: skip
    """Bytes [link, direction, ...] that a rank sends per step for one row; `gradient` is 0 where nothing trains."""
    gpus, nodes, ranks = cluster.gpus_per_node, cluster.nodes, cluster.world_size
    sent = np.zeros((2, len(DIRECTIONS), *np.shape(requested.rank)))
    payload = (float(cluster.id_bytes), wire, gradient)  # by direction: ids, rows, gradients
    inside, between = requested.rank * (gpus - 1) / gpus, requested.node / gpus * (nodes - 1) / nodes
    if tier == 3 and exchange == "flat":
        inside, between = requested.rank * (gpus - 1) / ranks, requested.rank * (ranks - gpus) / ranks
    if tier != 1:
        for direction, size in enumerate(payload):
            sent[NODE, direction] = inside * size
            if tier == 3:
                sent[CLUSTER, direction] = between * size
    if tier != 3:
        summed = _summed_bytes(cluster, gradient)
        sent[CLUSTER, SYNC] = (between + requested.any / ranks * (nodes - 1)) * summed
        if tier == 1:
            sent[NODE, SYNC] = (inside + requested.any * (gpus - 1) / gpus) * summed
    return sent


def memory_traffic(requested: RequestProbability, cluster: Cluster, tier: int, exchange: Exchange, wire: Floats,
                   gradient: float | Floats, update: float | Floats) -> tuple[Floats, Floats]:  # fmt: skip
    """Bytes of GPU memory traffic for one row, in the lookup and in the update, beyond the read of an unsharded lookup.

    `update` is what the update of one copy of the row reads and writes.
    """
    moved = requested.rank * (1 - cluster.local_share(tier, exchange)) if tier != 1 else np.zeros_like(requested.rank)
    if tier == 3 and exchange == "node":
        moved = moved + requested.node / cluster.gpus_per_node * (cluster.nodes - 1) / cluster.nodes
    return TOUCHES * moved * wire, TOUCHES * moved * gradient + requested.any * cluster.copies(tier) * update


def bytes_kept(requested: RequestProbability, cluster: Cluster, tier: int, exchange: Exchange, wire: Floats,
               gradient: float | Floats) -> Floats:  # fmt: skip
    """Bytes [direction, ...] of one row that a rank requests from itself, over no link. A single rank requests nothing."""
    local = cluster.local_share(tier, exchange)
    found = np.zeros((len(DIRECTIONS), *np.shape(requested.rank)))
    if cluster.world_size == 1:
        return found
    found[IDS], found[ROWS], found[GRADIENTS] = (
        requested.rank * local * size for size in (float(cluster.id_bytes), wire, gradient)
    )
    return found


def bytes_local(requested: RequestProbability, cluster: Cluster, tier: int, exchange: Exchange, wire: Floats,
                gradient: float | Floats) -> Floats:  # fmt: skip
    """`bytes_kept`, plus the other bytes in the message buffers that use no link: rows that a rank relays to itself, and its
    own part of the sums of replicated rows."""
    found = bytes_kept(requested, cluster, tier, exchange, wire, gradient)
    if cluster.world_size == 1:
        return found
    once = requested.node / cluster.world_size  # of a row requested by a node, on the rank that requests and owns it
    if tier == 3 and exchange == "node":
        found[:SYNC] += [once * size for size in (float(cluster.id_bytes), wire + 0 * once, gradient + 0 * once)]
    if tier != 3:
        found[SYNC] = (once + requested.rank / cluster.gpus_per_node * (tier == 1)) * _summed_bytes(cluster, gradient)
    return found


def buffer_bytes(sent: Floats, local: Floats, batches: int = 2) -> Floats:
    """Bytes of exchange buffers: the messages of a step [link, direction, ...] and their local part, sent and received.
    Buffers hold ids and rows of `batches` batches (one is prefetched), gradients and sums of one."""
    each = sent.sum(axis=0) + local
    return np.asarray(2 * (batches * (each[IDS] + each[ROWS]) + each[GRADIENTS] + each[SYNC]), np.float64)


def wire_bytes(dim: int, precision: RowPrecision, first_K: Floats, rows_K: Floats) -> tuple[Floats, Floats, Floats]:
    """For every curve step (rank of its first row, number of rows): bytes of a row on the wire, share of the rows with an fp32
    slot, and share with an int8 slot. The hottest rows have the slots."""
    total = float(rows_K.sum())
    fp32 = min(precision.fp32, 1.0) * total
    int8 = min(precision.int8 * total, total - fp32)
    with_fp32_K = np.clip((fp32 - first_K) / rows_K, 0.0, 1.0)
    with_int8_K = np.clip((fp32 + int8 - first_K) / rows_K, 0.0, 1.0) - with_fp32_K
    stored = float(row_bytes(dim, precision.base))
    wire_K = stored + with_fp32_K * (4.0 * dim - stored) + with_int8_K * (row_bytes(dim, "int8") - stored)
    return wire_K, with_fp32_K, with_int8_K


def at_once(tier: int, exchange: Exchange) -> bool:
    """Whether rows of a tier travel in one all-to-all, over all links at once: all but relayed and replicated rows."""
    return tier == 3 and exchange == "flat"


BagLengths = Sequence[tuple[float, float]]  # lookups of a bag, and the share of bags with this number


def expected_owners(lengths: BagLengths, ranks: int, hot_H: Floats | None = None) -> float:
    """Expected number of ranks that own rows of one bag. `hot_H` are the shares of the hottest rows, each on its own rank."""
    length, weight = np.array(lengths, np.float64).T
    if ranks == 1:
        return float(weight @ np.minimum(length, 1.0))
    hot_H = np.zeros(0) if hot_H is None else hot_H[:ranks]
    taken_H = np.append(hot_H, 0.0) + max(1.0 - hot_H.sum(), 0.0) / ranks  # the last: any of the other ranks
    count_H = np.append(np.ones(len(hot_H)), ranks - len(hot_H))
    none_LH = np.exp(length[:, None] * np.log1p(-np.minimum(taken_H, 1 - 1e-12)))
    return float(weight @ ((1 - none_LH) @ count_H))
