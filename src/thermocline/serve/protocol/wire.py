"""Counts in a ModelInferRequest, from protobuf's wire format, before protobuf builds anything.

Two bytes are an empty tensor, for which protobuf and Python build a kilobyte: 64 MB of them took 14 GiB and a minute. The walk
visits tags and skips contents, so large tensors cost nothing. It stops at the first count beyond its limit.
"""

from __future__ import annotations

import numpy as np

from thermocline.errors import BadInput

from .tensors import RequestLimits, refuse_count

UNCOUNTED_BYTES = 1 << 15  # smaller messages hold too little to matter; the walk would cost a small request 0.5 us a field
_NESTED = 5  # `inputs` of a request, and `contents` of an input
_REQUEST, _INPUT, _CONTENTS = range(3)
_SHAPE, _FP32, _FP64, _BYTES = 3, 6, 7, 8


def check_counts(data: bytes, limits: RequestLimits) -> int:
    """The typed values of a large ModelInferRequest. Raises `BadInput` if a request may not have as many values or fields."""
    if len(data) <= UNCOUNTED_BYTES:
        return 0
    fields = values = 0
    messages = [(0, len(data), _REQUEST)]
    while messages:
        at, end, kind = messages.pop()
        while at < end:
            fields += 1
            refuse_count("fields", fields, limits.fields)
            number, wire, at, after = _field(data, at, end)
            if wire == 2 and number == _NESTED and kind != _CONTENTS:
                messages.append((at, after, kind + 1))
            elif wire == 2 and (kind == _CONTENTS or (kind == _INPUT and number == _SHAPE)):
                values += _packed(data, at, after - at, number if kind == _CONTENTS else _SHAPE)
                refuse_count("values", values, limits.values + limits.fields)  # sizes of shapes count too
            at = after
    return values


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int, int]:
    """Number and wire type of a field, and where its contents begin and end."""
    tag, at = _varint(data, at, end)
    wire, after = tag & 7, at
    if wire == 0:
        _, after = _varint(data, at, end)
    elif wire == 2:
        length, at = _varint(data, at, end)
        after = at + length
    elif wire in (1, 5):
        after = at + (8 if wire == 1 else 4)
    else:
        raise _malformed(data, at)
    if after > end:
        raise _malformed(data, at)
    return tag >> 3, wire, at, after


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _malformed(data, at)


def _packed(data: bytes, at: int, length: int, number: int) -> int:
    """Values in a packed field. The last byte of each varint is below 0x80."""
    if number in (_FP32, _FP64, _BYTES):
        return 1 if number == _BYTES else length // (4 if number == _FP32 else 8)
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, length, at) < 0x80))


def _malformed(data: bytes, at: int) -> BadInput:
    words = f"the {len(data)} bytes of this request are not a ModelInferRequest: byte {at} begins no field"
    return BadInput(words, parameter="ModelInferRequest")
