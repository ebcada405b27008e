"""Checks of shapes, types and devices before a kernel runs. Contents are checked by the kernels."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, BadOffsets, FormatError, IdOutOfRange

from .arguments import LookupCall, OptimizerArrays, RowArrays
from .layout import Layout, output_shape, per_feature

_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LIMITS = dict.fromkeys((F.FP16, F.INT4_AFFINE, F.INT2_AFFINE), 65504.0)  # the codes, or the bias, are fp16
_LIMIT = 2.0**126


def largest(format: int) -> float:
    """The largest magnitude that rows of a format may have."""
    return _LIMITS.get(format, _LIMIT)


def check_values(values_ND: Tensor, format: int) -> None:
    """Check values to quantize: fp32, 2-D, finite, within the range of the format."""
    if values_ND.dim() != 2 or values_ND.dtype != torch.float32:
        raise BadInput(f"rows must be a 2-D fp32 tensor, not {values_ND.dim()}-D {values_ND.dtype}", parameter="rows")
    if not 1 <= values_ND.shape[1] <= F.MAX_DIM:
        raise FormatError(f"rows have {values_ND.shape[1]} columns; formats hold 1 to {F.MAX_DIM}", parameter="rows")
    limit = largest(format)
    good_N = (values_ND.abs() <= limit).all(dim=1)
    if bool(good_N.all()):
        return
    row = int((~good_N).nonzero()[0])
    worst = values_ND[row][~(values_ND[row].abs() <= limit)][0].item()
    if worst != worst or abs(worst) == float("inf"):
        raise FormatError(f"row {row} of the given rows holds {worst}; rows must be finite", row=row, value=worst)
    message = f"row {row} of the given rows holds {worst:g}; {F.NAMES[format]} holds at most {limit:g}"
    raise FormatError(message, row=row, value=worst, limit=limit)


def check_codes(codes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> None:
    """Check quantized rows of one format."""
    shapes = codes_NB.shape, meta_NW.shape
    wanted = (len(codes_NB), F.row_bytes(format, dim)), (len(codes_NB), F.META_WORDS[format])
    if shapes != wanted or codes_NB.dtype != torch.uint8 or meta_NW.dtype != torch.int32:
        found = f"{tuple(shapes[0])} {codes_NB.dtype} and {tuple(shapes[1])} {meta_NW.dtype}"
        message = f"codes and meta words are {found}; {F.NAMES[format]} rows need {wanted[0]} uint8 and {wanted[1]} int32"
        raise BadInput(message, parameter="codes", value=codes_NB.dtype)


def check_arrays(rows: RowArrays, optimizer: OptimizerArrays | None = None) -> None:
    """Check types, lengths and contiguity of an arena's arrays: kernels take addresses, and would write past the end."""
    codes, meta, layout, cache = rows
    sizes = layout.tables.sizes
    if (
        codes.dtype is not torch.uint8
        or codes.numel() < sizes[0]
        or not codes.is_contiguous()
        or meta.dtype is not torch.int32
        or meta.numel() < sizes[1]
        or not meta.is_contiguous()
    ):  # written out, which takes half the time of calls
        _check_array("codes", codes, torch.uint8, sizes[0])
        _check_array("meta words", meta, torch.int32, sizes[1])
    if cache is not None:
        values, near = cache[:2]
        if (
            values.dtype is not torch.float32 or values.numel() < sizes[2] or not values.is_contiguous()
            or near.dtype is not torch.int32 or near.numel() < sizes[3] or not near.is_contiguous()
        ):  # fmt: skip
            _check_array("cached values", values, torch.float32, sizes[2])
            _check_array("int8 slots", near, torch.int32, sizes[3])
    if optimizer is not None:
        for state in optimizer.states:
            size = layout.tables.rows if optimizer.optimizer == F.ROWWISE_ADAGRAD else sizes[4]
            _check_array("optimizer state", state, torch.float32, size)
        _check_array("hyperparameters", optimizer.hyper, torch.float64, F.HYPER_FIELDS)
        _check_array("clock", optimizer.clock, torch.int64, F.CLOCK_FIELDS)


def _check_array(name: str, array: Tensor, kind: torch.dtype, size: int) -> None:
    if array.dtype is not kind or array.numel() < size or not array.is_contiguous():
        message = f"{name} are {tuple(array.shape)} {array.dtype}; kernels take contiguous {kind} of at least {size} elements"
        raise BadInput(message, parameter=name, value=array.dtype, needed=size)


