"""Inputs of the checks, the same on every machine. Memory outside of rows is poisoned, so that wrong reads show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.layout import Cache, Layout, Pool, output_shape, write_spec
from thermocline.kernels.quantize import reference as quantize

_ALIGN, _POISON = 128, 0xAA


class CaseTable(NamedTuple):
    """One table of a case."""

    rows: int
    dim: int
    format: int


class VerifyCase(NamedTuple):
    """Tables, the table of each feature, and the size of a lookup. `hot`: every second id is row 1."""

    name: str
    tables: tuple[CaseTable, ...]
    features: tuple[int, ...]
    batch: int
    hot: bool

    def arena(self) -> RowArrays:
        return make_arena(self.tables, self.features)

    def build(self, mode: int, weighted: bool = False, seed: int = 0) -> tuple[RowArrays, LookupCall, Tensor]:
        """Rows, a lookup and the gradient of its output: bags of 0 to 6 ids, of 32 bits for odd seeds."""
        rows, generator = self.arena(), torch.Generator().manual_seed(seed)
        tables, bags = rows.layout.tables, 1 if mode == F.NONE else self.batch
        ids: list[Tensor] = []
        lengths: list[int] = []
        for field in tables.features:
            lengths += torch.randint(0, 7, (bags,), generator=generator).tolist() if mode != F.NONE else [self.batch]
            ids.append(torch.randint(0, field[F.ROWS], (sum(lengths[-bags:]),), generator=generator))
            if self.hot:
                ids[-1][::2] = 1
        ids_N, offsets = torch.cat(ids), torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        if seed % 2:
            ids_N, offsets = ids_N.int(), offsets.int()
        weights_N = torch.rand(ids_N.numel(), dtype=torch.float32, generator=generator) if weighted else None
        grad = torch.randn(output_shape(tables, ids_N, offsets, mode), dtype=torch.float32, generator=generator)
        return rows, LookupCall(ids_N, offsets, weights_N, mode), grad


def moved(value: Any, device: str) -> Any:
    """A copy on a device: of a tensor, or of all tensors in a tuple or list."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, (tuple, list)):
        parts = [moved(each, device) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def normal(seed: int, *shape: int) -> Tensor:
    """Normal random numbers."""
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))


def extreme_rows(rows: int, dim: int, seed: int = 0) -> Tensor:
    """Rows to quantize: normal ones, after a constant, zeros, an outlier, tiny and one-sided rows."""
    values_ND = normal(seed, rows, dim)
    values_ND[0], values_ND[1], values_ND[2, dim // 2] = 0.1, 0.0, -6e4
    values_ND[3] *= 1e-30
    values_ND[4] = values_ND[4].abs() + 7.0
    values_ND[5] *= 1e-39
    return values_ND


def make_arena(tables: Sequence[CaseTable], features: Sequence[int]) -> RowArrays:
    """An arena of filled tables. Consecutive tables of one dimension and format form one run."""
    fields: list[tuple[int, ...]] = []
    codes = meta = row = element = 0
    for number, (rows, dim, format) in enumerate(tables):
        if number == 0 or tables[number - 1][1:] != (dim, format):
            codes = -(-codes // _ALIGN) * _ALIGN
        fields.append((codes, meta, row, element, rows, dim, format))
        codes += rows * F.row_bytes(format, dim)
        meta += rows * F.META_WORDS[format]
        row, element = row + rows, element + rows * dim
    columns, lines = 0, []
    for feature in features:
        lines.append((*fields[feature], columns))
        columns += tables[feature].dim
    layout = Layout.of(torch.tensor(lines, dtype=torch.int64).view(-1, F.LAYOUT_FIELDS), write_spec(lines))
    all_codes = torch.full((codes + _ALIGN,), _POISON, dtype=torch.uint8)
    all_meta = torch.full((meta + 1,), -1, dtype=torch.int32)
    for number, table in enumerate(tables):
        codes_RB, meta_RW = quantize.quantize_rows(normal(number, table.rows, table.dim), table.format, None, None)
        at, words_at = fields[number][F.CODES], fields[number][F.META]
        all_codes[at : at + codes_RB.numel()] = codes_RB.flatten()
        all_meta[words_at : words_at + meta_RW.numel()] = meta_RW.flatten()
    return RowArrays(all_codes, all_meta, layout)


def with_cache(rows: RowArrays, slots: int, policy: int, int8_slots: int) -> RowArrays:
    """Rows of one table with a cache of empty slots, `int8_slots` of them int8."""
    codes, meta, row, _, count, dim, format, _ = field = rows.layout.tables.features[0]
    pool = Pool(dim, format, row, count, codes, meta, slots, slot=0, base=0, int8_slots=int8_slots)
    cache = Cache(
        values=normal(3, pool.fp32_slots * dim),
        near=torch.zeros(int8_slots * F.int8_slot_words(dim), dtype=torch.int32),
        rows=torch.full((slots,), F.EMPTY, dtype=torch.int64),
        scores=torch.zeros(slots, dtype=torch.int32),
        words=torch.zeros(slots, dtype=torch.int32),
        sketch=torch.zeros(4 * slots, dtype=torch.int32),
        ledger=torch.zeros(1, F.LEDGER_FIELDS, dtype=torch.int64),
        clock=torch.tensor([43, 0], dtype=torch.int64),
        steps=torch.zeros(1, dtype=torch.int64),
    )
    return rows._replace(layout=Layout.of(rows.layout.fields_F8, write_spec([field], [pool], policy)), cache=cache)


def make_optimizer(kind: int, rows: RowArrays) -> OptimizerArrays:
    """An optimizer before its first step, with non-zero states."""
    tables = rows.layout.tables
    elements = sum(field[F.ROWS] * field[F.DIM] for field in tables.distinct)
    sizes = {F.SGD: (), F.ADAGRAD: (elements,), F.ROWWISE_ADAGRAD: (tables.rows,), F.ADAM: (elements,) * 2}[kind]
    hyper = torch.zeros(F.HYPER_FIELDS, dtype=torch.float64)
    for field, value in ((F.LR, 0.05), (F.EPS, 1e-8), (F.BETA1, 0.9), (F.BETA2, 0.999), (F.WEIGHT_DECAY, 0.01)):
        hyper[field] = value
    hyper[F.BETA1_POWER] = hyper[F.BETA2_POWER] = 1.0
    states = [normal(n, size).abs() for n, size in enumerate(sizes)]
    return OptimizerArrays(states, hyper, torch.tensor([41, 0], dtype=torch.int64), kind)


def make_gradients(rows: RowArrays, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two thirds of the rows of all tables, and their gradients."""
    rows_U = torch.arange(rows.layout.tables.rows)
    rows_U = rows_U[rows_U % 3 != 1]
    return rows_U, normal(seed, rows_U.numel(), rows.layout.tables.max_dim)
