"""Ids that come and go on several ranks. Which row an id has, one rank knows: the owner of its bucket.

    bucket of an id   by its hash, as in one process
    owner             rank r has buckets B * r / W to B * (r + 1) / W - 1 of B: keys, counts and sketch

In a lookup a rank sends the distinct ids of its batch, with their counts, to their owners, and gets rows back. The owner looks
up the ids of all ranks in one step, as one process does: its buckets get the same bits. Then every rank hears which ids came
and went, and begins the rows that it stores. So rows may lie anywhere: plans and migrations move rows, never keys. What ranks
must agree on beside that (how fast the sketch halves) travels with the answers.

Rejected: keys beside their rows. It saves the numbers of rows on the wire, but a row with replicas would need replicas of
keys, and a migration would look all ids up again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows, refuse_elastic
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap, SaltedHash
from thermocline.ids.keyed_map import KeyedMap
from thermocline.ids.moved_ids import Moved
from thermocline.nn.backward_pass import current_pass
from thermocline.nn.elastic_maps import ElasticIds, ElasticMaps, begin_rows, keyed_maps, maps_for
from thermocline.nn.id_maps import FeatureMaps
from thermocline.nn.inputs import JaggedIds, check_integers

from .exchange import context as shared
from .exchange.handshake import announced, handshake
from .placement.table_map import Counts
from .process_groups import ProcessGroups, raise_if_any_failed
from .rank_keys import RankKeys

if TYPE_CHECKING:
    from thermocline.nn.rows_module import RowsModule
    from thermocline.rows.memory import MemoryUsage

    from .shard_source import ShardSource
    from .sharded_collection import ShardedCollection

_MOVES = 3  # numbers in front of each table's answers: ids that came, ids that went, lookups without a row


class _Part(NamedTuple):
    """The lookups of one key table in a batch."""

    ids_U: Tensor  # distinct, by owner
    counts_U: Tensor
    sent_P: Counts
    place_N: Tensor  # of each lookup among them


@dataclass(frozen=True)
class LiveMap(KeyedMap):
    """An elastic map of a sharded module: ids are looked up at their owners. Collective."""

    module: ShardedCollection | None = None
    number: int = 0

    def find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        assert self.module is not None
        maps = self.module.maps
        assert isinstance(maps, RankMaps)
        rows_N = maps.find(self.module, self.number, ids_N)
        return rows_N + self.first, rows_N < maps.keys[self.number].rules.rows

    @property
    def bytes(self) -> int:
        return 0


class RankMaps(ElasticMaps):
    """The id maps of a sharded module, some of them elastic, and the key tables of this rank."""

    keys: list[KeyTable]

    def __init__(
        self, features: Sequence[str], maps: Sequence[IdMap], tables: Sequence[int], device: torch.device, groups: ProcessGroups
    ) -> None:  # fmt: skip
        self.groups = groups
        super().__init__(features, maps, tables, device)

    def check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "meta"):
            refuse_elastic(f"on {device.type} with several ranks", "train on device='cpu', or on one GPU", device=device)

    def _new_keys(self, policy: ElasticRows, device: torch.device) -> KeyTable:
        return RankKeys(policy, SaltedHash(1, policy.salt).key, self.groups.rank, self.groups.size)

    def ids_of(self, module: RowsModule, n: int) -> ElasticIds:
        return ShardedElasticIds(cast("ShardedCollection", module), n)

    def count_bytes(self, memory: MemoryUsage, module: RowsModule) -> None:
        FeatureMaps.count_bytes(self, memory, module)  # the rows of a shard are in an order of their own: all take memory

    # -- a batch ------------------------------------------------------------------------------------------------------------

    def rows_of_batch(self, module: ShardedCollection, bags: JaggedIds, trains: bool) -> tuple[JaggedIds, Tensor | None]:
        """The bags with rows for ids, and factors of unpooled rows. With `trains`, gradients may follow. Collective."""
        steps = module.training and module.placeholder.requires_grad and current_pass() < 0  # ids come and go
        ids_N, offsets = bags.ids_N, bags.offsets
        with announced(module.state.context, module.name):
            check_integers(ids_N)
            batch = (offsets.numel() - 1) // len(self.maps)
            ends = offsets[::batch].tolist() if batch else [0] * (len(self.maps) + 1)
            rows_N = IdMaps.__call__(self, ids_N, offsets) if len(self.maps) > 1 else torch.empty_like(ids_N, dtype=torch.int64)
            asked = [torch.cat([ids_N[ends[f] : ends[f + 1]] for f in users]).long() for users in self.users]
            parts = [self._part(n, each_N) for n, each_N in enumerate(asked)]
        kind = "step" if steps else "read with gradients" if trains else "read"
        found = self._exchange(module, f"ids of a {kind}", list(enumerate(parts)), kind)
        for n, users in enumerate(self.users):
            own_N = found[n][parts[n].place_N] + self.places[n][1]
            for f, part_N in zip(users, own_N.split([ends[f + 1] - ends[f] for f in users]), strict=True):
                rows_N[ends[f] : ends[f + 1]] = part_N
        weights_N, factors = self.factors(rows_N, offsets, bags.weights_N, module.mode) if trains else (bags.weights_N, None)
        return bags._replace(ids_N=rows_N, weights_N=weights_N), factors

    def find(self, module: ShardedCollection, n: int, ids_N: Tensor) -> Tensor:
        """Rows of ids of one key table, which does not change. Collective."""
        part = self._part(n, ids_N.reshape(-1).long())
        return self._exchange(module, "finding ids", [(n, part)], "find")[0][part.place_N]

    def _rank_keys(self, n: int) -> RankKeys:
        keys = self.keys[n]
        assert isinstance(keys, RankKeys)
        return keys

    def _part(self, n: int, ids_N: Tensor) -> _Part:
        keys, ranks = self._rank_keys(n), self.groups.size
        ids_U, inverse_N, counts_U = ids_N.unique(return_inverse=True, return_counts=True)
        owner_U = keys.owners(ids_U, ranks)
        order_U = owner_U.argsort(stable=True)
        place_U = torch.empty_like(order_U)
        place_U[order_U] = torch.arange(order_U.numel())
        sent_P = torch.bincount(owner_U, minlength=ranks).numpy()
        return _Part(ids_U[order_U], counts_U[order_U], sent_P, place_U[inverse_N])

    def _exchange(
        self, module: ShardedCollection, what: str, parts: Sequence[tuple[int, _Part]], kind: str
    ) -> list[Tensor]:  # fmt: skip
        """Rows of distinct ids, which their owners look up."""
        context, ranks, tables = module.state.context, self.groups.size, len(parts)
        counts_PT = np.stack([part.sent_P for _, part in parts], axis=1)
        sizes_P = tables + 2 * counts_PT.sum(axis=1)
        sent_PJ, total_J = np.zeros((2, ranks, context.routes.exchanges), np.int64)
        sent_PJ[:, 0], total_J[0, 0] = sizes_P, sizes_P.sum()
        agreed = handshake(context, f"{module.name}: {what}", sent_PJ, total_J[0])
        lists = [each.split(part.sent_P.tolist()) for _, part in parts for each in (part.ids_U, part.counts_U)]
        message = torch.cat([each for p in range(ranks) for each in (torch.from_numpy(counts_PT[p]), *(o[p] for o in lists))])
        received_P = agreed.received_PJ[:, 0]
        asked = self._send(module, message, sizes_P, received_P).split(received_P.tolist())
        answers, moved, theirs_PT = self._answer(module, [n for n, _ in parts], asked, kind)
        sent_back_P, size_P = theirs_PT.sum(axis=1) + _MOVES * tables, counts_PT.sum(axis=1) + _MOVES * tables
        replies = self._send(module, answers, sent_back_P, size_P).long().split(size_P.tolist())
        numbers_PTM = np.stack([each[: _MOVES * tables].view(tables, _MOVES).numpy() for each in replies])
        if kind == "step":
            self._hear(module, [n for n, _ in parts], moved, numbers_PTM)
            for n, _ in parts:
                self._rank_keys(n).grow_with_all()
        rows = [each[_MOVES * tables :].split(counts_PT[p].tolist()) for p, each in enumerate(replies)]
        return [torch.cat([rows[p][t] for p in range(ranks)]) for t in range(tables)]

    def _send(self, module: ShardedCollection, message: Tensor, sent_P: Counts, received_P: Counts) -> Tensor:
        context, world = module.state.context, self.groups.world
        context.meter.add_untabled("ids", world.links, sent_P * message.itemsize)
        with context.meter.timed("ids"):
            return world.all_to_all(message, sent_P.tolist(), received_P.tolist())

    def _answer(
        self, module: ShardedCollection, numbers: Sequence[int], asked: Sequence[Tensor], kind: str
    ) -> tuple[Tensor, list[Moved], Counts]:
        """Look up the ids of all ranks: answers by rank, what moved by table, and rows by rank and table."""
        tables = len(numbers)
        counts_PT = np.stack([each[:tables].numpy() for each in asked])
        lists = [
            each[tables:].split([c for count in counts_PT[p].tolist() for c in (count, count)]) for p, each in enumerate(asked)
        ]
        rows, moved, heads = [], [], []
        for t, n in enumerate(numbers):
            keys = self._rank_keys(n)
            ids_M, times_M = (torch.cat([each[2 * t + at] for each in lists]) for at in (0, 1))
            change = Moved(*(ids_M[:0] for _ in range(4)))
            if kind == "find":
                rows_M, _ = keys.find(ids_M)
            else:
                ids_N, first_M = ids_M.repeat_interleave(times_M), times_M.cumsum(0) - times_M
                if kind == "step":
                    protect = module.pipeline.lookups > 0 or module.placeholder.pending is not None
                    rows_N, change = keys.step(ids_N, protect)
                else:
                    rows_N = keys.read(ids_N, kind != "read")
                rows_M = rows_N[first_M]
            rows.append(rows_M.split(counts_PT[:, t].tolist()))
            heads.append([change.came_K.numel(), change.went_E.numel(), keys.uncounted])
            moved.append(change)
        head = torch.tensor(heads, dtype=torch.int64).view(-1)
        answers = [torch.cat([head, *(each[p] for each in rows)]) for p in range(len(asked))]
        return torch.cat(answers).int(), moved, counts_PT

    def _hear(
        self, module: ShardedCollection, numbers: Sequence[int], moved: Sequence[Moved], numbers_PTM: Counts
    ) -> None:  # fmt: skip
        """Tell all ranks which ids came and went, and begin rows."""
        sizes_P = 2 * numbers_PTM[:, :, :2].sum(axis=(1, 2))
        for t, n in enumerate(numbers):
            came, went, uncounted = numbers_PTM[:, t].sum(axis=0).tolist()
            keys = self._rank_keys(n)
            keys.age(uncounted)
            keys.used_by_all += came - went
        if not sizes_P.any():
            return
        mine, world = torch.cat([each for change in moved for each in change[:4]]), self.groups.world
        others_P = sizes_P * (np.arange(len(sizes_P)) != world.index)
        module.state.context.meter.add_untabled("ids", world.links, np.full(len(sizes_P), mine.nbytes))
        received = [mine]
        if not world.is_single:
            large = 8 * int(sizes_P.max()) * (len(sizes_P) - 1) > shared.LARGE_MESSAGE
            received = [*world.broadcast(mine, others_P.tolist(), large)]
            received[world.index] = mine
        for p, message in enumerate(received):
            lists = message.split([c for came, went, _ in numbers_PTM[p].tolist() for c in (came, came, went, went)])
            for t, n in enumerate(numbers):
                self._begin_rows(module, n, Moved(*lists[4 * t : 4 * t + 4]))

    @torch.no_grad()
    def _begin_rows(self, module: ShardedCollection, n: int, moved: Moved) -> None:
        """Report ids that went, and begin the rows of ids that came, where this rank stores them."""
        (table, first), keys, index, shard = self.places[n], self.keys[n], module.row_index, module.shard
        base = index.first[table] + first
        if keys.on_evict is not None and moved.went_E.numel():
            where = index.locate(moved.left_E + base)
            home_K = (where.home_N == self.groups.rank).nonzero()[:, 0]
            values_KD = torch.empty(home_K.numel(), module.tables[table].dim, dtype=torch.float32)
            for k, at_K, index_K in shard.local(where.at(home_K)):
                values_KD[at_K] = shard.arena.read(k, index_K)
            if home_K.numel():
                keys.on_evict(moved.went_E[home_K], values_KD)
        for k, at_K, index_K in shard.local(index.locate(base + moved.rows_K)):
            begin_rows(shard.arena, k, shard.states(k), keys, moved.came_K[at_K], index_K)

    # -- other uses ---------------------------------------------------------------------------------------------------------

    def adopt(self, module: ShardedCollection, maps: Mapping[str, IdMap], values: bool) -> None:
        """Take the ids of an unsharded module; with `values`, set the rows that ids share to their first values."""
        index, shard = module.row_index, module.shard
        for n, ((table, first), users) in enumerate(zip(self.places, self.users, strict=True)):
            keys, given = self._rank_keys(n), maps[self.features[users[0]]]
            if isinstance(given, KeyedMap) and given.keys is not None:
                keys.take(given.keys)
            if values:
                shared_SD = keys.shared_values(module.tables[table].dim)
                rows_S = index.first[table] + first + keys.rules.rows + torch.arange(len(shared_SD))
                for k, at_K, index_K in shard.local(index.locate(rows_S)):
                    shard.arena.write(k, index_K, shared_SD[at_K])

    def live(self, module: ShardedCollection) -> dict[str, IdMap]:
        """The id maps by feature, whose elastic ones look ids up at their owners."""
        found = dict(zip(self.features, self.maps, strict=True))
        for n, users in enumerate(self.users):
            found |= {
                self.features[f]: LiveMap(self.maps[f].start, first=self.maps[f].first, module=module, number=n) for f in users
            }
        return found

    def pin(self, module: ShardedCollection, n: int, ids: Tensor) -> None:
        """Pin ids, the same on all ranks, at their owners. Collective; an error on one rank changes nothing on any."""
        keys, failed, moved = self._rank_keys(n), None, None
        before = {name: tensor.clone() for name, tensor in keys.tensors().items()}
        try:
            moved = keys.pin(self._mine(n, ids))
        except BaseException as error:
            failed = error
        try:
            raise_if_any_failed(self.groups, failed)
        except BaseException:
            for name, tensor in keys.tensors().items():
                tensor.copy_(before[name])
            raise
        assert moved is not None
        numbers = self.groups.all_gather([[moved.came_K.numel(), moved.went_E.numel(), 0]])
        self._hear(module, [n], [moved], np.array(numbers))

    def advance(self, module: ShardedCollection, n: int, now: float) -> None:
        """Set the time of the log, the same on all ranks. Collective."""
        times = self.groups.all_gather(float(now))
        if any(each != times[0] for each in times):
            message = f"ranks give the times {min(times)!r} to {max(times)!r}; give the same time of the log on all ranks"
            raise BadInput(message, parameter="now", value=now)
        moved = self.keys[n].advance(now)
        self._hear(module, [n], [moved], np.array(self.groups.all_gather([[0, moved.went_E.numel(), 0]])))

    def unpin(self, n: int, ids: Tensor) -> None:
        self.keys[n].unpin(self._mine(n, ids))

    def _mine(self, n: int, ids: Tensor) -> Tensor:
        keys, ids_N = self._rank_keys(n), ids.reshape(-1).long()
        return ids_N[keys.owners(ids_N, self.groups.size) == self.groups.rank]


class ShardedElasticIds(ElasticIds):
    """The ids that have rows of an elastic table, of all ranks. Collective, `ids` and `on_evict` excepted.

    `ids` has those of this rank's buckets. `on_evict` gets the rows whose home is this rank.
    """

    def __init__(self, module: ShardedCollection, n: int) -> None:
        super().__init__(module, n)
        assert isinstance(module.maps, RankMaps)
        self._collection, self._maps = module, module.maps

    def state(self) -> dict[str, float]:
        """Numbers of the table, of all ranks together."""
        every = self._maps.groups.all_gather(self._keys.state())
        total = {name: sum(each[name] for each in every) for name in every[0]}
        return total | {"load": total["used"] / max(1, total["rows"]), "steps": every[0]["steps"]}

    def rows_of(self, ids: Tensor) -> Tensor:
        """The table's row of each id, or -1 for ids that read shared rows. Every rank may ask for others."""
        check_integers(ids)
        rows_N = self._maps.find(self._collection, self._n, ids)
        return torch.where(rows_N < self._keys.rules.rows, rows_N + self._first, -1).view(ids.shape)

    def advance(self, now: float) -> None:
        """Set the time of the log, for `max_age`. Every rank calls this with the same time."""
        self._collection.invalidate_prefetched()
        self._maps.advance(self._collection, self._n, now)

    def pin(self, ids: Tensor) -> None:
        """Give ids rows of their own, which they keep. Every rank calls this with the same ids."""
        check_integers(ids)
        self._collection.invalidate_prefetched()
        self._maps.pin(self._collection, self._n, ids)

    def unpin(self, ids: Tensor) -> None:
        """Let pinned ids go again when they are cold. Every rank calls this with the same ids."""
        check_integers(ids)
        self._maps.unpin(self._n, ids)


