"""Update rows from their summed gradients: the definition, in IEEE fp32 operations without fused multiply-add.

A row is refused, and nothing of it written, if its new value is not below 2**126 in magnitude or its new state is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient
from thermocline.kernels.arguments import OptimizerArrays, RowArrays
from thermocline.kernels.cache import reference as caching
from thermocline.kernels.gather.reference import read_rows
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.slots import write_pointed

# Row-wise Adagrad keeps one number a row, the others one or two a column.
STATES = {F.SGD: 0, F.ADAGRAD: 1, F.ROWWISE_ADAGRAD: 1, F.ADAM: 2}
LIMIT = 2.0**126


def advance(clock: Tensor, hyper: Tensor) -> None:
    """One more step: the clock ticks and the powers of Adam's betas follow it."""
    clock[F.STEP] += 1
    hyper[F.BETA1_POWER : F.BETA2_POWER + 1] *= hyper[F.BETA1 : F.BETA2 + 1]


def tree_sum(x_ND: Tensor, planes: int) -> Tensor:
    """Sum over columns in a fixed order."""
    width = -(-x_ND.shape[1] // planes)
    size = 1 << (width - 1).bit_length()
    x_NPH = torch.nn.functional.pad(x_ND, (0, planes * width - x_ND.shape[1])).view(-1, planes, width)
    x_ND = torch.nn.functional.pad(x_NPH, (0, size - width)).view(-1, planes * size)
    while x_ND.shape[1] > 1:
        x_ND = x_ND[:, 0::2] + x_ND[:, 1::2]
    return x_ND[:, 0]


def square_root(x: Tensor) -> Tensor:
    """IEEE fp32 square root. torch's own is off by one in the last place for one number in six on CPUs (MKL)."""
    return x.double().sqrt().float()


def step(
    weight_ND: Tensor, grad_ND: Tensor, states: Sequence[Tensor], hyper: Tensor, optimizer: int, planes: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """(new weights, new states) of one step of the optimizer; hyper is float64, all the rest fp32."""
    lr, eps = hyper[F.LR].float(), hyper[F.EPS].float()
    if optimizer != F.ADAM:
        grad_ND = grad_ND + weight_ND * hyper[F.WEIGHT_DECAY].float()
    if optimizer == F.SGD:
        return weight_ND - lr * grad_ND, []
    if optimizer == F.ADAGRAD:
        sum_ND = states[0] + grad_ND * grad_ND
        return weight_ND - lr * (grad_ND / (square_root(sum_ND) + eps)), [sum_ND]
    if optimizer == F.ROWWISE_ADAGRAD:
        sum_N = states[0] + tree_sum(grad_ND * grad_ND, planes) / float(grad_ND.shape[1])
        return weight_ND - (lr / (square_root(sum_N) + eps))[:, None] * grad_ND, [sum_N]
    beta1, beta2 = hyper[F.BETA1].float(), hyper[F.BETA2].float()
    first_ND = states[0] * beta1 + grad_ND * (1 - hyper[F.BETA1]).float()
    second_ND = states[1] * beta2 + (grad_ND * grad_ND) * (1 - hyper[F.BETA2]).float()
    size = (hyper[F.LR] * (1 - hyper[F.BETA2_POWER]).sqrt() / (1 - hyper[F.BETA1_POWER])).float()
    kept_ND = weight_ND * (1 - hyper[F.LR] * hyper[F.WEIGHT_DECAY]).float()
    return kept_ND - size * (first_ND / (square_root(second_ND) + eps)), [first_ND, second_ND]


def update_rows(
    rows: RowArrays, optimizer: OptimizerArrays, rows_U: Tensor, grads_UW: Tensor, counts_U: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:  # fmt: skip
    """One more step of the clock, then update distinct arena rows in place. Lookups are counted for the cache.

    Rounding bits of a row are drawn for its name; without names, rows are named by their arena rows.
    """
    codes, meta, layout, cache = rows
    states, hyper, clock, kind, stochastic = optimizer
    advance(clock, hyper)
    names_U = rows_U if names_U is None else names_U
    if cache is not None:
        counts_U = torch.ones_like(rows_U) if counts_U is None else counts_U
        caching.refresh(codes, meta, cache, layout, rows_U, counts_U, stochastic)
    refused: list[Tensor] = []
    for field in layout.tables.distinct:
        format, dim, count, row = field[F.FORMAT], field[F.DIM], field[F.ROWS], field[F.ROW]
        width, words = F.row_bytes(format, dim), F.META_WORDS[format]
        mine = (rows_U >= row) & (rows_U < row + count)
        at_N, name_N = rows_U[mine] - row, names_U[mine]
        codes_RB = codes[field[F.CODES] : field[F.CODES] + count * width].view(count, width)
        meta_RW = meta[field[F.META] : field[F.META] + count * words].view(count, words)
        if kind == F.ROWWISE_ADAGRAD:
            tables = [s[row : row + count] for s in states]
        else:
            tables = [s[field[F.ELEMENT] : field[F.ELEMENT] + count * dim].view(count, dim) for s in states]
        weight_ND = read_rows(codes, meta, field, at_N, cache)
        old_states = [s[at_N] for s in tables]
        weight_ND, new_states = step(weight_ND, grads_UW[mine, :dim], old_states, hyper, kind, F.planes(format))
        good_N = (weight_ND.abs() < LIMIT).all(dim=1)
        for new in new_states:
            good_N &= new.isfinite() if new.dim() == 1 else new.isfinite().all(dim=1)
        refused.append(name_N[~good_N])
        at_N, name_N, weight_ND = at_N[good_N], name_N[good_N], weight_ND[good_N]
        for table, new in zip(tables, new_states, strict=True):
            table[at_N] = new[good_N]
        if cache is not None and words:
            cached_N = meta_RW[at_N, 0] < 0
            at_K = at_N[cached_N]
            write_pointed(cache, meta_RW[at_K, 0], weight_ND[cached_N], name_N[cached_N], clock if stochastic else None)
            at_N, name_N, weight_ND = at_N[~cached_N], name_N[~cached_N], weight_ND[~cached_N]
        codes_RB[at_N], meta_RW[at_N] = quantize.quantize_rows(weight_ND, format, clock if stochastic else None, name_N)
    bad = torch.cat(refused)
    if bad.numel():
        raise BadGradient(int(bad.min()), int(clock[F.STEP]), *layout.tables.table_of(int(bad.min())))
