"""The elastic id maps of a module: key tables that change in training steps, and the rows that begin with new ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.ids import gpu_keys
from thermocline.ids.elastic import Evicted, KeyTable
from thermocline.ids.elastic_rows import ElasticRows, refuse_elastic
from thermocline.ids.idmap import IdMap, SaltedHash
from thermocline.ids.keyed_map import KeyedMap
from thermocline.ids.moved_ids import Moved, MovedIds
from thermocline.kernels.elastic import fields as K

from .backward_pass import current_pass
from .id_maps import Factors, FeatureMaps
from .inputs import check_integers

if TYPE_CHECKING:
    from thermocline.rows.arena import Arena
    from thermocline.rows.memory import MemoryUsage

    from .rows_module import RowsModule


def maps_for(
    features: Sequence[str], maps: Sequence[IdMap | None], rows: Sequence[int], device: torch.device,
    tables: Sequence[int] = (0,),
) -> FeatureMaps | None:  # fmt: skip
    """The maps that a module needs, or None where all are identities over all rows; `tables`: that of each feature."""
    full = [IdMap.identity(count) for count in rows]
    known = [own if map is None else map for map, own in zip(maps, full, strict=True)]
    if any(each.is_elastic for each in known):
        return ElasticMaps(features, known, tables, device)
    return None if known == full else FeatureMaps(features, known, device)


class ElasticMaps(FeatureMaps):
    """Id maps of which some are elastic, and their key tables: one for all features that share one part of a table."""

    elastic = True

    def __init__(
        self, features: Sequence[str], maps: Sequence[IdMap], tables: Sequence[int], device: torch.device
    ) -> None:  # fmt: skip
        _check_shared(features, maps, tables)
        self.check_device(device)
        super().__init__(features, maps, device)
        self.places = sorted({(t, map.first) for t, map in zip(tables, maps, strict=True) if map.is_elastic})
        self.users = [
            [f for f, map in enumerate(maps) if map.is_elastic and (tables[f], map.first) == place] for place in self.places
        ]
        self.keys: list[KeyTable] = []
        for users in self.users:
            policy = maps[users[0]].start
            assert isinstance(policy, ElasticRows)
            self.keys.append(self._new_keys(policy, device))
        kept = [[int(f in users) for f in range(len(maps))] for users in self.users]
        self.masks = [torch.tensor(each, dtype=torch.int32, device=device) for each in kept]
        elastic = zip(self.places, self.users, self.keys, strict=True)
        zeros = {f: at[1] + keys.rules.rows for at, users, keys in elastic if not keys.policy.shared for f in users}
        self.has_zeros = bool(zeros)
        rows = [zeros.get(f, -1) for f in range(len(maps))]
        self.zeros_F = torch.tensor(rows, dtype=torch.int64, device=device)  # rows that read zeros

    def check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "meta"):
            refuse_elastic(f"on {device.type}", "train on device='cpu' or 'cuda'", device=device)

    def _new_keys(self, policy: ElasticRows, device: torch.device) -> KeyTable:
        return KeyTable(policy, SaltedHash(1, policy.salt).key, device)

    def ids_of(self, module: RowsModule, n: int) -> ElasticIds:
        """The ids of a key table, for users."""
        return ElasticIds(module, n)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(keys.bytes for keys in self.keys)

    def count_bytes(self, memory: MemoryUsage, module: RowsModule) -> None:
        super().count_bytes(memory, module)
        growing = [at for at in zip(self.places, self.keys, strict=True) if at[1].policy.grows]
        for (table, _), keys in growing if module.arena.device.type == "cpu" else ():
            rows = len(keys.places.closed(int(keys.open)))
            codes_RB, meta_RW, *_ = module.arena.views(table)
            arrays = {"codes": [codes_RB], "metadata": [meta_RW], "optimizer state": _states(module, table)}
            for part, tensors in arrays.items():
                memory.parts[part] -= rows * sum(t.element_size() * (t.numel() // t.shape[0]) for t in tensors)

    def tensors(self) -> dict[str, Tensor]:
        return {f"elastic{n}_{name}": each for n, keys in enumerate(self.keys) for name, each in keys.tensors().items()}

    def totals(self) -> dict[str, int]:
        states = [keys.state() for keys in self.keys]
        names = {"id_lookups": "lookups", "shared_lookups": "shared_lookups"}
        names |= {f"ids_{field}": field for field in ("used", "admitted", "evicted", "expired", "refused", "waiting")}
        return {name: sum(int(state[field]) for state in states) for name, field in names.items()}

    def replaced(self) -> None:
        for keys in self.keys:
            keys.note_moved(keys.places.rows(torch.arange(keys.keys.numel()) + keys.rules.first))

    def record_moves(self, recording: bool) -> None:
        """Record which rows get other ids, for publishes; or no longer."""
        for keys in self.keys:
            keys.moved = [] if recording else None

    def take_moved(self) -> list[tuple[int, MovedIds]]:
        """The rows of each table that got other ids since this was called last, or lost theirs."""
        found = [(place, keys.take_moved()) for place, keys in zip(self.places, self.keys, strict=True)]
        return [(table, moved._replace(rows_K=moved.rows_K + first)) for (table, first), moved in found if len(moved.rows_K)]

    def give_back_moved(self, taken: Sequence[tuple[int, MovedIds]]) -> None:
        """Record moves again, after a publish that failed."""
        for (table, first), keys in zip(self.places, self.keys, strict=True):
            for index, moved in taken:
                mine_K = (moved.rows_K >= first) & (moved.rows_K < first + keys.rules.rows)
                keys.note_moved(*([moved.rows_K[mine_K] - first] if index == table else []))

    def holds(self, table: int, first: int) -> bool:
        return (table, first) in self.places

    def start(self, module: RowsModule) -> None:
        if module.arena.device.type == "meta":
            return
        for (table, first), keys in zip(self.places, self.keys, strict=True):
            values_SD = keys.shared_values(module.arena.tables[table].dim)
            shared_S = torch.arange(keys.policy.others, device=values_SD.device)
            module.arena.write(table, first + keys.rules.rows + shared_S, values_SD)

    def check_zeros(self, table: int, rows_N: Tensor | None, values_ND: Tensor) -> None:
        for (index, first), keys in zip(self.places, self.keys, strict=True):
            row = first + keys.rules.rows
            at = row if rows_N is None else (rows_N == row).to(values_ND.device)
            if index == table and not keys.policy.shared and bool(values_ND[at].any()):
                message = f"row {row} stays zero: ids without a row read it (shared=0); leave it out, or set it to zeros"
                raise BadInput(message, parameter="values", value=row)

    def wait_for_backward(self) -> None:
        for keys in self.keys:
            keys.keep_rows()

    def rows_now(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        check_integers(ids_N)
        return self._look_up_on_gpu(None, ids_N, offsets, K.FIND)

    def admit(self, module: RowsModule, ids_N: Tensor, offsets: Tensor) -> Tensor:
        check_integers(ids_N)
        with module.trained.placeholder.lock:
            return self._admit(module, ids_N, offsets)

    def _admit(self, module: RowsModule, ids_N: Tensor, offsets: Tensor) -> Tensor:
        if self.keys[0].on_gpu:
            return self._look_up_on_gpu(module, ids_N, offsets, self._kind(module))
        batch = (offsets.numel() - 1) // len(self.maps)
        if len(self.maps) == 1:
            return self._look_up(module, 0, ids_N.long().contiguous())
        rows_N = self(ids_N, offsets)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self.maps) + 1)
        for n, users in enumerate(self.users):
            own_N = self._look_up(module, n, torch.cat([ids_N[ends[f] : ends[f + 1]] for f in users]).long())
            for f, part_N in zip(users, own_N.split([ends[f + 1] - ends[f] for f in users]), strict=True):
                rows_N[ends[f] : ends[f + 1]] = part_N
        return rows_N

    def _kind(self, module: RowsModule) -> int:
        """What a lookup does: `STEP` or `PROTECTED_STEP` in train(), outside of backward passes, which look up again."""
        placeholder = module.placeholder
        if module.training and placeholder.requires_grad and current_pass() < 0:
            return K.PROTECTED_STEP if placeholder.open or placeholder.pending is not None else K.STEP
        return K.READ_TO_TRAIN if placeholder.requires_grad and torch.is_grad_enabled() else K.READ

    def factors(self, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: str) -> Factors:
        if not self.has_zeros:
            return weights_N, None
        if mode not in ("sum", "none"):
            message = f"ids that read zeros (shared=0) need mode='sum' or 'none', not {mode!r}; use shared=1 or more"
            raise BadInput(message, parameter="shared", value=0, mode=mode)
        zero_N, batch = self.zeros_F, (offsets.numel() - 1) // len(self.maps)
        if len(self.maps) > 1:  # without a wait for a GPU
            zero_N = zero_N.repeat_interleave(offsets[::batch].diff(), output_size=rows_N.numel()) if batch else rows_N
        known_N = (rows_N != zero_N).float()
        if mode == "none":
            return None, known_N[:, None]
        return known_N if weights_N is None else weights_N * known_N, None

    def _look_up(self, module: RowsModule, n: int, ids_N: Tensor) -> Tensor:
        """Rows of ids of one key table, which changes in train()."""
        keys, kind = self.keys[n], self._kind(module)
        if kind >= K.STEP:
            rows_N, moved = keys.step(ids_N, kind == K.PROTECTED_STEP)
            self.replace_rows(module, n, moved)
        else:
            rows_N = keys.read(ids_N, kind == K.READ_TO_TRAIN)
        return rows_N + self.places[n][1] if self.places[n][1] else rows_N

    @torch.no_grad()
    def _look_up_on_gpu(self, module: RowsModule | None, ids_N: Tensor, offsets: Tensor, kind: int) -> Tensor:
        """Rows of the ids of all features. Waits for the GPU only where evicted ids or changed rows are to be reported."""
        ids_N, offsets = ids_N.long().contiguous(), offsets.contiguous()
        rows_N = self(ids_N, offsets) if len(self.maps) > 1 else torch.empty_like(ids_N)
        for n, keys in enumerate(self.keys):
            (table, first), protect = self.places[n], kind == K.PROTECTED_STEP
            reports = keys.on_evict is not None or keys.moved is not None
            moved = gpu_keys.expire_next(keys, protect) if kind >= K.STEP and reports else None
            came = gpu_keys.look_up(keys, K.GpuBatch(ids_N, offsets, self.masks[n], rows_N, first), kind)
            if came is None:
                continue
            assert module is not None
            if moved is None and not module.arena.tracks_writes:
                gpu_keys.begin_moves(keys, module.arena.table_rows(table, _states(module, table)), came, first)
            else:
                moved = gpu_keys.known_moves(moved or Moved(*(ids_N[:0] for _ in range(4))), came)
                keys.note_moved(moved.rows_K, moved.left_E)
                self.replace_rows(module, n, moved)
        return rows_N

    @torch.no_grad()
    def replace_rows(self, module: RowsModule, n: int, moved: Moved) -> None:
        """Report ids that went, and begin the rows of ids that came."""
        (table, first), keys = self.places[n], self.keys[n]
        if keys.on_evict is not None and moved.went_E.numel():
            keys.on_evict(moved.went_E, module.arena.read(table, moved.left_E + first))
        if moved.came_K.numel():
            begin_rows(module.arena, table, _states(module, table), keys, moved.came_K, moved.rows_K + first)


def _states(module: RowsModule, table: int) -> list[Tensor]:
    trainer = module.trainer
    return module.arena.state_views(table, trainer.states, trainer.optimizer.states_per_row > 0)


def begin_rows(
    arena: Arena, table: int, states: Sequence[Tensor], keys: KeyTable, ids_K: Tensor, rows_K: Tensor
) -> None:  # fmt: skip
    """Begin the rows of new ids; `states`: the optimizer state of the table."""
    target = arena.table_rows(table, states)
    if arena.tracks_writes:
        arena.before_write(rows_K + target.row)
    keys.begin_rows(target, ids_K, rows_K)
    arena.publish_first(table, rows_K)


class ElasticIds:
    """The ids that have rows of an elastic table, from `module.elastic()`.

    Example::

        bag = thermocline.EmbeddingBag(1000, 16, ids=thermocline.IdMap.elastic(1000))
        bag(torch.tensor([[7, -3]]))
        ids = bag.elastic()
        ids.state()["used"], ids.ids(), bag.get_rows(ids.rows_of(torch.tensor([7])))
    """

    def __init__(self, module: RowsModule, n: int) -> None:
        assert isinstance(module.maps, ElasticMaps)
        self._module, self._n = module, n
        self._keys, self._first = module.maps.keys[n], module.maps.places[n][1]

    def state(self) -> dict[str, float]:
        """Numbers of the table.

        Returns:
            `rows` for ids now, and `most_rows` that the table may grow to; `used` and `pinned` ones; `load` (used / rows); ids
            `admitted`, `evicted` (of them `expired`), `refused` (found only rows hotter or in use), `dropped` (by loading into
            fewer rows); `lookups` of training, of them `shared_lookups` read shared rows; the same in eval(); `waiting` ids
            without a row in the last step; `steps`.
        """
        return self._keys.state()

    def ids(self) -> Tensor:
        """The ids that have a row of their own."""
        return self._keys.keys[self._keys.occupied()]

    def rows_of(self, ids: Tensor) -> Tensor:
        """The table's row of each id, or -1 for ids that read shared rows."""
        check_integers(ids)
        rows_N = gpu_keys.rows_of(self._keys, ids.reshape(-1).long().to(self._keys.keys.device).contiguous())
        return torch.where(rows_N < self._keys.rules.rows, rows_N + self._first, -1).view(ids.shape).to(ids.device)

    @property
    def rule(self) -> ElasticRows:
        """The arguments of `IdMap.elastic`."""
        return self._keys.policy

    def advance(self, now: float) -> None:
        """Set the time of the log, for `max_age`. Call it before a training step, as often as the time changes.

        Args:
            now: the time of the next batch, in the unit of `max_age`. Earlier times than before change nothing.

        Raises:
            BadInput: the table has no `max_age`, or `now` is not finite.
        """
        maps = self._module.maps
        assert isinstance(maps, ElasticMaps)
        maps.replace_rows(self._module, self._n, self._keys.advance(now))

    def pin(self, ids: Tensor) -> None:
        """Give ids rows of their own, which they keep; raises `BadInput` if their buckets have no room."""
        check_integers(ids)
        maps = self._module.maps
        assert isinstance(maps, ElasticMaps)
        moved, device = gpu_keys.on_cpu(self._keys, lambda keys: keys.pin(ids.cpu())), self._keys.keys.device
        maps.replace_rows(self._module, self._n, Moved(*(each.to(device) for each in moved)))

    def unpin(self, ids: Tensor) -> None:
        """Let pinned ids go again when they are cold."""
        check_integers(ids)
        gpu_keys.on_cpu(self._keys, lambda keys: keys.unpin(ids.cpu()))

    def on_evict(self, call: Evicted | None) -> None:
        """Call `call(ids, rows)` with evicted ids and their rows (fp32) before other ids get the rows; copies have none."""
        self._keys.on_evict = call


