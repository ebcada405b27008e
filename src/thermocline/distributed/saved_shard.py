"""Rows of a shard in a `state_dict`, in pieces that any plan and any number of ranks can load.

`torch.distributed.checkpoint` reads the keys that the loading job has. Keys that name ranks or sizes that follow from a plan
would bind a checkpoint to both, so every job has the same `PIECES` keys, and each rank the same share of them. A piece is an
object and not a tensor: its size may differ, and it carries the numbers of its rows. A rank saves the rows whose home it is,
without a collective. Ranks load together: each reads its pieces, and sends every row to the ranks that store it now.

A `RowPiece` reads its rows when it is copied or pickled, as the tensors of a `state_dict` are read only when they are used.
Tensors in row order (DTensor) were rejected: a table whose tiers have several precisions, or a cache, has no fixed shape.

Under the same plan the cache is restored exactly. Under another one, cached rows get the slots there are, highest scores first,
and the other rows are rounded to nearest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import dequantize_rows
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import pointers, slots_of
from thermocline.nn.rows_module import blocks
from thermocline.rows.precision import format_of

from .exchange.handshake import handshake

if TYPE_CHECKING:
    from .sharded_collection import ShardedCollection

PIECES = 128  # keys of a module, and the most ranks that have one
SMALL = 1 << 10  # rows that are not divided
BLOCK = 1 << 16  # rows of a rank per message
Contents = dict[str, Any]


class RowPiece(bytes):
    """Rows of a shard: read when they are needed, or as they were loaded.

    The bytes are empty. Functions of torch that copy a `state_dict` to the CPU refuse objects of unknown types.
    """

    _contents: Contents | Callable[[], Contents]

    def __new__(cls, contents: Contents | Callable[[], Contents]) -> RowPiece:
        self = super().__new__(cls)
        self._contents = contents
        return self

    @property
    def contents(self) -> Contents:
        return self._contents() if callable(self._contents) else self._contents

    def __reduce__(self) -> tuple[Any, ...]:
        return RowPiece, (self.contents,)

    def __deepcopy__(self, _: Any) -> RowPiece:
        return RowPiece(self.contents)

    __eq__, __hash__ = object.__eq__, object.__hash__


torch.serialization.add_safe_globals([RowPiece])  # torch.load(weights_only=True) takes it


def pieces_of(rank: int, size: int) -> list[str]:
    """The keys of a rank."""
    if size > PIECES:
        raise BadInput(
            f"a state_dict has rows of at most {PIECES} ranks, this job has {size}; use thermocline.save",
            parameter="ranks", needed=size, available=PIECES,
        )  # fmt: skip
    return [f"rows_{piece:03d}" for piece in range(rank * PIECES // size, (rank + 1) * PIECES // size)]


def layout_text(module: ShardedCollection) -> str:
    """Everything that decides which slots belong to which rank: collections with equal layouts can exchange slots."""
    row_index, groups = module.row_index, module.groups
    parts = [f"{p.name} tier {p.tier} {p.dim} {p.precision} {p.fp32_slots} + {p.int8_slots}" for p in row_index.parts]
    maps = [map.digest()[:16] for map in row_index.maps]
    return "; ".join([f"{groups.nodes} x {groups.local_size} cards", *parts, *maps, module.rows.policy])


# -- saving -------------------------------------------------------------------------------------------------------------------


def saved_pieces(module: ShardedCollection) -> dict[str, RowPiece]:
    """The pieces of this rank, by key.

    Raises:
        BadInput: the module has elastic ids, which pieces do not hold, or its replicas are apart
    """
    if module.trained.replicas is not None:
        module.trained.replicas.raise_if_apart()
    if elastic := [feature for feature, ids in module.id_maps.items() if ids.is_elastic]:
        words = f"feature {elastic[0]!r} has elastic ids, which the state_dict of a shard does not hold; use thermocline.save"
        raise BadInput(words, feature=elastic[0])
    shard, names = _HomeRows(module), pieces_of(module.groups.rank, module.groups.size)
    return {name: RowPiece(_Reader(shard, number, len(names))) for number, name in enumerate(names)}


class _HomeRows:
    """The rows whose home this rank is, as the arena holds them when they are read."""

    def __init__(self, module: ShardedCollection) -> None:
        self.module, self.arena, self.row_index, self.shard = module, module.arena, module.row_index, module.shard

    @cached_property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """For each part, rows of its table and their places."""
        parts, rank = self.row_index.parts, self.module.groups.rank
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
        for table, first in enumerate(self.row_index.first):
            for begin, end in blocks(self.module.tables[table].rows):
                rows_N = torch.arange(begin, end, device=self.row_index.device)
                where = self.row_index.locate(rows_N + first)
                mine_N = where.home_N == rank
                for k, part in enumerate(parts):
                    if part.table == table:
                        at = (mine_N & (where.part_N == k)).nonzero()[:, 0]
                        found[k].append((rows_N[at], where.index_N[at]))
        return [(torch.cat(rows), torch.cat(places)) for rows, places in (zip(*each, strict=True) for each in found)]

    def read(self, k: int, number: int, count: int) -> Contents:
        """One of `count` parts of the rows of part `k`: stored rows and state, and cached rows with value and score."""
        rows = self.rows[k][0].numel()
        size = max(SMALL, -(-rows // count))
        rows_K, place_K = (each[number * size : (number + 1) * size] for each in self.rows[k])
        if not rows_K.numel():
            return {}
        codes_RB, meta_RW, first, _, _ = self.arena.views(k)
        codes_KB, meta_KW = codes_RB[place_K.to(codes_RB.device)], meta_RW[place_K]
        found: Contents = {"rows": rows_K, "codes": codes_KB, "meta": meta_KW}
        found |= {f"state{n}": state[place_K] for n, state in enumerate(self.shard.states(k))}
        if self.row_index.parts[k].slots:
            at_C = (meta_KW[:, 0] < 0).nonzero()[:, 0]
            pool = next(pool for pool in self.arena.pools if pool.row <= first < pool.row + pool.rows)
            cache, slot_C = Cache(*self.arena.cache), pool.slot + slots_of(pool, meta_KW[at_C, 0])
            found |= {"at": at_C, "scores": cache.scores[slot_C], "values": self.arena.read(k, place_K[at_C])}
            meta_KW[at_C, 0] = cache.words[slot_C]
        return {name: tensor.cpu() for name, tensor in found.items()}


class _Reader:
    """Reads one piece: some rows of each part. The first piece of a rank also says whose rows they are, and has its cache."""

    def __init__(self, shard: _HomeRows, number: int, count: int) -> None:
        self._shard, self._number, self._count = shard, number, count

    def __call__(self) -> Contents:
        module, parts = self._shard.module, self._shard.row_index.parts
        read = {k: self._shard.read(k, self._number, self._count) for k in range(len(parts))}
        found: Contents = {"rows": {k: contents for k, contents in read.items() if contents}}
        if not self._number:
            found["layout"] = layout_text(module)
            found["optimizer"] = F.OPTIMIZERS[module.trainer.optimizer.code]
            found["tables"] = {table.name: [table.rows, table.dim] for table in module.tables}
            found["parts"] = [[part.name, part.precision, part.slots > 0] for part in parts]
            found["cache"] = {name: each.cpu().clone() for name, each in _cache_arrays(module).items()}
        return found


def _cache_arrays(module: ShardedCollection) -> dict[str, Tensor]:
    fields = zip(Cache._fields, module.arena.cache, strict=False)
    return {name: tensor for name, tensor in fields if name != "home"}


# -- loading ------------------------------------------------------------------------------------------------------------------


def load_pieces(module: ShardedCollection, given: Mapping[str, Any], needed: Sequence[str]) -> str | None:
    """Load the pieces of all ranks. Returns what is wrong, the same on every rank; None if nothing is. Collective.

    `needed` are other keys that must be in the state.
    """
    context, groups = module.state.context, module.groups
    none_PJ = np.zeros((groups.size, context.routes.exchanges), np.int64)
    handshake(context, f"{module.name}: loading rows", none_PJ, none_PJ[0])
    names = pieces_of(groups.rank, groups.size)
    missing = [name for name in (*names, *needed) if name not in given]
    pieces = [given[name].contents for name in names if name not in missing]
    wrong = f"no {missing[0]}" if missing else _misfit(module, pieces)
    head = {name: pieces[0].get(name) for name in ("parts", "layout")} if pieces else {}
    counts: Counter[int] = sum((Counter({k: each["rows"].numel() for k, each in p["rows"].items()}) for p in pieces), Counter())
    everyone = groups.all_gather((wrong, head, counts))
    for rank, (error, _, _) in enumerate(everyone):
        if error:
            return f"rank {rank}: {error}"
    head = everyone[0][1]  # rank 0 has the first piece of the first rank that saved
    same = head["layout"] == layout_text(module)
    module.arena.replaced()
    with torch.no_grad():
        module.arena.unstage()
        if not same:
            module.flush()
        cached: list[tuple[Tensor, Tensor, Tensor]] = []
        for k, part in enumerate(head["parts"]):
            rounds = -(-max(counts[k] for _, _, counts in everyone) // BLOCK)
            cached += _load_part(module, [each["rows"][k] for each in pieces if k in each["rows"]], part, rounds)
        if same:
            _restore_cache(module, pieces[0]["cache"])
        else:
            _write_cached_rows(module, cached)
    return None


def _misfit(module: ShardedCollection, pieces: Sequence[Contents]) -> str:
    """Why a module cannot take pieces; empty if it can."""
    tables = {table.name: [table.rows, table.dim] for table in module.tables}
    optimizer = F.OPTIMIZERS[module.trainer.optimizer.code]
    for head in (piece for piece in pieces if "tables" in piece):
        if names := [name for name in {**tables, **head["tables"]} if head["tables"].get(name) != tables.get(name)]:
            return f"the saved tables differ from those of the module: {', '.join(names)}"
        if head["optimizer"] != optimizer:
            return f"rows were trained by {head['optimizer']}, the module has {optimizer}; build it with the saved optimizer"
    return ""


def _no_rows(module: ShardedCollection, dim: int, format: int) -> dict[str, Tensor]:
    """The contents of a piece without rows of a part."""
    shapes = {"rows": ((), torch.int64), "codes": ((F.row_bytes(format, dim),), torch.uint8)}
    shapes["meta"] = ((F.META_WORDS[format],), torch.int32)
    by_row = module.trainer.optimizer.states_per_row > 0
    shapes |= {f"state{n}": (() if by_row else (dim,), torch.float32) for n in range(len(module.trainer.states))}
    shapes |= {"at": ((), torch.int64), "scores": ((), torch.int32), "values": ((dim,), torch.float32)}
    return {name: torch.empty((0, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}


def _load_part(
    module: ShardedCollection, pieces: list[Contents], part: tuple[str, str, bool], rounds: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Send the rows of a saved part to the ranks that store them now, and yield cached rows that arrive here."""
    table, precision, slots = part
    number = [each.name for each in module.tables].index(table)
    first, device = module.row_index.first[number], module.row_index.device
    none = _no_rows(module, module.tables[number].dim, format_of(precision))
    cached = [none, *pieces] if slots else [none]
    rows_C = torch.cat([each["rows"][each["at"]] for each in cached])
    found = [torch.cat([each[name] for each in cached]) for name in ("scores", "values")]
    whole = [torch.cat([each[name] for each in (none, *pieces)]) for name in none if name not in ("at", "scores", "values")]
    for turn in range(rounds):
        here = [each[turn * BLOCK : (turn + 1) * BLOCK].to(device) for each in whole]
        rows_M, codes_MB, meta_MW, *states = _to_owners(module, here, first)
        for k, at_K, place_K in module.shard.local(module.row_index.locate(rows_M + first)):
            _store(module, k, place_K, precision, codes_MB[at_K], meta_MW[at_K])
            for mine, theirs in zip(module.shard.states(k), states, strict=True):
                mine[place_K] = theirs[at_K]
    if slots:
        rows_M, scores_M, values_MD = _to_owners(module, [each.to(device) for each in (rows_C, *found)], first)
        yield rows_M + first, scores_M, values_MD


