"""Functions that ranks run in the tests of simulator, replanning and migration."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import torch
from cases import TABLES, Model, batches, exact_loss, sizes_of

import thermocline as tc
from thermocline.distributed.replanning import migrate

BIG = 5003  # rows


def metered(
    rank: int, size: int, plan: tc.Plan, heat: Any, sizes: list[list[int]], settings: dict[str, Any] | None = None
) -> Any:
    """Some steps; the traffic records and messages of this rank."""
    model = Model(**settings or {})
    sharding = tc.shard_(model, plan, heat)
    for step, each in enumerate(sizes):
        model.tables(batches(step, each)[rank]).values().sum().backward()
    return sharding.sent(), sharding.collections["tables"].state.meter.messages_DL


def moved(rank: int, size: int, plans: list[tc.Plan], heats: list[Any], settings: dict[str, Any], steps: int) -> Any:
    """Train some steps by each plan, with migrations in between; local rows and state, and the learning rate."""
    migrate.BLOCK = 7
    model = Model(**settings)
    collection = model.tables
    sharding = tc.shard_(model, plans[0], heats[0], reduce="sum")
    kept, optimizer = model.tables, tc.fused_optimizer(model)
    assert kept is collection
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, steps, gamma=0.5)
    for number, (plan, heat) in enumerate(zip(plans, heats, strict=True)):
        if number:
            sharding.migrate(plan, heat)
            assert sharding.plan == plan and model.tables is kept
        owners = [table.pooled_by == "owner" and table.tiers[-1].tier == 3 for table in plan.tables]
        assert (kept.state.batch_layout.is_owner_pooled is not None) == any(owners)
        for step in range(number * steps, (number + 1) * steps):
            sizes = sizes_of(step, size)
            if size == 4:  # the batch after a migration was to come ahead of it
                kept.prefetch(batches(step + 1, sizes_of(step + 1, size))[rank])
            exact_loss(model.tables(batches(step, sizes)[rank]).values(), step, sum(sizes[:rank])).backward()
            optimizer.step()
            schedule.step()
    sharding.check_replicas()
    assert size == 1 or {part.name for part in kept.row_index.parts} == {line.table for line in sharding.sent() if line.table}
    kept.wait_for_exchange()
    return held_rows(kept), [(kept.trainer.clock.tolist(), kept.trainer.hyper.tolist())]


def held_rows(sharded: Any) -> list[tuple[int, np.ndarray, list[np.ndarray]]]:
    """Table, rows, codes, meta words and state of local rows."""
    sharded.wait_for_exchange()
    held = []
    for index, table in enumerate(sharded.tables):
        rows = torch.arange(table.rows)
        for k, at, place in sharded.shard.local(sharded.row_index.locate(rows + sharded.row_index.first[index])):
            parts = [*sharded.arena.views(k)[:2], *sharded.shard.states(k)]
            held.append((index, rows[at].numpy(), [part[place].numpy() for part in parts]))
    return held


def counted(rank: int, size: int, plan: tc.Plan, heat: Any, sizes: list[list[int]]) -> Any:
    """The heat of some steps, all counted, and the heat after it was taken."""
    model = Model()
    sharding = tc.shard_(model, plan, heat, count_every=1)
    for step, each in enumerate(sizes):
        model.tables(batches(step, each)[rank]).values().sum().backward()
    model.eval()
    model.tables(batches(99, sizes[0])[rank])  # not trained on
    found = sharding.heat()
    return found, found.sha256, [table.lookups for table in sharding.heat().tables.values()]


def drifted(rank: int, size: int, plan: tc.Plan, heat: Any, new: Any, horizons: list[int]) -> Any:
    """The proposal for another heat, the traffic of the migration by link, and the proposal after it."""
    model = big_model()
    sharding = tc.shard_(model, plan, heat)
    proposals = [tc.replan(sharding, new, horizon) for horizon in horizons]
    sent, exchange = {"card": 0, "node": 0, "cluster": 0}, migrate.RowMigration._exchange

    def watched(move: migrate.RowMigration, k: int, records: torch.Tensor, out: list[int], got: list[int]) -> torch.Tensor:
        for count, link in zip(out, move.groups.world.links, strict=True):
            sent[link] += count * records.shape[1]
        return exchange(move, k, records, out, got)

    migrate.RowMigration._exchange = watched  # type: ignore[method-assign]
    try:
        sharding.migrate(proposals[0].plan, proposals[0].heat)
    finally:
        migrate.RowMigration._exchange = exchange  # type: ignore[method-assign]
    again = tc.replan(sharding, new, horizons[0])
    numbers = [
        (p.now, p.then, p.saves, p.seconds, p.pays, p.pays_back_after, p.bytes, p.rows, str(p)) for p in [*proposals, again]
    ]
    return numbers, sent, proposals[0].plan


def big_model(policy: str = "lfu") -> torch.nn.Module:
    torch.manual_seed(1)
    tables = [tc.Table("item", BIG, 16), tc.Table("hour", 24, 8)]
    return torch.nn.ModuleDict({"rows": tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.0, policy=policy))})


def rounded(rank: int, size: int, plans: list[tc.Plan], heat: Any) -> Any:
    """Migrate to a plan in another precision without a step; rows before and after."""
    model = Model(precision="fp32")
    sharding = tc.shard_(model, plans[0], heat)
    before = [model.tables.get_rows(name).numpy() for name in TABLES]
    sharding.migrate(plans[1], heat)
    return before, [model.tables.get_rows(name).numpy() for name in TABLES]


def broken(rank: int, size: int, what: str, plans: list[tc.Plan], heat: Any, steps: int) -> Any:
    """Rank 1 fails during a migration, or has another plan; the error of each rank, and rows after further training."""
    migrate.BLOCK = 7
    model = Model()
    sharding = tc.shard_(model, plans[0], heat, reduce="sum")
    said: Any = "nothing"
    for step in range(steps):
        sizes = sizes_of(step, size)
        loss = exact_loss(model.tables(batches(step, sizes)[rank]).values(), step, sum(sizes[:rank]))
        if step == 3:
            said = _error_of(sharding, plans[2 if rank == 1 and what == "plans" else 1], heat, what if rank == 1 else "")
        loss.backward()
    sharding.check_replicas()
    return said, held_rows(model.tables)


def _error_of(sharding: Any, plan: tc.Plan, heat: Any, what: str) -> BaseException | str:
    """The error of a migration whose fifth block fails on this rank."""
    put, calls = migrate.RowMigration._store, []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 5 and what == "memory":
            raise MemoryError("no room")
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        put(*arguments)

    migrate.RowMigration._store = fail if what in ("memory", "Ctrl-C") else put  # type: ignore[method-assign]
    try:
        sharding.migrate(plan, heat)
    except (tc.ThermoclineError, MemoryError, KeyboardInterrupt) as error:
        return error.with_traceback(None)
    finally:
        migrate.RowMigration._store = put  # type: ignore[method-assign]
    return "nothing"


def late(rank: int, size: int, plans: list[tc.Plan], heat: Any) -> Exception | None:
    """Migrate between a forward and its backward; the error, and training goes on."""
    model, found = Model(), None
    sharding = tc.shard_(model, plans[0], heat)
    loss = model.tables(batches(1, [3] * size)[rank]).values().sum()
    sharding.migrate(plans[1], heat)
    try:
        loss.backward()
    except tc.BadInput as error:
        found = error.with_traceback(None)
    model.tables(batches(1, [3] * size)[rank]).values().sum().backward()
    return found
