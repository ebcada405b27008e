"""How often the cards of a step wait for each other: every exchange that has to end before the next can begin.

Each takes a latency, however little it carries and however many tables take part in it. That is a fixed price of having any
row of a kind at all, so what a step with copies costs on fast links is decided here. This is the only list of exchanges: the
planner, the parts of a step that a plan shows, `simulate` and `replan` all add up `turns`, and tests hold it against the
exchanges that real processes make (tests/distributed/test_phases.py). By part of the step, with who exchanges:

    ids          everyone   cards meet: what they are about to do, and how much they will ask for
                 hop        ids
                 across     (relayed) how much, and ids
    rows         across     (relayed) rows; with slots, first in which kind each of them comes
                 hop        the same
    gradients    hop        gradients
                 across     (relayed) gradients
    sync         across     (copies) how much, ids and gradients, unless relayed rows take them along
                 across     (copies) how much, and sums
                 node       (tier 1) how much, and sums

`hop` is the first way of a batch, in which everything goes that a card has for others: everyone, if rows of tier 3 are asked of
their owners, and else the cards of a node. Ids and gradients of tier 1 take part in it, for its sums are made on the way. Sums
that owners make of bags (`distributed/exchange/owner_pooling.py`) go beside all that, to everyone: ids, sums, gradients.

Where the next batch comes *ahead* (`prefetch.py`), its exchanges need not be waited for but behind the dense part: how
much, ids, which rows are late, and the rows that are not. Late rows are then waited for, as are the meeting, gradients and
sync. So a batch that comes ahead makes more exchanges than one that does not.

An exchange takes the latency of the farthest link that has something to carry. (Under gloo, small exchanges send empty messages
too, and wait for those.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from thermocline.plan.model import DIRECTIONS, Direction

from .step_cost import Machine

Reach = Literal["everyone", "node", "across"]  # all cards, those of a node, those of one number on all nodes


class Uses(NamedTuple):
    """What there is in a collection: rows of which kind."""

    flat: bool = False  # of tier 3, asked of their owners
    relayed: bool = False  # of tier 3, asked for once a node
    second: bool = False  # of tier 2
    first: bool = False  # of tier 1
    summed: bool = False  # whose owners pool them
    slots: bool = False  # that may be in slots of a cache


class Turn(NamedTuple):
    """One exchange. `ahead`: of the next batch, so that the dense part may hide it."""

    part: Direction
    reach: Reach
    ahead: bool = False


def turns(uses: Uses, nodes: int, cards: int, trains: bool = True, ahead: bool = True) -> Iterator[Turn]:
    """The exchanges of a training step, one after the other; of a request, where nothing trains. One card has none."""
    if nodes * cards == 1:
        return
    uses = uses._replace(relayed=uses.relayed and nodes > 1)
    if not trains:
        yield from _request(uses)
        return
    yield Turn("ids", "everyone")
    if ahead:
        yield from (Turn("ids", "everyone", True) for _ in range(1 + uses.summed))  # what no meeting has told yet
    yield from (Turn(part, reach, ahead) for part, reach in _asked(uses))
    if ahead:
        yield from (Turn(part, reach, True) for part, reach in _come(uses, marked=True))
    yield from (Turn(part, reach) for part, reach in _come(uses, marked=uses.slots))
    if uses.summed:
        yield Turn("rows", "everyone")
    yield from (Turn(part, reach) for part, reach in _brought(uses))
    yield from (Turn("sync", reach) for reach in _made_equal(uses, nodes, cards))


def _hop(uses: Uses) -> Reach:
    return "everyone" if uses.flat else "node"


def _asks(uses: Uses) -> bool:
    return uses.flat or uses.relayed or uses.second


def _request(uses: Uses) -> Iterator[Turn]:
    """Ids, which nothing hides, and rows."""
    for part in DIRECTIONS[:2]:
        if uses.flat or uses.summed:
            yield Turn(part, "everyone", part == "ids")
        elif uses.relayed or uses.second:
            yield Turn(part, "node", part == "ids")
        if uses.relayed:
            yield Turn(part, "across", part == "ids")


def _asked(uses: Uses) -> Iterator[tuple[Direction, Reach]]:
    if _asks(uses) or uses.first:
        yield "ids", _hop(uses)
    if uses.relayed:
        yield "ids", "across"
        yield "ids", "across"
    if uses.summed:
        yield "ids", "everyone"


def _come(uses: Uses, marked: bool) -> Iterator[tuple[Direction, Reach]]:
    """Rows; `marked`: something is said of each of them beforehand."""
    for _ in range((1 + marked) * uses.relayed):
        yield "rows", "across"
    for _ in range((1 + marked) * _asks(uses)):
        yield "rows", _hop(uses)


def _brought(uses: Uses) -> Iterator[tuple[Direction, Reach]]:
    if _asks(uses) or uses.first:
        yield "gradients", _hop(uses)
    if uses.relayed:
        yield "gradients", "across"
    if uses.summed:
        yield "gradients", "everyone"


def _made_equal(uses: Uses, nodes: int, cards: int) -> Iterator[Reach]:
    if nodes > 1 and (uses.first or uses.second):
        for _ in range(2 if uses.relayed else 5):
            yield "across"
    if uses.first and cards > 1:
        yield "node"
        yield "node"


class Waits(NamedTuple):
    """Seconds of latency: what is waited for, what the dense part may hide."""

    exposed: float
    hidden: float


def waits(machine: Machine, found: Iterable[Turn]) -> Waits:
    """Latency of some turns."""
    seconds = [0.0, 0.0]
    for turn in found:
        seconds[turn.ahead] += latency(machine, turn.reach)
    return Waits(*seconds)


def only_ahead(machine: Machine, uses: Uses, trains: bool = True) -> float:
    """Seconds of latency that there are only where the next batch comes ahead."""
    coming, apart = (sum(waits(machine, turns(uses, machine.nodes, machine.cards, trains, ahead))) for ahead in (True, False))
    return coming - apart


def latency(machine: Machine, reach: Reach) -> float:
    """Of one exchange: that of its farthest link."""
    far = machine.nodes > 1 and reach != "node"
    near = machine.cards > 1 and reach != "across"
    return machine.cluster_latency if far else machine.node_latency if near else 0.0
