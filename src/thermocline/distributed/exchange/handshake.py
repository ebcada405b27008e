"""All cards meet before a batch: each tells the others what it is about to do, and how many rows it will ask them for.

Where they differ, or one of them has failed, all of them raise, and the message names the rank.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from thermocline.distributed.process_groups import World, check_alike
from thermocline.errors import BadInput

from .routes import Counts
from .traffic_meter import Meter

_TROUBLE = 0
_AHEAD, _NEXT = 2, 1  # bits of what is told


class Told(NamedTuple):
    """What cards have told each other."""

    got_PJ: Counts  # rows that each asks this card for, in each of J exchanges
    most_J: Counts  # rows that any card asks for
    ahead: bool  # whether all have the batch at hand already
    differ: bool  # or some of them
    following: bool  # whether any has a batch to fetch after this one


class Says(NamedTuple):
    """What a card is about to do, with which rows."""

    intent: str
    asked_PJ: Counts  # in each of the exchanges that go on side by side
    total_J: Counts
    ahead: bool = False
    following: bool = False


def meet(world: World, meter: Meter, name: str, says: Says) -> Told:
    """Go on if all cards are about to do the same."""
    what = f"{name}: {says.intent}"
    word = 1 + ((zlib.crc32(what.encode()) & 0x0FFFFFFF) << 2 | _AHEAD * says.ahead | _NEXT * says.following)
    told_PJ = _tell(world, meter, word, says.asked_PJ, says.total_J)
    word_P = told_PJ[:, 0] - 1
    if _TROUBLE not in told_PJ[:, 0] and len(set((word_P >> 2).tolist())) == 1:
        ahead_P, next_P = (word_P & _AHEAD) > 0, (word_P & _NEXT) > 0
        ahead = bool(ahead_P.all())
        got_PJ, most_J = told_PJ[:, 1::2], told_PJ[:, 2::2].max(axis=0)
        return Told(got_PJ, most_J, ahead, not ahead and bool(ahead_P.any()), bool(next_P.any()))
    everyone = world.gather({"what they do": what, "error": ""})
    for rank, each in enumerate(everyone):
        if each["error"]:
            raise BadInput(f"rank {rank} stopped: {each['error']}")
    check_alike([{"what they do": each["what they do"]} for each in everyone], "this step")
    raise AssertionError("cards differ, and say the same")


def stop(world: World, meter: Meter, name: str, error: Exception, exchanges: int) -> None:
    """Tell all other cards that this one has failed; the caller raises."""
    _tell(world, meter, _TROUBLE, np.zeros((world.size, exchanges), np.int64), np.zeros(exchanges, np.int64))
    world.gather({"what they do": name, "error": f"{error}"})


def _tell(world: World, meter: Meter, word: int, asked_PJ: Counts, total_J: Counts) -> Counts:
    group = world.everyone
    each_PJ = np.stack([asked_PJ, np.broadcast_to(total_J, asked_PJ.shape)], axis=2).reshape(len(asked_PJ), -1)
    numbers_PJ = np.concatenate([np.full_like(each_PJ[:, :1], word), each_PJ], axis=1)
    with meter.timed("ids"):
        told_PJ = group.tell(numbers_PJ)
    meter.add_sizes("ids", group.links, numbers_PJ.shape[1])
    return told_PJ
