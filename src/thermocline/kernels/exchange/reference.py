"""Row exchange between ranks: the definition, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels import dequantize_rows
from thermocline.kernels.quantize.reference import quantize_rows

from .fields import DIM, GRADIENT, NOWHERE, OTHER_NODES, SAME_NODE, vector_bytes

_DTYPES = {4: torch.float32, 2: torch.bfloat16}


def distinct_rows(rows_N: Tensor, limit: int, once: bool = True) -> tuple[Tensor, Tensor]:
    """(rows below `limit`, ascending; index of each of `rows_N` among them): each row once, or with repetitions."""
    if once:
        found: tuple[Tensor, Tensor] = torch.unique(rows_N, return_inverse=True)
        return found
    sorted_N, order_N = rows_N.sort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(rows_N.numel(), device=rows_N.device)
    return sorted_N, inverse_N


def distinct_padded(rows_N: Tensor, limit: int, once: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """`distinct_rows` with room for one row of each input: (rows, then `limit`; indices; [number of rows])."""
    found_U, inverse_N = distinct_rows(rows_N, limit, once)
    number = torch.count_nonzero(found_U < limit)  # rows of `limit` and more are not among them
    padding = rows_N.new_full((rows_N.numel() - found_U.numel(),), limit)
    return torch.cat([found_U, padding]), inverse_N, number.to(torch.int32)[None]


def route(part_N: Tensor, home_N: Tensor, ways_K: Tensor, node: int, local_size: int, group: int) -> tuple[Tensor, Tensor]:
    """(rows of each part for each rank of a group, and last for none [group + 1, parts]; row indices in that order)."""
    way_N, parts = ways_K[part_N], ways_K.numel()
    same_N, other_N = node * local_size + home_N % local_size, home_N // local_size
    to_N = torch.where(way_N == SAME_NODE, same_N, torch.where(way_N == OTHER_NODES, other_N, home_N))
    key_N = torch.where(way_N == NOWHERE, group, to_N) * parts + part_N
    counts_PK = torch.bincount(key_N, minlength=(group + 1) * parts).view(group + 1, parts)
    return counts_PK, key_N.argsort(stable=True)


def offsets(part_N: Tensor, size_K: Tensor) -> tuple[Tensor, Tensor]:
    """(offsets of consecutive records, their end as a number on the device), given the bytes of a record of each part."""
    size_N = size_K[part_N]
    ends_N = size_N.cumsum(0)
    return ends_N - size_N, ends_N[-1] if ends_N.numel() else size_K.new_zeros(())


def _by_part(part_N: Tensor, fields_KF: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
    """(row indices, fields) of each part that occurs. The number of synchronizations does not depend on the number of parts."""
    counts_K = torch.bincount(part_N, minlength=len(fields_KF)).tolist()
    of_parts = zip(part_N.argsort(stable=True).split(counts_K), fields_KF.tolist(), strict=True)
    return ((at_K, fields) for at_K, fields in of_parts if at_K.numel())


def pack_rows(
    codes: Tensor, meta: Tensor, fields_KF: Tensor, part_N: Tensor, place_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:
    """Copy rows of an arena, given by part and place, to a message."""
    for at_K, (width, words, codes_at, meta_at, *_) in _by_part(part_N, fields_KF):
        place_K, column = place_N[at_K, None], torch.arange(width + 4 * words, device=codes.device)
        record_KB = codes[codes_at + place_K * width + column[:width]]
        if words:
            meta_KW = meta[meta_at + place_K * words + torch.arange(words, device=codes.device)]
            record_KB = torch.cat([record_KB, meta_KW.view(torch.uint8)], dim=1)
        out[offset_N[at_K, None] + column] = record_KB


def copy_rows(
    message: Tensor, from_N: Tensor, fields_KF: Tensor, part_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:  # fmt: skip
    """Copy rows of one message to another."""
    for at_K, (width, words, *_) in _by_part(part_N, fields_KF):
        column = torch.arange(width + 4 * words, device=out.device)
        out[offset_N[at_K, None] + column] = message[from_N[at_K, None] + column]


def unpack_rows(message: Tensor, offset_N: Tensor, fields_KF: Tensor, part_N: Tensor, target_N: Tensor, rows: Tensor) -> None:
    """Dequantize rows of a message to byte offsets `target_N` of `rows`."""
    floats = rows.view(torch.float32)
    for at_K, (width, words, _, _, _, dim, format, _) in _by_part(part_N, fields_KF):
        column = torch.arange(width + 4 * words, device=message.device)
        record_KB = message[offset_N[at_K, None] + column]
        codes_KB = record_KB[:, :width].contiguous()
        meta_KB = record_KB[:, width:].clone(memory_format=torch.contiguous_format)  # of one row: unaligned
        values_KD = dequantize_rows(codes_KB, meta_KB.view(torch.int32) if words else meta_KB.int(), format, dim)
        floats[target_N[at_K, None] // 4 + torch.arange(dim, device=message.device)] = values_KD


def pack_gradients(grads_UW: Tensor, fields_KF: Tensor, part_N: Tensor, at_N: Tensor, size: int | None = None) -> Tensor:
    """A message of the gradients of rows `at_N`, whose parts are `part_N`, of `size` bytes if they are known."""
    offset_N, end = offsets(part_N, vector_bytes(fields_KF[:, DIM], fields_KF[:, GRADIENT]))
    out = torch.empty(int(end) if size is None else size, dtype=torch.uint8, device=grads_UW.device)
    for at_K, (*_, dim, _, each) in _by_part(part_N, fields_KF):
        grads_KD = grads_UW[at_N[at_K], :dim].contiguous()
        column = torch.arange(vector_bytes(dim, each), device=out.device)
        record_KB = _as_int8(grads_KD) if each == 1 else grads_KD.to(_DTYPES[each]).view(torch.uint8)
        out[offset_N[at_K, None] + column] = record_KB
    return out


def _as_int8(values_KD: Tensor) -> Tensor:
    """Codes and scale of each vector; NaN in place of a scale where a value is not finite."""
    good_K = values_KD.isfinite().all(1)
    codes_KB, meta_KW = quantize_rows(torch.where(good_K[:, None], values_KD, 0.0), F.INT8, None, None)
    scale_K = torch.where(good_K[:, None], meta_KW.view(torch.float32), float("nan"))
    return torch.cat([codes_KB, scale_K.view(torch.uint8)], dim=1)


def unpack_gradients(message: Tensor, fields_KF: Tensor, part_N: Tensor, width: int) -> Tensor:
    """The gradients of a message as fp32, zeros after the columns of a row."""
    offset_N, _ = offsets(part_N, vector_bytes(fields_KF[:, DIM], fields_KF[:, GRADIENT]))
    grads_NW = torch.zeros(part_N.numel(), width, dtype=torch.float32, device=message.device)
    for at_K, (*_, dim, _, each) in _by_part(part_N, fields_KF):
        column = torch.arange(vector_bytes(dim, each), device=message.device)
        record_KB = message[offset_N[at_K, None] + column].contiguous()
        if each == 1:
            scale_K1 = record_KB[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
            grads_NW[at_K, :dim] = record_KB[:, :dim].view(torch.int8).float() * scale_K1
        else:
            grads_NW[at_K, :dim] = record_KB.view(_DTYPES[each]).float()
    return grads_NW
