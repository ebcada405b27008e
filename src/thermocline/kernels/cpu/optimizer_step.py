"""One optimizer step on one row in scratch. Equals `update/reference.py` bit for bit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from thermocline import formats as F

from .compile import addresses, helper, inlined
from .rows import copy_floats, read_row
from .vectors import WIDTH, Emit, Vec, bits_of, block, get_f32, put_f32
from .write_row import measure_row

_ZERO = np.float32(0)
_INFINITY_BITS = 0x7F800000

# Fields of `step_constants`.
_LR, _EPS, _BETA1, _BETA2, _REST1, _REST2, _SIZE, _KEPT, DECAY = range(9)


@lru_cache(maxsize=16)
def step_constants(hyper: tuple[float, ...]) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    """fp32 constants of a step and their address, from the `hyper` tensor; kept, as most steps have the same ones.

    They are computed in double and rounded once, as the reference does.
    """
    lr, eps, beta1, beta2, decay, power1, power2 = hyper
    # The powers are 1 before the first step and without betas; nothing reads the quotient then.
    size = lr * np.sqrt(1 - power2) / (1 - power1) if power1 != 1 else 0.0
    values = [lr, eps, beta1, beta2, 1 - beta1, 1 - beta2, size, 1 - lr * decay, decay]
    constants = np.array(values, dtype=np.float64).astype(np.float32)
    return constants, addresses("f", constants)[0]


@block("i64 i64 f32 -> none")
def _decay(e: Emit, w: Any, g: Any, decay: Any) -> None:
    e.store(g, e.load_f32(g) + e.load_f32(w) * e.splat(decay))


@block("i64 i64 i64 f32 f32 -> none")
def _adagrad(e: Emit, w: Any, g: Any, s: Any, lr: Any, eps: Any) -> None:
    grad = e.load_f32(g)
    total = e.load_f32(s) + grad * grad
    e.store(s, total)
    e.store(w, e.load_f32(w) - e.splat(lr) * (grad / (total.sqrt() + e.splat(eps))))


@block("i64 i64 i64 i64 i64 -> none")
def _adam(e: Emit, w: Any, g: Any, s: Any, t: Any, hyper: Any) -> None:
    number = [e.splat(e.load_scalar(e.at(hyper, 4 * i))) for i in range(_KEPT + 1)]
    grad = e.load_f32(g)
    first = e.load_f32(s) * number[_BETA1] + grad * number[_REST1]
    second = e.load_f32(t) * number[_BETA2] + (grad * grad) * number[_REST2]
    e.store(s, first)
    e.store(t, second)
    step = number[_SIZE] * (first / (second.sqrt() + number[_EPS]))
    e.store(w, e.load_f32(w) * number[_KEPT] - step)


def _pair_sums(low: Vec, high: Vec) -> Vec:
    """16 sums of neighbours among 32 numbers."""
    return low.shuffle(high, range(0, 2 * WIDTH, 2)) + low.shuffle(high, range(1, 2 * WIDTH, 2))


def _square_sum(blocks: int) -> Any:
    """Tree sum of the squares of `left` numbers, more than half of 16 * blocks, in registers."""

    @block("i64 i64 -> f32")
    def summed(e: Emit, g: Any, left: Any) -> Any:
        vecs = [e.load_f32(e.at(g, 4 * WIDTH * k)) for k in range(blocks)]
        for k in range(blocks // 2, blocks):
            vecs[k] = vecs[k].where(e.first(e.at(left, -WIDTH * k)), 0.0)
        vecs = [vec * vec for vec in vecs]
        while len(vecs) > 1:
            vecs = [_pair_sums(*vecs[k : k + 2]) for k in range(0, len(vecs), 2)]
        return vecs[0].fold(Vec.__add__)

    return summed


_square_sum1, _square_sum2, _square_sum4, _square_sum8 = (_square_sum(blocks) for blocks in (1, 2, 4, 8))
_MOST_SQUARES = 8 * WIDTH


@inlined
def _square_sum_of(g, left):
    if left > 4 * WIDTH:
        return _square_sum8(g, left)
    if left > 2 * WIDTH:
        return _square_sum4(g, left)
    if left > WIDTH:
        return _square_sum2(g, left)
    return _square_sum1(g, left) if left > 0 else _ZERO


@inlined
def _mean_square(g, dim, planes, sums):
    """Mean of g^2 by the reference's tree sum; further zeros of padding change nothing."""
    if dim & (dim - 1) == 0:  # planes make no difference
        planes = 1
    width, each, count = (dim + planes - 1) // planes, 1, 0
    while each * _MOST_SQUARES < width:
        each *= 2
    for p in range(planes):
        for k in range(0, each * _MOST_SQUARES, _MOST_SQUARES):
            left = min(width - k, dim - p * width - k, _MOST_SQUARES)
            put_f32(sums, count, _square_sum_of(g + 4 * (p * width + k), left))
            count += 1
    while count > 1:
        count //= 2
        for k in range(count):
            put_f32(sums, k, get_f32(sums, 2 * k) + get_f32(sums, 2 * k + 1))
    return get_f32(sums, 0) / np.float32(dim)


@helper
def decay_gradient(format, row, meta, dim, decay, g, w):
    """Add the gradient of the L2 penalty to that of a row; the weights go to scratch."""
    read_row(format, row, meta, dim, w)
    for c in range(0, 4 * dim, 4 * WIDTH):
        _decay(w + c, g + c, decay)


@inlined
def row_learning_rate(optimizer, g, dim, planes, sums, state, new_state, hyper):
    """The factor of a row's gradient. Row-wise Adagrad writes its new state to scratch."""
    lr = get_f32(hyper, _LR)
    if optimizer == F.ROWWISE_ADAGRAD:
        total = get_f32(state, 0) + _mean_square(g, dim, planes, sums)
        put_f32(new_state, 0, total)
        return lr / (np.sqrt(total) + get_f32(hyper, _EPS))
    return lr


@inlined
def is_finite(state):
    """Whether a state is finite: the square of a finite gradient may overflow."""
    return bits_of(state) & 0x7FFFFFFF < _INFINITY_BITS


@helper
def step_columns(optimizer, format, row, meta, state0, state1, dim, g, w, s, t, hyper):
    """Adagrad and Adam: new weights and states into scratch; returns the extent of the weights.

    A state that is not finite makes the extent infinite, and the row is refused.
    """
    read_row(format, row, meta, dim, w)
    copy_floats(state0, s, dim)
    if optimizer == F.ADAGRAD:
        for c in range(0, 4 * dim, 4 * WIDTH):
            _adagrad(w + c, g + c, s + c, get_f32(hyper, _LR), get_f32(hyper, _EPS))
    else:
        copy_floats(state1, t, dim)
        for c in range(0, 4 * dim, 4 * WIDTH):
            _adam(w + c, g + c, s + c, t + c, hyper)
    low, high, top = measure_row(w, dim)
    _, _, state_top = measure_row(s, dim)
    if optimizer == F.ADAM:
        _, _, second_top = measure_row(t, dim)
        state_top = max(state_top, second_top)
    return low, high, top if state_top < _INFINITY_BITS else _INFINITY_BITS
