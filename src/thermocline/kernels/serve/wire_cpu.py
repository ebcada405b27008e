"""Answer requests in Protobuf's wire format on a CPU: `kernels/cpu/wire.py` reads them, and the kernels of `cpu.py` look up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import wire as W
from thermocline.kernels.cpu.compile import addresses, helper, kernel
from thermocline.kernels.cpu.vectors import get_f32, get_i64, put_i64, put_u8
from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids.cpu import map_rows

from . import fields as S
from .cpu import FOUND, GROUP, ROW_OFFSETS, find_addresses, pool_bags
from .fields import ShardedTables

# Fields of the array that `WireLookup` passes, and of each feature's head: address, length, pooling mode.
(
    _FIELDS, _SHARDS, _ROTATIONS, _WORDS, _COUNTS, _BASES, _OFFSETS, _FEATURES, _NAMES, _MASK, _TEXT, _HEADS, _MAP_FIELDS,
    _MAP_WORDS, _MAP_COUNTS,
) = range(15)  # fmt: skip
_HEAD = 3


@helper
def _made(request, n):
    """Input n of a request."""
    return request + 8 * (W.HEAD + W.INPUT * n)


@helper
def _check_bags(starts, bags, count):
    """Whether the first ids of bags begin at 0, do not decrease, and end among `count` ids."""
    before = np.int64(0)
    for b in range(bags):
        start = get_i64(starts, b)
        if start < before or start > count or (b == 0 and start != 0):
            return False
        before = start
    return bags > 0 or count == 0


@helper
def _are_complete(table, request, seen):
    """Whether inputs are as long as their bytes and go together; marks in `seen` which input gives what of a feature."""
    inputs = get_i64(request, W.INPUTS)
    for n in range(3 * get_i64(table, _FEATURES)):
        put_i64(seen, n, 0)
    for n in range(inputs):
        made = _made(request, n)
        kind, place = get_i64(made, W.KIND), 3 * get_i64(made, W.FEATURE) + get_i64(made, W.KIND)
        if get_i64(made, W.BYTES) != (4 if kind == W.WEIGHTS else 8) * get_i64(made, W.COUNT) or get_i64(seen, place) != 0:
            return False
        put_i64(seen, place, n + 1)
    for n in range(inputs):
        own, mode = seen + 24 * get_i64(_made(request, n), W.FEATURE), _mode(table, get_i64(_made(request, n), W.FEATURE))
        pooled, weighted = get_i64(own, W.OFFSETS) != 0, get_i64(own, W.WEIGHTS) != 0
        if get_i64(own, W.IDS) == 0 or (weighted and not pooled) or (pooled and mode == F.MAX) or (weighted and mode != F.SUM):
            return False
    return True


@helper
def _mode(table, feature):
    return get_i64(get_i64(table, _HEADS), _HEAD * feature + 2)


@helper
def _shape(table, request, seen, feature):
    """(rows, columns) of a feature's output."""
    offsets = get_i64(seen, 3 * feature + W.OFFSETS)
    rows = get_i64(_made(request, (offsets if offsets != 0 else get_i64(seen, 3 * feature + W.IDS)) - 1), W.COUNT)
    return rows, get_i64(get_i64(table, _FIELDS) + 8 * S.FIELDS * feature, S.DIM)


# The kernels of a request keep the GIL: they take microseconds, and another thread that takes the GIL would delay the request.
@kernel("int64(int64, int64, int64, int64)", nogil=False)
def _read(data, length, table, request):
    """Read a request; returns the number of its values, or -1 if Protobuf must read it. `RAW`: bytes of its outputs."""
    most, seen = 3 * get_i64(table, _FEATURES), request - 24 * get_i64(table, _FEATURES)
    names, mask, text = get_i64(table, _NAMES), get_i64(table, _MASK), get_i64(table, _TEXT)
    if not W.read_request(data, data + length, names, mask, text, request, most) or not _are_complete(table, request, seen):
        return np.int64(-1)
    asked, outputs, values, size = get_i64(request, W.OUTPUTS), np.int64(0), np.int64(0), np.int64(0)
    for n in range(get_i64(request, W.INPUTS)):
        made = _made(request, n)
        feature = get_i64(made, W.FEATURE)
        values += get_i64(made, W.COUNT)
        if get_i64(made, W.KIND) == W.IDS:
            # Outputs are asked for in the order of the inputs, or Protobuf reads the request.
            if asked > 0 and (outputs == asked or get_i64(_made(request, outputs), W.OUTPUT) != feature):
                return np.int64(-1)
            outputs += 1
            rows, dim = _shape(table, request, seen, feature)
            size += W.output_bytes(get_i64(get_i64(table, _HEADS), _HEAD * feature + 1), rows, dim)[1]
    put_i64(request, W.RAW, size)
    return values if asked == 0 or asked == outputs else np.int64(-1)


