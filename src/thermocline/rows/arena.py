"""Many tables in one allocation: the arena.

An arena holds the rows of any number of tables, of any dimensions and precisions, in two arrays: `codes` (bytes) and `meta`
(32-bit words). Tables of one dimension and precision lie next to each other, so inside such a run the address of a row follows
from its number alone; one launch of a kernel then serves all of them. Features say which table they look up; several may share.

    tables in any order          codes                                    meta
    user  1000 x 64 int8         | user | shop | pad to 128 | item |      | user | shop | item |
    item   500 x 32 int4         each run begins on a 128-byte boundary; nothing is padded inside a run
    shop   200 x 64 int8
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.cache.reference import COUNT_UNIT
from thermocline.kernels.checks import check_lookup
from thermocline.kernels.layout import Cache, Layout, Pool, write_spec

from . import fused_quantized as fused
from .cache import (
    RecentCounts,
    evict_all,
    get_cached,
    make_cache,
    make_pools,
    policy_of,
    recent_counts,
    seat,
    set_cached,
    statistics,
    warm_up,
)
from .change_bitmap import Changes
from .memory import Memory, pin, pinned_zeros, size_of, table_zeros
from .staging import Stage
from .table_spec import TableSpec, place

_SEATED = 8 * COUNT_UNIT  # the count that rows of small tables begin with: 8 lookups
_SETTLED = 64  # lookups a slot after which hits are held against what heat predicts
_FAR = 0.1  # below that prediction, to be told


class Arena:
    """The rows of many tables. `features` names the table of each feature (default: one feature a table, in order).

    `slots` gives each table so many slots of a full-precision cache, which tables of one dimension, precision and group share,
    and `near` so many more that hold int8 rows, for int4 and int2 tables; `policy` ("lfu", "lru", "adaptive" or "fixed") says
    which rows are kept there while training. With residency "host" the codes lie in pinned host memory, and kernels of the
    card read and write them there; metadata and cache lie on the card. `prefetch` brings the rows of a batch ahead of it.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        slots: Sequence[int] | None = None,
        policy: str = "lfu",
        residency: str = "device",
        near: Sequence[int] | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.features = tuple(range(len(tables))) if features is None else tuple(features)
        fields, code_bytes, meta_words, self.elements = place(self.tables)
        on_host = residency == "host" and torch.device(device).type == "cuda"
        self.meta = table_zeros(meta_words, torch.int32, device)
        self.codes = pinned_zeros(code_bytes, self.device) if on_host else table_zeros(code_bytes, torch.uint8, device)
        self.rows = sum(t.rows for t in self.tables)
        layout: list[tuple[int, ...]] = []
        column = 0
        for table in self.features:
            layout.append((*fields[table], column))
            column += self.tables[table].dim
        groups, none = [table.group for table in self.tables], [0] * len(self.tables)
        self.pools = make_pools(fields, slots or none, near or none, groups)
        self.cache = make_cache(self.pools, device, staging=on_host or torch.device(device).type != "cuda")
        self._fields = fields
        self.spec = write_spec(layout, self.pools, policy_of(policy), self._names())
        fields_F8 = torch.tensor(layout, dtype=torch.int64, device=device).view(-1, F.LAYOUT_FIELDS)
        self.layout = Layout.of(fields_F8, self.spec)
        self._stage: Stage | None = None
        self.staged: float | None = None  # share of rows that find room when they are prefetched; None: three batches
        self.predicted: tuple[float, int, int] | None = None  # by the heat of `warm`: share of hits; lookups and hits by then
        self._moved: dict[str, int] = {}  # by stages that are no more
        self.changes: Changes | None = None  # rows that changed since an incremental save; None where nobody asks
        self.keeper: Callable[[Tensor], None] | None = None  # is shown rows before they change, while a snapshot is written
        self.no_anchor = torch.zeros(1, device=device)

    def _names(self) -> list[tuple[int, str]]:
        """Where each table begins, and what errors call it."""
        return sorted((field[F.ROW], table.name) for field, table in zip(self._fields, self.tables, strict=True))

    def rename(self, names: Sequence[str], features: Sequence[str] = ()) -> None:
        """Call tables, and features, by these names from now on."""
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
        """Where lookups run."""
        return self.meta.device

    @property
    def bytes(self) -> int:
        """Bytes of all rows, codes and metadata, alignment included."""
        return self.codes.numel() + 4 * self.meta.numel()

    def memory(self, states: Sequence[Tensor] = ()) -> Memory:
        """Bytes of everything, with the given optimizer state."""
        parts = {
            "codes": size_of(self.codes),
            "metadata": size_of(self.meta),
            "cache": size_of(*self.cache[:2]),
            "maps": size_of(*self.cache[2 : Cache._fields.index("home")]),
            "optimizer state": size_of(*states),
        }
        if self.changes is not None:
            parts["maps"] += size_of(self.changes.bits)
        if self._stage is not None:
            parts["staging"] = self._stage.bytes
        return Memory(parts, 4 * self.elements, size_of(self.codes) if self.codes.device != self.device else 0)

    def stats(self) -> dict[str, int]:
        """Lookups, hits, admissions, evictions, write-backs, promotions and bytes moved, since it was made.

        Admissions less evictions are the rows that are cached: those that begin in the cache, small tables and what `warm` put
        there, were admitted too, and a flush evicts.
        After a prefetch also rows and bytes that came and left ahead of their batches, and lookups that found no room; after
        `warm` also the hits that its heat predicts, and a warning where hits stay far below.
        """
        if not self.cache:
            return {}
        found = {**statistics(Cache(*self.cache), self.pools), **self._moved_ahead()}
        return found if self.predicted is None else found | self._hits_since_warm(found)

    def _hits_since_warm(self, found: dict[str, int]) -> dict[str, int]:
        assert self.predicted is not None
        share, lookups_then, hits_then = self.predicted
        lookups, hits = max(0, found["lookups"] - lookups_then), max(0, found["hits"] - hits_then)
        if lookups >= _SETTLED * sum(pool.slots for pool in self.pools) and hits < (share - _FAR) * lookups:
            message = (
                f"the cache held {hits / lookups:.0%} of the lookups, and the heat that it was warmed with predicts {share:.0%}"
            )
            warnings.warn(f"{message}: it is the heat of another log, or the log has changed", stacklevel=4)
        return {"predicted_hits": hits_then + int(share * lookups)}

    def _moved_ahead(self) -> dict[str, int]:
        now = {} if self._stage is None else self._stage.statistics()
        return {name: count + self._moved.get(name, 0) for name, count in now.items()} or self._moved

    @property
    def prefetches(self) -> bool:
        """Whether rows can be brought to the card: codes lie elsewhere, and there is a cache without near slots."""
        return self.codes.device != self.device and bool(self.cache) and not any(pool.int8_slots for pool in self.pools)

    def prefetch(self, *batches: tuple[Tensor, Tensor]) -> None:
        """Bring rows of batches to the card while others are worked on: ids and offsets of each, as `lookup` takes them.

        Does nothing where `prefetches` says so. Results never depend on it.
        """
        if not self.prefetches:
            return
        for ids_N, offsets in batches:
            check_lookup(self.layout, LookupCall(ids_N, offsets, None, F.SUM))
        with torch.inference_mode(False):  # what is made here stays, and training must be able to use it
            if self._stage is None or not self._stage.suffices(batches):
                self.unstage()
                self._stage = Stage(self.codes, self.meta, self.layout, batches, self.staged)
                self._set_home(self._stage.area.home)
            else:
                self._stage.prefetch(batches)

    def arrive(self) -> None:
        """Let what follows find the rows that were prefetched last. Without it they are found at the next prefetch."""
        if self._stage is not None:
            self._stage.arrive()

    def settle(self) -> None:
        """Put rows that were prefetched back into their tables, and wait until the host may look at its memory."""
        if self._stage is not None:
            self._stage.settle()
        if self.codes.device != self.device:
            torch.cuda.current_stream(self.device).synchronize()

    def unstage(self) -> None:
        """The same, and give up the room they had."""
        self.settle()
        if self._stage is not None:
            self._moved = self._moved_ahead()
            self._set_home((0, 0, 0))
            self._stage = None

    def _set_home(self, home: tuple[int, int, int]) -> None:
        """Tell kernels where rows are staged; (0, 0, 0): nowhere."""
        Cache(*self.cache).home.numpy()[:] = home  # past autograd: compiled graphs save the tensor for their backward

    def __getstate__(self) -> dict[str, Any]:
        self.unstage()
        return self.__dict__ | {"keeper": None}  # which is about these arrays, not about copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.codes.device != self.device:
            self.codes = pin(self.codes, self.device)  # copies of pinned memory are not pinned, and no card reaches them

    def flush(self) -> None:
        """Put every cached row back into its table, rounded to nearest, and leave the cache empty.

        To nearest, because this is for reading: nothing is added up over many roundings, and it loses less than chance does.
        """
        self.settle()
        if self.cache:
            evict_all(self.codes, self.meta, Cache(*self.cache), self.pools)

    def warm(self, heat: Sequence[Tensor]) -> None:
        """Fill the cache with the hottest rows, by counts of lookups for each row of each table. Flushes it first."""
        heat = [torch.as_tensor(heat_R) for heat_R in heat]
        for table, heat_R in zip(self.tables, heat, strict=True):
            if heat_R.shape != (table.rows,) or not bool(((heat_R >= 0) & heat_R.isfinite()).all()):
                raise BadInput(
                    f"heat of table {table.name!r} is {tuple(heat_R.shape)}; it must be {table.rows} counts, finite and none "
                    "below 0"
                )
        self.flush()
        if self.keeper is not None:
            self.keeper(torch.arange(self.rows))  # any row may get a pointer
        self.predicted = None
        held = total = 0.0
        for index, pool in enumerate(self.pools):
            heat_R = torch.cat([heat[t].to(self.device) for t in self._tables_of(pool)])
            held += warm_up(self.codes, self.meta, Cache(*self.cache), self.pools, index, heat_R, self.layout.tables.policy)
            total += float(heat_R.sum(dtype=torch.float64))
        if total:
            begun = statistics(Cache(*self.cache), self.pools)
            self.predicted = held / total, begun["lookups"], begun["hits"]

    def seat_small(self, parts: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Let small tables begin in the cache, smallest first, as long as they fit into it whole. It must be empty.

        `parts`: for each table where parts of it begin and end that count as tables of their own.

        Nobody knows yet which rows are hot; those of small tables are, mostly. A row that begins in a slot is not rounded when
        its first value is set, and hot rows that begin rounded train to another model (`docs/decisions/`). They count as
        looked up a few times: else rows that are seen once, in the first batches, would drive them out.
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
                at_K, where = torch.cat(taken), (self.codes, self.meta, Cache(*self.cache), self.pools, index)
                seat(*where, at_K, torch.full_like(at_K, _SEATED, dtype=torch.int32), self.layout.tables.policy)

    def recent_counts(self) -> list[RecentCounts]:
        """What the cache knows of the heat of each table's rows. Tables that share slots share what went past them, by size."""
        if not self.cache:
            raise BadInput("there is no cache, and nothing else counts lookups; profile the log, or its batches")
        none = torch.zeros(0, dtype=torch.int64)
        found = [RecentCounts(none, none, 0) for _ in self.tables]
        for index, pool in enumerate(self.pools):
            whole = recent_counts(Cache(*self.cache), self.pools, index, self.layout.tables.policy)
            for table in self._tables_of(pool):
                rows_K = whole.rows_K - (self._fields[table][F.ROW] - pool.row)
                mine_K = (rows_K >= 0) & (rows_K < self.tables[table].rows)
                missed = whole.missed * self.tables[table].rows // pool.rows
                found[table] = RecentCounts(rows_K[mine_K], whole.counts_K[mine_K], missed)
        return found

    def touched(self, table: int, states: Sequence[Tensor]) -> Tensor:
        """Which rows of a table were ever updated, by optimizer state that is not zero; all, where there is no state."""
        spec, field = self.tables[table], self._fields[table]
        if not states:
            return torch.ones(spec.rows, dtype=torch.bool)
        if states[0].numel() == self.rows:
            return states[0][field[F.ROW] : field[F.ROW] + spec.rows] != 0
        own = states[0][field[F.ELEMENT] : field[F.ELEMENT] + spec.rows * spec.dim]
        return (own.view(spec.rows, spec.dim) != 0).any(1)

    def _tables_of(self, pool: Pool) -> list[int]:
        """The tables that share the slots of a pool, in the order of their rows."""
        mine = [t for t, field in enumerate(self._fields) if pool.row <= field[F.ROW] < pool.row + pool.rows]
        return sorted(mine, key=lambda t: self._fields[t][F.ROW])

    def changing(self, rows_N: Tensor) -> None:
        """Tell whoever keeps account of it that these arena rows are about to change."""
        if self.changes is not None:
            self.changes.mark(rows_N)
        if self.keeper is not None:
            self.keeper(rows_N)

    @property
    def watched(self) -> bool:
        """Whether anybody wants to know of changes."""
        return self.changes is not None or self.keeper is not None

    def views(self, table: int) -> tuple[Tensor, Tensor, int, int, int]:
        """The codes and meta words of one table where they lie, its first arena row, its format and dimension."""
        codes, meta, row, _, rows, dim, format = self._fields[table]
        width, words = F.row_bytes(format, dim), F.META_WORDS[format]
        codes_RB = self.codes[codes : codes + rows * width].view(rows, width)
        return codes_RB, self.meta[meta : meta + rows * words].view(rows, words), row, format, dim

    def state_views(self, table: int, states: Sequence[Tensor], by_row: bool) -> list[Tensor]:
        """Optimizer state of one table where it lies: a number for each row, or a line."""
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
            get_cached(Cache(*self.cache), meta_RW[rows_N, 0], values_ND)
        return values_ND.clone() if format == F.FP32 else values_ND  # never the arena's own memory

    def write(self, table: int, rows_N: Tensor, values_ND: Tensor, clock: Tensor | None = None) -> None:
        """Set rows of one table; rounds to nearest, or stochastically where a clock is given. NaN and Inf raise."""
        codes_RB, meta_RW, row, format, dim = self.views(table)
        if values_ND.shape != (rows_N.numel(), dim):
            raise FormatError(f"values are {tuple(values_ND.shape)}; {rows_N.numel()} rows of {dim} columns were named")
        if self.device.type == "meta":  # shapes without values, for estimates
            return
        self.settle()
        self.changing(rows_N + row)
        codes_NB, meta_NW = quantize_rows(values_ND, format, clock, rows_N + row)  # refuses bad values before any is set
        if self.cache and F.META_WORDS[format]:
            words_N = meta_RW[rows_N, 0]
            cached_N = set_cached(Cache(*self.cache), self.pools, words_N, values_ND, rows_N + row, clock)
            rows_N, codes_NB, meta_NW = rows_N[~cached_N], codes_NB[~cached_N], meta_NW[~cached_N]
        meta_RW[rows_N] = meta_NW
        codes_RB[rows_N.to(codes_RB.device)] = codes_NB.to(codes_RB.device)

    def import_fused(self, table: int, packed: Tensor, requantize_negative: bool = False) -> None:
        """Fill a table of an affine precision from torch's or FBGEMM's fused form, bit for bit (see `fused.py`)."""
        self.flush()
        codes_RB, meta_RW, row, format, dim = self.views(table)
        fused.check_format(format)
        fused.check_fused(packed, format, dim, requantize_negative)
        if packed.shape[0] != codes_RB.shape[0]:
            raise FormatError(f"the fused table has {packed.shape[0]} rows; table {table} has {codes_RB.shape[0]}")
        self.changing(torch.arange(codes_RB.shape[0], device=self.device) + row)
        fused.unpack_into(packed, format, codes_RB, meta_RW)

    def export_fused(self, table: int) -> Tensor:
        """A table of an affine precision in torch's and FBGEMM's fused form, bit for bit. Flushes the cache first."""
        self.flush()
        codes_RB, meta_RW, _, format, dim = self.views(table)
        return fused.export_fused(codes_RB, meta_RW, format, dim)

    def randomize_(self, bound: float, generator: torch.Generator | None = None, block: int = 1 << 18) -> None:
        """Fill every table with uniform values in [-bound, bound), a block of rows at a time."""
        for index, table in enumerate(self.tables):
            for first in range(0, table.rows, block):
                rows_N = torch.arange(first, min(first + block, table.rows), device=self.device)
                shape = (rows_N.numel(), table.dim)
                values_ND = torch.rand(shape, device=self.device, generator=generator) * (2 * bound) - bound
                self.write(index, rows_N, values_ND)
