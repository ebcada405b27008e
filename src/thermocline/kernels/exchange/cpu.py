"""Row exchange between ranks on the CPU (definition: `reference.py`): one pass over the rows for each function."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu.compile import addresses, helper, inlined, kernel
from thermocline.kernels.cpu.rows import PAD, copy_floats, fill_floats, narrow, read_row
from thermocline.kernels.cpu.sort import DIGIT, radix_pass
from thermocline.kernels.cpu.vectors import get_i64, get_u8, get_u32, ones, prefetch, put_f32, put_i64, put_u8
from thermocline.kernels.cpu.write_row import measure_row, write_row

from . import fields as E
from . import reference
from .reference import offsets as offsets

ON_DEVICE = False  # sizes of results are at once on the host
PREFETCH_DISTANCE = 8  # rows
_PART_FIELDS = len(E.FIELDS)
_ZERO, _NAN = np.float32(0), np.float32(np.nan)
_LARGEST = 0x7F7FFFFF  # bits of the largest finite number


# -- distinct ---------------------------------------------------------------------------------------------------------


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _sort(keys, other, count, shift, passes, digits):
    """Sort keys by the bits above `shift`, DIGIT bits a pass; the result is in `other` if the number of passes is odd."""
    for turn in range(passes):
        radix_pass(keys, other, 0, 0, count, 0, shift + DIGIT * turn, DIGIT, digits)
        keys, other = other, keys


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def _distinct(keys, rows, inverse, count, bits, once):
    """Rows of sorted keys, and the index of each position's row among them; returns the number of rows."""
    found, last, mask = 0, -1, (1 << bits) - 1
    for i in range(count):
        key = get_i64(keys, i)
        row = key >> bits
        if row != last or once == 0:
            put_i64(rows, found, row)
            found, last = found + 1, row
        put_i64(inverse, key & mask, found - 1)
    return found


