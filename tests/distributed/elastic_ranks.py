"""Functions of ranks that train tables whose ids come and go; one process runs the same on the batches of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import plan_of, table_plan
from torch import nn

import thermocline as tc
from thermocline import BadInput, IdMap, Table
from thermocline.heat.profile import HeatProfile
from thermocline.heat.profiler import profile_batches

ALIKE = ("counts", "clock", "open")  # on all ranks, or summed
TABLES = {"hour": (24, 8, ("hour",)), "item": (300, 8, ("seen", "bought")), "shop": (83, 5, ("shop",))}
FEATURES = ("hour", "seen", "bought", "shop")
MAPS = {
    "item": IdMap.elastic(300, admit_after=2, half_life=4, shared=5),
    "shop": IdMap.elastic(83, shared=3, evict="lru", ttl=9, salt=5),
}

GROWING = IdMap.elastic(300, admit_after=2, half_life=4, shared=5, grow_from=20)
TIMED = IdMap.elastic(83, shared=0, max_age=4.0, admit_chance=0.5, salt=5)


class ElasticModel(nn.Module):
    """A static table, and two elastic ones; or two plain modules, one with padding."""

    def __init__(
        self, mode: str = "sum", update: str = "backward", plain: bool = False, precision: str = "int8", timed: bool = False,
        item_rows: int = 300, grows: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = TABLES | {"item": (item_rows, *TABLES["item"][1:])}
        maps = (
            MAPS | {"item": IdMap.elastic(item_rows, admit_after=2, half_life=4, shared=5)} | ({"shop": TIMED} if timed else {})
        )
        maps |= {"item": GROWING} if grows else {}
        torch.manual_seed(11)
        rows = tc.RowConfig(precision, cache=0.0, optimizer=tc.RowwiseAdagrad(lr=0.125), seed=5, update=update)
        if plain:
            self.item = tc.EmbeddingBag(
                300, 8, mode="sum", include_last_offset=True, padding_idx=-7, rows=rows, ids=maps["item"]
            )
            self.shop = tc.Embedding(83, 5, padding_idx=-7, rows=rows, ids=maps["shop"])
        else:
            tables = [Table(name, n, dim, features, ids=maps.get(name)) for name, (n, dim, features) in sizes.items()]
            self.tables = tc.EmbeddingCollection(tables, mode=mode, rows=rows)

    def forward(self, batch: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        if hasattr(self, "tables"):
            out = self.tables(batch)
            if self.tables.mode != "none":
                return out.values()
            return torch.cat([torch.nn.functional.pad(out[name], (0, 8 - out[name].shape[1])) for name in FEATURES])
        bags, (ids, offsets) = self.item(*batch["seen"]), batch["shop"]
        again = self.item(*batch["bought"])
        rows = torch.zeros(len(offsets) - 1, 5).index_add(
            0, torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff()), self.shop(ids)
        )
        return torch.cat([bags, again, rows], 1)

    @property
    def elastic_features(self) -> tuple[str | None, ...]:
        return ("seen", "shop") if hasattr(self, "tables") else (None,)

    @property
    def modules_of_rows(self) -> list[Any]:
        return [self.tables] if hasattr(self, "tables") else [self.item, self.shop]


def batch_of(step: int, size: int, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A batch of one rank: ids that slide, bags of 0 to 4, some padding."""
    draw, batch = np.random.default_rng((step, rank, 17)), {}
    for feature in FEATURES:
        lengths = draw.integers(0, 5, size)
        ids = draw.integers(0, 24, lengths.sum())
        if feature != "hour":
            ids = (draw.zipf(1.2, lengths.sum()) % 400 + 9 * step) * 7919_000_017 - (1 << 45)
            ids[draw.random(len(ids)) < 0.05] = -7
        batch[feature] = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return batch


def sizes_of(step: int, ranks: int) -> list[int]:
    return [int(n) for n in np.random.default_rng((step, 29)).integers(0, 30, ranks)] if step % 7 else [0] * ranks


def joined(parts: list[Any]) -> Any:
    batch = {}
    for feature in FEATURES:
        lengths = torch.cat([part[feature][1].diff() for part in parts])
        batch[feature] = torch.cat([part[feature][0] for part in parts]), nn.functional.pad(lengths.cumsum(0), (1, 0))
    return batch


