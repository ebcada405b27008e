"""How many different ids there were, from 16 KiB: HyperLogLog.

Every id is hashed to 64 bits. The first 14 choose one of 16,384 registers; a register keeps the longest run of zeros, plus
one, that any of its hashes had in the other 50. Registers of two parts of a log, joined by maximum, are those of the whole: an
id that was counted twice counts once. The estimate is that of Ertl ("New cardinality estimation algorithms for HyperLogLog
sketches", 2017), which needs neither tables of corrections nor a switch between small and large numbers.

The standard error is 1.04 / sqrt(16,384) = 0.81%, so 95 of 100 estimates are within 1.6%.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BITS = 14
REGISTERS = 1 << BITS
REST = 64 - BITS
ERROR = 1.96 * 1.04 / math.sqrt(REGISTERS)  # relative, 95%

Registers = NDArray[np.uint8]


def mix(ids_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of each id: the finalizer of splitmix64. `hashed.py` has the same for one id."""
    x_N = ids_N.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_N: NDArray[np.uint64] = x_N ^ (x_N >> np.uint64(31))
    return mixed_N


def registers_of(ids_N: NDArray[np.int64]) -> Registers:
    """The registers of some ids; repeated ones change nothing."""
    registers = np.zeros(REGISTERS, np.uint8)
    for first in range(0, len(ids_N), 1 << 20):
        x_N = mix(ids_N[first : first + (1 << 20)])
        rest_N = x_N & np.uint64((1 << REST) - 1)
        # frexp counts the bits of a number below 2^53 exactly
        rank_N = (REST + 1 - np.frexp(rest_N.astype(np.float64))[1]).astype(np.uint8)
        np.maximum.at(registers, (x_N >> np.uint64(REST)).astype(np.int64), rank_N)
    return registers


def estimate(registers: Registers) -> int:
    """About how many different ids the registers saw."""
    many_K = np.bincount(registers, minlength=REST + 2)
    z = REGISTERS * _tau(1 - many_K[REST + 1] / REGISTERS)
    for k in range(REST, 0, -1):
        z = 0.5 * (z + float(many_K[k]))
    z += REGISTERS * _sigma(many_K[0] / REGISTERS)
    return 0 if math.isinf(z) else round(REGISTERS**2 / (2 * math.log(2)) / z)


def _sigma(x: float) -> float:
    """x + x^2 + 2 x^4 + 4 x^8 + ...: what empty registers stand for."""
    if x == 1.0:
        return math.inf
    power, weight, total, before = x, 1.0, x, -1.0
    while total != before:
        power, before = power * power, total
        total += weight * power
        weight *= 2
    return total


def _tau(x: float) -> float:
    """What full registers stand for."""
    if x in (0.0, 1.0):
        return 0.0
    power, weight, total, before = x, 1.0, 1 - x, -1.0
    while total != before:
        power, weight, before = math.sqrt(power), weight / 2, total
        total -= (1 - power) ** 2 * weight
    return total / 3
