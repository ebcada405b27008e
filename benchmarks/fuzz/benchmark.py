"""`python -m benchmarks fuzz`: thousands of hostile checkpoints, plans and heat files.

    fuzz/checkpoint, fuzz/plan, fuzz/heat     mutations that ended neither in `BadInput` nor in the values of the good file
    fuzz/slowest                              seconds of the slowest mutation
    fuzz/memory                               bytes by which the peak memory of the process grew

A mutated checkpoint is loaded beside the good one by a `ShardGroup`, and read by `thermocline.load`. If it loads, every feature
whose id map is unchanged must have the rows of the good checkpoint. A plan must split tables so that every row has one place. A
heat file must have the counts that were written.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline as tc
from benchmarks.runner.record import Recorder
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan
from thermocline.plan.report.explain import explain
from thermocline.serve.tables.partition import RowHeat, split_tables
from thermocline.serve.tables.segments import ServedTable
from thermocline.serve.tables.shard_group import ShardGroup

from . import mutations as M

MUTATIONS, SECONDS, MEMORY = 10_000, 20.0, 1 << 30  # asked
REFUSED, SAME = "refused", "same"
ROWS = {"user": 40, "item": 1009}


class Wrong(AssertionError):
    """A mutation that was accepted with other values."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in this thread after some seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class CheckpointTarget:
    """A checkpoint of one full and one incremental save, and a group that loads its mutations."""

    def __init__(self, folder: Path) -> None:
        self._good, self._bad = folder / "good", folder / "bad"
        torch.manual_seed(1)
        tables = [
            tc.Table("user", ROWS["user"], 6, ["user", "friend"], ids={"friend": tc.IdMap.hashed(40, salt=2)}),
            tc.Table("item", ROWS["item"], 4, ids=tc.IdMap.pruned(range(0, 2010, 2), fallback=4)),
        ]
        model = tc.EmbeddingCollection(tables, mode="sum", rows=tc.RowConfig("int8", cache=0.1))
        tc.save(model, self._good, incremental=True)
        self.group = ShardGroup(self._good, shards=2)
        self._rows = {1: self._look_up(("user", "friend", "item"))}
        ids = torch.arange(30)[:, None].expand(-1, 3)
        model(ids).values().square().sum().backward()
        tc.save(model, self._good, incremental=True)
        self._manifest = json.loads((self._good / "manifest.json").read_bytes())
        self._names = [file["name"] for save in self._manifest["saves"] for file in save["files"]]
        self.group.load(self._good)
        self._rows[2] = self._look_up(("user", "friend", "item"))
        self._maps = self._manifest["id_maps"]

    def _look_up(self, features: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {name: self.group.lookup({name: np.arange(ROWS.get(name, 40))})[name] for name in features}

    def __call__(self, draw: random.Random) -> str:
        M.restore(self._good, self._bad)
        self._spoil(draw)
        if draw.random() < 0.2:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tc.load(self._bad)
            except BadInput:
                pass
        try:
            self.group.load(self._bad)
        except BadInput:
            return REFUSED
        now = json.loads((self._bad / "manifest.json").read_bytes())
        rows = self._rows[len(now["saves"])]  # without its incremental save, it is an older checkpoint
        same = [name for name in rows if now["id_maps"].get(name) == self._maps[name]]
        for name, found in self._look_up(tuple(name for name in same if name in self.group.current.features)).items():
            if not torch.equal(found, rows[name]):
                raise Wrong(f"rows of {name} differ")
        return SAME

    def _spoil(self, draw: random.Random) -> None:
        path, kind = self._bad / "manifest.json", draw.randrange(10)
        if kind < 5:
            path.write_text(M.signed(M.spoil_json(draw, self._manifest)))
        elif kind == 5:
            path.write_text(M.spoil_numbers(draw, path.read_text()))
        elif kind == 6:
            draw.choice(M.SPOIL_FILE)(draw, path)
        elif kind == 7:
            draw.choice(M.SPOIL_FILE)(draw, self._bad / draw.choice(self._names))
        else:
            self._spoil_and_sign(draw)

    def _spoil_and_sign(self, draw: random.Random) -> None:
        """Change the header of a file, and state its new size and sha256 in the manifest."""
        manifest, name = json.loads(json.dumps(self._manifest)), draw.choice(self._names)
        M.spoil_header(draw, self._bad / name)
        for file in (file for save in manifest["saves"] for file in save["files"] if file["name"] == name):
            data = (self._bad / name).read_bytes()
            file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (self._bad / "manifest.json").write_text(M.signed(manifest))

    def close(self) -> None:
        self.group.close()


class PlanTarget:
    """A plan for three shards."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "plan.json"
        heat = folder / "heat.tc"
        profile = make_heat()
        profile.save(heat)
        self._heat = {name: RowHeat(each.ids_H, each.counts_H) for name, each in profile.tables.items()}
        tables = [{"name": name, "rows": rows, "dim": 6, "features": [name]} for name, rows in ROWS.items()]
        (folder / "tables.yaml").write_text(json.dumps({"version": 1, "batch": 64, "tables": tables}))
        card = {"memory": "100MB", "bandwidth": "1TB/s"}
        links = {"node": {"bandwidth": "100GB/s"}}
        topology = {"version": 1, "nodes": 1, "cards_per_node": 3, "card": card, "links": links}
        (folder / "topology.yaml").write_text(json.dumps(topology))
        tc.make_plan(folder / "tables.yaml", heat, folder / "topology.yaml", goal="serve").save(self._path)
        self._good = self._path.read_text()
        self._tables = [ServedTable(name, rows, 6, 4, (name,)) for name, rows in ROWS.items()]

    def __call__(self, draw: random.Random) -> str:
        kind = draw.randrange(4)
        self._path.unlink(missing_ok=True) if self._path.is_symlink() or not self._path.is_dir() else self._path.rmdir()
        self._path.write_text(self._good)
        if kind == 0:
            draw.choice(M.SPOIL_FILE)(draw, self._path)
        elif kind == 1:
            self._path.write_text(M.spoil_numbers(draw, self._good))
        else:
            self._path.write_text(json.dumps(M.spoil_json(draw, json.loads(self._good))))
        try:
            plan = Plan.load(self._path)
            explain(plan)
            splits = split_tables(self._tables, 3, "plan", plan, self._heat)
        except (BadInput, FileNotFoundError):
            return REFUSED
        for table, split in zip(self._tables, splits, strict=True):
            rows_R = np.arange(table.rows)
            shard_R, place_R = split.owner_and_place(rows_R)
            places = len(np.unique(shard_R * table.rows + place_R))
            if not split.everywhere and (places < table.rows or shard_R.min() < 0 or shard_R.max() > 2):
                raise Wrong(f"rows of {table.name} have no place of their own")
        return SAME

    def close(self) -> None:
        pass


def make_heat() -> HeatProfile:
    draw = np.random.default_rng(3)
    batches = [{name: draw.zipf(1.3, 64) % rows for name, rows in ROWS.items()} for _ in range(9)]
    return tc.heat.profile_batches(batches)


class HeatTarget:
    """A heat file."""

    def __init__(self, folder: Path) -> None:
        self._path, self._good = folder / "heat.tc", folder / "good.tc"
        made = make_heat()
        made.save(self._good)
        self._sha256 = made.sha256

    def __call__(self, draw: random.Random) -> str:
        self._path.unlink(missing_ok=True) if self._path.is_symlink() or not self._path.is_dir() else self._path.rmdir()
        self._path.write_bytes(self._good.read_bytes())
        if draw.random() < 0.7:
            draw.choice(M.SPOIL_FILE)(draw, self._path)
        else:
            M.spoil_header(draw, self._path)
        try:
            found = HeatProfile.load(self._path)
            found.curves()
        except BadInput:
            return REFUSED
        if found.sha256 != self._sha256:
            raise Wrong("the counts differ")
        return SAME

    def close(self) -> None:
        pass


TARGETS: dict[str, Callable[[Path], Any]] = {"checkpoint": CheckpointTarget, "plan": PlanTarget, "heat": HeatTarget}
SHARES = {"checkpoint": 0.4, "plan": 0.3, "heat": 0.3}


def fuzz(name: str, count: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Outcomes of mutations by kind, the faults with their seeds, and the slowest."""
    outcomes, faults, slowest = Counter[str](), [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        try:
            for number in range(count):
                began = time.perf_counter()
                try:
                    with within(SECONDS):
                        outcomes[target(random.Random(f"{seed}/{number}"))] += 1
                except (Exception, Wrong):
                    outcomes["fault"] += 1
                    faults.append(f"seed {seed}/{number}: {traceback.format_exc(-3)}")
                slowest = max(slowest, time.perf_counter() - began)
                progress(number + 1)
        finally:
            target.close()
    return {"outcomes": dict(outcomes), "faults": faults, "slowest": slowest}


def run(
    mutations: int, seed: int, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Fuzz all targets, and record the result."""
    recorder = Recorder("fuzz", lambda line: None, judged=mutations >= MUTATIONS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, done = 0.0, 0
    for name, share in SHARES.items():
        count = round(share * mutations)

        def advance(number: int, before: int = done, name: str = name) -> None:
            progress(before + number, mutations, name)

        found = fuzz(name, count, seed, advance)
        faults, slowest, done = found["faults"], max(slowest, found["slowest"]), done + count
        further = {"mutations": count, "outcomes": found["outcomes"], "examples": faults[:3]}
        recorder.add(f"fuzz/{name}", len(faults), "faults", "none", 0, float(not faults), **further)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    recorder.add("fuzz/slowest", slowest, "s", "asked", SECONDS, SECONDS / max(slowest, 1e-3))
    recorder.add("fuzz/memory", grown, "bytes", "asked", MEMORY, MEMORY / max(grown, 1))
    return recorder.record
