"""The arms of the levers benchmark, and one training run. All rows are fp32; only their number is compared.

    full              a row for each id of the training part, and one for all others: the reference
    uniform-1in8      every feature hashed to an eighth as many rows as it has ids, at least one
    capped-1in8       common practice: at most c rows for each feature, the same c for all
    hashed-1in8       features hashed to sizes that lose least to collisions
    sized-1in8        the hottest ids have their own rows, others are hashed: sizes that lose least
    onehash-1in8      all features hashed to one table, each with its own salt
    pruned-once       ids that occur once share a row
    unified           the rows of `full`, concatenated in one table

Arms of one cut take the same bytes, maps included: those of the uniform arm, which has no maps. Seeds change the hash, too.
Three controls must be rejected on every log: `zeroed-89%` (`full` after training, with all but the hottest 11% of rows set to
zero), `uniform-1in32`, and `pruned-blind`, which keeps as many ids as `pruned-once`, chosen at random.

Heat is that of the training part: a new id of the test part falls where its map puts it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.accuracy.arms import KEPT, judge, zero_cold
from benchmarks.runner.memory_log import in_memory
from benchmarks.runner.paired import RunResult, TrainingJob
from thermocline.data.click_files import open_log
from thermocline.data.click_log import ClickLog, Clicks, MemoryLog
from thermocline.data.id_rows import MappedRows
from thermocline.data.random_bits import bits, key_of
from thermocline.heat.profile import TableHeat
from thermocline.heat.profiler import profile_batches
from thermocline.ids.idmap import IdMap
from thermocline.models import DLRM, initial_rows
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.plan.solve.row_levers import ID_BYTES, ReducedRows, hash_sizes, prune
from thermocline.rows.optimizers import RowwiseAdagrad
from thermocline.train import DLRMRun, DLRMSettings

STATE_BYTES = 4  # of row-wise Adagrad, for each row
CUTS = (2, 8, 32)
SIZED = ("capped", "hashed", "sized", "onehash")  # levers with a uniform arm of equal bytes


@dataclass(frozen=True)
class LeverArm:
    """One way to choose rows; `cut`: it keeps one row in `cut`."""

    lever: str = "full"
    cut: int | None = None

    @property
    def name(self) -> str:
        return f"{self.lever}-1in{self.cut}" if self.cut else self.lever

    @property
    def uniform(self) -> LeverArm | None:
        """The uniform arm of equal bytes."""
        return LeverArm("uniform", self.cut) if self.lever in SIZED else None

    @property
    def one_table(self) -> bool:
        return self.lever in ("unified", "onehash")


FULL, ZEROED = LeverArm(), LeverArm(f"zeroed-{1 - KEPT:.0%}")
ARMS = (
    FULL,
    ZEROED,
    *(LeverArm(lever, cut) for cut in CUTS for lever in ("uniform", *SIZED)),
    LeverArm("pruned-once"),
    LeverArm("pruned-blind"),
    LeverArm("unified"),
)


def run_job(job: TrainingJob[LeverArm]) -> dict[str, Any]:
    """Train and evaluate one arm with one seed; returns a `RunResult` as a dict, which can be pickled."""
    settings, started = job.settings, time.perf_counter()
    raw = raw_log(settings)
    chosen = choose(job.arm, raw.heat, settings.dim, settings.seed)
    mapped = MappedRows(chosen.maps)
    parts = (raw.train._replace(ids_BF=mapped(raw.train.ids_BF)), raw.test._replace(ids_BF=mapped(raw.test.ids_BF)))
    train, test = MemoryLog(parts[0], mapped.rows, settings.seed if raw.shuffle else None), MemoryLog(parts[1], mapped.rows)
    model = one_table_model(settings, chosen.maps, train.dense) if job.arm.one_table else None
    run = DLRMRun(settings, logs=(train, test), model=model)
    outcome = run.finish()
    seconds = time.perf_counter() - started
    measures = {"trained": {"auc": outcome.auc, "logloss": outcome.logloss}}
    tables: Any = run.model.embeddings
    memory, map_bytes = tables.memory(), sum(each.bytes for each in chosen.maps)
    if job.arm == FULL:
        zero_cold(tables, train, KEPT)
        measures["zeroed"] = judge(run)
    full = choose(FULL, raw.heat, settings.dim, settings.seed)
    full_rows, full_maps = sum(each.span for each in full.maps), sum(each.bytes for each in full.maps)
    state = memory.parts["optimizer state"]
    return asdict(
        RunResult(
            *job.key,
            measures,
            memory_ratio=(full_rows * 4 * settings.dim + full_maps) / (memory.total - state + map_bytes),
            memory_ratio_with_state=(full_rows * row_bytes(settings.dim) + full_maps) / (memory.total + map_bytes),
            stats={"bytes": memory.total + map_bytes, "map_bytes": map_bytes, **chosen.predicted},
            rows=memory.fp32 // (4 * settings.dim),
            seconds=seconds,
        )
    )


def row_bytes(dim: int) -> int:
    """Bytes of a row and its optimizer state."""
    return 4 * dim + STATE_BYTES


# -- the log, as it is --


class RawLog(NamedTuple):
    """A log with raw ids in memory, and the heat of its training part."""

    train: Clicks
    test: Clicks
    shuffle: bool  # MovieLens: the order follows the seed
    heat: tuple[TableHeat, ...]


def raw_log(settings: DLRMSettings) -> RawLog:
    """The log of a run. Seeds share a file's samples; only the order of a shuffled log follows the seed."""
    if settings.data is not None:
        return _read(settings.data, settings.test)
    return _made(settings.rows, settings.samples, settings.seed)


