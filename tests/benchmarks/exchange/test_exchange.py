"""The exchange benchmark: real processes over loopback, nodes as namespaces where root runs the tests, and what rows say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.exchange import benchmark as exchange
from benchmarks.exchange import logs as exchange_logs
from benchmarks.exchange import network as exchange_net
from benchmarks.exchange import rows as exchange_rows
from benchmarks.exchange import step as exchange_step
from benchmarks.exchange.network import Counted, Net
from benchmarks.exchange.rank import without_overlap
from benchmarks.exchange.step import Clock, Dense, Steps, load_batches
from benchmarks.plan.baselines import make_baseline_plan
from benchmarks.runner import show
from benchmarks.runner.record import Recorder
from thermocline.heat.curve import Curve
from thermocline.plan.cost.phases import RowKinds
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
NOT_ROOT = exchange_net.why_not()
LINKS = Links(node=Link(bandwidth=9e6, latency=1e-4), cluster=Link(bandwidth=1e6, latency=1e-4))
TOPOLOGY = Topology(nodes=2, gpus_per_node=1, gpu=GpuSpec(memory=1 << 30, bandwidth=1e9), links=LINKS)
TINY = exchange.ExchangePlan(
    cases=(exchange.ClusterCase(2, 1, 9, ("zipf-1.2",), ("P0", "P1", "P1q", "P1o", "P3")),),
    batch=7,
    zipf=(997, 61),
    topology=TOPOLOGY,
)


def test_arms_are_measured_by_real_processes_and_finished_runs_are_kept(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(exchange, "why_not", lambda: "it is a test")
    monkeypatch.setattr(exchange_net, "why_not", lambda: "it is a test")
    monkeypatch.setitem(exchange.SCALES, "zipf-1.2", exchange.Scale(4e6, 2, 0.003))
    runs = tmp_path / "exchange.runs.jsonl"
    found = exchange.run(TINY, runs)
    rows = {row["case"]: row for row in found["rows"]}
    assert "over loopback" in found["notes"][0] and not found["judged"]
    assert not [row for row in found["rows"] if "error" in row]
    p0, p1 = (rows[f"2x1/1in9/zipf-1.2/{arm}/apart"]["traffic"] for arm in ("P0", "P1"))
    distinct, lookups = p1["cluster/rows"] / 512, p0["cluster/rows"] / 512
    assert 1.5 * distinct < lookups < 7 * 128  # every lookup, and each row once
    assert rows["2x1/1in9/zipf-1.2/bytes-vs-P0"]["ratio"] > rows["2x1/1in9/zipf-1.2/bytes-vs-P1"]["ratio"] > 2
    ids, sums, gradients = (
        rows["2x1/1in9/zipf-1.2/P1o/apart"]["traffic"][f"cluster/{part}"] for part in ("ids", "rows", "gradients")
    )
    assert ids > lookups * 4 and sums == 7 * 512 and gradients == 7 * 256  # of every sequence, the other card has a share
    assert rows["2x1/1in9/zipf-1.2/owners/bytes-vs-P1q"]["ratio"] > 1
    written = runs.read_text()
    monkeypatch.setattr(exchange.ClusterRun, "do", lambda *given: pytest.fail("a finished run was repeated"))
    assert len(exchange.run(TINY, runs)["rows"]) == len(found["rows"]) and runs.read_text() == written


def test_what_stops_the_ranks_is_the_result_of_the_job_that_they_were_at(monkeypatch: Any, tmp_path: Path) -> None:
    said = []

    class Ended:
        returncode, stderr = 1, ["noise\n", "rank 1: BadInput: no such thing\n"]

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(exchange.time, "sleep", lambda seconds: None)
    said.append(exchange._watch(Ended(), tmp_path / "none.jsonl", lambda: None))  # type: ignore[arg-type]
    assert said == ["rank 1: BadInput: no such thing"]


def test_a_run_that_was_cut_off_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"name": "a"}\n{"name": "b", "st')
    assert set(exchange.read_runs(path)) == {"a"}


# -- logs -----------------------------------------------------------------------------------------------------------------


def test_histories_are_what_a_user_clicked_within_two_days(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    hour = 3_600_000
    clicks = [(0, 7, 0, 0), (1, 8, 1, 1), (0, 9, 0, 40), (1, 5, 2, 47), (0, 6, 3, 50), (1, 4, 4, 60), (0, 3, 3, 88)]
    user, item, session, hours = zip(*clicks, strict=True)
    columns = {"user": user, "item": item, "session": session, "ts_ms": [each * hour for each in hours]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "log.parquet")
    found = exchange_logs._histories(tmp_path / "log.parquet")
    each = [found.values_N[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]
    assert each == [[5, 4], [9, 6, 3]]  # sessions 4 and 3: user 1 up to hour 60, user 0 up to hour 88


def test_ranks_take_the_samples_of_a_step_one_after_the_other_by_turns(tmp_path: Path) -> None:
    log = exchange_logs.read("zipf-1.05", None, 97, 50)
    assert log is not None and log.first.samples == log.second.samples == 50
    log.save(tmp_path, "zipf-1.05", 3, 2)
    job = {"log": "zipf-1.05", "steps": 2}
    parts = [load_batches(tmp_path, job, rank, 4, 3) for rank in range(4)]
    assert parts[0][0] == 97
    for step, first in ((0, 0), (1, 2)):  # 50 // 12 = 4 blocks; the steps are the first and the third
        by_turns = [parts[(turn - step) % 4] for turn in range(4)]
        values_N = np.concatenate([inputs[step][0].numpy() for _, inputs in by_turns])
        assert (values_N == log.second.part(12 * first, 12 * first + 12).values_N).all()


# -- nodes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(NOT_ROOT), reason=f"nodes are namespaces: {NOT_ROOT}")
def test_nodes_are_joined_by_links_that_count_and_nothing_stays_behind() -> None:
    size = 300_000
    with exchange_net.cluster(2, 1) as net:
        net.shape(9e7, 1e7)
        shown = subprocess.run(["tc", "-n", net._name(1), "qdisc"], capture_output=True, text=True, check=True).stdout
        assert "tbf" in shown and "rate 80Mbit" in shown and "rate 720Mbit" in shown
        route = subprocess.run(["ip", "-n", net._name(1), "route"], capture_output=True, text=True, check=True).stdout
        setting = ["ip", "netns", "exec", net._name(1), "cat", "/proc/sys/net/ipv4/tcp_early_retrans"]
        assert "rto_min lock 20s" in route and subprocess.run(setting, capture_output=True, check=True).stdout.strip() == b"0"
        reader, writer = os.pipe()
        server = os.fork()
        if not server:
            net.enter(0)
            with socket.create_server((net.environment()["MASTER_ADDR"], 20_001)) as listening:
                os.write(writer, b"r")
                with listening.accept()[0] as connection:
                    while connection.recv(1 << 16):
                        pass
            os._exit(0)
        os.read(reader, 1)
        client = os.fork()
        if not client:
            net.enter(1)
            before = exchange_net.counted()["eth0"]
            with socket.create_connection((net.environment()["MASTER_ADDR"], 20_001)) as connection:
                connection.sendall(b"x" * size)
            sent = exchange_net.counted()["eth0"].since(before)
            os.write(writer, json.dumps((*sent[:2], exchange_net.sent_again())).encode())
            os._exit(0)
        for child in (client, server):
            os.waitpid(child, 0)
        *counts, again = json.loads(os.read(reader, 1000))
        sent = Counted(*counts)
        assert not again and 0 < sent.carried <= size * 1.03 and sent.bytes > sent.carried
    assert not [owner for owner, _ in exchange_net._found() if owner == net.owner]


@pytest.mark.skipif(bool(NOT_ROOT), reason=f"nodes are namespaces: {NOT_ROOT}")
def test_what_a_killed_run_left_is_removed_and_what_a_living_one_uses_is_not() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [Net(owner, 1, 1)._name(0) for owner in (dead.pid, os.getppid())]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        exchange_net.sweep()
        left = [name for _, name in exchange_net._found()]
        assert names[0] not in left and names[1] in left
    finally:
        for owner in (dead.pid, os.getppid()):
            exchange_net.remove(owner)


def test_counters_are_read_while_all_ranks_wait_for_each_other(monkeypatch: Any) -> None:
    done: list[str] = []
    each = {"lo": Counted(520, 10, exchange_net.WITHOUT_ETHERNET), "eth0": Counted(760, 10)}
    monkeypatch.setattr(exchange_step, "counted", lambda: done.append("read") or each)
    monkeypatch.setattr(exchange_step.dist, "get_rank", lambda: 2)
    steps = Steps(Net(1, 2, 2), Clock(), lambda: done.append("met"), lambda batch: batch[0], Dense(4, 0.0))
    found = steps._kernel()
    assert done == ["met", "read", "met"] and found["node"].carried == 0 and found["cluster"].carried == 100
    monkeypatch.setattr(exchange_step.dist, "get_rank", lambda: 3)
    assert steps._kernel() == {} and done[3:] == ["met", "met"]  # the first rank of the node tells


# -- rows -----------------------------------------------------------------------------------------------------------------


def _measured(job: dict[str, Any], seconds: float = 1.0) -> dict[str, Any]:
    traffic = {f"{link}/{part}": 100.0 for link in ("node", "cluster") for part in ("ids", "rows", "gradients", "sync")}
    lines = [
        {"kind": kind, "what": what, "predicted": 10.0, "measured": 10.1, "off": 0.01}
        for kind, what in (("memory", "rank 0: all"), ("traffic", "node: all"), ("traffic", "cluster: all"), ("time", "step"))
    ]
    found = {
        "step": seconds, "exposed": seconds, "exchange": {"forward": seconds / 2, "backward": seconds / 4}, "traffic": traffic,
        "kernel": {link: {"bytes": 708.0, "carried": 692.0} for link in ("node", "cluster")}, "balance": 1.02,
        "messages": {"node": 2.0, "cluster": 2.0}, "memory": 1000, "check": [] if job["arm"] == "P0" else lines,
    }  # fmt: skip
    return job | found


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    recorder = Recorder("exchange", lambda line: None)
    exchange_rows.write(recorder, [_measured(job) for job in exchange.ExchangePlan().jobs()])
    names = [row["case"] for row in recorder.rows]
    assert len(names) == len(set(names))
    assert set(show.load_asked(ASKED)["exchange"]) <= set(names)


def test_replicas_are_forced_where_it_is_asked_what_tiers_are_worth() -> None:
    forced = {(job["case"], job["log"]) for job in exchange.ExchangePlan().jobs() if job["arm"] in ("P3r", "P3c")}
    assert forced == {(case, log) for case in ("2x2/1in9", "4x2/1in9") for log in ("globo", "zipf-1.2")}


def test_a_run_without_overlap_is_compared_with_a_step_without_prefetch() -> None:
    links = Links(node=Link(bandwidth=1e9, latency=1e-4), cluster=Link(bandwidth=1e8, latency=1e-3))
    cluster = Topology(nodes=2, gpus_per_node=2, gpu=GpuSpec(memory=10**9, bandwidth=1e11), links=links, backend="gloo")
    table, heat = {"name": "item", "rows": 1000, "dim": 16, "pooling": "none", "precision": "fp32"}, Curve.zipf(1000, 1.0, 1e6)
    given = [TablesConfig.model_validate({"batch": 64, "dense": dense, "tables": [table]}) for dense in ("1s", "0s")]
    hides, apart = (make_baseline_plan("row-wise", each, {"item": heat}, cluster) for each in given)
    assert hides.step.overlaps and not apart.step.overlaps
    for plan in (hides, apart):
        assert without_overlap(plan, RowKinds(flat=True)) - plan.dense == pytest.approx(apart.step.total)


def test_ratios_above_one_say_that_ours_is_better() -> None:
    recorder = Recorder("exchange", lambda line: None, judged=False)
    jobs = [job for job in exchange.ExchangePlan(only=("2x2/1in9/globo",)).jobs()]
    slow = {"P0": 8.0, "P1": 3.0, "P2": 2.0, "P3": 1.0, "P1q": 1.5}
    exchange_rows.write(recorder, [_measured(job, slow.get(job["arm"], 4.0)) for job in jobs])
    ratio = {row["case"].removeprefix("2x2/1in9/globo/"): row["ratio"] for row in recorder.rows}
    assert ratio["time-vs-P0/apart"] == 8 and ratio["time-vs-P1/overlap"] == 3 and ratio["never-slower/apart"] == 2
    assert ratio["owners/time-vs-P1q/overlap"] == 1.5 / 4 and ratio["owners/bytes-vs-P1q"] == 1
    assert ratio["time-vs-P3r/overlap"] == ratio["time-vs-P3c/apart"] == 4
    assert ratio["tiers-vs-P1q"] == 1.5 and ratio["bytes-vs-P1"] == 1 and ratio["exchanged-vs-P0"] == 1
    assert ratio["balance"] == pytest.approx(1.1 / 1.02) and ratio["counters/cluster"] == pytest.approx(0.03 / 0.01)
    assert ratio["check/P3/traffic"] == pytest.approx(5) and "check/P0/traffic" not in ratio


def test_segments_sent_again_are_told_only_where_every_run_counted_them() -> None:
    jobs = [_measured(job) | {"again": 2} for job in exchange.ExchangePlan(only=("2x2/1in9/retail/P3",)).jobs()]
    for less, told in ((0, 2 * len(jobs)), (1, None)):
        recorder = Recorder("exchange", lambda line: None, judged=False)
        for job in jobs[:less]:
            del job["again"]
        exchange_rows.write(recorder, jobs)
        assert [row["again"] for row in recorder.rows if "/counters/" in row["case"]] == [told, told]
