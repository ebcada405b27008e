"""Ranks that are killed, again and again: does every one of them go on from where it should, with the bits it should have?

Four ranks train a sharded model and save now and then: all of it, what changed, and what changed in the background, in turn.
The ids of one table come and go, and it grows. At a random moment one rank, or all, are killed with SIGKILL, and the job is
started again on the same folder. A run without kills has left the sha256 of what every rank holds after every step; each rank
compares its own after resuming and after every step.

    lost       a save that had returned, and the job resumed from an older one
    corrupt    a rank that held other bits than in the run without kills, or a folder that did not open

Ranks are forks of this process, which has imported everything and loaded the kernels, and started no thread: a job is up in
half a second, where loading what its ranks need would take each of them several.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runner.record import Recorder
from thermocline import formats as F
from thermocline.checkpoint import BackgroundSave, Checkpoint, resume, save, save_async
from thermocline.distributed.shard import shard_
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.heat.profiler import profile_batches
from thermocline.ids.idmap import IdMap
from thermocline.kernels.cpu.compile import prepare
from thermocline.kernels.elastic.fields import STEPS as STEPS_COUNT
from thermocline.kernels.layout import Cache
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.plan.make import make_plan
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology
from thermocline.rows.arena import Arena

RANKS, STEPS, BATCH, EVERY = 4, 120, 64, 3
TABLES = {"user": (5003, 16), "item": (2001, 16), "shop": (97, 8), "news": (641, 8)}
NEWS = IdMap.elastic(641, half_life=5, grow_from=80)  # ids come and go, and the table grows
_CACHE = 0.05
_PATIENCE = 120.0  # seconds for a job to come up or to end


class _CrashModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        tables = [Table(name, rows, dim, ids=NEWS if name == "news" else None) for name, (rows, dim) in TABLES.items()]
        self.rows = EmbeddingCollection(tables, rows=RowConfig("int8", cache=_CACHE, seed=3))
        self.top: nn.Module = nn.Linear(sum(dim for _, dim in TABLES.values()), 1)


def _ids(step: int, rank: int) -> dict[str, Any]:
    draw = np.random.default_rng((step, rank))
    ids = {name: (draw.random((BATCH, 2)) ** 4 * rows).astype(np.int64) for name, (rows, _) in TABLES.items()}
    return ids | {"news": (ids["news"] // 2 + 9 * step) * 7919}


def run(kills: int, folder: Path, report: Callable[[int, int, str], None], seed: int = 0) -> dict[str, Any]:
    """Kill ranks `kills` times, with files under `folder`."""
    recorder = Recorder("crash", lambda text: None)
    chance = random.Random(seed)
    torch.set_num_threads(1)
    prepare()
    job = _CrashJob(folder)
    if failed := job.end(job.start(_plan, 1, "plan") + job.start(_train, RANKS, "reference")):
        raise AssertionError(f"the run without kills failed: {failed}")
    count = {"kills": 0, "in_saves": 0, "all_at_once": 0, "resumes": 0, "runs": 0, "lost": 0, "corrupt": 0}
    run_number, pace = 0, 1.0
    began = time.monotonic()
    while count["kills"] < kills:
        name = f"run{run_number}"
        processes = job.start(_train, RANKS, name)
        up = job.until_up(name, processes)
        time.sleep(chance.random() * pace if up else 0.0)
        saving = job.saving(name)
        victims = processes if chance.random() < 0.2 else [chance.choice(processes)]
        killed = [job.kill(process) for process in victims]
        for process in processes:
            if process not in victims and any(killed):
                job.kill(process)  # as a launcher does once one is gone
        failed = job.end(processes)
        told = job.told(name)
        count["resumes"] += told["resumed"]
        count["lost"] += told["lost"]
        count["corrupt"] += told["corrupt"] + (0 if _opens(folder / name) else 1)
        if any(killed):
            count["kills"] += 1
            count["in_saves"] += saving
            count["all_at_once"] += len(victims) > 1
        if not failed or told["lost"] or told["corrupt"]:  # it came to its end, or is of no use any more
            count["runs"] += not failed
            run_number += 1
        report(count["kills"], kills, f"{count['lost']} lost, {count['corrupt']} corrupt")
    good = kills if not count["lost"] + count["corrupt"] else kills - count["lost"] - count["corrupt"]
    recorder.add("kills", good, "kills survived", "all", kills, good / kills, **count, seconds=time.monotonic() - began)
    return recorder.record


def _opens(path: Path) -> bool:
    """Whether a folder is a whole checkpoint, or none yet."""
    if not (path / "manifest.json").exists():
        return True
    try:
        Checkpoint.open(path).verify()
        return True
    except Exception:
        return False


class _CrashJob:
    """Ranks as forked processes, and the files by which they tell what they do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def start(self, work: Callable[..., None], ranks: int, name: str) -> list[int]:
        self.number += 1
        notes = self.folder / f"{name}.notes"
        notes.mkdir(exist_ok=True)
        for old in notes.glob("up-*"):
            old.unlink()
        found = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(self.folder, name, rank, self.folder / f"store{self.number}", notes)
                    code = 0
                except BaseException as error:
                    (notes / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
                finally:
                    os._exit(code)
            found.append(child)
        if work is _plan:
            self.end(found)
        return found

    def until_up(self, name: str, processes: list[int]) -> bool:
        """Wait until all ranks train; False if they end before."""
        end = time.monotonic() + _PATIENCE
        while len(list((self.folder / f"{name}.notes").glob("up-*"))) < len(processes):
            if time.monotonic() > end or any(_gone(process) for process in processes):
                return False
            time.sleep(0.005)
        return True

    def saving(self, name: str) -> bool:
        """Whether a save is being written: a subfolder of this job's that no manifest names."""
        manifest, up = self.folder / name / "manifest.json", self.folder / f"{name}.notes" / "up-0"
        try:
            named, began = manifest.read_text() if manifest.exists() else "", up.stat().st_mtime
            return any(each.name not in named and each.stat().st_mtime > began for each in (self.folder / name).glob("save-*"))
        except FileNotFoundError:  # it has just come to its end
            return False

    def kill(self, process: int) -> bool:
        """Kill a process that runs; whether it still did."""
        if _gone(process):
            return False
        os.kill(process, signal.SIGKILL)
        return True

    def end(self, processes: list[int]) -> int:
        """Wait for all processes; returns the number of failures."""
        return sum(_status(process) != 0 for process in processes)

    def told(self, name: str) -> dict[str, int]:
        """Events that ranks have reported since the last call."""
        found = {"resumed": 0, "lost": 0, "corrupt": 0}
        for path in (self.folder / f"{name}.notes").glob("told-*"):
            found[path.name.split("-")[1]] += 1
            path.unlink()
        return found


_ENDED: dict[int, int] = {}


def _status(process: int) -> int:
    if process not in _ENDED:
        _ENDED[process] = os.waitpid(process, 0)[1]
    return _ENDED[process]


def _gone(process: int) -> bool:
    if process not in _ENDED:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            _ENDED[process] = status
    return process in _ENDED


# -- what the processes do --


def _plan(folder: Path, name: str, rank: int, store: Path, notes: Path) -> None:
    heat = profile_batches([_ids(step, rank) for step in range(STEPS) for rank in range(RANKS)])
    tables = [{"name": n, "rows": rows, "dim": dim, "precision": "int8", "cache": _CACHE} for n, (rows, dim) in TABLES.items()]
    cluster = Topology.load("laptop").model_copy(update={"gpus_per_node": RANKS})
    make_plan(TablesConfig.model_validate({"batch": BATCH, "tables": tables}), heat, cluster, budget="200kB").save(
        folder / "plan.json"
    )
    heat.save(folder / "heat.tc")


def _train(folder: Path, name: str, rank: int, store: Path, notes: Path) -> None:
    """All steps, or those that are left. The reference run saves nothing, and writes what it holds."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_PATIENCE / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    model = _CrashModel()
    shard_(model, folder / "plan.json", folder / "heat.tc")
    dense = torch.optim.Adam(model.top.parameters(), lr=0.01)
    model.top = DistributedDataParallel(model.top, find_unused_parameters=True)  # the flag keeps the order of sums
    reference, known = name == "reference", folder / f"known-{rank}.json"
    digests: list[str] = [_digest(model, dense)] if reference else json.loads(known.read_text())
    begin = 0 if reference else _resumed(folder / name, model, dense, rank, notes, digests)
    under_way: BackgroundSave | None = None
    (notes / f"up-{rank}").touch()
    for step in range(begin, STEPS):
        ids = {n: (torch.from_numpy(each).view(-1), torch.arange(0, 2 * BATCH + 1, 2)) for n, each in _ids(step, rank).items()}
        model.top(model.rows(ids).values()).square().mean().backward()
        dense.step()
        dense.zero_grad()
        if reference:
            digests.append(_digest(model, dense))
            continue
        if digests[step + 1] != _digest(model, dense):
            (notes / f"told-corrupt-{rank}-{os.getpid()}").touch()
            raise AssertionError(f"rank {rank} holds other bits after step {step}")
        if (step + 1) % EVERY == 0:
            under_way = _save(folder / name, model, dense, step + 1, rank, notes, under_way)
    if under_way is not None:
        under_way.wait()
    news = model.rows.elastic("news").state()
    assert news["evicted"] > 0 and news["rows"] > 2 * 80
    if reference:
        known.write_text(json.dumps(digests))
    dist.barrier()
    dist.destroy_process_group()


def _resumed(path: Path, model: nn.Module, dense: torch.optim.Optimizer, rank: int, notes: Path, digests: list[str]) -> int:
    """The step to go on with, after a look whether it is what it should be."""
    progress = resume(path, model, optimizers=dense)
    step = 0 if progress is None else int(progress["step"])
    committed = notes / "committed"
    if rank == 0 and committed.exists() and step < int(committed.read_text()):
        (notes / f"told-lost-{os.getpid()}").touch()
    if digests[step] != _digest(model, dense):
        (notes / f"told-corrupt-{rank}-{os.getpid()}").touch()
        raise AssertionError(f"rank {rank} resumed at step {step} with other bits")
    if progress is not None and rank == 0:
        (notes / f"told-resumed-{os.getpid()}").touch()
    return step


def _save(
    path: Path, model: nn.Module, dense: torch.optim.Optimizer, step: int, rank: int, notes: Path, before: BackgroundSave | None
) -> BackgroundSave | None:
    """Save in one of three ways. What has returned is committed: rank 0 notes it."""
    settings: Any = {"optimizers": dense, "progress": {"step": step}}
    if before is not None:
        before.wait()
        _commit(notes, step - EVERY, rank)
    way = step // EVERY % 3
    if way == 2:
        return save_async(model, path, incremental=True, **settings)
    save(model, path, incremental=way == 1, **settings)
    _commit(notes, step, rank)
    return None


def _commit(notes: Path, step: int, rank: int) -> None:
    if rank == 0:
        (notes / "committed.part").write_text(str(step))
        os.replace(notes / "committed.part", notes / "committed")


def _codes(arena: Arena) -> list[Tensor]:
    """Codes by table, without stale ones: the codes of a row that was changed in its slot are not read, and a save in the
    background may have seen it leave."""
    rows_S = Cache(*arena.cache).rows if arena.cache else torch.zeros(0, dtype=torch.int64)
    stale_K = rows_S[(rows_S != F.EMPTY) & (rows_S & F.DIRTY != 0)] & ~F.DIRTY
    found = []
    for table in range(len(arena.tables)):
        codes_RB, _, first, _, _ = arena.views(table)
        mine_K = stale_K[(stale_K >= first) & (stale_K < first + len(codes_RB))] - first
        found.append(codes_RB.clone().index_fill_(0, mine_K, 0))
    return found


def _digest(model: _CrashModel | nn.Module, dense: torch.optim.Optimizer) -> str:
    """SHA-256 of the state of a rank."""
    rows: Any = model.get_submodule("rows")
    if isinstance(rows, ShardedCollection):
        rows.wait_for_exchange()
    found = hashlib.sha256()
    tensors: list[Tensor] = [*_codes(rows.arena), rows.arena.meta, *rows.trainer.states, rows.trainer.hyper, rows.trainer.clock]
    tensors += rows.arena.cache
    for name, tensor in rows.maps.tensors().items():  # what ranks counted, the first one has after a resume
        tensors.append(tensor[STEPS_COUNT:] if name.endswith("_counts") else tensor)
    tensors += [value for state in dense.state.values() for value in state.values() if isinstance(value, Tensor)]
    for tensor in [*tensors, *model.get_submodule("top").parameters()]:
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
