"""Heat as a curve of steps."""

from __future__ import annotations

import numpy as np
import pytest

from support import has
from thermocline.errors import BadInput
from thermocline.heat.curve import ALONE, Curve


def test_a_curve_keeps_rows_and_lookups_and_the_hottest_rows_alone():
    counts_R = np.random.default_rng(3).zipf(1.3, 5_003) - 1
    curve = Curve.of_counts(counts_R)
    falling_R = np.sort(counts_R)[::-1]
    assert curve.rows == (counts_R > 0).sum()
    assert curve.lookups == counts_R.sum()
    assert (curve.lookups_K[:ALONE] == falling_R[:ALONE]).all()
    assert (np.diff(curve.share_K) <= 1e-12).all()


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_zipf_steps_hold_what_the_law_says(exponent):
    rows = 100_003
    law_R = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    law_R *= 1e6 / law_R.sum()
    curve = Curve.zipf(rows, exponent, lookups=1e6)
    reach_K = np.cumsum(curve.rows_K).astype(int)
    np.testing.assert_allclose(np.cumsum(curve.lookups_K), np.cumsum(law_R)[reach_K - 1], rtol=1e-4)
    assert len(curve.rows_K) < 300


def test_steps_grow_with_the_logarithm_of_the_rows():
    assert len(Curve.zipf(10_000_000_000, 1.05).rows_K) < 400


@pytest.mark.parametrize("exponent", [-1.0, float("nan"), float("inf")])
def test_an_exponent_that_is_none_is_refused(exponent):
    with pytest.raises(BadInput, check=has(parameter="exponent")):
        Curve.zipf(100, exponent)
