"""Requests through a group of shards on a CPU, one at a time: 2, 4 and 8 shards against one.

    group/cpu/64/4/p50      64 ids of a table of 1M rows x 64, fp32, not pooled; latency of a client in the same process
    group/cpu/2048/4/p99    2,048 ids

A row's ratio is the time with one shard over the time with several.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks.kernels.contender import WrongResult
from benchmarks.runner.record import Recorder
from benchmarks.runner.timing import cpu_chunk, interleave, quantile
from thermocline.checkpoint import save
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.serve.tables.shard_group import ShardGroup

CARDS, IDS = (2, 4, 8), (64, 2048)
ROWS, DIM = 1_000_000, 64
ROUNDS, REQUESTS = 10, 200


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure every wanted row."""
    cases = {(n, cards): f"group/cpu/{n}/{cards}" for n in IDS for cards in CARDS}
    cases = {key: case for key, case in cases.items() if any(wanted(f"{case}/{p}") for p in ("p50", "p99"))}
    if not cases:
        return
    rows = ROWS // 100 if quick else ROWS
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
        save(EmbeddingCollection([Table("user", rows, DIM)], rows=RowConfig("fp32", cache=0.0)), folder)
        with ShardGroup(folder, shards=1) as one:
            for cards in sorted({cards for _, cards in cases}):
                progress(CARDS.index(cards), len(CARDS), f"{cards} cards")
                with ShardGroup(folder, shards=cards) as several:
                    for n in [n for n, c in cases if c == cards]:
                        _race(recorder, cases[n, cards], {"one": one, "ours": several}, n, rows, 2 if quick else ROUNDS)


def _race(recorder: Recorder, case: str, groups: dict[str, ShardGroup], ids: int, rows: int, rounds: int) -> None:
    random = np.random.default_rng(1)
    requests = [{"user": random.integers(0, rows, ids)} for _ in range(REQUESTS)]
    answers = [group.infer([requests[0]])[0] for group in groups.values()]
    if not np.array_equal(answers[0]["user"], answers[1]["user"]):  # type: ignore[index]
        raise WrongResult("several cards answer otherwise than one")
    chunks = {name: cpu_chunk(lambda request, group=group: group.infer([request]), requests) for name, group in groups.items()}  # type: ignore[misc]
    times = interleave(chunks, rounds, dict.fromkeys(chunks, REQUESTS))
    for name, at in (("p50", 0.5), ("p99", 0.99)):
        ours, one = quantile(times["ours"].all, at), quantile(times["one"].all, at)
        recorder.add(f"{case}/{name}", ours, "ms", "one card", one, one / ours)
