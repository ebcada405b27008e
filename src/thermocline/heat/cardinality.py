"""HyperLogLog: the number of distinct ids, from 16 KiB.

Every id is hashed to 64 bits. The first 14 bits choose one of 16,384 registers; a register keeps the longest run of zeros, plus
one, in the other 50 bits of its hashes. The maximum of the registers of two parts of a log are the registers of the whole. The
estimate is that of Ertl ("New cardinality estimation algorithms for HyperLogLog sketches", 2017), which needs no correction
tables. The standard error is 1.04 / sqrt(16,384) = 0.81%, so 95% of the estimates are within 1.6%.
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


def registers_of(ids_N: NDArray[np.int64]) -> Registers:
    """The registers of some ids; repeated ids change nothing."""
    from .hash_counter import note_all  # deferred: brings Numba

    registers = np.zeros(REGISTERS, np.uint8)
    note_all(ids_N, np.broadcast_to(1, ids_N.shape), registers)
    return registers


def estimate(registers: Registers) -> int:
    """The estimated number of distinct ids."""
    many_K = np.bincount(registers, minlength=REST + 2)
    z = REGISTERS * _tau(1 - many_K[REST + 1] / REGISTERS)
    for k in range(REST, 0, -1):
        z = 0.5 * (z + float(many_K[k]))
    z += REGISTERS * _sigma(many_K[0] / REGISTERS)
    return 0 if math.isinf(z) else round(REGISTERS**2 / (2 * math.log(2)) / z)


def _sigma(x: float) -> float:
    """x + x^2 + 2 x^4 + 4 x^8 + ...: the contribution of empty registers."""
    if x == 1.0:
        return math.inf
    power, weight, total, before = x, 1.0, x, -1.0
    while total != before:
        power, before = power * power, total
        total += weight * power
        weight *= 2
    return total


def _tau(x: float) -> float:
    """The contribution of full registers."""
    if x in (0.0, 1.0):
        return 0.0
    power, weight, total, before = x, 1.0, 1 - x, -1.0
    while total != before:
        power, weight, before = math.sqrt(power), weight / 2, total
        total -= (1 - power) ** 2 * weight
    return total / 3
