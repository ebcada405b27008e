"""`python -m benchmarks memory`: bytes of tables against fp32 rows, and `memory()` against allocated bytes.

    cpu/D64/int8+5%/ratio         fp32 rows against codes, metadata, padding, cache, maps and counters
    cpu/D64/int8+5%/with-state    the same with optimizer state (row-wise Adagrad) in both
    cpu/D64/int8+5%/agrees        `memory().total` against allocated bytes: 1 - the difference
    cpu/D64/tiers-1%-5%-int2/...  1% of the rows in fp32, 5% in int8, the others in int2

Change tracking for incremental saves counts one bit for each row. Allocated bytes are found without `memory()`: from the GPU's
allocator, and on a CPU from the storages of all tensors that the module reaches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runner import record
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig

ROWS = (100_003, 60_001, 39_996)
DIMS = (16, 64, 128, 256)
KINDS = {
    "int8+5%": RowConfig("int8", cache=0.05),
    "int4+1%": RowConfig("int4", cache=0.01),
    "int2+1%": RowConfig("int2", cache=0.01),
    "tiers-1%-5%-int2": RowConfig({"fp32": 0.01, "int8": 0.05, "int2": 0.94}),
}
_BITS_A_BYTE = 8


def cases(device: str) -> list[str]:
    """The name of every row on a device."""
    return [f"{device}/D{dim}/{kind}/{what}" for dim in DIMS for kind in KINDS for what in ("ratio", "with-state", "agrees")]


def run(
    devices: list[str],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    rows: tuple[int, ...] = ROWS,
) -> dict[str, Any]:
    """Build the modules, one at a time, and return the record."""
    recorder = record.Recorder("memory", lambda line: None, judged=rows == ROWS)
    plan = [(device, dim, kind) for device in devices for dim in DIMS for kind in KINDS]
    for done, (device, dim, kind) in enumerate(plan):
        name = f"{device}/D{dim}/{kind}"
        progress(done, len(plan), name)
        before = _in_use(device)
        tables = [Table(f"t{i}", count, dim) for i, count in enumerate(rows)]
        module = EmbeddingCollection(tables, rows=KINDS[kind], device=device)
        allocated = tensor_bytes(module) if device == "cpu" else _in_use(device) - before
        _add(recorder, name, module, allocated)
        del module
    progress(len(plan), len(plan), "")
    return recorder.record


def _add(recorder: record.Recorder, name: str, module: EmbeddingCollection, allocated: int) -> None:
    memory = module.memory()
    tracking = sum(-(-table.rows // _BITS_A_BYTE) for table in module.arena.tables)
    state = memory.parts["optimizer state"]
    for what, beside, untracked in (("ratio", 0, memory.ratio), ("with-state", state, memory.ratio_with_state)):
        ours, fp32 = memory.total - state + beside + tracking, memory.fp32 + beside
        further: dict[str, Any] = {"untracked_ratio": untracked, "parts": memory.parts}
        recorder.add(f"{name}/{what}", ours, "bytes", peer="fp32 rows", peer_value=fp32, ratio=fp32 / ours, **further)
    agreement = 1 - abs(memory.total - allocated) / allocated
    recorder.add(f"{name}/agrees", memory.total, "bytes", peer="allocated", peer_value=allocated, ratio=agreement)


def _in_use(device: str) -> int:
    """Bytes allocated on the GPU."""
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def tensor_bytes(root: nn.Module) -> int:
    """Bytes of the storages of all tensors that can be reached from a module, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(root)}
    return sum(storages.values())


def tensors_of(root: object) -> Iterator[Tensor]:
    """All tensors that can be reached from an object by attributes, items and elements."""
    seen, waiting = set[int](), [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        if not isinstance(found, type) and hasattr(found, "__dict__"):
            waiting += vars(found).values()
