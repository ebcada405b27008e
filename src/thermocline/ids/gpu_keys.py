"""Key tables on a GPU: lookups that do not wait for it, and changes that are made on a copy on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from thermocline.kernels.elastic.fields import (
    BARRIER,
    EVICTED,
    EXPIRED,
    FIND,
    PROTECTED_STEP,
    STEP,
    STEPS,
    GpuBatch,
    GpuMoves,
    StepRule,
    TableRows,
)

from .elastic import KeyTable
from .growth import PlaceOrder
from .moved_ids import Moved

_REBASE = 1 << 20  # steps between two looks at their number
T = TypeVar("T")


def look_up(keys: KeyTable, batch: GpuBatch, kind: int) -> GpuMoves | None:
    """Write the rows of ids into the batch; in steps, the ids that came. Evicted ids that are reported expire before."""
    if kind < STEP:
        keys.kernels.find_rows(keys.arrays, keys.rules, keys.counts, batch, kind)
        _write_rows(keys.places, batch)
        return None
    keys.check_clock()
    keys.gpu_steps += 1
    if keys.gpu_steps % _REBASE == 0:
        keys.rebase()
    policy = keys.policy
    rule = StepRule(policy.admit_after, policy.admit_chance, None if keys.on_evict else policy.ttl, keys.sweep, policy.grows)
    moves: GpuMoves = keys.kernels.step(keys.arrays, keys.rules, keys.counts, keys.open, batch, rule, kind == PROTECTED_STEP)
    _write_rows(keys.places, batch)
    return moves._replace(rows_C=keys.places.rows(moves.rows_C))


def _write_rows(places: PlaceOrder, batch: GpuBatch) -> None:
    """Replace the places of ids in a batch by rows, without a wait."""
    if not places.buckets:
        return
    rows_N = places.rows(batch.rows_N - batch.first) + batch.first
    if (features := batch.users_F.numel()) > 1 and rows_N.numel():
        sizes = batch.offsets[:: (batch.offsets.numel() - 1) // features].diff()
        mine_N = batch.users_F.repeat_interleave(sizes, output_size=rows_N.numel())
        rows_N = torch.where(mine_N != 0, rows_N, batch.rows_N)
    batch.rows_N.copy_(rows_N)


def rows_of(keys: KeyTable, ids_N: Tensor) -> Tensor:
    """The row of each id, its own or a shared one, on any device."""
    if not keys.on_gpu:
        return keys.find(ids_N)[0]
    one, rows_N = torch.zeros(2, dtype=torch.int32, device=ids_N.device), torch.empty_like(ids_N)
    look_up(keys, GpuBatch(ids_N, one, one[:1], rows_N), FIND)
    return rows_N


def begin_moves(keys: KeyTable, table: TableRows, moves: GpuMoves, first: int) -> None:
    """Begin the rows of ids that came; `first` is added to them."""
    keys.kernels.begin_moves(table, moves, keys.policy.bound, first)


def expire_next(keys: KeyTable, protect: bool) -> Moved:
    """Free expired rows before a step whose evicted ids are reported. Waits for the GPU."""
    step, barrier = (int(keys.counts[field]) for field in (STEPS, BARRIER))
    left_E = keys.expire(step + 1, barrier if protect else step + 1).to(keys.keys.device)
    for field in (EVICTED, EXPIRED):
        keys.counts[field] += left_E.numel()
    return Moved(keys.keys[:0], keys.keys[:0], keys.keys[left_E], keys.places.rows(left_E))


def known_moves(expired: Moved, moves: GpuMoves) -> Moved:
    """The ids that came and went in a step. Waits for the GPU."""
    count = int(moves.numbers[0])
    order_K = moves.rows_C[:count].argsort()
    came_K, rows_K, before_K, left_K = (each[:count][order_K] for each in moves[:4])
    gone_K = left_K != 0
    return Moved(came_K, rows_K, torch.cat([expired.went_E, before_K[gone_K]]), torch.cat([expired.left_E, rows_K[gone_K]]))


def on_cpu(keys: KeyTable, change: Callable[[KeyTable], T]) -> T:
    """Change a key table: in place on a CPU, of a GPU on a copy."""
    if not keys.on_gpu:
        return change(keys)
    host = copy.copy(keys)
    host.moved = None if keys.moved is None else []
    moved = {name: tensor for name, tensor in keys.tensors().items() if name != "clock"}
    for name, tensor in moved.items():
        setattr(host, name, tensor.cpu())
    result = change(host)
    for name, tensor in moved.items():
        tensor.copy_(getattr(host, name))
    keys.note_moved(*(host.moved or ()))
    return result