def _store(module: ShardedCollection, k: int, place_K: Tensor, precision: str, codes_KB: Tensor, meta_KW: Tensor) -> None:
    """Store rows as they were saved, or rounded if their precision is another now."""
    codes_RB, meta_RW, _, format, dim = module.arena.views(k)
    if format == format_of(precision):
        codes_RB[place_K.to(codes_RB.device)], meta_RW[place_K] = codes_KB.to(codes_RB.device), meta_KW
    else:
        module.arena.write(k, place_K, dequantize_rows(codes_KB, meta_KW, format_of(precision), dim))


def _to_owners(module: ShardedCollection, fields: Sequence[Tensor], first: int) -> list[Tensor]:
    """Send rows of a table, and other fields of these rows, to all ranks that store them. Collective."""
    groups, rows_N = module.groups, fields[0]
    ranks_C = torch.arange(groups.size, device=rows_N.device)[:, None]
    rank_S, at_S = module.row_index.stored_by(ranks_C, module.row_index.locate(rows_N + first)).nonzero(as_tuple=True)
    sent = torch.bincount(rank_S, minlength=groups.size).tolist()
    ones = [1] * groups.size
    received = groups.world.all_to_all(torch.tensor(sent, dtype=torch.int64, device=rows_N.device), ones, ones).tolist()
    widths = [each.element_size() * math.prod(each.shape[1:]) for each in fields]
    bytes_ = [each[at_S].view(torch.uint8).view(len(at_S), width) for each, width in zip(fields, widths, strict=True)]
    records = groups.world.all_to_all(torch.cat(bytes_, dim=1), sent, received)
    parts = records.split(widths, dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(-1).view(like.dtype).view(len(records), *like.shape[1:])
        for part, like in zip(parts, fields, strict=True)
    ]


