"""Stochastic rounding is proved to be on before rows are trained."""

from __future__ import annotations

import pytest

from thermocline import PRECISIONS, Arena, RowwiseAdagrad, TableSpec, ThermoclineError, Trainer
from thermocline.rows import training as tripwire


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_passes(precision):
    tripwire.check_rounding.cache_clear()
    Trainer(Arena([TableSpec(9, 4, precision)]), RowwiseAdagrad(lr=0.1))


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "fp32"])
def test_a_kernel_that_rounds_to_nearest_is_caught(precision, monkeypatch):
    tripwire.check_rounding.cache_clear()
    real = tripwire.quantize_rows
    monkeypatch.setattr(tripwire, "quantize_rows", lambda values, format, clock, rows: real(values, format))
    with pytest.raises(ThermoclineError, check=lambda error: precision in str(error)):
        Trainer(Arena([TableSpec(9, 4, precision)]), RowwiseAdagrad(lr=0.1))
    tripwire.check_rounding.cache_clear()


def test_rounding_to_nearest_on_purpose_is_not_checked(monkeypatch):
    monkeypatch.setattr(tripwire, "quantize_rows", None)
    tripwire.check_rounding.cache_clear()
    Trainer(Arena([TableSpec(9, 4, "int8")]), RowwiseAdagrad(lr=0.1), stochastic=False)
