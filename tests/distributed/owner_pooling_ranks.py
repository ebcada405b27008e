"""Functions that ranks run in the tests of owner pooling. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import Model, batches, joined, sizes_of
from ranks import look_ahead
from replan_ranks import held_rows

import thermocline as tc


def linear_loss(out: torch.Tensor, step: int, first: int) -> torch.Tensor:
    """A loss with arbitrary gradients that do not depend on the output."""
    total = first + out.shape[0]
    factors = torch.from_numpy(np.random.default_rng((step, 47)).normal(size=(total, out.shape[1])).astype(np.float32))
    return (out * factors[first:]).sum()


def train(rank: int, size: int, plan: tc.Plan | None, heat: Any, settings: dict[str, Any], steps: int, ranks: int = 0) -> Any:
    """Train; local rows and state, and outputs. Without a plan: the batches of all ranks as one."""
    given = dict(settings)
    ahead = given.pop("ahead", "")
    model, outs, ranks = Model(**given), [], ranks or size
    if plan is not None:
        tc.shard_(model, plan, heat, reduce="sum", check_every=5)
    for step in range(steps):
        sizes = sizes_of(step, ranks)
        if ahead:
            look_ahead(model.tables, rank, size, step, ahead)
        parts = batches(step, sizes)
        out = model.tables(joined(parts) if plan is None else parts[rank]).values()
        outs.append(out.detach().clone().numpy())
        linear_loss(out, step, 0 if plan is None else sum(sizes[:rank])).backward()
    return (model.tables, outs) if plan is None else (held_rows(model.tables), outs)


def weighted(rank: int, size: int, plan: tc.Plan | None, heat: Any, ranks: int = 0) -> Any:
    """Bags with weights in every other step, prefetched; outputs, gradients of weights, all rows."""
    model, found, ranks = Model(precision="fp32", optimizer=tc.SGD(lr=0.125)), [], ranks or size
    if plan is not None:
        tc.shard_(model, plan, heat, reduce="sum")

    def batch_of(step: int) -> tuple[Any, list[torch.Tensor]]:
        parts = batches(step, [3] * ranks)
        batch = joined(parts) if plan is None else parts[rank]
        if step % 2:
            return batch, []
        weights = [torch.linspace(-1, 2, len(ids)).sin().requires_grad_() for ids, _ in batch.values()]
        if plan is None:  # as ranks have them
            weights = [
                torch.cat([torch.linspace(-1, 2, len(part[name][0])).sin() for part in parts]).requires_grad_()
                for name in batch
            ]
        return {name: (*bags, each) for (name, bags), each in zip(batch.items(), weights, strict=True)}, weights

    batch, weights = batch_of(0)
    for step in range(6):
        following, its_weights = batch_of(step + 1)
        if plan is not None and step < 5:
            model.tables.prefetch(following)
        out = model.tables(batch).values()
        linear_loss(out, step, 0 if plan is None else 3 * rank).backward()
        found.append((out.detach().clone().numpy(), [each.grad.numpy() for each in weights]))
        batch, weights = following, its_weights
    return found, {table.name: model.tables.get_rows(table.name).numpy() for table in model.tables.tables}


def measured(rank: int, size: int, plan: tc.Plan, heat: Any, batches: list[dict[str, Any]], dim: int) -> Any:
    """Train tables of one dimension by a plan of the planner; the traffic, and the run."""
    torch.manual_seed(3)
    tables = [tc.Table(each.name, each.rows, dim, each.features) for each in plan.tables]
    mode = "none" if plan.tables[0].pooling == "none" else "sum"
    model = torch.nn.ModuleDict(
        {"rows": tc.EmbeddingCollection(tables, mode=mode, rows=tc.RowConfig(plan.tables[0].precision, cache=0.0))}
    )
    sharding = tc.shard_(model, plan, heat)
    for batch in batches:
        given = {}
        for name, ids_NL in batch.items():
            each = len(ids_NL) // size
            mine = torch.from_numpy(ids_NL[rank * each : (rank + 1) * each])
            given[name] = mine.reshape(-1), torch.arange(each + 1) * mine.shape[1]
        model["rows"](given).values().sum().backward()
    return sharding.sent(), sharding.run(plan.batch, 1.0)
