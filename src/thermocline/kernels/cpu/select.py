"""Choosing on the CPU, from buckets and their histograms, as `choose` of `cache/reference.py` does."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

from thermocline.kernels.cache.reference import BUCKETS

from .compile import inlined
from .vectors import WIDTH, Emit, block, get_i64, get_u8, lowest_bit, put_i64


@block("i64 i64 i64 i64 -> i64")
def _within(e: Emit, buckets: Any, low: Any, high: Any, left: Any) -> Any:
    """Which of 16 buckets lie between low and high, both included, as bits."""
    bucket = e.load_unsigned(buckets, 8, left)
    inside = e.builder.and_(bucket.compare(">", e.splat(low) - 1), bucket.compare("<", e.splat(high) + 1))
    return e.mask_bits(e.builder.and_(inside, e.first(left)))


@inlined
def pick(buckets, first, last, low, high, tied, some, chosen, taken):
    """Places with a bucket between low and high into `chosen`, of bucket `tied` the first `some`; returns both counts."""
    for at in range(first, last, WIDTH):
        bits = _within(buckets + at, low, high, last - at)
        while bits != 0:
            place = at + lowest_bit(bits)
            bits &= bits - 1
            if get_u8(buckets, place) == tied:
                if some == 0:
                    continue
                some -= 1
            put_i64(chosen, taken, place)
            taken += 1
    return taken, some


@inlined
def cuts(candidates, victims):
    """`cuts` of the reference; of the four numbers the last is how many come in."""
    coming, below, cut = 0, 0, 0
    for k in range(BUCKETS):
        coming += get_i64(candidates, k)
    while coming > below:
        coming -= get_i64(candidates, cut)
        below += get_i64(victims, cut)
        cut += 1
    from_below = 0
    if cut > 0:
        from_below = min(get_i64(candidates, cut - 1), max(0, below - get_i64(victims, cut - 1) - coming))
    needed, left, low = coming + from_below, 0, 0
    while left + get_i64(victims, low) < needed:
        left += get_i64(victims, low)
        low += 1
    return cut, from_below, low, needed - left, needed


@inlined
def total(histograms, number, stride):
    """Add histograms 1 to number - 1 to histogram 0."""
    for n in range(1, number):
        for k in range(BUCKETS):
            put_i64(histograms, k, get_i64(histograms, k) + get_i64(histograms, n * stride + k))
