"""Functions of ranks that save and load sharded models with torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import torch
from cases import TABLES, Model, batches, dense_part, exact_loss, joined, sizes_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import thermocline as tc
from thermocline.distributed import saved_shard

saved_shard.SMALL, saved_shard.BLOCK = 5, 16  # so that tables have several pieces and messages

PARTS = 4  # batches of a step, whatever the number of ranks


class Whole(nn.Module):
    """Tables, and a dense part beside them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.inner = Model(**settings)
        self.top = dense_part()


def steps(model: Whole, rank: int, size: int, first: int, last: int) -> None:
    """Train on the same samples with any number of ranks."""
    for step in range(first, last):
        sizes = sizes_of(step, PARTS)
        mine = slice(rank * PARTS // size, (rank + 1) * PARTS // size)
        out = model.inner.tables(joined(batches(step, sizes)[mine])).values()
        exact_loss(out, step, sum(sizes[: mine.start])).backward()


def state(model: Whole) -> list[Any]:
    """All rows, and the clock."""
    tables = model.inner.tables
    return [*(tables.get_rows(name).numpy() for name in TABLES), tables.trainer.clock.tolist()]


def local(model: Whole) -> list[Any]:
    """The arrays of this rank: rows, state, cache."""
    tables: Any = model.inner.tables
    tables.wait_for_exchange()
    arena = tables.arena
    return [each.clone().numpy() for each in (arena.codes, arena.meta, *tables.trainer.states, *arena.cache[:9])]


def made(plan: Any, heat: Any, settings: dict[str, Any]) -> Whole:
    model = Whole(settings)
    tc.shard_(model, plan, heat, reduce="sum")
    return model


def go_on(
    rank: int, size: int, plan: Any, heat: Any, settings: dict[str, Any], given: str, saved: str, first: int, last: int
) -> Any:
    """Load, train and save; all rows after loading and after training."""
    model = made(plan, heat, settings)
    if given:
        with torch.no_grad():
            model.top.weight.zero_()
        dcp.load({"model": model}, checkpoint_id=given)
        assert torch.equal(model.top.weight, dense_part().weight)
    then = state(model)
    steps(model, rank, size, first, last)
    dcp.save({"model": model}, checkpoint_id=saved)
    return then, state(model)


def stop_and_go(rank: int, size: int, plan: Any, heat: Any, settings: dict[str, Any], folder: str, how: str) -> Any:
    """Save, train on, and load into a new model that trains the same; the arrays of both."""
    model, other = made(plan, heat, settings), made(plan, heat, settings)
    steps(model, rank, size, 0, 6)
    if how == "copy":
        saved = copy.deepcopy(model.state_dict())
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    elif how == "async":
        dcp.async_save(get_model_state_dict(model), checkpoint_id=folder).result()
    else:
        offloaded = StateDictOptions(cpu_offload=True)
        dcp.save(get_model_state_dict(model, options=offloaded), checkpoint_id=folder)
    steps(model, rank, size, 6, 12)
    if how in ("copy", "torch.save"):
        other.load_state_dict(saved)
    else:
        saved = get_model_state_dict(other)
        dcp.load(saved, checkpoint_id=folder)
        set_model_state_dict(other, saved)
    steps(other, rank, size, 6, 12)
    return local(model), local(other)


def refuse(rank: int, size: int, plan: Any, heat: Any) -> Any:
    """What every rank is told of a state that does not fit, on one rank only; and whether anything changed."""
    model = made(plan, heat, {})
    good, before, found = model.state_dict(), local(model), []
    other = Whole({"optimizer": tc.SGD(lr=0.1)})
    tc.shard_(other, plan, heat)
    bad = {"another optimizer": other.state_dict(), "a piece less": {key: good[key] for key in good if "rows_000" not in key}}
    for given in bad.values():
        try:
            model.load_state_dict(given if rank == 0 else good)
        except RuntimeError as error:
            found.append(str(error))
    dense = {key: value for key, value in good.items() if "tables" not in key}
    missing = model.load_state_dict(dense, strict=False).missing_keys
    assert len(missing) == len(good) - len(dense)
    return found, all(map(np.array_equal, before, local(model)))