@helper
def _look_up_input(table, request, seen, made, out, shard_counts, memory):
    """Write the bags of a feature to `out`; whether its ids, offsets and weights are valid, and all shards are up."""
    feature, count, shards = get_i64(made, W.FEATURE), get_i64(made, W.COUNT), get_i64(table, _SHARDS)
    field, own = get_i64(table, _FIELDS) + 8 * S.FIELDS * feature, seen + 24 * feature
    ends, targets, scratch = memory, memory + 16, memory + 32
    rows = scratch + 8 * 3 * GROUP
    addresses, bags, offsets, weights = rows + 8 * count, count, get_i64(table, _OFFSETS), np.int64(0)
    W.copy_bytes(get_i64(made, W.AT), rows, 8 * count)  # what kernels read is aligned
    if get_i64(own, W.OFFSETS) != 0:
        given = _made(request, get_i64(own, W.OFFSETS) - 1)
        bags, offsets = get_i64(given, W.COUNT), addresses + 8 * count
        W.copy_bytes(get_i64(given, W.AT), offsets, 8 * bags)
        if not _check_bags(offsets, bags, count):
            return False
        put_i64(offsets, bags, count)
    if get_i64(own, W.WEIGHTS) != 0:
        given, weights = _made(request, get_i64(own, W.WEIGHTS) - 1), offsets + 8 * (bags + 1)
        if get_i64(given, W.COUNT) != count:
            return False
        W.copy_bytes(get_i64(given, W.AT), weights, 4 * count)
        for i in range(count):
            if not np.isfinite(get_f32(weights, i)):
                return False
    put_i64(ends, 0, 0)
    put_i64(ends, 1, count)
    maps = get_i64(table, _MAP_FIELDS)
    if maps != 0:
        maps += 8 * M.FIELDS * feature
        words, counts = get_i64(table, _MAP_WORDS), get_i64(table, _MAP_COUNTS)
        if map_rows(maps, words, counts, rows, ends, 1, rows, scratch, 0, count) != FOUND:
            return False
    found = find_addresses(
        field, shards, get_i64(table, _ROTATIONS), get_i64(table, _WORDS), get_i64(table, _COUNTS),
        get_i64(table, _BASES) + 8 * (shards + 1) * feature, ends, rows, addresses, shard_counts, scratch, 0, count,
    )  # fmt: skip
    if found != FOUND:
        return False
    put_i64(ends, 1, bags)
    put_i64(targets, 0, 0)
    put_i64(targets, 1, get_i64(field, S.DIM))
    mean = get_i64(own, W.OFFSETS) != 0 and _mode(table, feature) == F.MEAN
    pool_bags(field, ends, addresses, offsets, weights, mean, out, targets, 0, bags)
    return True


@kernel("int64(int64, int64, int64, int64, int64)", nogil=False)
def _answer(table, request, out, tally, memory):
    """Look up a request that was read, and write its outputs. Returns 0, without counting a lookup, if it cannot."""
    inputs, seen = get_i64(request, W.INPUTS), request - 24 * get_i64(table, _FEATURES)
    shard_counts, shards = memory, get_i64(table, _SHARDS) + 1
    for shard in range(shards):
        put_i64(shard_counts, shard, 0)
    for n in range(inputs):
        feature = get_i64(_made(request, n), W.FEATURE)
        if get_i64(_made(request, n), W.KIND) == W.IDS:
            rows, dim = _shape(table, request, seen, feature)
            head = get_i64(table, _HEADS) + 8 * _HEAD * feature
            out = W.put_output(out, get_i64(head, 0), get_i64(head, 1), rows, dim)
    for n in range(inputs):
        made = _made(request, n)
        if get_i64(made, W.KIND) == W.IDS:
            rows, dim = _shape(table, request, seen, get_i64(made, W.FEATURE))
            put_u8(out, 0, 0x32)
            out = W.put_length(out + 1, 4 * rows * dim)
            if not _look_up_input(table, request, seen, made, out, shard_counts, memory + 8 * shards):
                return np.int64(0)
            out += 4 * rows * dim
    for shard in range(shards):
        put_i64(tally, shard, get_i64(tally, shard) + get_i64(shard_counts, shard))
    return np.int64(1)


