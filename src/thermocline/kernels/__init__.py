"""Functions on tensors: `reference.py` defines a kernel in PyTorch, `cpu.py` (Numba) and `gpu.py` (Triton) implement it."""

from .arguments import LookupCall, OptimizerArrays, RowArrays
from .dispatch import dequantize_rows, gather_pool, quantize_rows, sum_row_gradients, update_bags, update_rows, weight_gradient
from .layout import Layout

__all__ = [
    "Layout",
    "LookupCall",
    "OptimizerArrays",
    "RowArrays",
    "dequantize_rows",
    "gather_pool",
    "quantize_rows",
    "sum_row_gradients",
    "update_bags",
    "update_rows",
    "weight_gradient",
]
