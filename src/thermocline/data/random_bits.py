"""Counter-based random bits in torch integers: equal on every device, in any order, from any batch.

`bits(key, x)` mixes a key with a tensor of counters by the finalizer of SplitMix64, twice. torch has no unsigned 64-bit
arithmetic, but int64 multiplication wraps on every device, and a logical right shift is an arithmetic one, masked.
"""

from __future__ import annotations

from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same bits as the unsigned `value`."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix_number(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX1) & _WORD
    value = ((value ^ (value >> 27)) * _MIX2) & _WORD
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """A 64-bit key for a sequence of numbers."""
    key = len(parts)
    for part in parts:
        key = _mix_number((key + _GOLDEN) & _WORD ^ (part & _WORD))
    return key


def right(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ right(x, 30)) * _signed(_MIX1)
    x = (x ^ right(x, 27)) * _signed(_MIX2)
    return x ^ right(x, 31)


def bits(key: int | Tensor, x: Tensor) -> Tensor:
    """64 random bits (as int64) for each counter in `x`; a tensor of keys is broadcast."""
    return _mix((x ^ (_signed(key) if isinstance(key, int) else key)) * _signed(_GOLDEN))


def keys(*parts: int) -> int:
    """`key_of` as an int64, for a tensor of keys."""
    return _signed(key_of(*parts))