def elastic_ids(module: RowsModule, feature: str | None) -> ElasticIds:
    """The elastic ids of a feature; by default of the only elastic table."""
    maps = module.maps
    known = {maps.features[f]: n for n, users in enumerate(maps.users) for f in users} if isinstance(maps, ElasticMaps) else {}
    numbers = set(known.values()) if feature is None else {known[feature]} if feature in known else set()
    if len(numbers) != 1:
        message = f"feature {feature!r} has no elastic ids of its own; {', '.join(known) or 'none'} have: name one of these"
        raise BadInput(message, parameter="feature", value=feature, available=list(known))
    assert isinstance(maps, ElasticMaps)
    return maps.ids_of(module, numbers.pop())


def keyed_maps(module: RowsModule, maps: Mapping[str, IdMap]) -> Mapping[str, IdMap]:
    """Id maps by feature, elastic ones with the ids that have rows of the module now."""
    own = module.maps
    if not isinstance(own, ElasticMaps) or module.arena.device.type == "meta":
        return maps
    keys = {own.features[f]: keys for users, keys in zip(own.users, own.keys, strict=True) for f in users}
    return {name: KeyedMap.of(map, keys[name]) if name in keys else map for name, map in maps.items()}


def _check_shared(features: Sequence[str], maps: Sequence[IdMap], tables: Sequence[int]) -> None:
    """Raise if features share rows of a table by different rules, of which one is elastic."""
    for (f, a), (g, b) in combinations(enumerate(maps), 2):
        apart = a.first >= b.rows or b.first >= a.rows
        if tables[f] == tables[g] and a != b and not apart and (a.is_elastic or b.is_elastic):
            message = (
                f"features {features[f]!r} and {features[g]!r} share rows of a table by different id maps, {a} and {b}; "
                "elastic rows need the same map for all features, or tables of their own"
            )
            raise BadInput(message, parameter="ids", features=(features[f], features[g]), value=(a, b))
