"""Calibration: synthetic times, real processes over loopback, and two nodes behind a shaped link.

Bandwidths of real processes vary; only that of the shaped link is checked, because the kernel's shaper sets it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from thermocline.cli import app
from thermocline.distributed import calibration as calibrate
from thermocline.errors import BadInput
from thermocline.plan.calibration import measure_link, to_yaml
from thermocline.plan.topology import Link, Links, Topology, presets

COMMAND = [sys.executable, "-m", "torch.distributed.run"]
CALIBRATE = ["-m", "thermocline", "calibrate", "--quiet", "-o"]
RATE = 160_000_000  # bits a second of the shaped link: 20 MB/s
SPARE = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.parametrize("bandwidth, latency", [(50e9, 20e-6), (20e6, 1e-3), (4e12, 0.0), (1e5, 0.01)])
def test_latency_and_bandwidth_are_separated(bandwidth, latency):
    found = measure_link(lambda size: latency + size / bandwidth, most=1 << 30)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert found.latency == pytest.approx(latency + 8 / bandwidth)


def test_sizes_grow_until_long_enough_and_stay_within_the_limit():
    sizes = []

    def exchange(size):
        sizes.append(size)
        return size / 1e6

    measure_link(exchange, most=1 << 30)
    assert max(sizes) == 1 << 19  # 0.52 s at a megabyte a second
    sizes.clear()
    measure_link(exchange, most=100_001)
    assert max(sizes) == 100_001


def test_one_slow_exchange_does_not_change_the_result():
    calls = iter(range(1000))
    found = measure_link(lambda size: (1.0 if next(calls) % 7 == 3 else 0.0) + 1e-5 + size / 1e9, most=1 << 30)
    assert found.bandwidth == pytest.approx(1e9, rel=0.01) and found.latency == pytest.approx(1e-5, rel=0.01)


@pytest.mark.parametrize("name", presets())
def test_topology_round_trips_through_yaml(tmp_path, name):
    given = Topology.load(name)
    (tmp_path / "cluster.yaml").write_text(to_yaml(given))
    found = Topology.load(tmp_path / "cluster.yaml")
    assert found.model_dump() == given.model_dump()


def test_numbers_are_written_to_four_digits(tmp_path):
    links = Links(node=Link(bandwidth=123_456_789_012.3, latency=1.23456e-5))
    given = Topology.load("laptop").model_copy(update={"links": links, "name": "it's mine"})
    (tmp_path / "cluster.yaml").write_text(to_yaml(given))
    found = Topology.load(tmp_path / "cluster.yaml")
    assert found.links.node.bandwidth == pytest.approx(links.node.bandwidth, rel=1e-3)
    assert found.links.node.latency == pytest.approx(links.node.latency, rel=1e-3)
    assert found.name == "it's mine" and found.gpu == given.gpu


@pytest.mark.parametrize("rate, latency", [(999_800.0, 1e-5), (12.0, 3.0), (0.4, 1e-12), (5e14, 0.0)])
def test_slow_links_are_read_back_since_they_have_units(tmp_path, rate, latency):
    links = Links(node=Link(bandwidth=rate, latency=latency))
    (tmp_path / "cluster.yaml").write_text(to_yaml(Topology.load("laptop").model_copy(update={"links": links})))
    found = Topology.load(tmp_path / "cluster.yaml").links.node
    assert (found.bandwidth, found.latency) == (pytest.approx(rate, rel=1e-3), pytest.approx(latency, rel=1e-3, abs=1e-15))


def test_presets_are_listed():
    done = CliRunner().invoke(app, ["calibrate", "--presets"])
    assert done.exit_code == 0 and all(name in done.output for name in presets())


def environment(**more):
    return {**os.environ, **SPARE, **more}


def test_one_process_measures_its_machine(tmp_path):
    done = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path / "cluster.yaml")])
    assert done.exit_code == 0, done.output
    found = Topology.load(tmp_path / "cluster.yaml")
    assert found.world_size >= 1 and found.gpu.memory > 0 and "one process" in found.source and found.date


@pytest.mark.slow
def test_four_processes_measure_the_link_between_them(tmp_path):
    command = [*COMMAND, "--standalone", "--nproc-per-node", "4", *CALIBRATE, str(tmp_path / "cluster.yaml")]
    subprocess.run(command, check=True, timeout=600, env=environment(CUDA_VISIBLE_DEVICES=""))
    found = Topology.load(tmp_path / "cluster.yaml")
    assert (found.nodes, found.gpus_per_node) == (1, 4) and found.links.cluster is None
    assert "4 processes over gloo" in found.source


@contextlib.contextmanager
def two_nodes():
    """Two network namespaces, joined by a link that the kernel limits to RATE each way."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("two shaped nodes need root and iproute2")
    names = [f"tc{os.getpid()}{side}" for side in "ab"]

    def do(*words):
        subprocess.run(words, check=True, capture_output=True, text=True)

    try:
        try:
            for name in names:
                do("ip", "netns", "add", name)
            do("ip", "link", "add", "shaped", "netns", names[0], "type", "veth", "peer", "name", "shaped", "netns", names[1])
            for at, name in enumerate(names):
                inside = ("ip", "netns", "exec", name)
                do(*inside, "ip", "address", "add", f"10.77.0.{at + 1}/24", "dev", "shaped")
                do(*inside, "ip", "link", "set", "lo", "up")
                do(*inside, "ip", "link", "set", "shaped", "up")
                shape = ("rate", f"{RATE}bit", "burst", "128kb", "latency", "50ms")
                do(*inside, "tc", "qdisc", "add", "dev", "shaped", "root", "tbf", *shape)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not possible here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_two_nodes_measure_the_rate_of_a_shaped_link(tmp_path):
    with two_nodes() as names:
        ranks = []
        for at, name in enumerate(names):
            spread = ["--nnodes", "2", "--node-rank", str(at), "--nproc-per-node", "2"]
            meet = ["--master-addr", "10.77.0.1", "--master-port", "29555"]
            output = str(tmp_path / f"cluster{at}.yaml")
            command = ["ip", "netns", "exec", name, *COMMAND, *spread, *meet, *CALIBRATE, output]
            here = environment(GLOO_SOCKET_IFNAME="shaped", CUDA_VISIBLE_DEVICES="")
            ranks.append(subprocess.Popen(command, env=here))
        try:
            assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.terminate()  # torchrun then ends its processes too
                rank.wait(timeout=60)
    found = Topology.load(tmp_path / "cluster0.yaml")
    assert not (tmp_path / "cluster1.yaml").exists()  # the first rank writes, and no other
    assert (found.nodes, found.gpus_per_node) == (2, 2)
    assert found.links.cluster.bandwidth == pytest.approx(RATE / 8 / 2, rel=0.25)  # two GPUs share the link
    assert found.links.node.bandwidth > 2 * found.links.cluster.bandwidth
    assert found.links.cluster.alone == pytest.approx(RATE / 8, rel=0.25) and found.backend == "gloo"


@pytest.mark.parametrize(
    "names, nodes",
    [
        (["a 0", "a 0", "b 1", "b 1"], [[0, 1], [2, 3]]),
        (["b", "a", "b", "a"], [[0, 2], [1, 3]]),  # ranks dealt out in turn
        (["one 0", "one 1"], [[0], [1]]),  # two commands on one cluster
    ],
)
def test_ranks_are_grouped_by_node(monkeypatch, names, nodes):
    pretend(monkeypatch, names)
    assert calibrate._nodes() == nodes


def test_unequal_nodes_are_refused(monkeypatch):
    pretend(monkeypatch, ["a", "a", "a", "b"])
    with pytest.raises(BadInput):
        calibrate._nodes()


def pretend(monkeypatch, names):
    """Give ranks these node names."""
    monkeypatch.setattr(calibrate, "gather_objects", lambda mine: names)
