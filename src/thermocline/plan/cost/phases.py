"""The exchanges of a step, one after the other: how often ranks wait for each other.

This module has the only list of exchanges: planner, `simulate` and `replan` sum it, and tests compare it with real processes.
Each takes the latency of the farthest link with something to carry. docs/planner.md explains the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from thermocline.plan.model import Direction

from .step_cost import Cluster

CommScope = Literal["everyone", "node", "across"]  # all ranks, ranks of a node, ranks with one local rank on all nodes


class RowKinds(NamedTuple):
    """The kinds of rows in a collection."""

    flat: bool = False  # tier 3, requested from the owners
    relayed: bool = False  # tier 3, requested once per node
    second: bool = False  # tier 2
    first: bool = False  # tier 1
    summed: bool = False  # pooled by the owners
    slots: bool = False  # may have a cache slot


class ExchangePhase(NamedTuple):
    """One exchange. `prefetch`: of the next batch, so that the dense part may hide it."""

    part: Direction
    scope: CommScope
    prefetch: bool = False


def exchange_phases(
    kinds: RowKinds, nodes: int, gpus_per_node: int, trains: bool = True, prefetch: bool = True
) -> list[ExchangePhase]:
    """The exchanges of a training step, or of a request if nothing trains. A single rank has none."""
    if nodes * gpus_per_node == 1:
        return []
    relayed = kinds.relayed and nodes > 1
    requests = kinds.flat or relayed or kinds.second
    first_hop: CommScope = "everyone" if kinds.flat else "node"

    def times(count: int, part: Direction, scope: CommScope, prefetch: bool = False) -> list[ExchangePhase]:
        return [ExchangePhase(part, scope, prefetch)] * count

    if not trains:  # nothing hides the ids of a request
        first_hop = "everyone" if kinds.summed else first_hop
        ids = times(requests or kinds.summed, "ids", first_hop, True) + times(relayed, "ids", "across", True)
        return ids + times(requests or kinds.summed, "rows", first_hop) + times(relayed, "rows", "across")

    def rows(messages: int, prefetch: bool) -> list[ExchangePhase]:
        return times(messages * relayed, "rows", "across", prefetch) + times(messages * requests, "rows", first_hop, prefetch)

    replicas = nodes > 1 and (kinds.first or kinds.second)
    return [
        *times(1, "ids", "everyone"),  # handshake: what each rank is about to do, and how many ids it will send
        *times(prefetch * (1 + kinds.summed), "ids", "everyone", True),  # counts: no handshake has them yet
        *times(requests or kinds.first, "ids", first_hop, prefetch),
        *times(2 * relayed, "ids", "across", prefetch),  # counts and ids
        *times(kinds.summed, "ids", "everyone", prefetch),
        *rows(2 * prefetch, True),  # which rows are late, and the others
        *rows(1 + kinds.slots, False),  # with slots, first the kind of each row
        *times(kinds.summed, "rows", "everyone"),
        *times(requests or kinds.first, "gradients", first_hop),  # sums of tier 1 are formed on the way
        *times(relayed, "gradients", "across"),
        *times(kinds.summed, "gradients", "everyone"),
        *times(replicas * (2 if relayed else 5), "sync", "across"),  # counts, ids, gradients unless relayed; counts, sums
        *times(2 * (kinds.first and gpus_per_node > 1), "sync", "node"),  # counts and sums
    ]


class PhaseLatency(NamedTuple):
    """Seconds of latency: exposed, and hidden by the dense part."""

    exposed: float
    hidden: float


def phase_latency(cluster: Cluster, phases: Iterable[ExchangePhase]) -> PhaseLatency:
    """The latency of some exchanges."""
    seconds = [0.0, 0.0]
    for phase in phases:
        seconds[phase.prefetch] += exchange_latency(cluster, phase.scope)
    return PhaseLatency(*seconds)


def prefetch_latency(cluster: Cluster, kinds: RowKinds, trains: bool = True) -> float:
    """Seconds of latency that only a step with prefetch has."""
    with_prefetch, without = (
        sum(phase_latency(cluster, exchange_phases(kinds, cluster.nodes, cluster.gpus_per_node, trains, prefetch)))
        for prefetch in (True, False)
    )
    return with_prefetch - without


def exchange_latency(cluster: Cluster, scope: CommScope) -> float:
    """The latency of one exchange: that of its farthest link."""
    far = cluster.nodes > 1 and scope != "node"
    near = cluster.gpus_per_node > 1 and scope != "across"
    return cluster.cluster_latency if far else cluster.node_latency if near else 0.0
