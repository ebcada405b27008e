"""Planning files: their content, and the line and field of every mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from support import contradicts, has, mentions
from thermocline import FormatError
from thermocline.errors import BadInput
from thermocline.plan import units
from thermocline.plan.run_file import MeasuredRun
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology, presets

CLUSTER = """\
version: 1
name: two nodes of four H200
nodes: 2
cards_per_node: 4
card: {memory: 141GB, bandwidth: 4.0TB/s}
host: {memory: 2TB}
links:
  host: {bandwidth: 55GB/s, latency: 10us}
  node: {bandwidth: 450GB/s, latency: 10us}
  cluster:
    bandwidth: 400Gbit/s
    latency: 20us
"""
TABLES = """\
batch: 2048
dense: 4ms
tables:
  - name: item
    rows: 1_000_000
    dim: 128
    pooling: none
    features: [item, history]
    lookups: 20
    precision: int8
    cache: 0.05
  - name: no
    rows: 1e6
    dim: 64
    precision: {fp32: 0.01, int8: 0.05, int2: 0.94}
"""


@pytest.fixture
def load(tmp_path):
    def load(kind, text, name="file.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return kind.load(path)

    return load


def refused(load, kind, text, name="file.yaml"):
    """The error of a text, whose lines all name the file."""
    with pytest.raises(FormatError) as caught:
        load(kind, text, name)
    assert all(re.match(r"^\S*/" + name, line) for line in str(caught.value).splitlines())
    return caught.value


def test_a_cluster_is_read_with_its_units(load):
    found = load(Topology, CLUSTER)
    assert (found.world_size, found.gpu.memory, found.gpu.bandwidth) == (8, 141 * 10**9, 4e12)
    assert found.host.memory == 2 * 10**12
    assert found.links.cluster.bandwidth == 50e9 and found.links.cluster.latency == pytest.approx(20e-6)


def test_tables_are_read_with_yaml_1_2_words(load):
    found = load(TablesConfig, TABLES)
    assert found.dense == pytest.approx(0.004) and found.optimizer == "rowwise_adagrad"
    item, no = found.tables
    assert (item.rows, item.feature_names, item.cache) == (1_000_000, ("item", "history"), 0.05)
    assert (no.name, no.rows, no.feature_names, no.precision["int2"]) == ("no", 1_000_000, ("no",), 0.94)


@pytest.mark.parametrize("kind, text", [(Topology, CLUSTER), (TablesConfig, TABLES)])
def test_models_round_trip_through_json(load, kind, text):
    found = load(kind, text)
    for written in (found.model_dump_json(), json.dumps(json.loads(found.model_dump_json()), indent="\t")):
        assert load(kind, written, "file.json") == found
        assert load(kind, written.replace("\t", " ")) == found


@pytest.mark.parametrize("kind, text", [(Topology, TABLES), (TablesConfig, CLUSTER), (MeasuredRun, CLUSTER)])
def test_another_kind_of_file_is_refused_in_one_line(load, kind, text):
    with pytest.raises(FormatError, check=has(line=1)) as caught:
        load(kind, text)
    assert "\n" not in str(caught.value)


def test_a_date_stays_text(load):
    assert load(Topology, CLUSTER + "date: 2026-11-15\n").date == "2026-11-15"


@pytest.mark.parametrize(
    "old, new, line, field, words",
    [
        ("memory: 141GB", "memory: 0", 5, "card.memory", "0"),
        ("memory: 141GB", "memory: 141", 5, "card.memory", "141GB"),
        ("141GB", "141GBit", 5, "card.memory", "2GiB"),
        ("4.0TB/s", "4.0TB", 5, "card.bandwidth", "450GB/s"),
        ("latency: 20us", "latency: 20", 12, "links.cluster.latency", "10us"),
        ("latency: 20us", "latency: -1", 12, "links.cluster.latency", "-1"),
        ("nodes: 2", "nodes: 0", 3, "nodes", "1"),
        ("nodes: 2", "nodes: two", 3, "nodes", "'two'"),
        ("nodes: 2", "nodes: 2.5", 3, "nodes", "2.5"),
        ("nodes: 2", "nodes: true", 3, "nodes", "True"),
        ("  cluster:\n    bandwidth: 400Gbit/s\n    latency: 20us\n", "", 7, "links", "'cluster'"),
        ("card: {memory: 141GB, bandwidth: 4.0TB/s}\n", "", 1, "card", "missing"),
        ("version: 1", "version: 2", 1, "version", "1"),
    ],
)
def test_wrong_fields_of_a_topology_are_reported_with_their_line(load, old, new, line, field, words):
    assert old in CLUSTER
    error = refused(load, Topology, CLUSTER.replace(old, new, 1))
    assert error.problems == ((field, line),) and (error.parameter, error.line) == (field, line) and words in str(error)


def test_a_misspelt_field_gets_a_hint_and_is_missing_too(load):
    error = refused(load, Topology, CLUSTER.replace("bandwidth: 400", "bandwith: 400", 1))
    assert sorted(error.problems) == [("links.cluster.bandwidth", 10), ("links.cluster.bandwith", 11)]
    assert "'bandwidth'?" in str(error)


def test_a_field_given_twice_is_refused(load):
    assert (refused(load, Topology, CLUSTER.replace("nodes: 2", "nodes: 2\nnodes: 3")).line) == 4


@pytest.mark.parametrize(
    "old, new, line, field, words",
    [
        ("lookups: 20", "lookups: 1e300", 9, "tables[0].lookups", "1048576"),
        ("dim: 128", "dim: 4096", 6, "tables[0].dim", "2048"),
        ("rows: 1e6", "rows: -3", 13, "tables[1].rows", "-3"),
        ("cache: 0.05", "cache: 5", 11, "tables[0].cache", "5"),
        ("cache: 0.05", "cache: 2GiB", 11, "tables[0].cache", "'2GiB'"),
        ("precision: int8", "precision: int9", 10, "tables[0].precision", "'int8'?"),
        ("precision: int8", "precision: 8", 10, "tables[0].precision", "8"),
        ("precision: int8", "precision: fp16", 11, "tables[0].cache", "fp16"),
        ("int2: 0.94", "int2: 0.9", 15, "tables[1].precision", "0.96"),
        ("pooling: none", "pooling: avg", 7, "tables[0].pooling", "'avg'"),
        ("name: no", "name: item", 12, "tables[1].name", "tables[0]"),
        ("name: no", "name: history", 12, "tables[1].name", "'history'"),
        ("name: no", "name: ''", 12, "tables[1].name", ""),
        ("dense: 4ms", "dense: 4 parsecs", 2, "dense", "10us"),
        ("batch: 2048\n", "", 1, "batch", "missing"),
    ],
)
def test_wrong_fields_of_tables_are_reported_with_their_line(load, old, new, line, field, words):
    assert old in TABLES
    error = refused(load, TablesConfig, TABLES.replace(old, new, 1))
    assert error.problems == ((field, line),) and words in str(error)
    if field.startswith("tables[") and field.split(".")[1] != "name":
        assert f"'{'item' if '[0]' in field else 'no'}'" in str(error)  # tables are known by name


def test_two_tables_of_one_feature_name_both_dimensions(load):
    error = refused(load, TablesConfig, TABLES.replace("name: no", "name: no\n    features: [history]"))
    assert error.line == 13 and all(words in str(error) for words in ("'item'", "'no'", "128", "64"))


def test_all_problems_are_reported_at_once(load):
    text = TABLES.replace("dim: 128", "dim: 0").replace("batch: 2048", "batch: 0").replace("dim: 64", "dims: 64")
    assert [line for _, line in refused(load, TablesConfig, text).problems] == [1, 6, 12, 14]


def test_hundreds_of_problems_are_counted_not_listed(load):
    text = "batch: 1\ntables:\n" + "  - {name: t, rows: 0, dim: 1}\n" * 300
    lines = str(refused(load, TablesConfig, text)).splitlines()
    assert len(lines) == 21 and "280" in lines[-1]


@pytest.mark.parametrize(
    "text, name, line, field",
    [
        ("", "file.yaml", 1, None),
        ("- 1\n", "file.yaml", 1, None),
        ("batch: 1\ntables: []\n", "file.yaml", 2, "tables"),
        ('{"batch": 1,\n "tables": oh}', "file.json", 2, None),
        ('{"batch": 1,\n\t"batch": 2}', "file.json", None, "batch"),
        ('{\n\t"batch": 0,\n\t"tables": [{"name": "a", "rows": 1, "dim": 1}]}', "file.json", 2, "batch"),
        ("[" * 9999, "file.yaml", None, None),
        ("[" * 99999, "file.json", None, None),
        ("batch: 1" + 5000 * "0", "file.yaml", None, None),
        ("batch: !!python/object:os.system 1", "file.yaml", 1, None),
        ("nodes: [2", "file.yaml", 1, None),
    ],
)
def test_files_of_another_kind_are_refused(load, text, name, line, field):
    error = refused(load, TablesConfig, text, name)
    assert (getattr(error, "line", None), error.parameter) == (line, field)


def test_a_recursive_alias_is_refused(load):
    refused(load, TablesConfig, "batch: &b [*b]\n")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "tables.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "tables.yaml"), position=0)):
        TablesConfig.load(tmp_path / "tables.yaml")


def test_contradictions_are_refused_without_a_file():
    with pytest.raises(ValidationError, check=contradicts("tables", 1, "name")):
        TablesConfig(batch=1, tables=(TableConfig(name="a", rows=1, dim=1), TableConfig(name="a", rows=1, dim=1)))


MUTATIONS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(
            ["", " ", "\n", "\t", ":", "- ", "[", "}", "0", "-", "null", "true", "'", '"', "&a ", "*a", "<<: ", "!x ", "é"]
        ),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind, text", [(Topology, CLUSTER), (TablesConfig, TABLES)])
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mutations=MUTATIONS)
def test_mutated_files_are_read_or_refused_with_a_format_error(load, kind, text, mutations):
    for at, inserted, dropped in mutations:
        place = int(at * len(text))
        text = text[:place] + inserted + text[place + dropped :]
    try:
        load(kind, text)
    except FormatError as error:
        assert all(line.split(", line ")[0].split(": ")[0].endswith("file.yaml") for line in str(error).splitlines())


@pytest.mark.parametrize("name", ["hgx-h100", "hgx-h200", "hgx-a100-80", "l40s-pcie", "laptop"])
def test_every_preset_has_source_and_date(name):
    found = presets()[name]
    assert found.name and found.source and re.fullmatch(r"20\d\d-\d\d-\d\d", found.date)
    assert found == Topology.load(name)


def test_a_preset_can_have_more_nodes():
    found = Topology.load("hgx-h200", nodes=4)
    assert (found.nodes, found.world_size, found.gpu.memory) == (4, 32, 141 * 10**9)
    assert Topology.load("hgx-h200").world_size == 8


def test_more_nodes_without_a_cluster_link_are_refused():
    with pytest.raises(FormatError, check=has(path="preset l40s-pcie", parameter="links")):
        Topology.load("l40s-pcie", nodes=2)


def test_an_unknown_preset_is_refused_with_a_hint():
    with pytest.raises(BadInput, check=has(parameter="topology", value="hgx-h20")) as refused:
        Topology.load("hgx-h20")
    assert "hgx-h200" in refused.value.available and mentions("'hgx-h200'")(refused.value)  # quoted: the nearest


def test_a_file_takes_precedence_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laptop").write_text(CLUSTER)
    assert Topology.load("laptop").world_size == 8


@pytest.mark.parametrize(
    "read, text, value",
    [
        (units.read_bytes, "141GB", 141e9),
        (units.read_bytes, " 2 GiB ", 2 << 30),
        (units.read_bytes, "1.5kB", 1500),
        (units.read_bytes, 7, 7),
        (units.read_rate, "400Gbit/s", 50e9),
        (units.read_rate, "4.0TB/s", 4e12),
        (units.read_seconds, "10us", 1e-5),
        (units.read_seconds, "4 ms", 4e-3),
    ],
)
def test_quantities_are_read_in_their_units(read, text, value):
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize("given", ["", "GB", "12", "1 parsec", "-1GB", True, None, [1]])
def test_wrong_quantities_are_refused(given):
    with pytest.raises(BadInput, check=has(value=given)):
        units.read_bytes(given)


@pytest.mark.parametrize("value", [0.0, 3.0, 4.5e5, 54.3e9, 4.0e12])
def test_rates_round_trip(value):
    assert units.read_rate(units.show_rate(value)) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("value", [0.0, 2e-9, 10e-6, 0.004, 3.0])
def test_times_round_trip(value):
    assert units.read_seconds(units.show_seconds(value)) == pytest.approx(value, rel=1e-3)


def test_bytes_are_shown_with_one_to_three_digits():
    assert [units.show_bytes(n) for n in (0, 999, 1000, 1 << 20, 141 * 10**9, 1 << 51)] == [
        "0 B", "999 B", "0.98 KiB", "1.00 MiB", "131.32 GiB", "2,048.00 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, unwanted",
    [
        (["--help"], {"torch", "numpy", "pydantic", "yaml"}),
        (["estimate", "--help"], {"torch", "numpy", "yaml"}),
        (["estimate", "--tables", "tables.yaml", "--topology", "hgx-h200"], {"torch", "numba"}),
        (["calibrate", "--presets"], {"torch", "numba"}),
    ],
)
def test_no_command_imports_more_than_it_needs(tmp_path, arguments, unwanted):
    (tmp_path / "tables.yaml").write_text(TABLES)
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({unwanted!r} & set(sys.modules)), file=sys.stderr))\n"
        "from thermocline.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "[]\n")
