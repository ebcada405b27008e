"""The benchmarks of the server, small: the clients that measure, and the judges of what they see."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.chaos import benchmark as chaos
from benchmarks.chaos.actors import DIM, ROWS, Actors
from benchmarks.runner.record import Recorder
from benchmarks.serve import network as serve_network
from benchmarks.serve.load_client import cpu_seconds, measure, requests

ASKED = json.loads((Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json").read_text())


def test_processor_time_counts_children_and_threads():
    burn = "import time\nwhile time.process_time() < {}: pass"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {burn.format(900)!r}])\n" + burn.format(900)
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as burning:
        try:
            end = time.monotonic() + 120
            while cpu_seconds(burning.pid) < 0.5 and time.monotonic() < end:
                time.sleep(0.05)
            alone, child = sum(os.times()[:2]), cpu_seconds(burning.pid)  # it burns on: what is counted later is more
            assert child >= 0.5 and cpu_seconds(os.getpid()) >= child + 0.5 * alone
        finally:
            os.killpg(burning.pid, 9)


def test_clients_measure_an_echo_server(tmp_path):
    effort = serve_network.LoadBudget(101, 1, 0.2)
    table = np.zeros((101, serve_network.DIM), np.float32)
    notes = []
    found = serve_network.race([serve_network.echo(9)], table, 9, 3, effort, Recorder("serve", notes.append, judged=False))
    assert notes == [] and len(found["echo"]) == 1
    assert all(each["requests_per_cpu_s"] > 10 and 0 < each["p50_ms"] <= each["p99_ms"] for each in found["echo"])


def test_clients_without_a_server_raise_and_do_not_wait_for_ever():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        job = {"address": f"127.0.0.1:{closed.getsockname()[1]}", "pid": os.getpid(), "clients": 2, "seconds": 0.1}
        with pytest.raises(grpc.aio.AioRpcError, check=lambda error: error.code() is grpc.StatusCode.UNAVAILABLE):
            asyncio.run(asyncio.wait_for(measure({**job, "ids": 3, "rows": 101, "features": ["t"]}), 120))


def test_a_peer_that_is_not_there_or_does_not_start_is_recorded():
    notes = []
    recorder = Recorder("serve", notes.append, judged=False)
    broken = serve_network.ServerContender("kserve", [sys.executable, "-c", "import nowhere_to_be_found"])
    found = serve_network.race([broken], np.zeros((101, 64), np.float32), 9, 1, serve_network.QUICK, recorder)
    assert found == {"kserve": []} and "kserve did not come up: ModuleNotFoundError" in recorder.record["notes"][0]
    mine = {"requests_per_cpu_s": 100.0, "p99_ms": 2.0}
    serve_network._add(recorder, "network/64/1/kserve", {"ours-1": [mine, mine]} | found, "kserve")
    assert [row["skipped"] for row in recorder.rows] == ["kserve is absent"] * 2 and recorder.rows[0]["ours"] == 100


def test_ratios_above_one_mean_that_we_are_better():
    recorder = Recorder("serve", lambda line: None, judged=False)
    mine, theirs = {"requests_per_cpu_s": 300.0, "p99_ms": 2.0}, {"requests_per_cpu_s": 200.0, "p99_ms": 5.0}
    serve_network._add(recorder, "network/64/1/kserve", {"ours-1": [mine], "kserve": [theirs]}, "kserve")
    assert [row["ratio"] for row in recorder.rows] == [1.5, 2.5]


def test_asked_cases_are_those_that_are_measured():
    clients = {case["case"].split("/")[2] for case in ASKED["serve"] if case["case"].startswith("network/64/")}
    assert clients == {str(number) for number in serve_network.CLIENTS}
    cards = {case["case"].split("/")[2] for case in ASKED["serve"] if case["case"].startswith("network/cards/")}
    assert cards == {str(number) for number in serve_network.CARDS}
    named = {line for line in (chaos.__doc__ or "").split() if line.startswith("chaos/")}
    assert {case["case"] for case in ASKED["chaos"]} == named


def test_requests_are_the_same_for_every_server():
    first, ids_RN = requests(5, 77, "t")
    again, _ = requests(5, 77, "t")
    assert first == again and ids_RN.max() < 77 and len(set(first)) == len(first)


class FewChains:
    rows = {  # noqa: RUF012
        version: {name: np.full((ROWS, DIM), value + shift, np.float32) for shift, name in ((0.0, "a"), (0.5, "b"))}
        for version, value in (("1.1", 1.0), ("1.2", 2.0))
    }


@pytest.mark.parametrize(
    "version, a, b, verdict",
    [
        ("1.1", 1.0, 1.5, "answered"),
        ("1.2", 2.0, 2.5, "answered"),
        ("1.1", 1.0, 2.5, "mixed"),
        ("1.1", 2.0, 2.5, "mixed"),
        ("1.1", 1.0, 7.0, "wrong"),
        ("9.9", 1.0, 1.5, "wrong"),
    ],
)
def test_chaos_knows_a_right_answer_from_a_mixed_or_wrong_one(version, a, b, verdict):
    ids = {"a": np.arange(3), "b": np.arange(5)}
    found = {"a": np.full((3, DIM), a, np.float32), "b": np.full((5, DIM), b, np.float32)}
    assert Actors("", "", FewChains())._judge(version, ids, found) == verdict
