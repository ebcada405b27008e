"""Lean part of the serve benchmark: the server's processor time for one request, against an echo server's.

    lean/FEATURESxIDS/echo      of a request of FEATURES features with IDS ids each, unpooled, over that of an echo server
    lean/26x1/1x16              of a request of 26 features with one id, over that of one feature with 16

The echo server is gRPC's own for asyncio, in the same event loop, and answers with as many bytes. Both servers run at the same
time and are measured in turn, several times, so that other work on the machine meets both. Results are medians of the ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.runner.record import Recorder

from .network import DIM, FULL, QUICK, Result, ServerContender, check_ready, echo, ours, started

SHAPES = ((26, 1), (1, 16))
CLIENTS = 4


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure all rows."""
    cases = {shape: f"lean/{shape[0]}x{shape[1]}/echo" for shape in SHAPES}
    if not any(map(wanted, (*cases.values(), "lean/26x1/1x16"))):
        return
    rows, effort = 10_007, QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = make_features(folder / "checkpoint", max(features for features, _ in SHAPES), rows)
        contenders: list[ServerContender] = [ours(folder / "checkpoint", 2), *(echo(ids, features) for features, ids in SHAPES)]
        with started(contenders, folder) as (server, *echoes):
            for one in (server, *echoes):
                one.wait(check_ready)
            time.sleep(effort.settle)
            found: dict[tuple[int, int], list[tuple[Result, Result]]] = {shape: [] for shape in SHAPES}
            for number in range(4 * effort.rounds):
                progress(number, 4 * effort.rounds, "lean")
                for shape, peer in zip(SHAPES, echoes, strict=True):
                    job = (CLIENTS, shape[1], rows, effort.seconds / 2, names[: shape[0]])
                    found[shape].append((server.measure(*job), peer.measure(*job)))
    for shape, case in cases.items():
        _add(recorder, case, *([each[side] for each in found[shape]] for side in (0, 1)))
    _add(recorder, "lean/26x1/1x16", *([each[0] for each in found[shape]] for shape in SHAPES))


def _add(recorder: Recorder, case: str, mine: list[Result], other: list[Result]) -> None:
    """A row of microseconds of processor time a request. The ratio is above 1 where the first is slower."""
    us = [[1e6 / each["requests_per_cpu_s"] for each in side] for side in (mine, other)]
    ratios = sorted(one / two for one, two in zip(*us, strict=True))
    value, peer = statistics.median(us[0]), statistics.median(us[1])
    further = {"quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]}
    name = "echo" if case.endswith("echo") else "1x16"
    recorder.add(
        case, value, "us of cpu a request", name, peer, 1 / statistics.median(ratios), ratios[-1] - ratios[0], **further
    )


def make_features(folder: Path, features: int, rows: int) -> list[str]:
    """Save a checkpoint with tables of one feature each; returns the features."""
    import torch

    import thermocline

    torch.manual_seed(1)
    names = [f"C{number}" for number in range(1, features + 1)]
    tables = [thermocline.Table(name, rows, DIM) for name in names]
    module = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("fp32", cache=0.0))
    thermocline.save(module, folder)
    return names