def _restore_cache(module: ShardedCollection, saved: Mapping[str, Tensor]) -> None:
    """Restore all slots, and the pointers of cached rows."""
    arena = module.arena
    for name, tensor in _cache_arrays(module).items() if arena.cache else ():
        tensor.copy_(saved[name])
    for pool in arena.pools:
        rows_S = Cache(*arena.cache).rows[pool.slot : pool.slot + pool.slots]
        held = (rows_S != F.EMPTY).nonzero()[:, 0]
        row_K = rows_S[held] & ~F.DIRTY
        arena.meta[pool.meta + F.META_WORDS[pool.format] * (row_K - pool.row)] = pointers(pool, held)


def _write_cached_rows(module: ShardedCollection, cached: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Give rows that were cached the slots there are, by score, and round the others."""
    arena = module.arena
    here = [
        (k, place_K, scores[at_K], values[at_K])
        for rows, scores, values in cached
        for k, at_K, place_K in module.shard.local(module.row_index.locate(rows))
    ]
    if arena.pools:
        heat = [torch.zeros(table.rows, dtype=torch.int32) for table in arena.tables]
        for k, place_K, scores_K, _ in here:
            heat[k][place_K.cpu()] = 1 + scores_K.cpu().clamp(0, 1 << 30).int()
        arena.warm(heat)
        arena.predicted = None  # predictions are for the heat of a log
    for k, place_K, _, values_KD in here:
        arena.write(k, place_K, values_KD)
