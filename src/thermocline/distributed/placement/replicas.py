"""Copies of rows are the same bit for bit: said by their sha256, which ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thermocline.errors import ThermoclineError

if TYPE_CHECKING:
    from thermocline.distributed.sharded_collection import ShardedCollection


def compare_copies(collection: ShardedCollection) -> None:
    """Raise if any two cards that hold the same rows differ in them. All ranks call this together."""
    everyone = collection.world.gather(_digests(collection))
    cards, size = collection.world.cards, collection.world.size
    for name in everyone[0]:
        for card in range(cards if name.startswith("tier 2") else 1):
            ranks = range(card, size, cards) if name.startswith("tier 2") else range(size)
            wrong = [rank for rank in ranks if everyone[rank][name] != everyone[ranks[0]][name]]
            if wrong:
                raise ThermoclineError(f"{collection.name}: {name} is not the same on rank {ranks[0]} and on ranks {wrong}")


def _digests(collection: ShardedCollection) -> dict[str, str]:
    """Of what must be equal on cards that hold the same: rows, state and slots of tiers 1 and 2, clock and rates."""
    arena, held = collection.arena, collection.held
    found = {"clock and learning rate": _sha256([collection.trainer.clock, collection.trainer.hyper])}
    for k, part in enumerate(collection.atlas.parts):
        if part.tier < 3:
            parts = [*arena.views(k)[:2], *held.states(k), *held.slots(k)]
            found[f"tier {part.tier} of table {part.name!r}"] = _sha256(parts)
    return found


def _sha256(tensors: Sequence[Tensor]) -> str:
    """Of their bytes, one after another."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