def check_lookup(layout: Layout, call: LookupCall) -> None:
    """Check shapes, types and devices of one lookup."""
    ids_N, offsets, weights_N, mode, dtype, _ = call
    features, device = len(layout.tables.features), layout.fields_F8.device
    if (
        features
        and weights_N is None
        and dtype in _FLOATS
        and ids_N.dtype in _INTS
        and offsets.dtype in _INTS
        and ids_N.dim() == offsets.dim() == 1
        and ids_N.device == offsets.device == device
        and (offsets.numel() > 1 or (offsets.numel() == 1 and ids_N.numel() == 0))
        and (offsets.numel() == features + 1 if mode == F.NONE else (offsets.numel() - 1) % features == 0)
    ):
        return  # the common case, at a tenth of the time
    if dtype not in _FLOATS:
        raise BadInput(f"output type is {dtype}; use {', '.join(str(d) for d in _FLOATS)}", parameter="dtype", value=dtype)
    _check_flat("ids", ids_N, _INTS, device)
    _check_flat("offsets", offsets, _INTS, device)
    if weights_N is not None:
        _check_flat("per-sample weights", weights_N, _FLOATS, device)
    if features == 0:
        raise BadInput("no feature to look up", parameter="features")
    if mode == F.NONE and offsets.numel() != features + 1:
        message = f"unpooled lookups of {features} features need {features + 1} offsets, not {offsets.numel()}"
        raise BadInput(message, parameter="offsets", value=offsets.numel())
    check_bags(features, device, ids_N, offsets)
    if weights_N is not None and weights_N.numel() != ids_N.numel():
        message = f"{weights_N.numel()} per-sample weights for {ids_N.numel()} ids; there must be one for each"
        raise BadInput(message, parameter="per-sample weights", value=weights_N.numel())
    if weights_N is not None and mode != F.SUM:
        message = f"per-sample weights work with sum pooling, not with {F.MODES[mode]}"
        raise BadInput(message, parameter="per-sample weights", mode=F.MODES[mode])


def check_bags(features: int, device: torch.device, ids_N: Tensor, offsets: Tensor) -> None:
    """Check shapes, types and devices of the ids of all features."""
    _check_flat("ids", ids_N, _INTS, device)
    _check_flat("offsets", offsets, _INTS, device)
    if offsets.numel() < 1 or (offsets.numel() - 1) % features:
        message = f"{offsets.numel()} offsets do not divide over {features} features: features * batch + 1 are needed"
        raise BadInput(message, parameter="offsets", value=offsets.numel())
    if offsets.numel() == 1 and ids_N.numel():
        message = f"offsets end at 0 but there are {ids_N.numel()} ids; the last offset must be that number"
        raise BadInput(message, parameter="offsets", value=0, position=0)


def check_tokens(tokens_BL: Tensor, device: torch.device, longest: int) -> None:
    """Check shape, type and device of tokens, and that the longest n-gram fits into a sequence."""
    if tokens_BL.dtype not in _INTS:
        message = f"tokens are {tokens_BL.dtype}; use {' or '.join(str(k) for k in _INTS)}"
        raise BadInput(message, parameter="tokens", value=tokens_BL.dtype)
    if tokens_BL.dim() != 2:
        raise BadInput(f"tokens are {tokens_BL.dim()}-D; use [batch, length]", parameter="tokens", value=tokens_BL.dim())
    if tokens_BL.shape[1] < longest:
        raise BadInput(
            f"sequences have {tokens_BL.shape[1]} tokens, and the longest n-gram has {longest}; give the tokens before (of a "
            "decoded sequence the last ones), or pad on the left with an excluded token",
            parameter="tokens", value=tokens_BL.shape[1], needed=longest,
        )  # fmt: skip
    if tokens_BL.device != device:
        message = f"tokens are on {tokens_BL.device} but the table on {device}; move them with .to({str(device)!r})"
        raise BadInput(message, parameter="tokens", value=tokens_BL.device)


