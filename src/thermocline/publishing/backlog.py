"""`RowBacklog`: what a byte budget sends of the changed rows, and how.

The error of a row is its heat times the squared distance between the row and what servers have of it: lookups pay for both.
Three quarters of the budget go to the largest errors, as small steps (`row_steps.py`), a tenth of the bytes of a row. The rest
sends whole rows, those that wait longest first, so each is sent within `pending bytes / (budget / 4)` seconds.

This needs a copy of all rows as servers have them. Rejected: updates in place of the error, which need none and lose more
(docs/decisions/publishing.md). The copy belongs to the thread of the log. The training thread copies rows: those that changed,
and those that are `wanted` because they have the largest errors, or wait longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.checkpoint.publishes.part import PublishedTable
from thermocline.checkpoint.publishes.row_delta import RowDelta, merge_deltas
from thermocline.checkpoint.publishes.row_steps import FORMATS, MOST_CODES, STEP_BYTES, RowSteps, coefficients, directions_of
from thermocline.kernels import dequantize_rows
from thermocline.rows.change_bitmap import UpdateCounts

from .selection import RowAges, choose, waiting_ages

_LEAST_BYTES = 1.5  # of a row as a step, to bound how many are tried
_TRIES, _MOST_TRIES, _CLOSE = 6, 16, 0.93  # to find the step that fills the budget, and the share that is enough
_WANTED, _COOL = 1 << 14, 4096  # rows at least; publishes until heat is halved
_LARGEST, _HUGE = 127, 1e20  # code of a step; error of a row that is not finite, or too far for a step

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]


class CopiedRows(NamedTuple):
    """Rows of one slot of a backlog, as a checkpoint of the moment would serve them."""

    slot: int
    places_K: Rows  # in the slot, ascending
    delta: RowDelta  # numbered as in the table
    counts_K: NDArray[np.uint8]  # updates since the last publish


class ChosenRows(NamedTuple):
    """What a publish has: all of its rows; and the same in few bytes, whole rows and steps."""

    rows: dict[str, RowDelta]
    whole: dict[str, RowDelta]
    steps: list[RowSteps]
    waiting: tuple[tuple[float, float], ...]


class _Group(NamedTuple):
    """Rows of equal columns that may be sent as steps, by table and number."""

    slot_K: Rows
    place_K: Rows
    number_K: Rows
    exponents_K: NDArray[np.int8]
    coefficients_DK: Floats
    directions_DD: NDArray[np.int8]


class RowBacklog:
    """Rows of several slots, which are tables of arenas. `served`: all rows of each slot as servers have them."""

    def __init__(
        self, tables: Sequence[PublishedTable], served: Sequence[RowDelta], clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._tables, self._served = tables, served
        names = [table.name for table in tables]
        self._number_S = np.array([names.index(name) for name in names], np.int64)  # equal for parts of one table
        self.first = np.cumsum([0, *(len(each.codes_KB) for each in served)])
        rows = int(self.first[-1])
        self._heat_R, self._error_R = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        self._whole_R, self._waits_R = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)  # waits: nothing of it was sent
        self._ages, self._step, self._publishes = RowAges(rows, clock), 1e-2, 0
        self.wanted: Rows = np.zeros(0, np.int64)
        self._sent = self.wanted

    @property
    def pending(self) -> Rows:
        """Rows that servers have otherwise."""
        return np.flatnonzero((self._error_R > 0) | self._waits_R)

    def send_whole(self, copied: Sequence[CopiedRows]) -> None:
        """Send pending and copied rows whole: a server loaded a save, which has other values of them than were sent."""
        for at_K in (self.pending, *map(self._at, copied)):
            self._whole_R[at_K] = True

    def give_back(self) -> None:
        """The last publish failed: send its rows again, whole."""
        self._whole_R[self._sent] = self._waits_R[self._sent] = True
        self.wanted = np.union1d(self.wanted, self._sent)

    def choose(self, copied: Sequence[CopiedRows], available: float, steps: bool) -> ChosenRows:
        """Which copied rows to send with the available bytes. `steps`: whether servers take steps."""
        copied = [each for each in copied if len(each.places_K)]
        at_K = self._sent = _joined([self._at(each) for each in copied], np.int64)
        counts_K = _joined([each.counts_K for each in copied], np.uint8)
        first_K = counts_K == UpdateCounts.FIRST  # another id's now
        self._heat_R[at_K] = np.where(first_K, 1, self._heat_R[at_K] + counts_K)
        self._waits_R[at_K] |= counts_K > 0
        changes = [self._measure(each) for each in copied]
        error_K, waits_K, age_K = self._error_R[at_K], self._waits_R[at_K], np.zeros(len(at_K))
        age_K[waits_K] = self._ages.seconds(at_K[waits_K])
        tables = [(self._tables[each.slot], len(each.places_K)) for each in copied]
        bytes_K = _joined([np.full(rows, whole_bytes(table)) for table, rows in tables], np.int64)
        fine_K = _joined([np.full(rows, table.format in FORMATS) for table, rows in tables], np.bool_)
        dim_K = _joined([np.full(rows, table.dim) for table, rows in tables], np.int64)
        fine_K &= ~self._whole_R[at_K] & (error_K < _HUGE) & (dim_K**2 < available / 2) & steps
        whole_K = choose(bytes_K, first_K, error_K, age_K, fine_K, available)
        left = max(available - float(bytes_K[whole_K].sum()), 0.0)
        few_K = _tried(np.flatnonzero(fine_K & ~whole_K & (error_K > 0)), error_K, dim_K, left)
        whole = self._put_whole(copied, np.flatnonzero(whole_K))
        found = self._fill(self._groups(copied, changes, few_K), left)
        rows = _merged([*whole.items(), *(each for places, some in found for each in self._put_steps(*places, some).items())])
        for each in copied if found else ():
            self._measure(each)
        self._sent = at_K[whole_K | (waits_K & ~self._waits_R[at_K]) | (error_K != self._error_R[at_K])]
        waiting = waiting_ages(self._heat_R[at_K], age_K, ~self._waits_R[at_K])
        self._want()
        return ChosenRows(rows, whole, [some for _, some in found], waiting)

    def _at(self, copied: CopiedRows) -> Rows:
        found: Rows = self.first[copied.slot] + copied.places_K
        return found

    def _measure(self, copied: CopiedRows) -> Floats:
        """How rows differ from what servers have; keeps their errors."""
        table, at_K = self._tables[copied.slot], self._at(copied)
        now_KD, before_KD = (
            dequantize_rows(torch.from_numpy(each.codes_KB), torch.from_numpy(each.meta_KW), table.format, table.dim).numpy()
            for each in (copied.delta, taken(self._served[copied.slot], copied.places_K))
        )
        change_KD: Floats = now_KD - before_KD
        with np.errstate(over="ignore", invalid="ignore"):
            error_K = np.maximum(self._heat_R[at_K], 1) * np.square(change_KD).sum(1)
        self._error_R[at_K] = np.nan_to_num(error_K, nan=_HUGE, posinf=_HUGE).clip(max=_HUGE)
        return change_KD

    def _want(self) -> None:
        """Find the rows that the next publish copies beside those that change until then."""
        self._publishes += 1
        if self._publishes % _COOL == 0:
            self._heat_R /= 2
        pending_P, most = self.pending, max(_WANTED, 2 * len(self._sent))
        if len(pending_P) > most:
            waits_P = pending_P[self._waits_R[pending_P]]
            oldest = waits_P[np.argsort(-self._ages.seconds(waits_P), kind="stable")[: most // 2]]
            worst = pending_P[np.argpartition(-self._error_R[pending_P], most // 2)[: most // 2]]
            pending_P = np.union1d(oldest, worst)
        self.wanted = pending_P

    def _put(self, slot: int, places_K: Rows, delta: RowDelta) -> None:
        """Remember that servers have rows now."""
        served, at_K = self._served[slot], self.first[slot] + places_K
        served.codes_KB[places_K], served.meta_KW[places_K] = delta.codes_KB, delta.meta_KW
        self._error_R[at_K] = 0
        self._whole_R[at_K] = self._waits_R[at_K] = False
        self._ages.forget(at_K)

    def _put_whole(self, copied: Sequence[CopiedRows], sent_K: Rows) -> dict[str, RowDelta]:
        """Remember that servers have rows now. Returns them by table."""
        found = list[tuple[str, RowDelta]]()
        for each, mine_K in _split(copied, sent_K):
            if len(mine_K):
                self._put(each.slot, each.places_K[mine_K], delta := taken(each.delta, mine_K))
                found.append((self._tables[each.slot].name, delta))
        return _merged(found)

    # -- steps --------------------------------------------------------------------------------------------------------------

    def _put_steps(self, slot_K: Rows, place_K: Rows, steps: RowSteps) -> dict[str, RowDelta]:
        """Remember that servers have steps now. Returns the rows after them."""
        base, formats = dict[str, RowDelta](), {table.name: table.format for table in self._tables}
        for name, part in steps.parts():
            slots, places = slot_K[part], place_K[part]
            pieces = [taken(self._served[slot], places[slots == slot]) for slot in np.unique(slots).tolist()]
            order_K = np.argsort(slots, kind="stable").argsort()  # back to the order of the table
            codes_KB, meta_KW = (np.concatenate([getattr(each, field) for each in pieces]) for field in ("codes_KB", "meta_KW"))
            base[name] = RowDelta(steps.rows_K[part], codes_KB[order_K], meta_KW[order_K])
        after = steps.applied(base, formats)
        for name, part in steps.parts():
            for slot in np.unique(slot_K[part]).tolist():
                mine_M = np.flatnonzero(slot_K[part] == slot)
                self._put(slot, place_K[part][mine_M], taken(after[name], mine_M))
        return after

    def _groups(self, copied: Sequence[CopiedRows], changes: Sequence[Floats], few_K: Rows) -> list[_Group]:
        """Rows that are tried as steps, by columns."""
        parts = dict[int, list[tuple[CopiedRows, Floats, Rows]]]()
        for (each, mine_K), change_KD in zip(_split(copied, few_K), changes, strict=True):
            if len(mine_K):
                parts.setdefault(change_KD.shape[1], []).append((each, change_KD[mine_K], mine_K))
        return [self._group(each) for each in parts.values()]

    def _group(self, parts: Sequence[tuple[CopiedRows, Floats, Rows]]) -> _Group:
        slot_K = np.concatenate([np.full(len(few_K), each.slot) for each, _, few_K in parts])
        place_K = np.concatenate([each.places_K[few_K] for each, _, few_K in parts])
        number_K = np.concatenate([each.delta.rows_K[few_K] for each, _, few_K in parts])
        change_KD = np.concatenate([change_KD for _, change_KD, _ in parts])
        order_K = np.lexsort((number_K, self._number_S[slot_K]))
        slot_K, place_K, number_K, change_KD = slot_K[order_K], place_K[order_K], number_K[order_K], change_KD[order_K]
        weight_K = np.sqrt(np.maximum(self._heat_R[self.first[slot_K] + place_K], 1))
        directions_DD = directions_of(change_KD * weight_K[:, None])
        exponents_K = -np.rint(np.log2(weight_K)).astype(np.int8)
        return _Group(slot_K, place_K, number_K, exponents_K, coefficients(change_KD, directions_DD), directions_DD)

    def _fill(self, groups: Sequence[_Group], available: float) -> list[tuple[tuple[Rows, Rows], RowSteps]]:
        """The finest steps of rows that fit, with the slots and places of the rows."""
        best: list[tuple[tuple[Rows, Rows], RowSteps]] = []
        low, high = 0.0, np.inf  # a step that is too fine, and one that fits
        for tries in range(_MOST_TRIES if groups and available > 0 else 0):
            if tries >= _TRIES and best:
                break
            found = [self._rounded(group, self._step) for group in groups]
            found = [each for each in found if len(each[1].rows_K)]
            size = sum(len(piece) for _, steps in found for piece in steps.pieces)
            if size <= available:
                best, high = found, self._step
                if size > _CLOSE * available:
                    break
            else:
                low = self._step
            between = low > 0 and high < np.inf
            self._step = float(
                np.sqrt(low * high) if between else self._step * np.clip(1.03 * size / max(available, 1), 0.3, 3)
            )
        self._step = high if high < np.inf else self._step
        return best

    def _rounded(self, group: _Group, step: float) -> tuple[tuple[Rows, Rows], RowSteps]:
        """Rows of a group that move by at least half a step."""
        size_K = np.ldexp(np.float32(step), group.exponents_K.astype(np.int32))
        codes_DK = np.rint(group.coefficients_DK / size_K).clip(-_LARGEST, _LARGEST).astype(np.int8)
        kept = np.flatnonzero(codes_DK.any(0))
        slot_K = group.slot_K[kept]
        numbers, counts = np.unique(self._number_S[slot_K], return_counts=True)  # rows are sorted by them
        tables = [(self._tables[number].name, count) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)]
        steps = RowSteps(
            tables, group.number_K[kept], group.exponents_K[kept], codes_DK[:, kept], group.directions_DD, step
        )  # fmt: skip
        return (slot_K, group.place_K[kept]), steps


def whole_bytes(table: PublishedTable) -> int:
    """Bytes of a row in a publish."""
    return 8 + F.row_bytes(table.format, table.dim) + 4 * F.META_WORDS[table.format]


def _tried(few_K: Rows, error_K: Floats, dim_K: Rows, left: float) -> Rows:
    """The rows that are tried as steps, those with the largest errors, ascending: as many as bytes are left for, and fit."""
    few_K = few_K[np.argsort(-error_K[few_K], kind="stable")[: int(min(left / _LEAST_BYTES, len(few_K)))]]
    codes_K = np.cumsum(dim_K[few_K] + STEP_BYTES)
    most = MOST_CODES - int(np.square(np.unique(dim_K[few_K])).sum())
    return np.sort(few_K[codes_K <= most])


def taken(delta: RowDelta, which_K: Rows) -> RowDelta:
    """Some rows of a delta."""
    return RowDelta(delta.rows_K[which_K], delta.codes_KB[which_K], delta.meta_KW[which_K])


def _split(copied: Sequence[CopiedRows], some_K: Rows) -> Iterator[tuple[CopiedRows, Rows]]:
    """Positions among all copied rows, ascending, as positions in each."""
    begin = 0
    for each in copied:
        low, high = np.searchsorted(some_K, (begin, begin + len(each.places_K)))
        yield each, some_K[low:high] - begin
        begin += len(each.places_K)


def _merged(found: Sequence[tuple[str, RowDelta]]) -> dict[str, RowDelta]:
    """Rows by table, ascending."""
    deltas = dict[str, list[RowDelta]]()
    for name, delta in found:
        deltas.setdefault(name, []).append(delta)
    merged = {name: merge_deltas(each) for name, each in deltas.items()}
    return {name: taken(each, each.rows_K.argsort()) for name, each in merged.items()}  # places of a rank have another order


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])
