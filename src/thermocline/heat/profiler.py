"""From batches to a heat profile: one pass in bounded memory, which can be saved and restored.

A `Profiler` gets the samples in the order of the log. It cuts them at the ends of slices, gives every counter the ends of
batches, and finds memory for full counters. Its state can be saved between two chunks; a restored profile equals an
uninterrupted one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.errors import BadInput, FormatError

from .counter import IdCounter, make_room
from .heat_file import read_arrays, write_arrays
from .log_columns import LogIds
from .profile import HeatProfile

SLICES = 8
SLICE = 1 << 20  # samples of a slice, if the number of samples is not known
# Memory of Python with numpy, pyarrow and Numba's compiler, and of the chunks being read; of a Parquet page per column; and the
# least memory of the counters.
REST, PAGE, LEAST = 352 << 20, 5 << 18, 64 << 20
_KEY = "thermocline.heat.partial"
MOST_SAMPLES = 1 << 40  # in the batch of a node


@dataclass(frozen=True)
class ProfilerSettings:
    """Settings of a profile.

    Args:
        memory: Bytes of the whole process. Counts that do not fit are sketched.
        batch: Samples per GPU and step, to count repeats.
        cards_per_node: GPUs per node, to count repeats in the batches of a node.

    Raises:
        BadInput: A number is too small.

    Example::

        profile_files(["clicks.parquet"], settings=ProfilerSettings(memory=8 << 30, batch=4096))
    """

    memory: int = 1 << 30
    batch: int = 2048
    cards_per_node: int = 8

    def __post_init__(self) -> None:
        if self.batch < 1 or self.cards_per_node < 1:
            message = f"batch is {self.batch} and cards_per_node {self.cards_per_node}; both are at least 1"
            raise BadInput(message, parameter="batch" if self.batch < 1 else "cards_per_node")
        if self.batch * self.cards_per_node > MOST_SAMPLES:
            raise BadInput(
                f"batch is {self.batch:,} and cards_per_node {self.cards_per_node:,}: a node would train on "
                f"{self.batch * self.cards_per_node:,} samples at once; the product may be at most {MOST_SAMPLES:,}",
                parameter="batch",
            )


class _CountTask:
    """The counting of one table in some samples."""

    def __init__(self, counter: IdCounter, bags: LogIds, first: int, batch: int) -> None:
        """`first` is the number of the first sample in the log."""
        self.counter, self.ids_N, self.at, self.batch = counter, bags.ids_N, 0, first // batch
        samples = bags.samples
        ends_K = np.arange((self.batch + 1) * batch - first, samples + batch, batch).clip(max=samples)
        self.ends_K = ends_K if bags.offsets is None else bags.offsets[ends_K]
        counter.note_bags(samples, bags.offsets)
        counter.missing += bags.missing

    def go(self) -> bool:
        """Continues counting; False if the counter is full."""
        self.at = self.counter.count(self.ids_N, self.at, self.ends_K, self.batch)
        return self.at == len(self.ids_N)


class Profiler:
    """Counts the lookups of tables, sample by sample."""

    def __init__(self, tables: Sequence[str], settings: ProfilerSettings, samples: int | None = None) -> None:
        """`samples` is the number of samples of the log, if known: slices are then an eighth of them."""
        self.settings = settings
        reading = REST + PAGE * len(tables)
        self.memory = settings.memory - reading  # of counters
        if self.memory < LEAST:
            message = (
                f"memory is {settings.memory >> 20} MiB, and reading {len(tables)} columns takes {reading >> 20} MiB; "
                f"give at least {(reading + LEAST) >> 20} MiB, or profile fewer columns at once"
            )
            raise BadInput(message, parameter="memory", needed=reading + LEAST, available=settings.memory)
        self.slice = SLICE if samples is None else max(1, -(-samples // SLICES))
        self.counters = {name: IdCounter(name, settings.batch, settings.cards_per_node) for name in tables}
        self.done = 0  # samples
        self.pool = ThreadPoolExecutor(min(len(tables), len(os.sched_getaffinity(0))))

    def add(self, chunk: Mapping[str, LogIds]) -> None:
        """Adds the next samples: the ids of every table."""
        samples = {bags.samples for bags in chunk.values()}
        if len(samples) != 1 or chunk.keys() != self.counters.keys():
            found = {name: bags.samples for name, bags in chunk.items()}
            counts = ", ".join(f"{name}: {count}" for name, count in found.items())
            message = f"every batch needs the same tables and samples ({', '.join(self.counters)}); this one has {counts}"
            raise BadInput(message, parameter="batches", value=found)
        (left,) = samples
        first = 0
        while left:
            if self.done and self.done % self.slice == 0:
                list(self.pool.map(IdCounter.turn, self.counters.values()))
            many = min(left, self.slice - self.done % self.slice)
            self._count({name: bags.part(first, first + many) for name, bags in chunk.items()})
            first, left, self.done = first + many, left - many, self.done + many

    def _count(self, chunk: Mapping[str, LogIds]) -> None:
        """Counts samples of one slice, tables in parallel. Memory is assigned in between, in the order of the tables, so that
        a log has the same profile on any number of cores.
        """
        work = [_CountTask(self.counters[name], bags, self.done, self.settings.batch) for name, bags in chunk.items()]
        while work := [each for each, done in zip(work, self.pool.map(_CountTask.go, work), strict=True) if not done]:
            for each in work:
                make_room(each.counter, list(self.counters.values()), self.memory)

    def result(self, source: str) -> HeatProfile:
        """The profile. Nothing can be added afterwards."""
        self.pool.shutdown()
        # The largest last, when the others are small: sorting its ids takes as much memory as counting them.
        by_size = sorted(self.counters.values(), key=lambda counter: counter.bytes)
        tables = {counter.name: counter.result(self.done) for counter in by_size}
        return HeatProfile({name: tables[name] for name in self.counters}, source)

    # -- to go on later --

    def save(self, path: Path, of: Mapping[str, Any]) -> None:
        """Saves the state of the work that `of` describes."""
        arrays: dict[str, Any] = {}
        texts = []
        for number, counter in enumerate(self.counters.values()):
            kept, text = counter.state()
            arrays |= {f"{number}.{name}": array for name, array in kept.items()}
            texts.append(text)
        state = {"of": of, "settings": asdict(self.settings), "slice": self.slice, "done": self.done, "tables": texts}
        write_arrays(path, arrays, {_KEY: json.dumps(state)})

    def restore(self, path: Path, of: Mapping[str, Any]) -> None:
        """Restores a saved state, unless it belongs to other work."""
        arrays, metadata = read_arrays(path, "a partial profile")
        if _KEY not in metadata:
            raise FormatError(f"'{path}' is not a partial profile; move it away", path=str(path))
        state = json.loads(metadata[_KEY])
        same = json.loads(json.dumps([of, asdict(self.settings), self.slice]))
        if [state["of"], state["settings"], state["slice"]] != same:
            return
        self.done = state["done"]
        for number, (counter, text) in enumerate(zip(self.counters.values(), state["tables"], strict=True)):
            mine = f"{number}."
            counter.restore({name[len(mine) :]: a for name, a in arrays.items() if name.startswith(mine)}, text)


def profile_batches(
    batches: Iterable[Mapping[str, Any]], *, samples: int | None = None, source: str = "batches", **settings: int
) -> HeatProfile:
    """Profile batches in the order of training, from any iterator.

    Args:
        batches: Mappings from table to ids: [batch] for one id per sample, [batch, n] for n, or (values, offsets) for bags with
            batch + 1 offsets. Arrays may be numpy's or torch's.
        samples: Number of samples, if known. Drift is then measured between eighths of them, else per 1,048,576 samples.
        source: Description of the source for the profile.
        settings: Fields of `ProfilerSettings`.

    Returns:
        The heat profile.

    Raises:
        BadInput: There are no batches, or ids of a batch have a wrong type or shape.

    Example::

        profile_batches(({"item": batch["item"]} for batch in loader), batch=2048).save("heat.tc")
    """
    profiler: Profiler | None = None
    for batch in batches:
        if profiler is None:
            profiler = Profiler(list(batch), ProfilerSettings(**settings), samples)
        profiler.add({name: log_ids(name, ids) for name, ids in batch.items()})
    if profiler is None:
        raise BadInput("there are no batches to profile", parameter="batches")
    return profiler.result(source)


def log_ids(name: str, ids: Any) -> LogIds:
    """The ids of a batch in any of its forms."""
    if not isinstance(ids, tuple):
        ids_BN = _integers(name, ids)
        if ids_BN.ndim == 1:
            return LogIds(ids_BN)
        if ids_BN.ndim == 2:
            return LogIds(ids_BN.reshape(-1), np.arange(len(ids_BN) + 1) * ids_BN.shape[1])
        message = f"ids of {name!r} are {ids_BN.ndim}-D; give [batch], [batch, n] or (values, offsets)"
        raise BadInput(message, table=name, value=ids_BN.ndim)
    values_N, offsets = (_integers(name, part) for part in ids[:2])
    if values_N.ndim != 1 or offsets.ndim != 1 or len(offsets) == 0:
        message = f"values and offsets of {name!r} are {values_N.ndim}-D and {offsets.ndim}-D; both have one dimension"
        raise BadInput(message, table=name)
    if offsets[0] != 0 or offsets[-1] != len(values_N) or (np.diff(offsets) < 0).any():
        raise BadInput(
            f"offsets of {name!r} run from {offsets[0]} to {offsets[-1]}; they rise from 0 to the number of values, "
            f"{len(values_N)}, the end included",
            table=name, value=offsets.tolist(), needed=len(values_N),
        )  # fmt: skip
    return LogIds(values_N, offsets)


def _integers(name: str, ids: Any) -> Any:
    array = np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids)
    if array.dtype.kind not in "iu":
        raise BadInput(f"ids of {name!r} are {array.dtype}; ids are integers", table=name, value=str(array.dtype))
    return array.astype(np.int64)
