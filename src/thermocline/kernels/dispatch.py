"""The kernels by name: check the arguments, then call Triton for CUDA tensors and Numba for CPU tensors. Imports are lazy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from .arguments import LookupCall, OptimizerArrays, RowArrays
from .checks import check_arrays, check_bags, check_codes, check_gradient, check_lookup, check_rows, check_tokens, check_values
from .layout import Layout

_OF_DEVICE = {"cpu": "cpu", "cuda": "gpu"}


@cache
def _module(kernel: str, device: str) -> ModuleType:
    if device not in _OF_DEVICE:
        raise NotImplementedError(f"no kernels for device {device!r}; move the tables to 'cpu' or 'cuda'")
    return import_module(f".{kernel}.{_OF_DEVICE[device]}", __package__)


def implementation_for(kernel: str, tensor: Tensor) -> ModuleType:
    """The module that implements `kernel` on the device of `tensor`; of a table, its meta words: codes may be on the host."""
    return _module(kernel, tensor.device.type)


def quantize_rows(
    values_ND: Tensor, format: int, clock: Tensor | None = None, rows_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 rows -> (codes as bytes, meta words). Nearest, or stochastic where a clock and row numbers are given."""
    check_values(values_ND, format)
    codes_NB, meta_NW = implementation_for("quantize", values_ND).quantize_rows(values_ND, format, clock, rows_N)
    return codes_NB, meta_NW


def dequantize_rows(codes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> Tensor:
    """(codes as bytes, meta words) -> fp32 rows."""
    check_codes(codes_NB, meta_NW, format, dim)
    values_ND: Tensor = implementation_for("quantize", codes_NB).dequantize_rows(codes_NB, meta_NW, format, dim)
    return values_ND


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features, feature-major with features * batch + 1 offsets."""
    check_bags(fields_FM.shape[0], fields_FM.device, ids_N, offsets)
    rows_N: Tensor = implementation_for("ids", fields_FM).map_ids(fields_FM, words, counts, ids_N, offsets)
    return rows_N


def ngram_rows(
    keys_S: Tensor, excluded_X: Tensor, tokens_BL: Tensor, orders: Sequence[int], vocabulary: int, part: int
) -> Tensor:
    """Rows [batch, length, slots] (int64) of the n-grams that end at each token."""
    check_tokens(tokens_BL, keys_S.device, max(orders))
    implementation = implementation_for("ngrams", keys_S)
    rows_BLS: Tensor = implementation.ngram_rows(keys_S, excluded_X, tokens_BL, orders, vocabulary, part)
    return rows_BLS


def gather_pool(rows: RowArrays, call: LookupCall) -> tuple[Tensor, Tensor]:
    """(pooled output, for max pooling the winners, else an empty tensor)."""
    check_arrays(rows)
    check_lookup(rows.layout, call)
    out, winners = implementation_for("gather", rows.meta).gather_pool(rows, call)
    return out, winners


def weight_gradient(rows: RowArrays, call: LookupCall, grad_out: Tensor) -> Tensor:
    """Gradient of the per-sample weights of a sum-pooled lookup."""
    check_arrays(rows)
    check_lookup(rows.layout, call)
    check_gradient(rows.layout, call, grad_out)
    result_N: Tensor = implementation_for("gather", rows.meta).weight_gradient(rows, call, grad_out)
    return result_N


def sum_row_gradients(
    layout: Layout, call: LookupCall, winners: Tensor, grad_out: Tensor, distinct: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(distinct arena rows in ascending order, their summed fp32 gradients). A GPU that is given their number does not wait."""
    check_lookup(layout, call)
    check_gradient(layout, call, grad_out, winners)
    known = () if distinct is None or grad_out.device.type == "cpu" else (distinct,)
    rows_U, grads_UW = implementation_for("sum_gradients", grad_out).sum_row_gradients(layout, call, winners, grad_out, *known)
    return rows_U, grads_UW


def update_rows(
    rows: RowArrays, optimizer: OptimizerArrays, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:  # fmt: skip
    """One optimizer step on distinct arena rows with their summed gradients, in place.

    Args:
        seen_N: the arena row of every lookup, ascending, for the cache; by default one lookup for each of `rows_U`. If it is
            empty, the cache stays as it is.
        names_U: numbers of the rows for rounding bits and errors; by default their arena rows.
    """
    check_arrays(rows, optimizer)
    check_rows(rows.layout, rows_U, grads_UW, names_U)
    implementation_for("update", rows.meta).update_rows(rows, optimizer, rows_U, grads_UW, seen_N, names_U)


def update_bags(rows: RowArrays, optimizer: OptimizerArrays, call: LookupCall, winners: Tensor, grad_out: Tensor) -> None:
    """`sum_row_gradients` followed by `update_rows`, without sums in memory."""
    check_arrays(rows, optimizer)
    check_lookup(rows.layout, call)
    check_gradient(rows.layout, call, grad_out, winners)
    implementation_for("update", rows.meta).update_bags(rows, optimizer, call, winners, grad_out)
