"""`python -m benchmarks serve`: tables over several shards against one shard, other servers, and plain file reads.

    parity/...    lookups on 2, 4 and 8 shards against one (`parity.py`)
    group/...     requests through a group of shard processes, against one process (`group.py`)
    start/...     from a checkpoint to ready (`start.py`)
    rank/...      one user and N candidates, against N pairs (`ranking.py`)
    balance/...   balance of shards on real logs (`balance.py`)
    hosts/...     shards on two hosts, against one host (`hosts.py`)
    levers/...    a trained model served in fewer bytes: size, speed and quality (`levers.py`)
    fronts/...    several front processes, against one (`fronts.py`)
    stall/...     waits of others and memory while large requests are answered (`stall.py`)
    lean/...      processor time of a request, against an echo server's (`lean.py`)
    network/...   the server against other servers of the protocol, by processor time (`network.py`)

On a GPU only `parity` is measured: the others measure processes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runner.record import Recorder
from benchmarks.serve import balance as serve_balance
from benchmarks.serve import fronts as serve_fronts
from benchmarks.serve import group as serve_group
from benchmarks.serve import hosts as serve_hosts
from benchmarks.serve import lean as serve_lean
from benchmarks.serve import levers as serve_levers
from benchmarks.serve import network as serve_network
from benchmarks.serve import parity as serve_parity
from benchmarks.serve import ranking as serve_rank
from benchmarks.serve import stall as serve_stall
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
        serve_lean.run(recorder, wanted, quick, progress)
        serve_fronts.run(recorder, wanted, quick, progress)
        serve_stall.run(recorder, wanted, quick, progress)
        if data is None or not data.is_dir():
            recorder.note(f"no logs: {data} is not a folder; balance was not measured")
        else:
            serve_balance.run(recorder, data, wanted, quick, progress)
        if peers is not None:
            serve_network.run(recorder, wanted, quick, progress, peers)
    return recorder.record
