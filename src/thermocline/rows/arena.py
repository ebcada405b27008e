"""The arena: the rows of any number of tables in two arrays, `codes` (bytes) and `meta` (32-bit words).

Tables of one dimension and precision are adjacent, so the number of a row in such a run gives its address, and one kernel
launch serves all of them. Each feature looks up one table; several features may share a table.

    tables in any order          codes                                    meta
    user  1000 x 64 int8         | user | shop | pad to 128 | item |      | user | shop | item |
    item   500 x 32 int4         each run begins on a 128-byte boundary; nothing is padded inside a run
    shop   200 x 64 int8
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.cache.reference import COUNT_UNIT
from thermocline.kernels.checks import check_lookup
from thermocline.kernels.elastic.fields import TableRows
from thermocline.kernels.layout import Cache, Layout, Pool, write_spec
from thermocline.kernels.slots import read_pointed

from . import cache as slot_cache
from . import fused_quantized as fused
from .cache import RecentCounts
from .change_bitmap import Changes, UpdateCounts
from .memory import MemoryUsage, kept_for, pin, size_of, table_zeros
from .staging import Stage
from .table_spec import TableSpec, place

_SMALL_TABLE_COUNT = 8 * COUNT_UNIT  # initial count of rows of small tables: 8 lookups
_SETTLED = 64  # lookups a slot after which hits are compared with the prediction of the heat
_FAR = 0.1  # difference that warns


class Arena:
    """The rows of many tables.

    Args:
        tables: sizes, precisions and names.
        features: the table of each feature; by default one feature a table, in order.
        device: where lookups run.
        slots: fp32 cache slots for each table; tables of one dimension, precision and group share theirs.
        policy: eviction policy of the cache: "lfu", "lru", "adaptive" or "fixed".
        residency: "device", or "host" for codes in pinned host memory, which GPU kernels read and write there.
        int8_slots: more slots for each int4 or int2 table, which hold int8 rows.

    Raises:
        BadInput: the policy is unknown, or a table cannot have the slots that it is given.

    Example::

        arena = thermocline.Arena([thermocline.TableSpec(1000, 64, "int8", "user")], slots=[50])
        thermocline.lookup(arena, torch.tensor([3, 5]), torch.tensor([0, 2])).shape  # [1, 64]
    """

    def __init__(
        self, tables: Sequence[TableSpec], features: Sequence[int] | None = None, device: torch.device | str = "cpu",
        slots: Sequence[int] | None = None, policy: str = "lfu", residency: str = "device",
        int8_slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.tables = tuple(tables)
        self.features = tuple(range(len(tables))) if features is None else tuple(features)
        fields, code_bytes, meta_words, self.elements = place(self.tables)
        self.residency = residency
        on_host = residency == "host" and torch.device(device).type == "cuda"
        self.meta = table_zeros(meta_words, torch.int32, device)
        if on_host:
            self.codes = kept_for(self.device, torch.zeros(code_bytes, dtype=torch.uint8, pin_memory=True))
        else:
            self.codes = table_zeros(code_bytes, torch.uint8, device)
        self.rows = sum(t.rows for t in self.tables)
        columns = accumulate((self.tables[table].dim for table in self.features), initial=0)
        layout = [(*fields[table], column) for table, column in zip(self.features, columns, strict=False)]
        groups, none = [table.group for table in self.tables], [0] * len(self.tables)
        self.pools = slot_cache.make_pools(fields, slots or none, int8_slots or none, groups)
        self.cache = slot_cache.make_cache(self.pools, device, staging=on_host or torch.device(device).type != "cuda")
        self._fields = fields
        self.spec = write_spec(layout, self.pools, slot_cache.policy_of(policy), self._names())
        fields_F8 = torch.tensor(layout, dtype=torch.int64, device=device).view(-1, F.LAYOUT_FIELDS)
        self.layout = Layout.of(fields_F8, self.spec)
        self._stage: Stage | None = None
        self.staged: float | None = None  # room for prefetched rows, as a share of all rows; None: room for three batches
        self.predicted: tuple[float, int, int] | None = None  # hit rate that the heat of `warm` predicts; lookups and hits then
        self._moved: dict[str, int] = {}  # counts of earlier stages
        self.changes: Changes | None = None  # rows that changed since an incremental save
        self.unpublished: UpdateCounts | None = None  # changes of rows since they were published
        self.before_write_hook: Callable[[Tensor], None] | None = None  # gets rows before they change, during a snapshot
        # ties a lookup that does not train into the graph
        self.untrained_placeholder = torch.zeros(1, dtype=torch.float32, device=device)

    def _names(self) -> list[tuple[int, str]]:
        """First arena row and name of each table."""
        return sorted((field[F.ROW], table.name) for field, table in zip(self._fields, self.tables, strict=True))

    def rename(self, names: Sequence[str], features: Sequence[str] = ()) -> None:
        """Name the tables and features, for errors."""
        self.tables = tuple(replace(table, name=name) for table, name in zip(self.tables, names, strict=True))
        tables = self.layout.tables
        self.spec = write_spec(tables.features, self.pools, tables.policy, self._names(), features)
        self.layout = Layout.of(self.layout.fields_F8, self.spec)

    @property
    def arrays(self) -> RowArrays:
        """The rows as kernels take them."""
        return RowArrays(self.codes, self.meta, self.layout, Cache(*self.cache) if self.cache else None)

    @property
    def device(self) -> torch.device:
        """The device of lookups."""
        return self.meta.device

    @property
    def bytes(self) -> int:
        """Bytes of all rows, codes and metadata, alignment included."""
        return self.codes.numel() + 4 * self.meta.numel()

    def memory(self, states: Sequence[Tensor] = ()) -> MemoryUsage:
        """Bytes of all arrays, with the given optimizer state."""
        parts = {
            "codes": size_of(self.codes),
            "metadata": size_of(self.meta),
            "cache": size_of(*self.cache[:2]),
            "maps": size_of(*self.cache[2 : Cache._fields.index("home")]),
            "optimizer state": size_of(*states),
        }
        if self.changes is not None:
            parts["maps"] += size_of(self.changes.bits)
        if self.unpublished is not None:
            parts["maps"] += size_of(self.unpublished.counts_R)
        if self._stage is not None:
            parts["staging"] = self._stage.bytes
        return MemoryUsage(parts, 4 * self.elements, size_of(self.codes) if self.codes.device != self.device else 0)

    def stats(self) -> dict[str, int]:
        """Counts of the cache, of prefetches and of predicted hits (see `RowsModule.stats`)."""
        if not self.cache:
            return {}
        found = {**slot_cache.statistics(Cache(*self.cache), self.pools), **self._moved_ahead()}
        if self.predicted is None:
            return found
        share, lookups_then, hits_then = self.predicted
        lookups, hits = max(0, found["lookups"] - lookups_then), max(0, found["hits"] - hits_then)
        if lookups >= _SETTLED * sum(pool.slots for pool in self.pools) and hits < (share - _FAR) * lookups:
            rates = f"the cache held {hits / lookups:.0%} of the lookups; the heat given to warm() predicts {share:.0%}"
            warnings.warn(f"{rates}: it is the heat of another log, or the log has changed", stacklevel=3)
        return found | {"predicted_hits": hits_then + int(share * lookups)}

    def _moved_ahead(self) -> dict[str, int]:
        now = {} if self._stage is None else self._stage.statistics()
        return {name: count + self._moved.get(name, 0) for name, count in now.items()} or self._moved

    @property
    def prefetches(self) -> bool:
        """Whether rows can be prefetched: codes lie on the host, and there is a cache without int8 slots."""
        return self.codes.device != self.device and bool(self.cache) and not any(pool.int8_slots for pool in self.pools)

    def prefetch(self, *batches: tuple[Tensor, Tensor]) -> None:
        """Copy the rows of later batches to the GPU: ids and offsets of each, as `lookup` takes them.

        Does nothing where `prefetches` is False. Results never depend on it.
        """
        if not self.prefetches:
            return
        for ids_N, offsets in batches:
            check_lookup(self.layout, LookupCall(ids_N, offsets, None, F.SUM))
        with torch.inference_mode(False):  # training uses what is made here
            if self._stage is None or not self._stage.suffices(batches):
                self.unstage()
                self._stage = Stage(self.codes, self.meta, self.layout, batches, self.staged)
                self._set_home(self._stage.area.home)
            else:
                self._stage.prefetch(batches)

    def arrive(self) -> None:
        """Let later work use the rows that were prefetched last, which the next prefetch would do otherwise."""
        if self._stage is not None:
            self._stage.arrive()

    def settle(self) -> None:
        """Write staged rows back to their tables, and wait until the host may read its memory."""
        if self._stage is not None:
            self._stage.settle()
        if self.codes.device != self.device:
            torch.cuda.current_stream(self.device).synchronize()

    def unstage(self) -> None:
        """Write staged rows back and free the staging area."""
        self.settle()
        if self._stage is not None:
            self._moved = self._moved_ahead()
            self._set_home((0, 0, 0))
            self._stage = None

    def _set_home(self, home: tuple[int, int, int]) -> None:
        """Publish the staging area to kernels; (0, 0, 0): none."""
        Cache(*self.cache).home.numpy()[:] = home  # past autograd: compiled graphs save the tensor for their backward

    def __getstate__(self) -> dict[str, Any]:
        self.unstage()
        return self.__dict__ | {"before_write_hook": None, "unpublished": None}  # copies have other arrays

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.codes.device != self.device:
            self.codes = pin(self.codes, self.device)  # copies of pinned memory are not pinned

    def flush(self) -> None:
        """Write every cached row back to its table, rounded to nearest, and empty the cache."""
        self.settle()
        if self.cache:
            slot_cache.evict_all(self.codes, self.meta, Cache(*self.cache), self.pools)

    def warm(self, heat: Sequence[Tensor]) -> None:
        """Fill the cache with the hottest rows, by counts of lookups for each row of each table. Flushes it first."""
        heat = [torch.as_tensor(heat_R) for heat_R in heat]
        for table, heat_R in zip(self.tables, heat, strict=True):
            if heat_R.shape != (table.rows,) or not bool(((heat_R >= 0) & heat_R.isfinite()).all()):
                message = f"heat of table {table.name!r} is {tuple(heat_R.shape)}; give {table.rows} finite counts >= 0"
                raise BadInput(message, parameter="heat", table=table.name, needed=table.rows)
        self.flush()
        if self.before_write_hook is not None:
            self.before_write_hook(torch.arange(self.rows))  # any row may get a pointer
        self.predicted = None
        held = total = 0.0
        for index, pool in enumerate(self.pools):
            heat_R = torch.cat([heat[t].to(self.device) for t in self._tables_of(pool)])
            held += slot_cache.warm_up(*self._pool(index), heat_R, self.layout.tables.policy)
            total += float(heat_R.sum(dtype=torch.float64))
        if total:
            begun = slot_cache.statistics(Cache(*self.cache), self.pools)
            self.predicted = held / total, begun["lookups"], begun["hits"]

    def cache_small_tables(self, parts: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Fill the empty cache with small tables, smallest first, as far as they fit as a whole.

        Rows of small tables are mostly hot, and hot rows that begin rounded train to another model (`docs/decisions/`). Their
        counts begin at a few lookups; else rows that the first batches use once would evict them. `parts` has, for each table,
        the first and end row of the parts that count as tables.
        """
        if self.device.type == "meta":
            return
        for index, pool in enumerate(self.pools):
            taken: list[Tensor] = []
            room = pool.slots
            begins = [(self._fields[t][F.ROW] - pool.row, part) for t in self._tables_of(pool) for part in parts[t]]
            for begin, (first, last) in sorted(begins, key=lambda each: each[1][1] - each[1][0]):
                if last - first > room:
                    break
                taken.append(torch.arange(begin + first, begin + last, device=self.device))
                room -= last - first
            if taken:
                at_K = torch.cat(taken)
                counts_K = torch.full_like(at_K, _SMALL_TABLE_COUNT, dtype=torch.int32)
                slot_cache.admit(*self._pool(index), at_K, counts_K, self.layout.tables.policy)

    def _pool(self, index: int) -> tuple[Tensor, Tensor, Cache, Sequence[Pool], int]:
        """A pool as the functions of `cache.py` take it."""
        return self.codes, self.meta, Cache(*self.cache), self.pools, index

    def recent_counts(self) -> list[RecentCounts]:
        """Recent lookup counts of each table's rows. Tables that share slots share the count of misses by size."""
        if not self.cache:
            raise BadInput("no cache counts lookups here; profile the log or its batches", parameter="cache")
        none = torch.zeros(0, dtype=torch.int64)
        found = [RecentCounts(none, none, 0) for _ in self.tables]
        for index, pool in enumerate(self.pools):
            whole = slot_cache.recent_counts(Cache(*self.cache), self.pools, index, self.layout.tables.policy)
            for table in self._tables_of(pool):
                rows_K = whole.rows_K - (self._fields[table][F.ROW] - pool.row)
                mine_K = (rows_K >= 0) & (rows_K < self.tables[table].rows)
                missed = whole.missed * self.tables[table].rows // pool.rows
                found[table] = RecentCounts(rows_K[mine_K], whole.counts_K[mine_K], missed)
        return found

    def touched(self, table: int, states: Sequence[Tensor]) -> Tensor:
        """Mask of a table's rows with optimizer state other than zero; all rows where the optimizer has no state."""
        rows = self.tables[table].rows
        if not states:
            return torch.ones(rows, dtype=torch.bool)
        (first,) = self.state_views(table, states[:1], by_row=states[0].numel() == self.rows)
        return (first.reshape(rows, -1) != 0).any(1)

    def _tables_of(self, pool: Pool) -> list[int]:
        """The tables of a pool, in the order of their rows."""
        mine = [t for t, field in enumerate(self._fields) if pool.row <= field[F.ROW] < pool.row + pool.rows]
        return sorted(mine, key=lambda t: self._fields[t][F.ROW])

    def before_write(self, rows_N: Tensor) -> None:
        """Record that these arena rows are about to change."""
        if self.changes is not None:
            self.changes.mark(rows_N)
        if self.unpublished is not None:
            self.unpublished.mark(rows_N)
        if self.before_write_hook is not None:
            self.before_write_hook(rows_N)

    def publish_first(self, table: int, rows_N: Tensor) -> None:
        """Have the next publish send rows of a table, whatever its budget."""
        if self.unpublished is not None:
            self.unpublished.publish_first(rows_N + self._fields[table][F.ROW])

    def replaced(self) -> None:
        """Record that all rows were replaced: the next incremental save is full, and the next publish has every row."""
        self.changes = None
        if self.unpublished is not None:
            self.unpublished.publish_first(torch.arange(self.rows))

    @property
    def tracks_writes(self) -> bool:
        """Whether `before_write` has an effect."""
        return self.changes is not None or self.unpublished is not None or self.before_write_hook is not None

    def views(self, table: int) -> tuple[Tensor, Tensor, int, int, int]:
        """(views of a table's codes and meta words, its first arena row, format, dimension)."""
        codes, meta, row, _, rows, dim, format = self._fields[table]
        width, words = F.row_bytes(format, dim), F.META_WORDS[format]
        codes_RB = self.codes[codes : codes + rows * width].view(rows, width)
        return codes_RB, self.meta[meta : meta + rows * words].view(rows, words), row, format, dim

    def state_views(self, table: int, states: Sequence[Tensor], by_row: bool) -> list[Tensor]:
        """Views of a table's optimizer state: one number, or `dim` numbers, for each row."""
        _, _, row, element, rows, dim, _ = self._fields[table]
        if by_row:
            return [state[row : row + rows] for state in states]
        return [state[element : element + rows * dim].view(rows, dim) for state in states]

    def read(self, table: int, rows_N: Tensor | slice = slice(None)) -> Tensor:
        """Rows of one table, dequantized to fp32."""
        self.settle()
        codes_RB, meta_RW, _, format, dim = self.views(table)
        at = rows_N if isinstance(rows_N, slice) else rows_N.to(codes_RB.device)
        values_ND = dequantize_rows(codes_RB[at].to(self.device), meta_RW[rows_N], format, dim)
        if self.cache and F.META_WORDS[format]:
            cached_N = (words_N := meta_RW[rows_N, 0]) < 0
            values_ND[cached_N] = read_pointed(Cache(*self.cache), words_N[cached_N], dim)
        return values_ND.clone() if format == F.FP32 else values_ND  # never the arena's own memory

    def write(
        self, table: int, rows_N: Tensor, values_ND: Tensor, clock: Tensor | None = None, names_N: Tensor | None = None
    ) -> None:
        """Set rows of one table, rounded to nearest or, with a clock, by bits for `names_N` (arena rows). NaN and Inf raise."""
        codes_RB, meta_RW, row, format, dim = self.views(table)
        if values_ND.shape != (rows_N.numel(), dim):
            needed = (rows_N.numel(), dim)
            raise FormatError(f"values are {tuple(values_ND.shape)}; use {needed}", parameter="values", needed=needed)
        if self.device.type == "meta":  # shapes without values, for estimates
            return
        self.settle()
        self.before_write(rows_N + row)
        names_N = rows_N + row if names_N is None else names_N
        codes_NB, meta_NW = quantize_rows(values_ND, format, clock, names_N)  # refuses bad values before any is set
        if self.cache and F.META_WORDS[format]:
            words_N = meta_RW[rows_N, 0]
            cached_N = slot_cache.set_cached(Cache(*self.cache), self.pools, words_N, values_ND, rows_N + row, clock)
            rows_N, codes_NB, meta_NW = rows_N[~cached_N], codes_NB[~cached_N], meta_NW[~cached_N]
        meta_RW[rows_N] = meta_NW
        codes_RB[rows_N.to(codes_RB.device)] = codes_NB.to(codes_RB.device)

    def table_rows(self, table: int, states: Sequence[Tensor]) -> TableRows:
        """What the kernels of elastic ids take of a table; `states`: views of its optimizer state."""
        codes_RB, meta_RW, row, format, dim = self.views(table)
        pools = ((n, pool) for n, pool in enumerate(self.pools) if pool.row <= row < pool.row + pool.rows)
        cache = Cache(*self.cache) if self.cache else None
        return TableRows(codes_RB, meta_RW, format, dim, row, cache, next(pools, None), states)

    def import_fused(self, table: int, packed: Tensor, requantize_negative: bool = False) -> None:
        """Fill a table of an affine precision from torch's or FBGEMM's fused form, bit for bit (see `fused_quantized.py`)."""
        self.flush()
        codes_RB, meta_RW, row, format, dim = self.views(table)
        fused.check_format(format)
        fused.check_fused(packed, format, dim, requantize_negative)
        if packed.shape[0] != codes_RB.shape[0]:
            message = f"the fused table has {packed.shape[0]} rows; table {table} has {codes_RB.shape[0]}"
            raise FormatError(message, parameter="packed", value=packed.shape[0], needed=codes_RB.shape[0])
        self.before_write(torch.arange(codes_RB.shape[0], device=self.device) + row)
        fused.unpack_into(packed, format, codes_RB, meta_RW)

    def export_fused(self, table: int) -> Tensor:
        """A table of an affine precision in torch's and FBGEMM's fused form, bit for bit. Flushes the cache first."""
        self.flush()
        codes_RB, meta_RW, _, format, dim = self.views(table)
        return fused.export_fused(codes_RB, meta_RW, format, dim)

    def randomize_(self, bound: float, generator: torch.Generator | None = None, block: int = 1 << 18) -> None:
        """Fill every table with uniform values in [-bound, bound), a block of rows at a time."""
        for index, table in enumerate(self.tables):
            for rows_N in torch.arange(table.rows, device=self.device).split(block):
                uniform_ND = torch.rand(rows_N.numel(), table.dim, dtype=torch.float32, device=self.device, generator=generator)
                self.write(index, rows_N, uniform_ND * (2 * bound) - bound)