def _check_flat(name: str, tensor: Tensor, kinds: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in kinds:
        message = f"{name} are {tensor.dtype}; use {' or '.join(str(k) for k in kinds)}"
        raise BadInput(message, parameter=name, value=tensor.dtype)
    if tensor.dim() != 1:
        raise BadInput(f"{name} have {tensor.dim()} dimensions; they must be flat", parameter=name, value=tensor.dim())
    if tensor.device != device:
        message = f"{name} are on {tensor.device} but the tables on {device}; move them with .to({str(device)!r})"
        raise BadInput(message, parameter=name, value=tensor.device)


def raise_bad_id(layout: Layout, position: int, ids_N: Tensor, offsets: Tensor) -> NoReturn:
    """Raise for the id at a position; the offsets have been checked."""
    tables = layout.tables
    starts_F = offsets[per_feature(layout, offsets) * torch.arange(len(tables.features))]
    feature = int((starts_F <= position).sum()) - 1
    rows, first = tables.features[feature][F.ROWS], int(starts_F[feature])
    raise IdOutOfRange(feature, position, int(ids_N[position]), rows, *tables.names_of(feature), first)


def raise_bad_offsets(offsets: Tensor, count: int) -> None:
    """Raise if offsets do not begin at 0, rise, and end at the number of ids."""
    if offsets.device.type == "cpu":
        array = offsets.numpy()  # a quarter of the time of tensors
        if array[0] == 0 and array[-1] == count and bool((array[1:] >= array[:-1]).all()):
            return

    def bad(message: str, position: int) -> BadInput:
        return BadOffsets(message, parameter="offsets", position=position, value=int(offsets[position]))

    last = offsets.numel() - 1
    if int(offsets[0]) != 0:
        raise bad(f"offsets begin at {int(offsets[0])}; they must begin at 0", 0)
    if int(offsets[-1]) != count:
        raise bad(f"offsets end at {int(offsets[-1])} but there are {count} ids; the last offset must be that number", last)
    falls = offsets.diff() < 0
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        if at + 1 == last:  # the last offset may have been appended from the number of ids
            raise bad(f"offsets reach {int(offsets[at])} at position {at}, but there are {count} ids", at)
        message = f"offsets fall from {int(offsets[at])} to {int(offsets[at + 1])} at position {at + 1}; they must rise"
        raise bad(message, at + 1)


def check_gradient(layout: Layout, call: LookupCall, grad_out: Tensor, winners: Tensor | None = None) -> None:
    """Check that a gradient, and the winners of max pooling, have the shape of the output; and the device of the gradient."""
    shape = output_shape(layout.tables, call.ids_N, call.offsets, call.mode)
    if grad_out.shape != shape or grad_out.dtype not in _FLOATS or grad_out.device != layout.fields_F8.device:
        raise BadInput(
            f"gradient is {tuple(grad_out.shape)} {grad_out.dtype} on {grad_out.device}; "
            f"the output was {shape} on {layout.fields_F8.device}",
            parameter="gradient",
        )
    if winners is not None and (winners.dtype != torch.int32 or (call.mode == F.MAX and winners.shape != shape)):
        message = f"winners are {tuple(winners.shape)} {winners.dtype}; the output was {shape}, and winners are int32"
        raise BadInput(message, parameter="winners", value=winners.dtype)


def check_rows(layout: Layout, rows_U: Tensor, grads_UW: Tensor, names_U: Tensor | None = None) -> None:
    """Check arena rows and their gradients; on a CPU also whether the rows exist, which would stall a GPU."""
    shape = (rows_U.numel(), layout.tables.max_dim)
    if rows_U.dtype not in _INTS or rows_U.dim() != 1 or grads_UW.shape != shape:
        message = f"rows are {tuple(rows_U.shape)} {rows_U.dtype} and gradients {tuple(grads_UW.shape)}, not {shape}"
        raise BadInput(message, parameter="rows")
    if names_U is not None and (names_U.shape != rows_U.shape or names_U.dtype != torch.int64):
        message = f"names are {tuple(names_U.shape)} {names_U.dtype}; {rows_U.numel()} rows need one int64 each"
        raise BadInput(message, parameter="names")
    if rows_U.device.type == "cpu" and rows_U.numel():
        low, high = int(rows_U.min()), int(rows_U.max())
        if low < 0 or high >= layout.tables.rows:
            raise BadInput(
                f"rows run from {low} to {high}, but the arena has {layout.tables.rows} (0 to {layout.tables.rows - 1})",
                parameter="rows", value=(low, high), available=layout.tables.rows,
            )  # fmt: skip
