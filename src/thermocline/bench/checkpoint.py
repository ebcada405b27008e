"""How fast checkpoints are written and read, next to torch.save and torch.distributed.checkpoint (DCP) of the same arrays.

All write to the same disk in turn, so that a busy machine is busy for all, and all make what they wrote last (fsync; DCP does
so by itself, after torch.save it is done here). Ours also computes and compares a sha256 of every byte, DCP nothing. Loading
fills the module that is there. The disk's cache holds the files for everybody.

    save/dcp, load/dcp, save/torch, load/torch    seconds, ours and the peer's
    async/stall      longest of: the call of save_async, and what a step took longer than usual; as a share of a save that waits
    async/step       what steps take while a save is written, over what they take without
    incremental      bytes that a save writes after 1% of the rows were looked up, as a share of a full one
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ..checkpoint.background import save_async
from ..checkpoint.load import load
from ..checkpoint.reader import Checkpoint
from ..checkpoint.save import save
from ..nn.collection import EmbeddingCollection, Table
from .record import Recorder

ROWS, DIM, TABLES, BATCH, RUNS = 3_000_000, 64, 4, 2048, 5
STALL, CHANGED = 0.15, 0.02  # asked: at most
_WARM = 30  # steps until the cache knows what to keep


def run(rows: int, folder: Path, report: Callable[[int, int, str], None], quick: bool = False) -> dict[str, Any]:
    """Measure all of it with so many rows, in files under `folder`."""
    torch.manual_seed(0)
    recorder = Recorder("checkpoint", lambda text: report(len(recorder.rows), 7, text), judged=not quick)
    tables = EmbeddingCollection([Table(f"t{n}", rows // TABLES, DIM) for n in range(TABLES)], precision="int8", cache=0.05)
    draw = np.random.default_rng(0)
    for _ in range(_WARM):
        _step(tables, draw)
    size = sum(array.numel() * array.element_size() for array in tables.state_dict().values())
    recorder.note(f"{rows:,} rows of {DIM} columns in int8, row-wise Adagrad, 5% cached: {size / 1e6:.0f} MB")
    saves = _race(tables, folder, 2 if quick else RUNS)
    for what in ("save", "load"):
        for peer, name in (("dcp", "torch.distributed.checkpoint"), ("torch", f"torch.{what}")):
            ours, theirs = (saves[f"{what}/{who}"] for who in ("ours", peer))
            low, high = np.percentile(ours, [10, 90])
            recorder.add(
                f"{what}/{peer}", median(ours), "s", name, median(theirs), median(theirs) / median(ours),
                float((high - low) / median(ours)), megabytes_per_second=size / 1e6 / median(ours),
            )  # fmt: skip
    _measure_async(recorder, tables, folder / "async", median(saves["save/ours"]), draw)
    _measure_incremental(recorder, tables, folder / "incremental")
    return recorder.record


def _step(tables: EmbeddingCollection, draw: np.random.Generator) -> float:
    """One training step on skewed ids; its seconds."""
    rows = tables.tables[0].rows
    ids = torch.from_numpy((draw.random((BATCH, TABLES)) ** 4 * rows).astype(np.int64))
    start = time.perf_counter()
    tables(ids).values().square().mean().backward()
    return time.perf_counter() - start


def _race(tables: EmbeddingCollection, folder: Path, runs: int) -> dict[str, list[float]]:
    """Seconds of all, each run in turn."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    file = folder / "torch.pt"

    def torch_save() -> None:
        with open(file, "wb") as out:
            torch.save(tables.state_dict(), out)
            out.flush()
            os.fsync(out.fileno())

    steps: dict[str, Callable[[], object]] = {
        "save/ours": lambda: save(tables, folder / "ours"),
        "save/dcp": lambda: dcp_save({"model": tables}, checkpoint_id=folder / "dcp"),
        "save/torch": torch_save,
        "load/ours": lambda: load(folder / "ours", into=tables),
        "load/dcp": lambda: dcp_load({"model": tables}, checkpoint_id=folder / "dcp"),
        "load/torch": lambda: tables.load_state_dict(torch.load(file, weights_only=True)),
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's, that there is one process
        for _ in range(runs):
            for name, work in steps.items():
                if name.startswith("save"):
                    shutil.rmtree(folder / name[5:], ignore_errors=True)
                    file.unlink(missing_ok=True)
                    torch_save() if name != "save/torch" else None  # what load reads
                start = time.perf_counter()
                work()
                found[name].append(time.perf_counter() - start)
    return found


def _measure_async(
    recorder: Recorder, tables: EmbeddingCollection, folder: Path, sync: float, draw: np.random.Generator
) -> None:
    usual = median(_step(tables, draw) for _ in range(20))
    during: list[float] = []
    stalls: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        under_way = save_async(tables, folder)
        stalls.append(time.perf_counter() - start)
        while not under_way.done:
            during.append(_step(tables, draw))
        under_way.wait()
    longest = max(*stalls, max(during) - usual)
    recorder.add(
        "async/stall", longest / sync, "of a save", f"at most {STALL}", STALL, STALL * sync / longest, call=max(stalls),
        seconds=longest,
    )  # fmt: skip
    recorder.add("async/step", median(during) / usual, "of a step", steps=len(during), usual=usual)


def _measure_incremental(recorder: Recorder, tables: EmbeddingCollection, folder: Path) -> None:
    save(tables, folder, incremental=True)
    rows = tables.tables[0].rows
    for at in torch.randperm(rows)[: rows // 100].split(BATCH):
        tables(at[:, None].expand(-1, TABLES).contiguous()).values().square().mean().backward()
    start = time.perf_counter()
    save(tables, folder, incremental=True)
    seconds = time.perf_counter() - start
    full, changed = (each.bytes for each in Checkpoint.open(folder).manifest.saves)
    recorder.add(
        "incremental", changed / full, "of the bytes", f"at most {CHANGED}", CHANGED, CHANGED * full / changed, seconds=seconds,
        bytes=changed,
    )  # fmt: skip
