"""One user and N candidates: a request that computes the user's part once, against the same model with N pairs.

    rank/dlrm/1000        26 features, 20 of the user and 6 of a candidate, 13 dense numbers of the user
    rank/sequence/1000    a history of 50 items; with pairs, looked up and encoded for each

Both use the same shards, lookups included, in one process. Scores are compared before anything is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels.contender import WrongResult
from benchmarks.runner.race import TimingBudget, race
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import cpu_chunk
from thermocline.checkpoint import save
from thermocline.models import DLRM
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.serve.ranking import RankingModel, SequenceScorer
from thermocline.serve.tables.lookup import LookupResult
from thermocline.serve.tables.shard_group import ShardGroup

CANDIDATES = (1, 10, 100, 1000)
EFFORT = TimingBudget(rounds=5, chunk_ms=100.0, least=3, most=50)
QUICK = TimingBudget(rounds=2, chunk_ms=1.0, least=1, most=2)
ROWS, DIM, LENGTH = 20_000, 16, 50
USER, ITEM = 20, 6

Request = dict[str, NDArray[Any]]


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure both models with every number of candidates."""
    for n, (name, measure) in enumerate((("dlrm", _dlrm), ("sequence", _sequence))):
        progress(n, 2, f"rank {name}")
        cases = {count: f"rank/{name}/{count}" for count in CANDIDATES if wanted(f"rank/{name}/{count}")}
        if not cases:
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
                measure(recorder, folder, cases, QUICK if quick else EFFORT)
        except Exception as error:
            for case in cases.values():
                recorder.fail(case, brief(error))


def _dlrm(recorder: Recorder, folder: str, cases: dict[int, str], effort: TimingBudget) -> None:
    names = [f"c{n}" for n in range(USER + ITEM)]
    torch.manual_seed(1)
    tables = EmbeddingCollection([Table(name, ROWS, DIM) for name in names], rows=RowConfig("int8", cache=0.0))
    save(DLRM(tables, features=len(names), dim=DIM), folder)
    random = np.random.default_rng(1)
    with ShardGroup(folder, shards=4) as group:
        rank = RankingModel(group)
        for count, case in cases.items():
            shared: Request = {"dense": random.standard_normal(13).astype(np.float32)}
            shared |= {name: random.integers(0, ROWS, 1 if n < USER else count) for n, name in enumerate(names)}
            pairs = {
                name: np.repeat(each, count) if len(each) == 1 else each for name, each in shared.items() if name != "dense"
            }
            pairs["dense"] = np.repeat(shared["dense"][None], count, 0)
            _race(recorder, case, partial(_score, rank, shared), partial(_score, rank, pairs), effort)


def _sequence(recorder: Recorder, folder: str, cases: dict[int, str], effort: TimingBudget) -> None:
    from importlib import import_module

    model = import_module("thermocline.models.sequence").SequenceModel
    torch.manual_seed(1)
    table = Table("item", ROWS, 64, features=("item", "negative"))
    save(model(EmbeddingCollection([table], mode="none", rows=RowConfig("int8", cache=0.0)), dim=64, length=LENGTH), folder)
    random = np.random.default_rng(1)
    with ShardGroup(folder, shards=4) as group:
        rank, scorer = RankingModel(group), SequenceScorer(group.current)
        for count, case in cases.items():
            request: Request = {"history": random.integers(0, ROWS, LENGTH), "candidates": random.integers(0, ROWS, count)}

            def pairs(request: Request = request, count: int = count) -> torch.Tensor:
                asked = {"item": np.tile(request["history"], count), "negative": request["candidates"]}
                with torch.no_grad():
                    rows = group.lookup(asked)
                    return (rows["negative"] * scorer.encode(rows["item"].view(count, LENGTH, -1))).sum(1)

            _race(recorder, case, partial(_score, rank, request), pairs, effort)


def _score(rank: RankingModel, request: Request) -> torch.Tensor:
    answer = rank.infer([request])[0]
    assert isinstance(answer, LookupResult), answer
    return torch.from_numpy(answer["score"])


def _race(
    recorder: Recorder, case: str, ours: Callable[[], torch.Tensor], pairs: Callable[[], torch.Tensor], effort: TimingBudget
) -> None:  # fmt: skip
    if not torch.allclose(ours(), pairs(), rtol=1e-3, atol=1e-4):
        raise WrongResult("scores of pairs differ from those of one request")
    chunks = {"ours": cpu_chunk(lambda _: ours(), [None]), "pairs": cpu_chunk(lambda _: pairs(), [None])}
    times = race(chunks, effort)
    mine, theirs = times["ours"], times["pairs"]
    recorder.add(case, mine.median, "ms", "as pairs", theirs.median, theirs.median / mine.median, mine.spread)
