"""One optimizer step on one row in scratch. Bit for bit what `update/reference.py` says.

SGD and row-wise Adagrad both take a multiple of the gradient from the row: here is only that multiple (`step_rate`),
the rest is `descend_row`. Adagrad and Adam go column by column with states of their own (`step_columns`).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from .compile import helper, inlined
from .rows import copy_floats, read_row
from .vectors import WIDTH, Emit, Vec, bits_of, block, get_f32, put_f32
from .write_row import largest_magnitude, measure_row

_ZERO = np.float32(0)
_INFINITY_BITS = 0x7F800000

# Fields of the fp32 numbers a step reads, made by `numbers`.
_LR, _EPS, _BETA1, _BETA2, _REST1, _REST2, _SIZE, _ROOT, _KEPT = range(9)


def numbers(hyper: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a step reads, from the `hyper` tensor: computed in double and rounded once, as the reference does."""
    lr, eps, beta1, beta2, decay, power1, power2 = hyper
    # Powers are 1 where no step was taken yet or the optimizer has no betas; nothing reads the quotient then.
    size = lr / (1 - power1) if power1 != 1 else 0.0
    values = [lr, eps, beta1, beta2, 1 - beta1, 1 - beta2, size, np.sqrt(1 - power2), 1 - lr * decay]
    return np.array(values, dtype=np.float64).astype(np.float32)


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
    step = number[_SIZE] * (first / (second.sqrt() / number[_ROOT] + number[_EPS]))
    e.store(w, e.load_f32(w) * number[_KEPT] - step)


def _neighbours(low: Vec, high: Vec) -> Vec:
    """16 sums of neighbours among 32 numbers."""
    return low.shuffle(high, range(0, 2 * WIDTH, 2)) + low.shuffle(high, range(1, 2 * WIDTH, 2))


def _summed(blocks: int) -> Any:
    """Tree sum of the squares of 16 * blocks numbers, in registers."""

    @block("i64 -> f32")
    def summed(e: Emit, g: Any) -> Any:
        vecs = [e.load_f32(e.at(g, 4 * WIDTH * k)) for k in range(blocks)]
        vecs = [v * v for v in vecs]
        while len(vecs) > 1:
            vecs = [_neighbours(*vecs[k : k + 2]) for k in range(0, len(vecs), 2)]
        return vecs[0].fold(Vec.__add__)

    return summed


_summed4, _summed8 = _summed(4), _summed(8)


@block("i64 i64 -> f32")
def _summed_part(e: Emit, g: Any, left: Any) -> Any:
    vec = e.load_f32(g).where(e.first(left), 0.0)
    return (vec * vec).fold(Vec.__add__)


@inlined
def _mean_square(g, dim, planes, sums):
    """Mean of g^2: the tree sum of the reference. More zeros than it fills planes up with change nothing."""
    if dim == 4 * WIDTH:
        return _summed4(g) / np.float32(dim)
    count = 0
    if dim & (dim - 1) == 0 and dim >= 8 * WIDTH:  # planes make no difference then
        for c in range(0, dim, 8 * WIDTH):
            put_f32(sums, count, _summed8(g + 4 * c))
            count += 1
    else:
        width = (dim + planes - 1) // planes
        each = 1
        while each * WIDTH < width:
            each *= 2
        for p in range(planes):
            for k in range(each):
                column, left = p * width + k * WIDTH, min(width - k * WIDTH, dim - p * width - k * WIDTH)
                put_f32(sums, count, _summed_part(g + 4 * column, left) if left > 0 else _ZERO)
                count += 1
    while count > 1:
        count //= 2
        for k in range(count):
            put_f32(sums, k, get_f32(sums, 2 * k) + get_f32(sums, 2 * k + 1))
    return get_f32(sums, 0) / np.float32(dim)


@inlined
def step_rate(optimizer, g, dim, planes, sums, state, new_state, hyper):
    """What the gradient of a row is multiplied with: SGD and row-wise Adagrad, which keeps its new state in scratch."""
    lr = get_f32(hyper, _LR)
    if optimizer == F.ROWWISE_ADAGRAD:
        total = get_f32(state, 0) + _mean_square(g, dim, planes, sums)
        put_f32(new_state, 0, total)
        return lr / (np.sqrt(total) + get_f32(hyper, _EPS))
    return lr


@inlined
def is_finite(state):
    """Whether a state may be kept: the square of a finite gradient need not be finite."""
    return bits_of(state) & 0x7FFFFFFF < _INFINITY_BITS


@helper
def step_columns(optimizer, format, row, meta, state0, state1, dim, g, w, s, t, hyper):
    """Adagrad and Adam: new weights and states into scratch; returns the extent of the weights.

    A state that is not finite makes the extent infinite, so that the row is refused.
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
    state_top = largest_magnitude(s, dim)
    if optimizer == F.ADAM:
        state_top = max(state_top, largest_magnitude(t, dim))
    return low, high, top if state_top < _INFINITY_BITS else _INFINITY_BITS
