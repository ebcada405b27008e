"""A lookup with a given tiling, whatever the library would choose."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gather.bag_launch import BagTiling, launch_bags
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.layout import output_shape


def label_of(tiling: BagTiling) -> str:
    """A short name."""
    options = {"fetch": tiling.fetch, "i2f": not tiling.convert, "split": tiling.split}
    return " ".join([f"w{tiling.width} r{tiling.rows} b{tiling.bags}", *(name for name, on in options.items() if on)])


def gather_pool(rows: RowArrays, call: LookupCall, tiling: BagTiling, out: Tensor | None = None) -> Tensor:
    """Sum or mean of bags by the bag kernel."""
    error_buffer(rows.meta).open(rows.layout.fields_F8, rows.layout.tables)
    if out is None:
        shape = output_shape(rows.layout.tables, call.ids_N, call.offsets, call.mode)
        out = torch.empty(shape, dtype=call.dtype, device=rows.meta.device)
    if out.numel():
        launch_bags(rows, call, out, tiling)
    return out
