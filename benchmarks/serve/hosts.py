"""Shards on two hosts against the same shards on one host: the cost of a round trip, and the bytes between hosts.

    hosts/2x2/64/p50      64 ids of a table of 1M rows x 64, fp32, not pooled; two hosts of two shards each
    hosts/2x2/2048/p99    2,048 ids
    hosts/2x2/64/bytes    bytes between hosts for a request, against those of its rows in fp32

A host is a network namespace, its link held to 10 Gbit/s (`exchange/network.py`); only root can make them. Half of the rows
lie on the other host. Answers are compared with the table's before anything is timed. A row's ratio is one host's time over
ours.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exchange.network import Net, cluster, why_not
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import quantile
from thermocline.errors import BadInput
from thermocline.nn.config import RowConfig

IDS = (64, 2048)
ROWS, DIM, REQUESTS, ROUNDS = 1_000_000, 64, 100, 5
RATE = 10e9 / 8 / 2  # bytes a second of each of two cards
HOLD = "from thermocline.serve import run_shard_host; run_shard_host(sys.argv[5])"
FRONT = "from benchmarks.serve_hosts import front; front(*sys.argv[5:])"
_ENTER = "import sys; from benchmarks.exchange_net import Net; Net(*map(int, sys.argv[1:4])).enter(int(sys.argv[4])); "


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure every wanted row."""
    cases = [ids for ids in IDS if any(wanted(f"hosts/2x2/{ids}/{what}") for what in ("p50", "p99", "bytes"))]
    if not cases:
        return
    if reason := why_not():
        recorder.note(f"cards on several hosts were not measured: {reason}")
        return
    progress(0, 1, "two hosts")
    rows = ROWS // 100 if quick else ROWS
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
        _save(folder, rows)
        try:
            with cluster(2, 2) as net:
                net.shape(100 * RATE, RATE)
                two = _measured(net, folder, rows, cases)
            one = {str(ids): measure(folder, rows, ids) for ids in cases}
        except Exception as error:
            for ids in cases:
                recorder.fail(f"hosts/2x2/{ids}/p50", brief(error))
            return
    for ids in cases:
        for name in ("p50", "p99"):
            mine, other = two[str(ids)][name], one[str(ids)][name]
            recorder.add(f"hosts/2x2/{ids}/{name}", mine, "ms", "one host", other, other / mine)
        moved = two[str(ids)]["bytes"]
        recorder.add(f"hosts/2x2/{ids}/bytes", moved, "bytes", "rows of the answer", 4.0 * ids * DIM, 4 * ids * DIM / moved)


def _save(folder: str, rows: int) -> None:
    import torch

    from thermocline.checkpoint import save
    from thermocline.nn.collection import EmbeddingCollection, Table

    torch.manual_seed(1)
    tables = EmbeddingCollection([Table("user", rows, DIM)], rows=RowConfig("fp32", cache=0.0))
    save(tables, folder)
    np.save(Path(folder) / "expected.npy", tables.get_rows("user", torch.arange(2048)).numpy())


def _measured(net: Net, folder: str, rows: int, cases: list[int]) -> Any:
    secret = Path(folder) / "secret"
    secret.write_text(secrets.token_hex())
    environment = {**os.environ, **net.environment(), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    environment["THERMOCLINE_SECRET_FILE"] = str(secret)

    def start(rank: int, program: str, *more: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _ENTER + program, *map(str, net), str(rank), *map(str, more)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes)

    front, host = start(0, FRONT, folder, rows, *cases), start(1, HOLD, folder)
    try:
        said, errors = front.communicate(timeout=600)
        if front.returncode:
            raise BadInput(f"the front failed: {errors.strip().splitlines()[-1]}")
        return json.loads(said)
    finally:
        for each in (front, host):
            each.kill()
            each.communicate()


def front(folder: str, rows: str, *cases: str) -> None:
    """The process on the first host."""
    print(json.dumps({ids: measure(folder, int(rows), int(ids)) for ids in cases}))


def measure(folder: str, rows: int, ids: int) -> dict[str, float]:
    """Milliseconds of a request, and its bytes between hosts."""
    from benchmarks.runner.timing import cpu_chunk, interleave
    from thermocline.serve.remote.remote_hosts import connect_remote_hosts
    from thermocline.serve.tables.shard_group import ShardGroup

    draw = np.random.default_rng(1)
    with ShardGroup(folder, shards=4) as group:
        expected = np.load(Path(folder) / "expected.npy")
        if not np.array_equal(group.lookup({"user": np.arange(2048)})["user"].numpy(), expected):
            raise BadInput("cards answer other rows than the table has")
        requests = [{"user": draw.integers(0, rows, ids)} for _ in range(REQUESTS)]
        hosts = connect_remote_hosts("cpu", 4)
        before = 0 if hosts is None else hosts.sent + hosts.received
        times = interleave({"ours": cpu_chunk(lambda request: group.infer([request]), requests)}, ROUNDS, {"ours": REQUESTS})
        moved = 0 if hosts is None else hosts.sent + hosts.received - before
        found = times["ours"].all
        return {"p50": quantile(found, 0.5), "p99": quantile(found, 0.99), "bytes": moved / len(found)}
