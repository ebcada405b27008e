"""A check at start-up that stochastic rounding is on.

Rounding to nearest drops every update that is smaller than half a step of the row, and nothing else shows it: the loss falls,
only less. So before rows of a precision are trained on a device, a few are rounded by the kernel that will round them, and
counted.
"""

from __future__ import annotations

from functools import cache

import torch

from thermocline import formats as F
from thermocline.errors import ThermoclineError
from thermocline.kernels import dequantize_rows, quantize_rows

_ROWS, _DIM, _SHARE = 256, 16, 0.25


@cache
def check_rounding(format: int, device: torch.device) -> None:
    """Raise if values a quarter of a step above a code are not rounded up in about a quarter of the cases."""
    if format == F.FP32 or device.type == "meta":
        return
    if F.BITS[format] >= 16 or format == F.FP8:
        low, step = 1.0, {F.FP16: 2.0**-10, F.BF16: 2.0**-7, F.FP8: 0.125}[format]
        values_ND = torch.full((_ROWS, _DIM), low + _SHARE * step, device=device)
        values_ND[:, 0] = 448.0 if format == F.FP8 else low  # so that the scale of fp8 rows is 1
    else:
        low, step = 0.0, 1.0
        values_ND = torch.full((_ROWS, _DIM), low + _SHARE * step, device=device)
        symmetric = format == F.INT8
        values_ND[:, 0] = 127.0 if symmetric else 0.0
        values_ND[:, 1] = -127.0 if symmetric else float(F.levels(format))
    clock = torch.tensor([1, 1], device=device)
    codes_NB, meta_NW = quantize_rows(values_ND, format, clock, torch.arange(_ROWS, device=device))
    rounded_ND = dequantize_rows(codes_NB, meta_NW, format, _DIM)[:, 2:]
    up = float((rounded_ND > low + 0.5 * step).float().mean())
    if not 0.6 * _SHARE < up < 1.4 * _SHARE:
        raise ThermoclineError(
            f"stochastic rounding to {F.NAMES[format]} is not working on {device}: of values {_SHARE} of a step above a code, "
            f"{up:.0%} were rounded up. Run `thermocline verify` and report what it says"
        )