def order_of(mode: str, parts: list[Any]) -> list[np.ndarray]:
    """Where the outputs of each rank are in those of one process."""
    sizes = [[len(part[name][0]) if mode == "none" else len(part[name][1]) - 1 for name in FEATURES] for part in parts]
    if mode != "none":
        ends = np.cumsum([0, *(each[0] for each in sizes)])
        return [np.arange(ends[r], ends[r + 1]) for r in range(len(parts))]
    counts, found = np.array(sizes), []
    for r in range(len(parts)):
        begins = [counts[:, :f].sum() + counts[:r, f].sum() for f in range(len(FEATURES))]
        found.append(np.concatenate([np.arange(b, b + counts[r, f]) for f, b in enumerate(begins)]))
    return found


def elastic_plan(
    nodes: int, cards: int, seed: int = 0, plain: bool = False, item_rows: int = 300
) -> tuple[tc.Plan, Any]:  # fmt: skip
    """Tables sharded by row; with a seed, random tiers and owners, and some heat of ids."""
    draw, tables = np.random.default_rng(seed), []
    heat = heat_of() if seed else None
    for name, (rows, dim, features) in TABLES.items():
        rows = item_rows if name == "item" else rows
        if plain and name == "hour":
            continue
        first, second = sorted(draw.integers(0, rows + 1, 2)) if seed else (0, 0)
        card = int(draw.integers(nodes * cards)) if seed and draw.random() < 0.3 else None
        tiers = (0, 0) if card is not None else (int(first), int(second - first))
        exchange = ["flat", "node"][draw.integers(2)] if seed else "flat"
        shape = rows, dim, (name,) if plain else features
        tables.append(table_plan(name, *tiers, "int8", exchange, card, shape=shape))
    return plan_of(nodes, cards, tables, heat), heat


def heat_of() -> HeatProfile:
    """Heat by raw id, of the first batches."""
    parts = [batch_of(step, 20, 0) for step in range(6)]
    ids = {name: np.concatenate([part[name][0].numpy() for part in parts])[:150] for name in FEATURES}
    return HeatProfile(profile_batches([ids]).tables, created="then")


def train(rank: int, size: int, plan: tc.Plan | None, heat: Any, settings: dict[str, Any], first: int, last: int) -> Any:
    """Train, with an evaluation now and then; without a plan in one process on the batches of `size` ranks."""
    model = ElasticModel(**settings)
    sharding = None if plan is None else tc.shard_(model, plan, heat, reduce="sum")
    outs, gone = run_steps(model, sharding, rank, size, first, last)
    return outs, gone, all_of(model)


def save(rank: int, size: int, plan: tc.Plan | None, folder: str, settings: dict[str, Any]) -> Any:
    """Train on, and save twice: a full save and an incremental one."""
    model = ElasticModel(**settings)
    sharding = None if plan is None else tc.shard_(model, plan, reduce="sum")
    for first, last in ((0, 8), (8, 12)):
        run_steps(model, sharding, rank, size, first, last)
        if sharding is not None:
            tc.save(model, folder, incremental=True)
    return all_of(model)


def load(rank: int, size: int, plan: tc.Plan | None, heat: Any, folder: str, settings: dict[str, Any]) -> Any:
    """Load and train on: everything before and after."""
    model = ElasticModel(**settings)
    sharding = None if plan is None else tc.shard_(model, plan, heat, reduce="sum")
    tc.load_into(model, folder)
    then = all_of(model)
    run_steps(model, sharding, rank, size, 12, 18)
    return then, all_of(model)


