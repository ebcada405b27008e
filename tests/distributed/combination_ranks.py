"""Functions that ranks run in the tests of combinations. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import TABLES, batches, exact_loss, joined, sizes_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import thermocline as tc


def model_of(choices: dict[str, Any]) -> Any:
    """A collection of all tables, one of which several features look up, or a plain module for each table."""
    torch.manual_seed(17)
    rows = tc.RowConfig(
        choices["precision"], cache=0.0, seed=5, update=choices["update"], residency=choices["residency"],
        optimizer=tc.RowwiseAdagrad(lr=0.125),
    )  # fmt: skip
    if choices["module"] == "plain":
        made = {name: tc.EmbeddingBag(rows_, dim, mode="sum", rows=rows) for name, (rows_, dim, _) in TABLES.items()}
        return nn.ModuleDict(made)
    tables = [tc.Table(name, rows_, dim, features) for name, (rows_, dim, features) in TABLES.items()]
    return nn.ModuleDict({"tables": tc.EmbeddingCollection(tables, rows=rows)})


def outputs(model: Any, choices: dict[str, Any], batch: Any) -> torch.Tensor:
    if choices["module"] == "plain":
        return torch.cat([model[name](*batch[features[0]]) for name, (_, _, features) in TABLES.items()], dim=1)
    return model["tables"](batch).values()  # type: ignore[no-any-return]


def prefetch(model: Any, choices: dict[str, Any], batch: Any) -> None:
    if choices["module"] == "plain":
        for name, (_, _, features) in TABLES.items():
            model[name].prefetch(*batch[features[0]])
    else:
        model["tables"].prefetch(batch)


def train(rank: int, size: int, choices: dict[str, Any], plan: Any, heat: Any, steps: int, ranks: int = 0) -> Any:
    """Train, on ranks or in one process on the batches of `ranks`; all rows."""
    model = model_of(choices)
    if not ranks:
        replicas = choices["replicas"]
        mesh = DeviceMesh("cpu", torch.arange(size).view(replicas, -1)) if replicas > 1 else None
        tc.shard_(model, plan, heat, reduce="sum", mesh=mesh)
    optimizer, ahead = tc.fused_optimizer(model), choices["ahead"] * (not ranks)
    for step in range(steps):
        sizes = sizes_of(step, ranks or size)
        for after in range(1 + (step > 0) * (ahead - 1), ahead + 1) if ahead and step + ahead < steps else ():
            prefetch(model, choices, batches(step + after, sizes_of(step + after, size))[rank])
        parts = batches(step, sizes)
        out = outputs(model, choices, joined(parts) if ranks else parts[rank])
        exact_loss(out, step, 0 if ranks else sum(sizes[:rank])).backward()
        if choices["update"] == "step" and step % choices["micro"] == choices["micro"] - 1:
            optimizer.step()
            optimizer.zero_grad()
    if choices["module"] == "plain":
        return [model[name].weight.detach().numpy() for name in TABLES]
    return [np.asarray(model["tables"].get_rows(name)) for name in TABLES]