def distinct_rows(rows_N: Tensor, limit: int, once: bool = True) -> tuple[Tensor, Tensor]:
    """(rows below `limit`, ascending; index of each of `rows_N` among them): each row once, or with repetitions."""
    count = rows_N.numel()
    bits, row_bits = max(1, count.bit_length()), max(1, (limit - 1).bit_length())
    if row_bits + bits > 62:
        return reference.distinct_rows(rows_N, limit, once)
    keys_N = (rows_N << bits) | torch.arange(count)
    other_N = torch.empty_like(keys_N)
    passes = -(-row_bits // DIGIT)
    digits = np.empty(1 << DIGIT, dtype=np.int64)
    _sort(*addresses("qq", keys_N, other_N), count, bits, passes, *addresses("q", digits))
    sorted_N, spare_N = (other_N, keys_N) if passes % 2 else (keys_N, other_N)
    inverse_N = torch.empty_like(keys_N)
    number = _distinct(*addresses("qqq", sorted_N, spare_N, inverse_N), count, bits, once)
    return spare_N[:number].clone(), inverse_N


# -- owners of rows --------------------------------------------------------------------------------------------------


@inlined
def _below(words, below, row):
    """(whether a row is in a bitmap, its rank)."""
    block, word = row >> 9, row >> 6
    rank = get_u32(below, block)
    for w in range(block << 3, word):
        rank += ones(get_i64(words, w))
    own = get_i64(words, word)
    rank += ones(own & ((1 << (row & 63)) - 1))
    return (own >> (row & 63)) & 1, rank


@inlined
def _scattered(index, count, bits, fold, multipliers):
    """The fixed bijection of `plan/balance.py`."""
    mask = (1 << bits) - 1
    at = index
    going = True
    while going:
        for m in range(3):
            at ^= at >> fold
            at = (at * get_i64(multipliers, m)) & mask
        at ^= at >> fold
        going = at >= count
    return at


@helper
def _cold(table, index, local_size, multipliers):
    """(owner, place) of the index-th cold row of a table."""
    cold, bits = get_i64(table, E.COLD), get_i64(table, E.BITS)
    position = _scattered(index, cold, bits, max(1, bits // 2), multipliers)
    if local_size == 1:
        return 0, position
    block = position // local_size
    turns = get_i64(table, E.TURNS)
    turn = get_u8(turns, block)
    if get_i64(table, E.TURN) == 2:
        turn = get_u8(turns, 2 * block) + 256 * get_u8(turns, 2 * block + 1)
    return (position + turn) % local_size, block


@kernel("void(" + ", ".join(["int64"] * 10) + ")")
def _locate(maps, multipliers, rows, parts, homes, places, tables, nodes, local_size, count):
    table = maps
    for i in range(count):
        row = get_i64(rows, i)
        if not get_i64(table, E.FIRST) <= row < get_i64(table, E.END):
            table = maps
            for t in range(1, tables):
                if row >= get_i64(maps, t * E.MAP_FIELDS + E.FIRST):
                    table = maps + 8 * t * E.MAP_FIELDS
        row -= get_i64(table, E.FIRST)
        copied, below, first, first_below = 0, 0, 0, 0
        if get_i64(table, E.COPIED) == E.SOME:
            copied, below = _below(get_i64(table, E.WORDS2), get_i64(table, E.BELOW2), row)
        elif get_i64(table, E.COPIED) == E.ALL:
            copied, below = 1, row
        if get_i64(table, E.EVERYWHERE) == E.SOME:
            first, first_below = _below(get_i64(table, E.WORDS1), get_i64(table, E.BELOW1), row)
        elif get_i64(table, E.EVERYWHERE) == E.ALL:
            first, first_below = copied, below
        if get_i64(table, E.OWNER) >= 0:
            tier, home, place = 3, get_i64(table, E.OWNER), row
        elif first:
            tier, home, place = 1, first_below % (nodes * local_size), first_below
        elif copied:
            second = below - first_below
            tier, home, place = 2, second // local_size % nodes * local_size + second % local_size, second // local_size
        else:
            tier = 3
            home, place = _cold(table, row - below, nodes * local_size, multipliers)
        put_i64(parts, i, get_i64(table, E.PART + tier - 1))
        put_i64(homes, i, home)
        put_i64(places, i, place)


def locate(
    maps_TM: Tensor, multipliers: tuple[int, ...], nodes: int, local_size: int, rows_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Part, owner and place of global rows; `maps_TM` has the MAP_FIELDS of each table, by first row."""
    rows_N = rows_N.contiguous()
    part_N, home_N, place_N = (torch.empty_like(rows_N) for _ in range(3))
    numbers = np.array(multipliers)
    arrays = addresses("qqqqqq", maps_TM, numbers, rows_N, part_N, home_N, place_N)
    _locate(*arrays, len(maps_TM), nodes, local_size, rows_N.numel())
    return part_N, home_N, place_N


# -- routing ----------------------------------------------------------------------------------------------------------


@kernel("void(" + ", ".join(["int64"] * 11) + ")")
def _route(part, home, ways, keys, counts, order, count, parts, node, local_size, group):
    for i in range(count):
        k, h = get_i64(part, i), get_i64(home, i)
        way = get_i64(ways, k)
        key = group * parts + k
        if way == E.SAME_NODE:
            key = (node * local_size + h % local_size) * parts + k
        elif way == E.OTHER_NODES:
            key = h // local_size * parts + k
        elif way != E.NOWHERE:
            key = h * parts + k
        put_i64(keys, i, key)
        put_i64(counts, key + 1, get_i64(counts, key + 1) + 1)
    for key in range((group + 1) * parts):
        put_i64(counts, key + 1, get_i64(counts, key + 1) + get_i64(counts, key))
    for i in range(count):
        key = get_i64(keys, i)
        at = get_i64(counts, key)
        put_i64(order, at, i)
        put_i64(counts, key, at + 1)


def route(part_N: Tensor, home_N: Tensor, ways_K: Tensor, node: int, local_size: int, group: int) -> tuple[Tensor, Tensor]:
    """(rows of each part for each rank of a group, and last for none [group + 1, parts]; row indices in that order)."""
    parts, keys_N, order_N = ways_K.numel(), torch.empty_like(part_N), torch.empty_like(part_N)
    ends = np.zeros((group + 1) * parts + 1, dtype=np.int64)
    assert part_N.shape == home_N.shape
    arrays = addresses("qqqqqq", part_N, home_N, ways_K, keys_N, ends, order_N)
    _route(*arrays, part_N.numel(), parts, node, local_size, group)
    return torch.from_numpy(np.diff(ends[:-1], prepend=0)).view(group + 1, parts), order_N


# -- messages ---------------------------------------------------------------------------------------------------------


@inlined
def _copy_bytes(source, target, count):
    for b in range(count):
        put_u8(target, b, get_u8(source, b))


@inlined
def _copy_row(source, target, width):
    four = width // 4
    copy_floats(source, target, four)
    _copy_bytes(source + 4 * four, target + 4 * four, width - 4 * four)


@kernel("void(" + ", ".join(["int64"] * 8) + ")")
def _pack_rows(codes, meta, fields, part, place, offset, out, count):
    for i in range(count):
        if i + PREFETCH_DISTANCE < count:
            later = fields + 8 * _PART_FIELDS * get_i64(part, i + PREFETCH_DISTANCE)
            prefetch(codes + get_i64(later, E.CODES) + get_i64(place, i + PREFETCH_DISTANCE) * get_i64(later, E.ROW_BYTES))
        field, p, to = fields + 8 * _PART_FIELDS * get_i64(part, i), get_i64(place, i), out + get_i64(offset, i)
        width, words = get_i64(field, E.ROW_BYTES), 4 * get_i64(field, E.WORDS)
        _copy_row(codes + get_i64(field, E.CODES) + p * width, to, width)
        _copy_bytes(meta + 4 * get_i64(field, E.META) + p * words, to + width, words)


@kernel("void(" + ", ".join(["int64"] * 7) + ")")
def _copy_rows(message, source, fields, part, offset, out, count):
    for i in range(count):
        field = fields + 8 * _PART_FIELDS * get_i64(part, i)
        size = get_i64(field, E.ROW_BYTES) + 4 * get_i64(field, E.WORDS)
        _copy_row(message + get_i64(source, i), out + get_i64(offset, i), size)


@kernel("void(" + ", ".join(["int64"] * 7) + ")")
def _unpack_rows(message, offset, fields, part, target, rows, count):
    for i in range(count):
        field, row = fields + 8 * _PART_FIELDS * get_i64(part, i), message + get_i64(offset, i)
        about = row + get_i64(field, E.ROW_BYTES)
        read_row(get_i64(field, E.FORMAT), row, about, get_i64(field, E.DIM), rows + get_i64(target, i))


@kernel("void(" + ", ".join(["int64"] * 8) + ")")
def _pack_gradients(grads, fields, part, at, scratch, out, pitch, count):
    for i in range(count):
        field, source = fields + 8 * _PART_FIELDS * get_i64(part, i), grads + 4 * pitch * get_i64(at, i)
        dim, each = get_i64(field, E.DIM), get_i64(field, E.GRADIENT)
        if each == 4:
            copy_floats(source, out, dim)
        else:
            copy_floats(source, scratch, dim)
            if each == 2:
                narrow(scratch, out, dim, F.BF16)
            else:
                low, high, size = measure_row(scratch, dim)
                if size > _LARGEST:
                    fill_floats(scratch, dim, _ZERO)
                    low, high, size = measure_row(scratch, dim)
                    write_row(F.INT8, scratch, dim, low, high, size, out, out + dim, 0, 0)
                    put_f32(out + dim, 0, _NAN)
                else:
                    write_row(F.INT8, scratch, dim, low, high, size, out, out + dim, 0, 0)
                out += 4
        out += dim * each


@kernel("void(" + ", ".join(["int64"] * 6) + ")")
def _unpack_gradients(message, fields, part, grads, pitch, count):
    for i in range(count):
        field = fields + 8 * _PART_FIELDS * get_i64(part, i)
        dim, each = get_i64(field, E.DIM), get_i64(field, E.GRADIENT)
        if each == 4:
            copy_floats(message, grads, dim)
        elif each == 2:
            read_row(F.BF16, message, message, dim, grads)
        else:
            read_row(F.INT8, message, message + dim, dim, grads)
            message += 4
        fill_floats(grads + 4 * dim, pitch - dim, _ZERO)
        message, grads = message + dim * each, grads + 4 * pitch


def pack_rows(
    codes: Tensor, meta: Tensor, fields_KF: Tensor, part_N: Tensor, place_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:
    """Copy rows of an arena, given by part and place, to a message."""
    assert part_N.shape == place_N.shape == offset_N.shape
    _pack_rows(*addresses("BiqqqqB", codes, meta, fields_KF, part_N, place_N, offset_N, out), part_N.numel())


def copy_rows(
    message: Tensor, from_N: Tensor, fields_KF: Tensor, part_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:  # fmt: skip
    """Copy rows of one message to another."""
    assert part_N.shape == from_N.shape == offset_N.shape
    _copy_rows(*addresses("BqqqqB", message, from_N, fields_KF, part_N, offset_N, out), part_N.numel())


def unpack_rows(message: Tensor, offset_N: Tensor, fields_KF: Tensor, part_N: Tensor, target_N: Tensor, rows: Tensor) -> None:
    """Dequantize rows of a message to byte offsets `target_N` of `rows`."""
    assert part_N.shape == offset_N.shape == target_N.shape
    _unpack_rows(*addresses("BqqqqB", message, offset_N, fields_KF, part_N, target_N, rows), part_N.numel())


def pack_gradients(grads_UW: Tensor, fields_KF: Tensor, part_N: Tensor, at_N: Tensor, size: int | None = None) -> Tensor:
    """A message of the gradients of rows `at_N`, whose parts are `part_N`."""
    grads_UW = grads_UW.contiguous()
    counts_K = np.bincount(part_N.numpy(), minlength=len(fields_KF))
    fields, scratch = fields_KF.numpy(), np.empty(F.MAX_DIM + PAD, dtype=np.float32)
    out = torch.empty(int(counts_K @ E.vector_bytes(fields[:, E.DIM], fields[:, E.GRADIENT])), dtype=torch.uint8)
    assert part_N.shape == at_N.shape
    _pack_gradients(*addresses("fqqqfB", grads_UW, fields, part_N, at_N, scratch, out), grads_UW.shape[1], part_N.numel())
    return out


def unpack_gradients(message: Tensor, fields_KF: Tensor, part_N: Tensor, width: int) -> Tensor:
    """The gradients of a message as fp32, zeros after the columns of a row."""
    grads_NW = torch.empty(part_N.numel(), width, dtype=torch.float32)
    _unpack_gradients(*addresses("Bqqf", message, fields_KF, part_N, grads_NW), width, part_N.numel())
    return grads_NW
