"""The loss by collisions: the share of what a table could learn that is lost when ids share rows (model in docs/levers.md).

K  steps of a curve, hottest first      S  nodes of the integral      N  numbers of shared rows
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from thermocline.heat.curve import Curve

Floats = NDArray[np.float64]

# Trapezoid rule in log s, from s where no id has decayed to s where the coldest has. Its error falls exponentially with the
# nodes: with two per factor e only the part before the first node counts, 1e-4 of the result.
_FIRST, _LAST, _PER_E = 1e-4, 40.0, 2


def harm(curve: Curve, kept: int, shared: int) -> float:
    """The share of a feature's effects lost if its `kept` hottest ids have rows and the others are hashed to `shared` rows."""
    beyond = split_curve(curve, kept)[1]
    if not beyond.lookups:
        return 0.0
    seen_K = beyond.lookups_K > 0
    beyond = Curve(beyond.rows_K[seen_K], beyond.lookups_K[seen_K])
    lost = float(harms(beyond, np.array([shared], np.float64))[0, 0])
    return lost * beyond.lookups / curve.lookups


def harms(curve: Curve, shared_N: Floats) -> Floats:
    """The same for many choices: row k of the result keeps the ids of the first k steps, column n hashes the others to
    `shared_N[n]` rows."""
    rows_K, share_K = curve.rows_K, curve.share_K
    coldest = float(share_K[share_K > 0].min())
    nodes = 2 + int(_PER_E * math.log(_LAST / coldest / _FIRST))
    log_S = np.linspace(math.log(_FIRST), math.log(_LAST / coldest), nodes)
    s_S = np.exp(log_S)
    weight_S = s_S * (log_S[1] - log_S[0])
    alone_KS = np.exp(-share_K[:, None] * s_S)
    mass_K = rows_K * share_K
    out_KN = np.empty((len(rows_K) + 1, len(shared_N)))
    for column, shared in enumerate(shared_N):
        if shared <= 1:
            with np.errstate(invalid="ignore"):
                found_K = np.nan_to_num(_from(mass_K * share_K) / _from(mass_K))
        else:
            empty_KS = 1 - (1 - alone_KS) / shared
            others_KS = np.exp(_from(rows_K[:, None] * np.log(empty_KS)))
            found_KS = _from((mass_K * share_K)[:, None] * alone_KS / empty_KS) * others_KS
            found_K = found_KS @ weight_S
        out_KN[:, column] = np.clip(_from(mass_K) - found_K, 0.0, None)
    return out_KN


def _from(values_K: Floats) -> Floats:
    """Sums from each step to the coldest, and a final 0."""
    sums_K = np.cumsum(values_K[::-1], axis=0)[::-1]
    return np.concatenate([sums_K, np.zeros_like(values_K[:1])])


def split_curve(curve: Curve, rows: float) -> tuple[Curve, Curve]:
    """The hottest `rows` rows of a curve, and the others; rows of one step are equal."""
    hot_K = np.clip(rows - (np.cumsum(curve.rows_K) - curve.rows_K), 0.0, curve.rows_K)
    parts = []
    for rows_K in (hot_K, curve.rows_K - hot_K):
        some_K = rows_K > 0
        parts.append(Curve(rows_K[some_K], (curve.lookups_K * rows_K / curve.rows_K)[some_K]))
    return parts[0], parts[1]
