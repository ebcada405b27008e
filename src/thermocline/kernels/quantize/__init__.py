"""Quantize and dequantize rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.checks import check_values
from thermocline.kernels.dispatch import implementation_for


def quantize_rows(
    values_ND: Tensor, format: int, clock: Tensor | None = None, rows_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 rows -> (codes as bytes, meta words). Nearest, or stochastic where a clock and row numbers are given."""
    check_values(values_ND, format)
    codes_NB, meta_NW = implementation_for("quantize", values_ND).quantize_rows(values_ND, format, clock, rows_N)
    return codes_NB, meta_NW


def dequantize_rows(codes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> Tensor:
    """(codes as bytes, meta words) -> fp32 rows."""
    values_ND: Tensor = implementation_for("quantize", codes_NB).dequantize_rows(codes_NB, meta_NW, format, dim)
    return values_ND
