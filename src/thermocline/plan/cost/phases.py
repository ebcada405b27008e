"""The exchanges of a step, one after the other: how often ranks wait for each other.

Each exchange takes a latency, independent of its bytes and tables. That is a fixed price of having any row of a kind, and
decides whether replicas pay on fast links. This module has the only list of exchanges: the planner, the parts of a step in a
plan, `simulate` and `replan` all sum `exchange_phases`, and tests compare it with real processes
(tests/distributed/test_phases.py). By part of the step, with the ranks that take part:

    ids          everyone   handshake: what each rank is about to do, and how many ids it will send
                 first hop  ids
                 across     (relayed) counts, and ids
    rows         across     (relayed) rows; with slots, first the kind of each row
                 first hop  the same
    gradients    first hop  gradients
                 across     (relayed) gradients
    sync         across     (replicas) counts, ids and gradients, unless relayed rows carry them
                 across     (replicas) counts, and sums
                 node       (tier 1) counts, and sums

The first hop carries everything that a rank has for others: to everyone if rows of tier 3 are requested from their owners,
else to the ranks of the node. Ids and gradients of tier 1 take part, because its sums are formed on the way. Sums pooled by
owners (`distributed/exchange/owner_pooling.py`) take separate exchanges with everyone: ids, sums, gradients.

With prefetch, the dense part hides these exchanges of the next batch: counts, ids, which rows are late, and the rows that are
not. Late rows, handshake, gradients and sync are still waited for. A prefetched batch therefore makes more exchanges.

An exchange takes the latency of the farthest link with something to carry. (Under gloo, small exchanges send and await empty
messages as well.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from thermocline.plan.model import DIRECTIONS, Direction

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
) -> Iterator[ExchangePhase]:
    """The exchanges of a training step, or of a request if nothing trains. A single rank has none."""
    if nodes * gpus_per_node == 1:
        return
    kinds = kinds._replace(relayed=kinds.relayed and nodes > 1)
    if not trains:
        yield from _request(kinds)
        return
    yield ExchangePhase("ids", "everyone")
    if prefetch:
        yield from (
            ExchangePhase("ids", "everyone", True) for _ in range(1 + kinds.summed)
        )  # counts: no handshake has them yet
    yield from (ExchangePhase(part, scope, prefetch) for part, scope in _send_ids(kinds))
    if prefetch:
        yield from (ExchangePhase(part, scope, True) for part, scope in _send_rows(kinds, marked=True))
    yield from (ExchangePhase(part, scope) for part, scope in _send_rows(kinds, marked=kinds.slots))
    if kinds.summed:
        yield ExchangePhase("rows", "everyone")
    yield from (ExchangePhase(part, scope) for part, scope in _send_gradients(kinds))
    yield from (ExchangePhase("sync", scope) for scope in _sync(kinds, nodes, gpus_per_node))


def _first_hop(kinds: RowKinds) -> CommScope:
    return "everyone" if kinds.flat else "node"


def _requests(kinds: RowKinds) -> bool:
    return kinds.flat or kinds.relayed or kinds.second


def _request(kinds: RowKinds) -> Iterator[ExchangePhase]:
    """The exchanges of a served request: ids and rows. Nothing hides the ids."""
    for part in DIRECTIONS[:2]:
        if kinds.flat or kinds.summed:
            yield ExchangePhase(part, "everyone", part == "ids")
        elif kinds.relayed or kinds.second:
            yield ExchangePhase(part, "node", part == "ids")
        if kinds.relayed:
            yield ExchangePhase(part, "across", part == "ids")


def _send_ids(kinds: RowKinds) -> Iterator[tuple[Direction, CommScope]]:
    if _requests(kinds) or kinds.first:
        yield "ids", _first_hop(kinds)
    if kinds.relayed:
        yield "ids", "across"
        yield "ids", "across"
    if kinds.summed:
        yield "ids", "everyone"


def _send_rows(kinds: RowKinds, marked: bool) -> Iterator[tuple[Direction, CommScope]]:
    """Rows; `marked`: after a message with the kind of each row."""
    for _ in range((1 + marked) * kinds.relayed):
        yield "rows", "across"
    for _ in range((1 + marked) * _requests(kinds)):
        yield "rows", _first_hop(kinds)


def _send_gradients(kinds: RowKinds) -> Iterator[tuple[Direction, CommScope]]:
    if _requests(kinds) or kinds.first:
        yield "gradients", _first_hop(kinds)
    if kinds.relayed:
        yield "gradients", "across"
    if kinds.summed:
        yield "gradients", "everyone"


def _sync(kinds: RowKinds, nodes: int, gpus_per_node: int) -> Iterator[CommScope]:
    if nodes > 1 and (kinds.first or kinds.second):
        for _ in range(2 if kinds.relayed else 5):
            yield "across"
    if kinds.first and gpus_per_node > 1:
        yield "node"
        yield "node"


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
