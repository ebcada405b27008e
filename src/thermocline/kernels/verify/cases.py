"""Inputs of the checks: tables, lookups and gradients, the same on every machine.

Memory outside of rows is poisoned, so that a wrong read shows up as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.layout import Cache, Layout, Pool, output_shape, write_spec
from thermocline.kernels.quantize import reference as quantize

_ALIGN = 128
_POISON = 0xAA


class CaseTable(NamedTuple):
    """One table of a tables_case."""

    rows: int
    dim: int
    format: int


class CaseArena(NamedTuple):
    """The arrays of tables."""

    codes: Tensor
    meta: Tensor
    layout: Layout
    elements: int

    @property
    def arrays(self) -> RowArrays:
        return RowArrays(self.codes, self.meta, self.layout)

    def to(self, device: str) -> CaseArena:
        """A copy on a device."""
        layout = self.layout._replace(fields_F8=self.layout.fields_F8.to(device))
        return CaseArena(self.codes.to(device, copy=True), self.meta.to(device, copy=True), layout, self.elements)


class CaseLookup(NamedTuple):
    """A lookup, in the order of kernel arguments, and the gradient of its output."""

    ids_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    mode: int
    grad: Tensor

    @property
    def call(self) -> LookupCall:
        return LookupCall(self.ids_N, self.offsets, self.weights_N, self.mode)

    def to(self, device: str) -> CaseLookup:
        weights_N = None if self.weights_N is None else self.weights_N.to(device)
        return CaseLookup(self.ids_N.to(device), self.offsets.to(device), weights_N, self.mode, self.grad.to(device))


class CaseOptimizer(NamedTuple):
    """The optimizer arrays of an update."""

    code: int
    states: list[Tensor]
    hyper: Tensor
    clock: Tensor

    @property
    def arrays(self) -> OptimizerArrays:
        return OptimizerArrays(self.states, self.hyper, self.clock, self.code)

    def to(self, device: str) -> CaseOptimizer:
        states = [s.to(device, copy=True) for s in self.states]
        return CaseOptimizer(self.code, states, self.hyper.to(device, copy=True), self.clock.to(device, copy=True))


def normal(seed: int, *shape: int) -> Tensor:
    """Normal random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def extreme_rows(rows: int, dim: int, seed: int = 0) -> Tensor:
    """Rows to quantize: normal ones, after a constant, zeros, an outlier, tiny and one-sided rows."""
    values_ND = normal(seed, rows, dim)
    values_ND[0] = 0.1
    values_ND[1] = 0.0
    values_ND[2, dim // 2] = -6e4
    values_ND[3] *= 1e-30
    values_ND[4] = values_ND[4].abs() + 7.0
    values_ND[5] *= 1e-39
    return values_ND


def make_arena(tables: Sequence[CaseTable], features: Sequence[int] | None = None) -> CaseArena:
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
    columns, layout = 0, []
    for feature in range(len(tables)) if features is None else features:
        layout.append((*fields[feature], columns))
        columns += tables[feature].dim
    fields_F8 = torch.tensor(layout, dtype=torch.int64).view(-1, F.LAYOUT_FIELDS)
    all_codes = torch.full((codes + _ALIGN,), _POISON, dtype=torch.uint8)
    arena = CaseArena(
        all_codes, torch.full((meta + 1,), -1, dtype=torch.int32), Layout.of(fields_F8, write_spec(layout)), element
    )
    for number, table in enumerate(tables):
        codes_RB, meta_RW = quantize.quantize_rows(normal(number, table.rows, table.dim), table.format, None, None)
        at, words_at = fields[number][F.CODES], fields[number][F.META]
        arena.codes[at : at + codes_RB.numel()] = codes_RB.flatten()
        arena.meta[words_at : words_at + meta_RW.numel()] = meta_RW.flatten()
    return arena


def with_cache(arena: CaseArena, slots: int, policy: int, int8_slots: int = 0) -> tuple[CaseArena, Cache]:
    """An arena of one table with a cache of empty slots, `int8_slots` of them int8."""
    tables = arena.layout.tables
    field = tables.features[0]
    place = (field[F.ROW], field[F.ROWS], field[F.CODES], field[F.META])
    pool = Pool(field[F.DIM], field[F.FORMAT], *place, slots, slot=0, base=0, int8_slots=int8_slots)
    layout = Layout.of(arena.layout.fields_F8, write_spec(tables.features, [pool], policy))
    cache = Cache(
        values=normal(3, pool.fp32_slots * field[F.DIM]),
        near=torch.zeros(int8_slots * F.int8_slot_words(field[F.DIM]), dtype=torch.int32),
        rows=torch.full((slots,), F.EMPTY),
        scores=torch.zeros(slots, dtype=torch.int32),
        words=torch.zeros(slots, dtype=torch.int32),
        sketch=torch.zeros(4 * slots, dtype=torch.int32),
        ledger=torch.zeros(1, F.LEDGER_FIELDS, dtype=torch.int64),
        clock=torch.tensor([43, 0]),
        steps=torch.zeros(1, dtype=torch.int64),
    )
    return arena._replace(layout=layout), cache


def make_lookup(
    arena: CaseArena, mode: int, batch: int, weighted: bool = False, hot: bool = False, seed: int = 0
) -> CaseLookup:
    """Bags of 0 to 6 ids. `hot`: every second id is row 1."""
    generator = torch.Generator().manual_seed(seed)
    tables = arena.layout.tables
    bags = 1 if mode == F.NONE else batch
    ids: list[Tensor] = []
    lengths: list[int] = []
    for field in tables.features:
        lengths += torch.randint(0, 7, (bags,), generator=generator).tolist() if mode != F.NONE else [batch]
        ids.append(torch.randint(0, field[F.ROWS], (sum(lengths[-bags:]),), generator=generator))
        if hot:
            ids[-1][::2] = 1
    ids_N, offsets = torch.cat(ids), torch.tensor([0, *lengths]).cumsum(0)
    if seed % 2:
        ids_N, offsets = ids_N.int(), offsets.int()
    weights_N = torch.rand(ids_N.numel(), generator=generator) if weighted else None
    shape = output_shape(tables, ids_N, offsets, mode)
    return CaseLookup(ids_N, offsets, weights_N, mode, torch.randn(shape, generator=generator))


def optimizer(code: int, arena: CaseArena) -> CaseOptimizer:
    """An optimizer before its first step, with non-zero states."""
    tables = arena.layout.tables
    sizes = {F.SGD: (), F.ADAGRAD: (arena.elements,), F.ROWWISE_ADAGRAD: (tables.rows,), F.ADAM: (arena.elements,) * 2}
    hyper = torch.zeros(F.HYPER_FIELDS, dtype=torch.float64)
    for field, value in ((F.LR, 0.05), (F.EPS, 1e-8), (F.BETA1, 0.9), (F.BETA2, 0.999), (F.WEIGHT_DECAY, 0.01)):
        hyper[field] = value
    hyper[F.BETA1_POWER] = hyper[F.BETA2_POWER] = 1.0
    states = [normal(n, size).abs() for n, size in enumerate(sizes[code])]
    return CaseOptimizer(code, states, hyper, torch.tensor([41, 0]))


def make_gradients(arena: CaseArena, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two thirds of the rows of all tables, and their gradients."""
    tables = arena.layout.tables
    rows_U = torch.arange(tables.rows)
    rows_U = rows_U[rows_U % 3 != 1]
    return rows_U, normal(seed, rows_U.numel(), tables.max_dim)
