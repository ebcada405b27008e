"""How fast checkpoints are written and read, next to torch.save and torch.distributed.checkpoint (DCP) of the same arrays.

Contenders write to the same disk in turn, so that other load affects all of them, and all call fsync: DCP for each of its
files, this benchmark for torch.save, Thermocline for files and folders. Thermocline also computes a sha256 of every byte and
verifies it on loading; the others compute no checksums. Loading fills an existing module. The page cache holds the files of all
contenders. The first round, which allocates memory and disk space, does not count.

    save/dcp, load/dcp, save/torch, load/torch    seconds, ours and the peer's
    async/stall      longest of: the call of save_async, and what a step took longer than usual; as a share of a save that
                     waits. The median of several saves; `worst` of all of them, and `without` a save, in as many steps
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

from benchmarks.runner.record import Recorder
from thermocline.checkpoint import Checkpoint, load_into, save, save_async
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig

ROWS, DIM, TABLES, BATCH, RUNS, ASYNC = 8_000_000, 64, 4, 2048, 9, 5
STALL, CHANGED = 0.15, 0.02  # asked: at most
_WARM = 30  # steps until the cache is filled


def run(rows: int, folder: Path, report: Callable[[int, int, str], None], quick: bool = False) -> dict[str, Any]:
    """Measure tables of `rows` rows, with files under `folder`."""
    torch.manual_seed(0)
    recorder = Recorder("checkpoint", lambda text: report(len(recorder.rows), 7, text), judged=not quick)
    tables = EmbeddingCollection(
        [Table(f"t{n}", rows // TABLES, DIM) for n in range(TABLES)], rows=RowConfig("int8", cache=0.05)
    )
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
    _measure_async(recorder, tables, folder / "async", median(saves["save/ours"]), draw, 2 if quick else ASYNC)
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
        "load/ours": lambda: load_into(tables, folder / "ours"),
        "load/dcp": lambda: dcp_load({"model": tables}, checkpoint_id=folder / "dcp"),
        "load/torch": lambda: tables.load_state_dict(torch.load(file, weights_only=True)),
    }
    places = {"save/ours": folder / "ours", "save/dcp": folder / "dcp", "save/torch": file}
    found: dict[str, list[float]] = {name: [] for name in steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's, that there is one process
        for _ in range(1 + runs):
            for name, work in steps.items():
                if name in places:
                    shutil.rmtree(places[name], ignore_errors=True)
                    file.unlink(missing_ok=True) if name == "save/torch" else None
                start = time.perf_counter()
                work()
                found[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def _measure_async(
    recorder: Recorder, tables: EmbeddingCollection, folder: Path, sync: float, draw: np.random.Generator, saves: int
) -> None:
    usual = median(_step(tables, draw) for _ in range(20))
    during: list[list[float]] = []
    calls: list[float] = []
    for _ in range(saves):
        start = time.perf_counter()
        under_way = save_async(tables, folder)
        calls.append(time.perf_counter() - start)
        during.append([])
        while not under_way.done:
            during[-1].append(_step(tables, draw))
        under_way.wait()
    stalls = [max(call, max(steps, default=0.0) - usual) for call, steps in zip(calls, during, strict=True)]
    without = max(_step(tables, draw) for _ in range(len(during[-1]))) - usual
    longest = median(stalls)
    recorder.add(
        "async/stall", longest / sync, "of a save", f"at most {STALL}", STALL, STALL * sync / longest, seconds=longest,
        call=median(calls), worst=max(stalls), without=without,
    )  # fmt: skip
    steps = [step for each in during for step in each]
    recorder.add("async/step", median(steps) / usual, "of a step", steps=len(steps), usual=usual)


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