class WireLookup:
    """Answers requests in Protobuf's wire format: one kernel reads a request, another looks up and writes the response.

    Pointers to the tables are collected once, and each thread keeps its scratch memory: reading 26 inputs with Protobuf and
    joining them for `gather_pool` takes longer than all the rest of the server. Not thread-safe between `read` and `answer`.

    Args:
        placed: the tables, on a CPU
        names: features, in the order of `placed`
        modes: how each is pooled
        maps: fields, words and counts of the features' id maps, or None
        tally_C: lookups of each shard and of the overlay, counted here
        pin: held as long as rows may be read
    """

    def __init__(
        self, placed: ShardedTables, names: Sequence[str], modes: Sequence[int], maps: Sequence[Tensor] | None, tally_C: Any,
        pin: object = None,
    ) -> None:  # fmt: skip
        kinds = (("", W.IDS), (".offsets", W.OFFSETS), (".weights", W.WEIGHTS))
        names_SN, text = W.name_table([((name + end).encode(), n, kind) for n, name in enumerate(names) for end, kind in kinds])
        heads = [W.output_head(name.encode()) for name in names]
        text_B = np.frombuffer(text + b"".join(heads), np.uint8).copy()
        sizes_F = np.array([len(head) for head in heads])
        starts_F = addresses("B", text_B)[0] + len(text) + np.cumsum(sizes_F) - sizes_F
        heads_FH = np.stack([starts_F, sizes_F, np.array(modes)], 1).astype(np.int64)
        self._alive = placed, tally_C, names_SN, text_B, heads_FH, maps, pin  # addresses of all but the pin are used
        self._request_N = np.zeros(3 * len(names) * (1 + W.INPUT) + W.HEAD, np.int64)
        self._head, self._shards = self._request_N[3 * len(names) :][: W.HEAD], placed.shards
        tables = (placed.fields_FN, placed.rotations, placed.words, placed.counts, placed.bases_FC, ROW_OFFSETS)
        fields, *others = addresses("qBqiqq", *tables)
        at_names, at_text, at_heads = addresses("qBq", names_SN, text_B, heads_FH)
        known = [len(names), at_names, len(names_SN) - 1, at_text, at_heads, *addresses("qqi", *(maps or (None,) * 3))]
        self._table = np.array([fields, placed.shards, *others, *known], np.int64)
        self._at, self._tally, self._request = addresses("qqq", self._table, tally_C, self._head)

    def read(self, data: int, length: int) -> tuple[int, int, int, int, int, int]:
        """Read the message at an address: its values, or -1 if Protobuf must read it; the bytes of its outputs; and where its
        version begins and ends, and its id."""
        values = _read(data, length, self._at, self._request)
        first, last, id_first, id_last, _, _, size = self._head.tolist()
        none = 0 if id_first == 0 else data
        return values, size, *((first - data, last - data) if first else (0, 0)), id_first - none, id_last - none

    def answer(self, values: int, out: int) -> bool:
        """Write the outputs of the request that was read, of at most `MAX_UNPOOLED_ROWS` values, to the address `out`.

        Returns False if an id, an offset or a weight is invalid, or a shard is down. The general path raises the error.
        """
        return bool(_answer(self._at, self._request, out, self._tally, _scratch.of(4 * values + self._shards + 8)))


class _ThreadScratch(threading.local):
    """Scratch memory of a thread."""

    def __init__(self) -> None:
        self._memory, self._at = np.zeros(0, np.int64), 0

    def of(self, size: int) -> int:
        """Address of at least `size` int64 numbers, beside those that every launch needs."""
        if len(self._memory) < size + 3 * GROUP + 8:
            self._memory = np.zeros(2 * size + 3 * GROUP + 8, np.int64)
            self._at = self._memory.__array_interface__["data"][0]
        return self._at


_scratch = _ThreadScratch()