def publish(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> int:
    """Train and publish to the log; then a checkpoint of the moment of the last publish."""
    model = ElasticModel()
    sharding = tc.shard_(model, plan, heat, reduce="sum")
    run_steps(model, sharding, rank, size, 0, 6)
    with tc.publish(model, folder, interval=0.0) as publisher:
        for first in (6, 9, 12):
            run_steps(model, sharding, rank, size, first, first + 3)
            publisher.flush()
        tc.save(model, folder + " expected")
        return publisher.number


def begun(size: int) -> dict[str, torch.Tensor]:
    """A model after a few steps in one process."""
    model = ElasticModel()
    run_steps(model, None, 0, size, 0, 5)
    return model.state_dict()


def move(rank: int, size: int, plans: list[tc.Plan] | None, state: dict[str, torch.Tensor]) -> Any:
    """Shard a trained model, pin ids, migrate by the heat of the ids so far, and train on."""
    model, sharding = ElasticModel(), None
    model.load_state_dict(state)
    if plans is not None:
        sharding = tc.shard_(model, plans[0], reduce="sum", count_every=1)
        with pytest.raises(BadInput, check=lambda error: error.feature is not None):
            model.state_dict()  # it would not hold the ids
    pinned = torch.tensor([5, -7, 1 << 60])
    before, early = run_steps(model, sharding, rank, size, 5, 6)
    model.tables.elastic("shop").pin(pinned)
    outs, gone = run_steps(model, sharding, rank, size, 6, 12)
    if sharding is not None:
        heat = sharding.heat()
        sharding.migrate(plans[1].model_copy(update={"heat": heat.sha256}), heat)
    model.tables.elastic("shop").unpin(pinned[:1])
    more, evicted = run_steps(model, sharding, rank, size, 12, 25)
    assert bool((model.tables.elastic("shop").rows_of(pinned[1:]) >= 0).all())
    return before + outs + more, sorted(early + gone + evicted), all_of(model)


def run_steps(model: ElasticModel, sharding: Any, rank: int, size: int, first: int, last: int) -> Any:
    rows = tc.fused_optimizer(model) if model.modules_of_rows[0].rows.update == "step" else None
    mode, outs, gone = getattr(model, "tables", None) and model.tables.mode, [], []
    for module in model.modules_of_rows:
        for feature in model.elastic_features:
            module.elastic(feature).on_evict(lambda ids, values: gone.extend(zip(ids.tolist(), values.tolist(), strict=True)))
    for step in range(first, last):
        parts = [batch_of(step, count, r) for r, count in enumerate(sizes_of(step, size))]
        where = order_of(mode, parts)
        for module in model.modules_of_rows:
            for name in (feature for feature in model.elastic_features if module.elastic(feature).rule.max_age is not None):
                module.elastic(name).advance(0.7 * step)
        out = model(joined(parts) if sharding is None else parts[rank])
        outs.append(out.detach().clone().numpy())
        factors = torch.from_numpy(np.random.default_rng((step, 41)).integers(-3, 4, (sum(map(len, where)), out.shape[1])))
        (out * (factors if sharding is None else factors[where[rank]])).sum().backward()
        if sharding is None:
            outs[-1] = [outs[-1][at] for at in where]
        if rows is not None and step % 2:
            rows.step()
            rows.zero_grad()
        if step % 5 == 3:
            with torch.no_grad():
                model.eval()
                out = model(joined(parts) if sharding is None else parts[rank]).numpy()
                outs.append([out[at] for at in where] if sharding is None else out)
                model.train()
    return outs, sorted(gone)


def all_of(model: ElasticModel) -> dict[str, Any]:
    """Rows, ids with rows, and numbers of all tables."""
    found: dict[str, Any] = {}
    for module in model.modules_of_rows:
        at = len(found)
        for name in TABLES if model.elastic_features[0] else (None,):
            found[f"{at} rows of {name}"] = (
                module.get_rows(name) if name else module.get_rows(torch.arange(module.num_embeddings))
            ).numpy()
        for n, keys in enumerate(module.maps.keys):
            gathered = keys.tensors()
            if hasattr(module, "groups"):
                every = module.groups.all_gather(dict(gathered))
                gathered = {name: torch.cat([each[name] for each in every]) for name in every[0] if name not in ALIKE}
            found |= {f"{at} keys {n} {name}": tensor.clone().numpy() for name, tensor in gathered.items() if name not in ALIKE}
        for feature in model.elastic_features:
            ids = module.elastic(feature)
            found[f"{at} state of {feature}"] = ids.state()
            probe = torch.arange(0, 500) * 7919_000_017 - (1 << 45)
            found[f"{at} rows of ids of {feature}"] = ids.rows_of(probe).numpy()
    return found
