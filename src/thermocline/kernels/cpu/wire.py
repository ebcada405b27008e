"""Read and write messages of the Open Inference Protocol in Protobuf's wire format, without an object for each field.

`read_request` knows what clients of tables send: inputs of one dimension with raw bytes, text in ASCII, lengths below 2^28. It
returns False for anything else, valid or not, which Protobuf then reads. A byte is read only if it lies in its message.

A table of names has `NAME` numbers for each name: where it is in `text`, its length, the number of its feature, and what it
gives: `IDS`, `OFFSETS` or `WEIGHTS`. It is a hash table of a power of two, at most half full; a length of 0 is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .compile import helper
from .vectors import get_i64, get_u8, put_i64, put_u8

IDS, OFFSETS, WEIGHTS = range(3)
NAME = 4
# What `read_request` writes: numbers of the request, and INPUT numbers for each input.
VERSION_AT, VERSION_END, ID_AT, ID_END, INPUTS, OUTPUTS, RAW, HEAD = range(8)
FEATURE, KIND, COUNT, AT, BYTES, OUTPUT, INPUT = range(7)
_FNV, _PRIME = np.int64(-3750763034362895579), np.int64(1099511628211)
_MALFORMED = np.int64(-1)


@helper
def _read_length(at, end):
    """(a number below 2^28, where it ends), or (-1, ...)."""
    value, shift = np.int64(0), np.int64(0)
    while at < end and shift < 28:
        byte = get_u8(at, 0)
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
    return _MALFORMED, at


@helper
def _is_ascii(at, end):
    for i in range(end - at):
        if get_u8(at, i) >= 0x80:
            return False
    return True


@helper
def _is_text(at, end, first, second, third, fourth, fifth):
    """Whether bytes are five given ones, or four if the fifth is 0."""
    size = 4 + (fifth != 0)
    if end - at != size or get_u8(at, 0) != first or get_u8(at, 1) != second or get_u8(at, 2) != third:
        return False
    return get_u8(at, 3) == fourth and (fifth == 0 or get_u8(at, 4) == fifth)


@helper
def _find_name(names, mask, text, at, end):
    """The place of a name in the table, or -1."""
    value = _FNV
    for i in range(end - at):
        value = (value ^ get_u8(at, i)) * _PRIME
    slot = value & mask
    while get_i64(names, NAME * slot + 1) != 0:
        if get_i64(names, NAME * slot + 1) == end - at:
            known, same = text + get_i64(names, NAME * slot), True
            for i in range(end - at):
                same = same and get_u8(known, i) == get_u8(at, i)
            if same:
                return NAME * slot
        slot = (slot + 1) & mask
    return _MALFORMED


@helper
def _read_tensor(at, end, names, mask, text, made):
    """Read an InferInputTensor into INPUT numbers."""
    name, name_end, kind, kind_end, count = np.int64(0), np.int64(0), np.int64(0), np.int64(0), _MALFORMED
    while at < end:
        tag = get_u8(at, 0)
        value, at = _read_length(at + 1, end)
        if value < 0:
            return False
        if tag == 0x18 and count < 0:  # a size of the shape
            count = value
            continue
        if value > end - at:
            return False
        if tag == 0x0A and name == 0:
            name, name_end = at, at + value
        elif tag == 0x12 and kind == 0:
            kind, kind_end = at, at + value
        elif tag == 0x1A and count < 0:  # sizes of the shape, packed: one
            count, after = _read_length(at, at + value)
            if count < 0 or after != at + value:
                return False
        else:
            return False
        at += value
    if name == 0 or kind == 0 or count < 0:
        return False
    found = _find_name(names, mask, text, name, name_end)
    if found < 0:
        return False
    put_i64(made, FEATURE, get_i64(names, found + 2))
    put_i64(made, KIND, get_i64(names, found + 3))
    put_i64(made, COUNT, count)
    if get_i64(names, found + 3) == WEIGHTS:
        return _is_text(kind, kind_end, 70, 80, 51, 50, 0)  # FP32
    return _is_text(kind, kind_end, 73, 78, 84, 54, 52)  # INT64


@helper
def _read_output(at, end, names, mask, text):
    """The feature of an InferRequestedOutputTensor that has a name only, or -1."""
    if at == end or get_u8(at, 0) != 0x0A:
        return _MALFORMED
    size, at = _read_length(at + 1, end)
    if size < 0 or size != end - at:
        return _MALFORMED
    found = _find_name(names, mask, text, at, end)
    if found < 0 or get_i64(names, found + 3) != IDS:
        return _MALFORMED
    return get_i64(names, found + 2)


@helper
def read_request(at, end, names, mask, text, request, most):
    """Read a ModelInferRequest of at most `most` inputs, whose first field is the name of its model; whether it was read."""
    for i in range(HEAD):
        put_i64(request, i, 0)
    inputs, outputs, raws, models = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    while at < end:
        tag = get_u8(at, 0)
        size, at = _read_length(at + 1, end)
        if size < 0 or size > end - at:
            return False
        after = at + size
        made = request + 8 * HEAD
        if tag == 0x0A:
            models += 1
        elif (tag == 0x12 or tag == 0x1A) and _is_ascii(at, after):
            first = VERSION_AT if tag == 0x12 else ID_AT
            if get_i64(request, first) != 0:
                return False
            put_i64(request, first, at)
            put_i64(request, first + 1, after)
        elif tag == 0x2A and inputs < most and _read_tensor(at, after, names, mask, text, made + 8 * INPUT * inputs):
            inputs += 1
        elif tag == 0x32 and outputs < most:
            feature = _read_output(at, after, names, mask, text)
            if feature < 0:
                return False
            put_i64(made, INPUT * outputs + OUTPUT, feature)
            outputs += 1
        elif tag == 0x3A and raws < most:
            put_i64(made, INPUT * raws + AT, at)
            put_i64(made, INPUT * raws + BYTES, size)
            raws += 1
        else:
            return False
        at = after
    put_i64(request, INPUTS, inputs)
    put_i64(request, OUTPUTS, outputs)
    return models == 1 and inputs > 0 and inputs == raws


@helper
def length_bytes(value):
    """Bytes of a number."""
    size = np.int64(1)
    while value > 0x7F:
        value >>= 7
        size += 1
    return size


@helper
def put_length(at, value):
    """Write a number; returns where it ends."""
    while value > 0x7F:
        put_u8(at, 0, value & 0x7F | 0x80)
        value >>= 7
        at += 1
    put_u8(at, 0, value)
    return at + 1


@helper
def copy_bytes(source, target, count):
    """Copy `count` bytes, neither aligned."""
    for i in range(count):
        put_u8(target, i, get_u8(source, i))


@helper
def output_bytes(head, rows, dim):
    """(bytes of an InferOutputTensor with a head of name and datatype, bytes of its field and that of its raw contents)."""
    size = head + 2 + length_bytes(rows) + length_bytes(dim)
    raw = 4 * rows * dim
    return size, 2 + length_bytes(size) + size + length_bytes(raw) + raw


@helper
def put_output(at, head_at, head, rows, dim):
    """Write an output's field without its raw contents; returns where it ends."""
    size, _ = output_bytes(head, rows, dim)
    put_u8(at, 0, 0x2A)
    at = put_length(at + 1, size)
    copy_bytes(head_at, at, head)
    put_u8(at + head, 0, 0x1A)
    at = put_length(at + head + 1, length_bytes(rows) + length_bytes(dim))
    return put_length(put_length(at, rows), dim)


def output_head(name: bytes) -> bytes:
    """Name and datatype of an InferOutputTensor."""
    length, size = bytearray(), len(name)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"\x0a" + bytes(length) + name + b"\x12\x04FP32"


def name_table(names: Sequence[tuple[bytes, int, int]]) -> tuple[NDArray[np.int64], bytes]:
    """The table of (name, feature, kind), and the text that it refers to."""
    slots = 1 << max(1, (2 * len(names)).bit_length())
    table_SN, text = np.zeros((slots, NAME), np.int64), bytearray()
    for name, feature, kind in names:
        value = int(_FNV)
        for byte in name:
            value = (value ^ byte) * int(_PRIME) & (1 << 64) - 1
        slot = value & (slots - 1)
        while table_SN[slot, 1]:
            slot = (slot + 1) & (slots - 1)
        table_SN[slot] = len(text), len(name), feature, kind
        text += name
    return table_SN, bytes(text)