def needed_maps(
    module: ShardedCollection, maps: Sequence[IdMap], rows: Sequence[int], tables: Sequence[int]
) -> FeatureMaps | None:  # fmt: skip
    """The id maps that a sharded module needs."""
    device = module.arena.device
    if any(map.is_elastic for map in maps) and not module.row_index.unsharded:
        return RankMaps(module.features, maps, tables, device, module.groups)
    return maps_for(module.features, maps, rows, device, tables)


def check_migration(module: ShardedCollection, new: ShardedCollection) -> None:
    """Raise if a migration of one process needs key tables of another kind, which handles and publishers do not know."""
    if isinstance(module.maps, ElasticMaps) and module.row_index.unsharded != new.row_index.unsharded:
        where = "in migrations of one process between rows of one precision and of several"
        refuse_elastic(where, "save a checkpoint and load it into a model sharded by the new plan")


def adopt_ids(module: ShardedCollection, source: ShardSource) -> None:
    """Take the ids of an unsharded module. Rows of a module on the meta device begin as those of a new one."""
    if isinstance(module.maps, RankMaps):
        module.maps.adopt(module, source.live_maps, values=source.arena.device.type == "meta")
    elif isinstance(module.maps, ElasticMaps):  # one rank has all rows
        for users, keys in zip(module.maps.users, module.maps.keys, strict=True):
            given = source.live_maps[module.features[users[0]]]
            if isinstance(given, KeyedMap) and given.keys is not None:
                for name, tensor in keys.tensors().items():
                    tensor.copy_(given.keys.tensors()[name])
        if source.arena.device.type == "meta":
            module.maps.start(module)


def live_ids(module: ShardedCollection) -> Mapping[str, IdMap]:
    """The id maps of a module; elastic ones with the ids that have rows now."""
    if isinstance(module.maps, RankMaps):
        return module.maps.live(module)
    return keyed_maps(module, module.id_maps)
