"""What ranks do in the tests. Every function runs on each of them and gets rank, ranks and what the test gave."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import Model, batches, exact_loss, joined, sizes_of, smooth_loss

import thermocline as tc


def work(rank: int, tasks: Any, results: Any) -> None:
    """A process: do what comes, until nothing more does."""
    while (task := tasks.get()) is not None:
        name, store, size, arguments = task
        try:
            results.put((rank, True, run(globals()[name], rank, size, store, arguments)))
        except Exception as error:
            results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run(function: Callable[..., Any], rank: int, size: int, store: str, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
    try:
        return function(rank, size, *arguments)
    finally:
        if size > 1:
            dist.destroy_process_group()


def train(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train sharded and, beside it, in one process on the batches of all ranks; what differs between the two."""
    given = dict(settings)
    loss = exact_loss if given.pop("exact") else smooth_loss
    model, whole = Model(**given), Model(**given)
    sharding = tc.shard_(model, plan, heat)
    for step in range(steps):
        sizes = sizes_of(step, size)
        parts = batches(step, sizes)
        loss(model.tables(parts[rank]).values(), step, sum(sizes[:rank])).backward()
        loss(whole.tables(joined(parts)).values(), step, 0).backward()
    sharding.check_replicas()
    return compare(model.tables, whole.tables)


def compare(sharded: Any, whole: tc.EmbeddingCollection) -> dict[str, Any]:
    """Rows and state that lie here, beside those of one process."""
    rows = different = 0
    worst = 0.0
    for index, table in enumerate(whole.tables):
        numbers = torch.arange(table.rows)
        for k, at, place in sharded._mine(sharded.atlas(numbers + sharded.atlas.first[index])):
            mine = [*sharded.arena.views(k)[:2], *sharded.held.states(k)]
            by_row = whole.trainer.optimizer.states_per_row > 0
            theirs = [*whole.arena.views(index)[:2], *whole.arena.state_views(index, whole.trainer.states, by_row)]
            rows += len(at)
            different += sum(not torch.equal(a[place], b[numbers[at]]) for a, b in zip(mine, theirs, strict=True))
            values = sharded.arena.read(k, place), whole.arena.read(index, numbers[at])
            worst = max(worst, float((values[0] - values[1]).abs().max()))
    read = [float((sharded.get_rows(t.name) - whole.get_rows(t.name)).abs().max()) for t in whole.tables]
    return {"rows": rows, "different": different, "worst": max(worst, *read)}
