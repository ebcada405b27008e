"""Functions of ranks that train sharded plain modules; one process runs the same on the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thermocline as tc
from thermocline.train.ranks import TrainingRanks

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


def train_plain(
    rank: int, size: int, plan: Any, heat: Any, ranks: int, steps: int = 20, ahead: bool = False, asked: bool = False
) -> Any:
    """Outputs of each step, and all rows. One process has the batches of all `ranks`.

    `asked`: other gradients are computed first, and those of rows are asked for by name.
    """
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
        batch = parts[rank] if size > 1 else joined_parts(parts)
        batch["weights"].requires_grad_(asked)
        out = model(batch)
        outs.append(out.detach().numpy())
        loss = loss_of(out, step, sum(sizes[:rank]) if size > 1 else 0)
        if asked:
            torch.autograd.grad(loss, batch["weights"], retain_graph=True)
        loss.backward(inputs=list(model.parameters()) if asked else None)
    return outs, state_of(model)


def train_cached(rank: int, size: int, plan: Any, heat: Any, update: str, ahead: bool) -> Any:
    """Train with cached rows; all rows."""
    model = PlainModel(update, cache=0.2)
    tc.shard_(model, plan, heat, check_every=2)
    rows = tc.fused_optimizer(model)
    for step in range(12):
        if ahead:
            following = parts_of(step + 1, sizes_at(step + 1, size))[rank]
            model.bags.prefetch(following["ids"], following["offsets"], following["weights"])
        out = model(parts_of(step, sizes_at(step, size))[rank])
        loss_of(out, step, 0).backward()
        rows.step()
        rows.zero_grad()
    assert not ahead or model.bags.state.meter.prefetched >= 10
    return state_of(model)


def reload_plain(rank: int, size: int, plan: Any, heat: Any, loaded: str, saved: str) -> Any:
    """Load what one process saved, train, save for one process; all rows."""
    model = PlainModel()
    tc.shard_(model, plan, heat, reduce="sum")
    tc.load_into(model, loaded)
    model(parts_of(9, [3] * size)[rank]).sum().backward()
    tc.save(model, saved)
    return state_of(model)


def train_wrapped(rank: int, size: int, plan: Any, heat: Any, ranks: int, wrap: str, update: str) -> Any:
    """The dense part in DDP, or in FSDP2 as the whole model without the placeholders; all rows, and the dense part. On several
    nodes FSDP2 has the mesh of nodes x ranks: shards within a node, replicas between nodes."""
    model = nn.Sequential(PlainModel(update, tc.SGD(lr=0.125), "fp32"), nn.Linear(26, 4))
    dense: Any = model[1]
    if plan is not None:
        sharding = tc.shard_(model[0], plan, heat)
        mesh = sharding.mesh if plan.topology.nodes > 1 else None
    if plan is not None and wrap == "FSDP2":
        fully_shard(dense, mesh=mesh)
        ignored = {each for name, each in model.named_parameters() if name.endswith("placeholder")}
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    elif plan is not None:
        model[1] = DistributedDataParallel(dense)
    optimizers = [torch.optim.SGD(model[1].parameters(), lr=0.1), tc.fused_optimizer(model)]
    for step in range(4):
        parts = parts_of(step, [4] * ranks)
        out = model(parts[rank] if size > 1 else joined_parts(parts))
        out.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    sharded = plan is not None and wrap == "FSDP2"
    return state_of(model[0]), (dense.weight.full_tensor() if sharded else dense.weight).detach().numpy()


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


def checkpoint_by_torch(rank: int, size: int, plan: Any, heat: Any, folder: str) -> Any:
    """Save after some steps with torch.distributed.checkpoint, load into a new model; the rows and clocks of both."""
    models, optimizers = [], []
    for steps in (3, 1):
        model = PlainModel()
        tc.shard_(model, plan, heat)
        rows = tc.fused_optimizer(model)
        for step in range(steps):
            loss_of(model(parts_of(step, [3] * size)[rank]), step, 0).backward()
            rows.step()
        rows.param_groups[0]["lr"] = 0.5 / steps
        models.append(model)
        optimizers.append(rows)
    saved = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": saved[0], "rows": saved[1]}, checkpoint_id=folder)
    model, rows = get_state_dict(models[1], optimizers[1])
    dcp.load({"model": model, "rows": rows}, checkpoint_id=folder)
    set_state_dict(models[1], optimizers[1], model_state_dict=model, optim_state_dict=rows)
    assert optimizers[1].param_groups[0]["lr"] == 0.5 / 3
    refused = []
    try:
        fully_shard(models[1])
    except tc.BadInput as error:
        refused.append(error.parameter)
    return [state_of(model) for model in models], refused


def resume_with_ddp(rank: int, size: int, how: str) -> bool:
    """Whether a dense part in DDP that goes on from a copy has the bits of one that was not interrupted."""

    def dense_of(step: int, state: Any) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
        model.load_state_dict(state[0] if state else model.state_dict())
        adam = torch.optim.Adam(model.parameters())
        adam.load_state_dict(state[1] if state else adam.state_dict())
        if how == "train":
            TrainingRanks(rank, size).wrap(model)
        else:
            model[0] = DistributedDataParallel(model[0], find_unused_parameters=how == "flag")
        for at in range(step, 6):
            inputs = torch.from_numpy(np.random.default_rng((at, rank)).normal(size=(32, 40)).astype(np.float32))
            model(inputs).square().mean().backward()
            adam.step()
            adam.zero_grad()
            if at == 3 and not state:
                saved[:] = copy.deepcopy([model[0].module.state_dict(prefix="0."), adam.state_dict()])
        return model

    saved: list[Any] = []
    whole, resumed = dense_of(0, None), dense_of(4, saved)
    return all(map(torch.equal, whole.parameters(), resumed.parameters()))


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
        if how == "scaled" and step == 5 and first == 0 and len(out):  # Inf for two rows, which not all ranks store
            loss = loss + out[0, -1] * float("inf")
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
