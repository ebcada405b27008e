"""`python -m benchmarks serve`: tables over several cards, against one card and against reading the files.

    parity/...    `serve_parity.py`: lookups on 2, 4 and 8 cards against one
    group/...     `serve_group.py`: requests through a group of processes, against a group of one
    start/...     `serve_start.py`: from a checkpoint to ready
    rank/...      `serve_rank.py`: one user and N candidates, against N pairs
    balance/...   `serve_balance.py`: how evenly cards share the lookups of real logs
    hosts/...     `serve_hosts.py`: cards on two hosts, against the same on one
    levers/...    `serve_levers.py`: a trained model served in fewer bytes: which, how fast, how good
    network/...   `serve_network.py`: the server against other servers of the same protocol, by processor time

On a GPU only `parity` is measured: the others are of processes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runner.record import Recorder
from benchmarks.serve import balance as serve_balance
from benchmarks.serve import group as serve_group
from benchmarks.serve import hosts as serve_hosts
from benchmarks.serve import levers as serve_levers
from benchmarks.serve import network as serve_network
from benchmarks.serve import parity as serve_parity
from benchmarks.serve import ranking as serve_rank
from benchmarks.serve import start as serve_start

Progress = Callable[[int, int, str], None]


def run(
    device: str = "cpu",
    data: Path | None = None,
    filter: str | None = None,
    quick: bool = False,
    report: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total, what: None,
    peers: dict[str, Path | None] | None = None,
) -> dict[str, Any]:
    """Measure every row whose name contains `filter`, and return the record. `peers`: Pythons of servers to race."""
    recorder = Recorder("serve", report, judged=not quick)

    def wanted(case: str) -> bool:
        return filter is None or filter in case

    serve_parity.run(recorder, device, wanted, quick, progress)
    if device == "cpu":
        serve_group.run(recorder, wanted, quick, progress)
        serve_start.run(recorder, wanted, quick, progress)
        serve_rank.run(recorder, wanted, quick, progress)
        serve_hosts.run(recorder, wanted, quick, progress)
        serve_levers.run(recorder, wanted, quick, progress)
        if data is None or not data.is_dir():
            recorder.note(f"no logs: {data} is not a folder; balance was not measured")
        else:
            serve_balance.run(recorder, data, wanted, quick, progress)
        if peers is not None:
            serve_network.run(recorder, wanted, quick, progress, peers)
    return recorder.record
