"""Functions of ranks that train sharded plain modules; one process runs the same on the batches of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import thermocline as tc

ROWS = {"bags": (97, 8), "words": (61, 8), "shared": (23, 5)}


class PlainModel(nn.Module):
    """Bags with weights, an Embedding with a padding row, and a bag that two forwards share."""

    def __init__(self, update: str = "backward", optimizer: Any = None, precision: str = "int8", cache: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        rows = tc.RowConfig(precision, cache=cache, optimizer=optimizer or tc.RowwiseAdagrad(lr=0.125), seed=5, update=update)
        self.bags = tc.EmbeddingBag(*ROWS["bags"], mode="sum", include_last_offset=True, padding_idx=3, rows=rows)
        self.words = tc.Embedding(*ROWS["words"], padding_idx=2, rows=rows)
        self.shared = tc.EmbeddingBag(*ROWS["shared"], mode="sum", rows=rows)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        bags = self.bags(batch["ids"], batch["offsets"], batch["weights"])
        words = self.words(batch["words"]).sum(1)
        return torch.cat([bags, words, self.shared(batch["one"]), self.shared(batch["two"])], dim=1)


def parts_of(step: int, sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    """A batch for each rank."""
    draw, found = np.random.default_rng((step, 5)), []
    for size in sizes:
        lengths = draw.integers(0, 5, size)
        ids = draw.zipf(1.3, lengths.sum()) % 97
        drawn = {
            "ids": ids, "offsets": np.concatenate([[0], np.cumsum(lengths)]), "words": draw.zipf(1.3, (size, 3)) % 61,
            "one": draw.integers(0, 23, (size, 2)), "two": draw.integers(0, 23, (size, 2)),
        }  # fmt: skip
        batch = {name: torch.from_numpy(each.astype(np.int64)) for name, each in drawn.items()}
        found.append(batch | {"weights": torch.from_numpy(draw.integers(-2, 3, len(ids)).astype(np.float32))})
    return found


def joined_parts(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "offsets"}
    lengths = torch.cat([part["offsets"].diff() for part in parts])
    return batch | {"offsets": nn.functional.pad(lengths.cumsum(0), (1, 0))}


def loss_of(out: torch.Tensor, step: int, first: int) -> torch.Tensor:
    """A loss whose gradients are small integers: their sums are exact in any order."""
    factors = np.random.default_rng((step, 41)).integers(-3, 4, (first + out.shape[0], out.shape[1])).astype(np.float32)
    return (out * torch.from_numpy(factors)[first:]).sum()


def sizes_at(step: int, ranks: int) -> list[int]:
    return [int(n) for n in np.random.default_rng((step, 29)).integers(0, 6, ranks)]


def state_of(model: Any) -> dict[str, Any]:
    """All rows of all modules, and the clocks."""
    with torch.no_grad():
        return {name: getattr(model, name).weight.as_subclass(torch.Tensor).numpy() for name in ROWS} | {
            "clocks": [getattr(model, name).trainer.clock.tolist() for name in ROWS]
        }


def train_plain(rank: int, size: int, plan: Any, heat: Any, ranks: int, steps: int = 20, ahead: bool = False) -> Any:
    """Outputs of each step, and all rows. One process has the batches of all `ranks`."""
    model, outs = PlainModel(), []
    held = [model.bags]  # the model is not the only one that holds a module
    if plan is not None:
        tc.shard_(model, plan, heat, reduce="sum", check_every=7)
    assert held[0] is model.bags
    for step in range(steps):
        sizes = sizes_at(step, ranks)
        parts = parts_of(step, sizes)
        if ahead:
            following = parts_of(step + 1, sizes_at(step + 1, ranks))[rank]
            model.bags.prefetch(following["ids"], following["offsets"], following["weights"])
            model.words.prefetch(following["words"])
        out = model(parts[rank] if size > 1 else joined_parts(parts))
        outs.append(out.detach().numpy())
        loss_of(out, step, sum(sizes[:rank]) if size > 1 else 0).backward()
    return outs, state_of(model)


def train_root(rank: int, size: int, plan: Any, heat: Any, kind: str) -> Any:
    """A collection or a bag that is the model itself; its class, and all rows."""
    torch.manual_seed(11)
    rows = tc.RowConfig("int8", cache=0.0, optimizer=tc.RowwiseAdagrad(lr=0.125))
    model: Any = tc.EmbeddingBag(97, 8, mode="sum", rows=rows)
    if kind == "collection":
        model = tc.EmbeddingCollection([tc.Table("table", 97, 8, ("table id",))], rows=rows)
    fired: list[Any] = []
    model.register_forward_hook(lambda *_: fired.append(1))
    if plan is not None:
        tc.shard_(model, plan, heat, reduce="sum")
    for step in range(5):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 97, (4, 1)))
        out = model(ids[2 * rank : 2 * rank + 2] if size > 1 else ids)
        (out if isinstance(out, torch.Tensor) else out.values()).sum().backward()
    assert len(fired) == 5
    return type(model).__name__, (model.get_rows("table") if kind == "collection" else model.weight.detach()).numpy().copy()


def train_tied(rank: int, size: int, plan: Any, heat: Any, optimizer: Any) -> Any:
    """A full softmax against the weight of an Embedding, beside a lookup of it; all rows, and the heat of the job."""
    torch.manual_seed(11)
    rows = tc.RowConfig("fp32", optimizer=optimizer)
    model = nn.ModuleDict({"words": tc.Embedding(*ROWS["words"], padding_idx=2, rows=rows)})
    sharding = None if plan is None else tc.shard_(model, plan, heat, reduce="sum", count_every=1)
    words: Any = model["words"]
    for step in range(6):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 30, (4, 3)))
        mine = ids[2 * rank : 2 * rank + 2] if size > 1 else ids
        signs = torch.sign(torch.arange(61) - 30.0)  # row 30 gets no gradient
        (words(mine).sum() + (words.weight * signs[:, None]).sum() * (2.0 / size)).backward()
    assert sharding is None or int(sharding.heat().tables["words id"].lookups) == 6 * 12
    return words.weight.detach().numpy().copy()


def train_steps(rank: int, size: int, plan: Any, heat: Any, ranks: int, how: str) -> Any:
    """Train with update="step", with `how` done between backward and step; all rows, and what each step reported."""
    model = PlainModel(update="step", optimizer=tc.Adagrad(lr=0.125))
    if plan is not None:
        tc.shard_(model, plan, heat, reduce="sum", check_every=3)
    rows = tc.fused_optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(rows, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=how == "scaled")
    said = []
    for step in range(12):
        parts = parts_of(step, sizes_at(step, ranks))
        out = model(parts[rank] if size > 1 else joined_parts(parts))
        first = sum(sizes_at(step, ranks)[:rank]) if size > 1 else 0
        loss = loss_of(out, step, first)
        if how == "scaled" and step == 5 and len(out):  # Inf, on the ranks that have samples of this step
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 3 < 2 and how == "accumulated":
            continue
        if how == "clipped":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=8.0)
            largest = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], float("inf"))
            said.append((float(norm), float(largest)))
        if how == "scaled":
            scaler.step(rows)
            scaler.update()
            said.append(scaler.get_scale())
        else:
            rows.step()
        schedule.step()
        rows.zero_grad()
    return said, state_of(model)
