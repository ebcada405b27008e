"""From a checkpoint to ready shards: bytes per second, against a sequential copy of the same files.

    start/cpu/int8/4      processes started, checksums verified, rows in the memory of four shards, kernels warm
    start/cpu/int8/4/load the same without checksums and with running shards: reading and placing rows

Files are in the page cache for both: this measures the program, not the disk. The sequential rate is that of a copy of the
memory-mapped files into fresh shared memory in one thread, the minimum for any loader. `read` is the rate of reading the files
into one small buffer, and `sha256` the rate of checksums in one thread. `terabyte_s` is the time for 1 TB at the measured rate.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.runner.record import Recorder
from benchmarks.runner.timing import seconds
from thermocline.checkpoint import Checkpoint, save
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.serve.tables.checkpoint_source import CheckpointSource
from thermocline.serve.tables.segments import SharedSegment, make_layout
from thermocline.serve.tables.shard_group import ShardGroup
from thermocline.serve.tables.supervisor import Supervisor

ROWS, DIM, TABLES = 1_000_000, 128, 6
RUNS = 5


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure both rows for each precision that is wanted."""
    for n, precision in enumerate(("int8", "fp32")):
        cards = 4
        case = f"start/cpu/{precision}/{cards}"
        progress(n, 2, case)
        if not wanted(case):
            continue
        with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
            rows = ROWS // 100 if quick else ROWS
            tables = [Table(f"t{t}", rows, DIM) for t in range(TABLES)]
            save(EmbeddingCollection(tables, rows=RowConfig(precision, cache=0.0)), folder)
            _measure(recorder, case, folder, cards, 1 if quick else RUNS)


def _measure(recorder: Recorder, case: str, folder: str, cards: int, runs: int) -> None:
    size = Checkpoint.open(folder).manifest.saves[-1].bytes
    work: dict[str, Callable[[], float]] = {
        "copy": lambda: _copy(Path(folder)),
        "read": lambda: seconds(lambda: _read(Path(folder))),
        "sha256": lambda: seconds(lambda: _digest(Path(folder))),
        "start": lambda: _start(folder, cards),
        "load": lambda: _load(folder, cards),
    }
    taken = {name: sorted(once() for _ in range(runs))[runs // 2] for name, once in work.items()}
    rate = {name: size / once / 1e9 for name, once in taken.items()}
    for name, ours in ((case, rate["start"]), (f"{case}/load", rate["load"])):
        further = {"bytes": size, "terabyte_s": 1e3 / ours, "read": rate["read"], "sha256": rate["sha256"]}
        recorder.add(name, ours, "GB/s", "sequential copy", rate["copy"], ours / rate["copy"], **further)


def _read(folder: Path) -> None:
    buffer = bytearray(1 << 24)
    for path in sorted(folder.rglob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _copy(folder: Path) -> float:
    """Seconds until all files are in memory; freeing it is not counted, here and in `_start`."""
    start, kept = time.perf_counter(), []
    for path in sorted(folder.rglob("*.safetensors")):
        file = np.memmap(path, np.uint8, "r")
        kept.append(SharedSegment(len(file)))
        np.copyto(kept[-1].memory, file)
    return time.perf_counter() - start


def _start(folder: str, cards: int) -> float:
    start = time.perf_counter()
    with ShardGroup(folder, cards):
        return time.perf_counter() - start


def _digest(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        hashlib.sha256(np.memmap(path, np.uint8, "r")).digest()  # type: ignore[arg-type]


def _load(folder: str, cards: int) -> float:
    """Seconds to place rows, with running shards and without checksums."""
    source, supervisor = CheckpointSource(folder), Supervisor(cards)
    try:
        layout = make_layout(source.tables, source.splits(cards, "hash", None, None), records=True)
        segments = [SharedSegment(size_C) for size_C in layout.sizes_S]
        job = source.load_job(layout)
        supervisor.load("warm", type(job)(layout, job.files, (), ()), segments)
        start = time.perf_counter()
        supervisor.load("1", type(job)(layout, job.files, job.phases, ()), segments)
        return time.perf_counter() - start
    finally:
        supervisor.close()