@lru_cache(maxsize=1)
def _read(data: Path, test: Path | None) -> RawLog:
    return _raw(*open_log(data, test, raw=True))


@lru_cache(maxsize=1)
def _made(rows: int, samples: int, seed: int) -> RawLog:
    return _raw(*DLRMSettings(rows=rows, samples=samples, seed=seed).logs())


def _raw(train: ClickLog, test: ClickLog) -> RawLog:
    shuffled = isinstance(train, MemoryLog) and train.shuffle is not None
    kept, judged = (log.clicks if isinstance(log, MemoryLog) else in_memory(log).clicks for log in (train, test))
    return RawLog(kept, judged, shuffled, tuple(heat_of(kept)))


def heat_of(clicks: Clicks) -> list[TableHeat]:
    """The heat of every feature."""
    ids = {f"C{feature}": ids_B for feature, ids_B in enumerate(clicks.ids_BF.t().contiguous(), 1)}
    return list(profile_batches([ids], samples=len(clicks.label_B)).tables.values())


# -- maps --


class ChosenMaps(NamedTuple):
    """The map of each feature, and the lever's predictions."""

    maps: list[IdMap]
    predicted: dict[str, float]


def choose(arm: LeverArm, heat: Sequence[TableHeat], dim: int, seed: int) -> ChosenMaps:
    """The maps of an arm, from heat."""
    salts = [key_of(seed, feature) for feature in range(len(heat))]
    uniform = [max(1, round(table.distinct / (arm.cut or 1))) for table in heat]
    if arm.lever in ("full", "unified", ZEROED.lever):
        maps = [IdMap.pruned(table.ids_H) for table in heat]
        return ChosenMaps(_one_after_the_other(maps) if arm.one_table else maps, {})
    if arm.lever == "uniform":
        return ChosenMaps([IdMap.hashed(rows, salt) for rows, salt in zip(uniform, salts, strict=True)], {})
    if arm.lever == "onehash":
        return ChosenMaps([IdMap.hashed(sum(uniform), salt) for salt in salts], {})
    if arm.lever == "pruned-blind":
        once = choose(LeverArm("pruned-once"), heat, dim, seed).maps
        return ChosenMaps([_any(table, each.span - 1, salt) for table, each, salt in zip(heat, once, salts, strict=True)], {})
    tables, row = {table.name: table for table in heat}, float(row_bytes(dim))
    curves = {name: table.curve() for name, table in tables.items()}
    if arm.lever == "pruned-once":
        fewer = prune(tables, 1, row)
    elif arm.lever == "capped":
        fewer = _capped(tables, sum(uniform) * row, row)
    else:
        fewer = hash_sizes(curves, sum(uniform) * row, row, keep_hot=arm.lever == "sized")
    maps = [
        IdMap.pruned(tables[each.name].ids_H[: each.kept], each.shared, salt) if each.kept else IdMap.hashed(each.shared, salt)
        for each, salt in zip(fewer.features, salts, strict=True)
    ]
    predicted = {"predicted_bytes": fewer.bytes, "saved": fewer.saved, "harm": fewer.harm, "fallback": fewer.fallback}
    return ChosenMaps(maps, predicted)


def _capped(tables: dict[str, TableHeat], budget: float, row: float) -> ReducedRows:
    """The largest common number of rows within the budget."""

    def limited(most: int) -> ReducedRows:
        parts = [
            hash_sizes({name: table.curve()}, _all(table, row) if table.distinct <= most else most * row, row, keep_hot=False)
            for name, table in tables.items()
        ]
        return ReducedRows(tuple(feature for part in parts for feature in part.features))

    def bytes_of(most: int) -> float:
        return sum(_all(table, row) if table.distinct <= most else most * row for table in tables.values())

    low, high = 1, max(table.distinct for table in tables.values())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= budget else (low, middle - 1)
    return limited(low)


def _all(table: TableHeat, row: float) -> float:
    """Bytes of a row for each id, and one row for all others."""
    return table.distinct * (row + ID_BYTES) + row


def _any(table: TableHeat, count: int, salt: int) -> IdMap:
    """A map that keeps `count` random ids."""
    order = bits(salt, torch.from_numpy(table.ids_H)).argsort().numpy()
    return IdMap.pruned(table.ids_H[order[:count]])


def _one_after_the_other(maps: Sequence[IdMap]) -> list[IdMap]:
    begins = np.cumsum([0, *(each.span for each in maps)])
    return [each.offset(int(begin)) for each, begin in zip(maps, begins, strict=False)]


def one_table_model(settings: DLRMSettings, maps: Sequence[IdMap], dense: int) -> DLRM:
    """A model whose features share one table. Initial rows are those of separate tables."""
    names = [f"C{feature}" for feature in range(1, len(maps) + 1)]
    tables = EmbeddingCollection(
        [Table("all", max(each.rows for each in maps), settings.dim, names)],
        rows=RowConfig("fp32", optimizer=RowwiseAdagrad(lr=settings.lr), seed=settings.seed),
    )
    for feature, (first, span) in enumerate(dict.fromkeys((each.first, each.span) for each in maps)):
        rows_N = torch.arange(span)
        tables.set_rows("all", first + rows_N, initial_rows(settings.seed, feature, rows_N, settings.dim, span))
    return settings.model_of(tables, len(maps), dense)
