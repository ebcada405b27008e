"""Selection from buckets and their histograms on the CPU, as `select` of `cache/reference.py` defines it."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

from thermocline.kernels.cache.reference import BUCKETS

from .compile import inlined
from .vectors import WIDTH, Emit, block, get_i64, get_u8, lowest_bit, put_i64


@block("i64 i64 i64 i64 -> i64")
def _within(e: Emit, buckets: Any, low: Any, high: Any, left: Any) -> Any:
    """Bits of those of 16 buckets that lie between low and high, both included."""
    bucket = e.load_unsigned(buckets, 8, left)
    inside = e.builder.and_(bucket.compare(">", e.splat(low) - 1), bucket.compare("<", e.splat(high) + 1))
    return e.mask_bits(e.builder.and_(inside, e.first(left)))


@inlined
def select_places(buckets, first, last, low, high, tied, ties, selected, count):
    """Append places with a bucket from low to high to `selected`, of bucket `tied` only the first `ties`.

    Returns the new length of `selected`, and how many tied places are left to take.
    """
    for at in range(first, last, WIDTH):
        bits = _within(buckets + at, low, high, last - at)
        while bits != 0:
            place = at + lowest_bit(bits)
            bits &= bits - 1
            if get_u8(buckets, place) == tied:
                if ties == 0:
                    continue
                ties -= 1
            put_i64(selected, count, place)
            count += 1
    return count, ties


@inlined
def thresholds(candidates, victims):
    """`thresholds` of the reference, and the number of admitted candidates."""
    coming, below, cut = 0, 0, 0
    for k in range(BUCKETS):
        coming += get_i64(candidates, k)
    while coming > below:
        coming -= get_i64(candidates, cut)
        below += get_i64(victims, cut)
        cut += 1
    from_tied = 0
    if cut > 0:
        from_tied = min(get_i64(candidates, cut - 1), max(0, below - get_i64(victims, cut - 1) - coming))
    needed, evicted, low = coming + from_tied, 0, 0
    while evicted + get_i64(victims, low) < needed:
        evicted += get_i64(victims, low)
        low += 1
    return cut, from_tied, low, needed - evicted, needed


@inlined
def sum_histograms(histograms, number, stride):
    """Add histograms 1 to number - 1 to histogram 0."""
    for n in range(1, number):
        for k in range(BUCKETS):
            put_i64(histograms, k, get_i64(histograms, k) + get_i64(histograms, n * stride + k))
