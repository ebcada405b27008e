"""Planning files: what they may say, and the line and field of what they may not."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thermocline import FormatError
from thermocline.errors import BadInput
from thermocline.plan import units
from thermocline.plan.tables import TableFile, Tables
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
    """The problems of a text, one a line, without the path of the file."""
    with pytest.raises(FormatError) as error:
        load(kind, text, name)
    return [re.sub(r"^\S*/", "", line, count=1) for line in str(error.value).splitlines()]


def test_a_cluster_is_read_with_its_units(load):
    found = load(Topology, CLUSTER)
    assert (found.cards, found.card.memory, found.card.bandwidth) == (8, 141 * 10**9, 4e12)
    assert found.host.memory == 2 * 10**12
    assert found.links.cluster.bandwidth == 50e9 and found.links.cluster.latency == pytest.approx(20e-6)


def test_tables_are_read_and_words_stay_words(load):
    found = load(Tables, TABLES)
    assert found.dense == pytest.approx(0.004) and found.optimizer == "rowwise_adagrad"
    item, no = found.tables
    assert (item.rows, item.looked_up_by, item.cache) == (1_000_000, ("item", "history"), 0.05)
    assert (no.name, no.rows, no.looked_up_by, no.precision["int2"]) == ("no", 1_000_000, ("no",), 0.94)


@pytest.mark.parametrize("kind, text", [(Topology, CLUSTER), (Tables, TABLES)])
def test_what_a_model_writes_as_json_it_reads_again(load, kind, text):
    found = load(kind, text)
    for written in (found.model_dump_json(), json.dumps(json.loads(found.model_dump_json()), indent="\t")):
        assert load(kind, written, "file.json") == found
        assert load(kind, written.replace("\t", " ")) == found


def test_a_date_is_text_as_it_was_written(load):
    assert load(Topology, CLUSTER + "date: 2026-11-15\n").date == "2026-11-15"


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("memory: 141GB", "memory: 0", "line 5, field card.memory: 0 is not above 0; it is bytes of a card"),
        ("memory: 141GB", "memory: 141", "line 5, field card.memory: 141 bytes is less than 1,048,576; add a unit.*141GB"),
        ("141GB", "141GBit", "line 5, field card.memory: '141GBit' is not bytes, such as 141GB or 2GiB"),
        ("4.0TB/s", "4.0TB", "line 5, field card.bandwidth: '4.0TB' is not a rate, such as 450GB/s"),
        ("latency: 20us", "latency: 20", "line 12, field links.cluster.latency: 20 seconds is longer than 1 s.*10us"),
        ("latency: 20us", "latency: -1", "line 12, field links.cluster.latency: -1 is below 0"),
        (
            "bandwidth: 400",
            "bandwith: 400",
            "line 11, field links.cluster.bandwith: there is no such field .did you mean 'bandw",
        ),
        ("nodes: 2", "nodes: 0", "line 3, field nodes: 0 is below 1; it is machines, 1 or more"),
        ("nodes: 2", "nodes: two", "line 3, field nodes: 'two' is not a whole number; it is machines"),
        ("nodes: 2", "nodes: 2.5", "line 3, field nodes: 2.5 does not do .*integer"),
        ("nodes: 2", "nodes: true", "line 3, field nodes: True is not a whole number"),
        ("  cluster:\n    bandwidth: 400Gbit/s\n    latency: 20us\n", "", "line 7, field links: nodes is 2, and .*'cluster'"),
        ("card: {memory: 141GB, bandwidth: 4.0TB/s}\n", "", "line 1, field card: is missing"),
        ("version: 1", "version: 2", "line 1, field version: 2 is not known; use 1"),
        ("nodes: 2", "nodes: 2\nnodes: 3", "line 4, field nodes: given before, in line 3; keep one"),
        ("nodes: 2", "nodes: [2", "line .*: this is not YAML"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_told_with_line_and_field(load, old, new, says):
    assert old in CLUSTER
    problems = refused(load, Topology, CLUSTER.replace(old, new, 1))
    assert re.search(f"file.yaml, {says}", "\n".join(problems)), problems
    assert len(problems) == (2 if "no such field" in says else 1), problems  # the misspelt one is missing too


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("lookups: 20", "lookups: 1e300", "line 9, field tables[0].lookups (table 'item'): 1e+300 is above 1048576"),
        ("dim: 128", "dim: 4096", "line 6, field tables[0].dim (table 'item'): 4096 is above 2048; it is columns of a row, 1"),
        ("rows: 1e6", "rows: -3", "line 13, field tables[1].rows (table 'no'): -3 is below 1; it is 1 or more"),
        ("cache: 0.05", "cache: 5", "line 11, field tables[0].cache (table 'item'): 5 is above 1"),
        ("cache: 0.05", "cache: 2GiB", "line 11, field tables[0].cache (table 'item'): '2GiB' is not a number"),
        ("precision: int8", "precision: int9", "line 10, field tables[0].precision (table 'item'): 'int9' is not known (did"),
        ("precision: int8", "precision: 8", "line 10, field tables[0].precision (table 'item'): 8 is neither a name nor"),
        ("precision: int8", "precision: fp16", "line 11, field tables[0].cache (table 'item'): cache is 0.05 and precision"),
        ("int2: 0.94", "int2: 0.9", "line 15, field tables[1].precision (table 'no'): {'fp32': 0.01, 'int8': 0.05, 'int2"),
        ("pooling: none", "pooling: avg", "line 7, field tables[0].pooling (table 'item'): 'avg' is not known"),
        ("name: no", "name: item", "line 12, field tables[1].name (table 'item'): tables[0] has this name too"),
        ("name: no", "name: history", "line 12, field tables[1].name (table 'history'): feature 'history' looks up 'item'"),
        ("name: no", "name: ''", "line 12, field tables[1].name"),
        ("dense: 4ms", "dense: 4 parsecs", "line 2, field dense: '4 parsecs' is not a time, such as 10us or 4ms"),
        ("batch: 2048\n", "", "line 1, field batch: is missing; it is samples a card and step"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tables_is_told_with_line_and_field(load, old, new, says):
    assert old in TABLES
    problems = refused(load, Tables, TABLES.replace(old, new, 1))
    assert [problem.startswith(f"file.yaml, {says}") for problem in problems] == [True], problems


def test_two_tables_of_one_feature_name_both_dimensions(load):
    (problem,) = refused(load, Tables, TABLES.replace("name: no", "name: no\n    features: [history]"))
    assert "line 13" in problem and "'item' and 'no' of dimensions 128 and 64" in problem


def test_all_problems_are_told_at_once_one_a_line(load):
    text = TABLES.replace("dim: 128", "dim: 0").replace("batch: 2048", "batch: 0").replace("dim: 64", "dims: 64")
    problems = refused(load, Tables, text)
    assert [re.search(r"line (\d+)", problem)[1] for problem in problems] == ["1", "6", "12", "14"]


def test_hundreds_of_problems_are_counted_not_listed(load):
    text = "batch: 1\ntables:\n" + "  - {name: t, rows: 0, dim: 1}\n" * 300
    problems = refused(load, Tables, text)
    assert len(problems) == 21 and problems[-1] == "file.yaml: and 280 problems more"


@pytest.mark.parametrize(
    "text, name, says",
    [
        ("", "file.yaml", "file.yaml, line 1: this is an empty file; a Tables file has the fields version, batch"),
        ("- 1\n", "file.yaml", "file.yaml, line 1: this is a list"),
        ("batch: 1\ntables: []\n", "file.yaml", "file.yaml, line 2, field tables: there are none; name at least one"),
        ('{"batch": 1,\n "tables": oh}', "file.json", "file.json, line 2: this is not JSON"),
        ('{"batch": 1,\n\t"batch": 2}', "file.json", "file.json: field batch is given twice"),
        (
            '{\n\t"batch": 0,\n\t"tables": [{"name": "a", "rows": 1, "dim": 1}]}',
            "file.json",
            "file.json, line 2, field batch: 0",
        ),
        ("batch: &b [*b]\n", "file.yaml", "file.yaml"),
        ("[" * 9999, "file.yaml", "file.yaml: this cannot be read"),
        ("[" * 99999, "file.json", "file.json: this cannot be read"),
        ("batch: 1" + 5000 * "0", "file.yaml", "file.yaml: this cannot be read"),
        ("batch: !!python/object:os.system 1", "file.yaml", "file.yaml, line 1: this is not YAML"),
    ],
)
def test_what_is_no_such_file_at_all_is_told_too(load, text, name, says):
    assert refused(load, Tables, text, name)[0].startswith(says)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "tables.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="byte 0 is not UTF-8"):
        Tables.load(tmp_path / "tables.yaml")


def test_contradictions_are_refused_without_a_file_as_well():
    with pytest.raises(ValueError, match="tables\\[0\\] has this name"):
        Tables(batch=1, tables=(TableFile(name="a", rows=1, dim=1), TableFile(name="a", rows=1, dim=1)))


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


@pytest.mark.parametrize("kind, text", [(Topology, CLUSTER), (Tables, TABLES)])
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mutations=MUTATIONS)
def test_whatever_is_in_a_file_it_is_read_or_refused_in_sentences(load, kind, text, mutations):
    for at, inserted, dropped in mutations:
        place = int(at * len(text))
        text = text[:place] + inserted + text[place + dropped :]
    try:
        load(kind, text)
    except FormatError as error:
        assert all(line.split(", line ")[0].split(": ")[0].endswith("file.yaml") for line in str(error).splitlines())


@pytest.mark.parametrize("name", ["hgx-h100", "hgx-h200", "hgx-a100-80", "l40s-pcie", "laptop"])
def test_every_preset_says_where_its_numbers_come_from(name):
    found = presets()[name]
    assert found.name and found.source and re.fullmatch(r"20\d\d-\d\d-\d\d", found.date)
    assert found == Topology.load(name)


def test_a_preset_can_have_more_nodes():
    found = Topology.load("hgx-h200", nodes=4)
    assert (found.nodes, found.cards, found.card.memory) == (4, 32, 141 * 10**9)
    assert Topology.load("hgx-h200").cards == 8


def test_more_nodes_than_links_are_known_for_are_refused():
    with pytest.raises(
        FormatError, match=r"preset l40s-pcie, line \d+, field links: nodes is 2, and there is no link 'cluster'"
    ):
        Topology.load("l40s-pcie", nodes=2)


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(BadInput, match=r"did you mean 'hgx-h200'.*laptop"):
        Topology.load("hgx-h20")


def test_a_file_goes_before_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laptop").write_text(CLUSTER)
    assert Topology.load("laptop").cards == 8


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
def test_what_is_no_quantity_is_refused(given):
    with pytest.raises(BadInput, match="is not bytes"):
        units.read_bytes(given)


@pytest.mark.parametrize("value", [0.0, 3.0, 4.5e5, 54.3e9, 4.0e12])
def test_what_is_shown_of_a_rate_is_read_back(value):
    assert units.read_rate(units.show_rate(value)) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("value", [0.0, 2e-9, 10e-6, 0.004, 3.0])
def test_what_is_shown_of_a_time_is_read_back(value):
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
