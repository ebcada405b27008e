"""Estimates: bytes that agree with modules, the fewest GPUs, and models inspected on the meta device."""

from __future__ import annotations

import json
import resource

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thermocline
from support import has
from thermocline.cli import app, main
from thermocline.errors import BadInput
from thermocline.heat import Curve
from thermocline.nn.interop.find_tables import find_tables, load_model
from thermocline.plan.estimate import AS_GIVEN, CHOICES, estimate_memory
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology
from thermocline.plan.units import read_share

MODEL = """
from __future__ import annotations

from dataclasses import dataclass

import thermocline
from torch import nn
from beside import DIM

HOT = {"fp32": 0.01, "int8": 0.05, "int2": 0.94}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.EmbeddingBag(1_000_000_000, DIM, mode="sum")
        self.words = nn.Embedding(501, 7, padding_idx=0)
        self.tied = nn.Embedding(501, 7)
        self.tied.weight = self.words.weight
        self.rows = thermocline.EmbeddingCollection(
            [thermocline.Table("user", 100_000_000, 32, ("a", "b")), thermocline.Table("item", 33, 32)], mode="mean"
        )
        self.hot = thermocline.Embedding(999, 64, padding_idx=3, rows=thermocline.RowConfig(HOT))
        self.dense = nn.Linear(10, 10)

def needs(argument):
    return Model()

@dataclass
class Settings:
    dim: int = 8

number = 3

def reads(path=None):
    model = nn.Embedding(5, 5)
    return model.weight.sum().item()

def text():
    return "no module"

class Empty(nn.Module):
    pass
"""


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "beside.py").write_text("DIM = 128\n")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def tables_of(*shapes, batch=100, **change):
    return TablesConfig.model_validate(
        {"batch": batch, "tables": [{"name": f"t{n}", "rows": rows, "dim": dim} for n, (rows, dim) in enumerate(shapes)]}
        | change
    )


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_every_choice_takes_the_bytes_of_a_collection(choice):
    shapes = [(15003, 64), (9001, 17), (1400, 128)]
    (found,) = [found for found in estimate_memory(tables_of(*shapes)) if found.choice == choice]
    tables = [thermocline.Table(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    cache = choice.cache if isinstance(choice.precision, str) else None
    real = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig(choice.precision, cache=cache)).memory()
    assert found.parts == pytest.approx(real.parts, rel=0.01)
    assert found.total == sum(found.tables.values())


def test_precisions_of_the_file_come_first():
    table = {"name": "a", "rows": 1000, "dim": 64, "precision": "int4", "cache": 0.1}
    first = estimate_memory(tables_of(tables=[table]))[0]
    real = thermocline.EmbeddingBag(1000, 64, rows=thermocline.RowConfig("int4", cache=0.1)).memory()
    assert first.choice == AS_GIVEN and first.parts == real.parts
    assert AS_GIVEN not in [found.choice for found in estimate_memory(tables_of((1000, 64)))]


@pytest.mark.parametrize("rows", [10**6, 10**9, 7 * 10**9 + 1, 10**11])
def test_one_gpu_less_would_not_hold_the_tables(rows):
    topology = Topology.load("hgx-h200")
    for found in estimate_memory(tables_of((rows, 64)), topology):
        fit = found.on_gpu
        assert fit.gpu_bytes <= topology.gpu.memory and fit.nodes == -(-fit.gpus // 8)
        if fit.gpus > 1:
            buffers = found.buffers if fit.gpus > 2 else 0
            assert found.total / (fit.gpus - 1) + buffers > topology.gpu.memory


def test_codes_on_hosts_need_fewer_gpus_until_hosts_are_full():
    topology = Topology.load("hgx-h200")
    fp32 = estimate_memory(tables_of((10**10, 128)), topology)[0]
    assert fp32.host == 10**10 * 512 and fp32.on_host.host_bytes <= topology.host.memory
    assert (fp32.on_gpu.gpus, fp32.on_host.gpus, fp32.on_host.nodes) == (37, 17, 3)  # 5.12 TB on hosts of 2 TB


def test_no_host_estimate_without_host_memory():
    assert estimate_memory(tables_of((10**10, 128)), Topology.load("l40s-pcie"))[0].on_host is None


def test_buffers_larger_than_a_gpu_fit_nowhere():
    found = estimate_memory(tables_of((10**10, 128), batch=10**9), Topology.load("laptop"))
    assert found[0].on_gpu is None


def test_a_model_of_terabytes_is_inspected_without_memory(model_file):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = find_tables(load_model(model_file, "Model"))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200_000  # KiB; its rows are half a terabyte
    assert [table["name"] for table in found] == ["plain", "words", "rows.user", "rows.item", "hot"]
    assert found[0] == {"name": "plain", "rows": 10**9, "dim": 128, "pooling": "sum", "precision": "fp32"}
    assert found[2]["features"] == ["a", "b"] and found[2]["pooling"] == "mean" and found[2]["cache"] == 0.05
    assert found[4]["precision"] == {"fp32": 0.01, "int8": 0.05, "int2": 0.94} and found[4]["pooling"] == "none"


def test_meta_modules_report_the_bytes_of_real_ones():
    for precision in ("int8", "int4", {"int8": 0.1, "int2": 0.9}):
        with torch.device("meta"):
            shape_only = thermocline.EmbeddingBag(1001, 48, rows=thermocline.RowConfig(precision), padding_idx=5)
        assert shape_only.memory() == thermocline.EmbeddingBag(1001, 48, rows=thermocline.RowConfig(precision)).memory()


def test_a_model_instance_is_used_as_it_is(tmp_path):
    (tmp_path / "made.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Embedding(3, 5))\n")
    assert isinstance(load_model(tmp_path / "made.py", "model"), nn.Module)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("Modl", {"value": "Modl", "available": ["Model", "Settings", "Empty"]}),
        ("needs", {"value": "needs", "needed": ["argument"]}),
        ("text", {"value": "str"}),
        ("number", {"value": "int"}),
    ],
)
def test_load_model_refuses_what_is_not_a_model(model_file, name, fields):
    with pytest.raises(BadInput, check=has(parameter="model", **fields)):
        load_model(model_file, name)


def test_load_model_refuses_a_model_that_reads_its_weights(model_file):
    with pytest.raises(BadInput, check=has(parameter="model", value="reads", path=model_file)) as refused:
        load_model(model_file, "reads")
    assert isinstance(refused.value.__cause__, RuntimeError)


def run(*arguments):
    return CliRunner().invoke(app, ["estimate", *map(str, arguments)], catch_exceptions=False)


def test_command_prints_every_table_and_choice(tmp_path):
    (tmp_path / "tables.yaml").write_text("batch: 8\ntables:\n  - {name: item, rows: 1_000_000_000, dim: 128}\n")
    result = run("--tables", tmp_path / "tables.yaml", "--topology", "hgx-h200")
    assert result.exit_code == 0
    for words in (
        "item",
        "1,000,000,000",
        "480.56 GiB",
        "optimizer state",
        "4 (120.14 GiB per GPU)",
        *(c.name for c in CHOICES),
    ):
        assert words in result.output


def test_command_writes_json_and_accepts_models(model_file):
    result = run("--tables", f"{model_file}:Model", "--topology", "laptop", "--json", "-")
    found = json.loads(result.output)
    assert [table["rows"] for table in found["tables"]] == [10**9, 501, 10**8, 33, 999]
    given, fp32 = found["estimates"][:2]
    assert given["name"] == "as given" and fp32["name"] == "fp32"
    assert fp32["parts"]["codes"] == 4 * (10**9 * 128 + 501 * 7 + (10**8 + 33) * 32 + 999 * 64)
    assert fp32["on_card"]["cards"] == -(-fp32["total"] // (8 * 10**9))
    assert any("batch" in note for note in found["notes"])


@pytest.mark.parametrize("name, says", [("", ":Model"), (":Empty", "nn.Embedding")])
def test_command_reports_a_missing_model_name(model_file, name, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["thermocline", "estimate", "--tables", f"{model_file}{name}"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "memory, choice, runs",
    [
        ("24GiB", "fp32", ["--topology", "gpu-24"]),
        ("4GiB", "int8 + 5% cache", ["--budget", "4GiB"]),
        ("1.4GiB", "int2 + 1% fp32 + 5% int8", ["--budget", "1.4GiB"]),
    ],
)
def test_memory_ends_with_a_verdict_and_a_command_that_runs(tmp_path, memory, choice, runs):
    (tmp_path / "tables.yaml").write_text("batch: 8\ntables:\n  - {name: item, rows: 40_000_000, dim: 64}\n")
    result = run("--tables", tmp_path / "tables.yaml", "--memory", memory)
    verdict, command = (line.split(":", 1)[1].strip() for line in result.output.splitlines()[-2:])
    assert verdict.startswith(f"{choice} fits on 1 GPU") and set(runs) <= set(command.split())
    words = command.removeprefix("thermocline ").replace("plan.json", str(tmp_path / "plan.json")).split()
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0


def test_memory_that_is_too_small_names_a_preset_that_fits(tmp_path):
    (tmp_path / "tables.yaml").write_text("batch: 8\ntables:\n  - {name: item, rows: 900_000_000, dim: 64}\n")
    found = json.loads(run("--tables", tmp_path / "tables.yaml", "--memory", "2GiB", "--json", "-").output)["verdict"]
    assert found["verdict"].startswith("nothing fits") and found["run"].endswith("--topology gpu-40")


def test_a_model_is_told_its_row_config(tmp_path):
    (tmp_path / "small.py").write_text("from torch import nn\n\ndef model():\n    return nn.Embedding(40_000_000, 64)\n")
    found = json.loads(run("--tables", f"{tmp_path / 'small.py'}:model", "--memory", "4GiB", "--json", "-").output)
    assert found["verdict"]["run"] == "thermocline.convert_(model, thermocline.RowConfig('int8', cache=0.05))"


def test_memory_and_topology_together_are_refused(tmp_path):
    (tmp_path / "tables.yaml").write_text("batch: 8\ntables:\n  - {name: item, rows: 9, dim: 64}\n")
    with pytest.raises(BadInput, check=has(parameter="memory")):
        run("--tables", tmp_path / "tables.yaml", "--memory", "2GiB", "--topology", "laptop")


@pytest.mark.parametrize("size", [16, 24, 40, 48, 80, 141, 192])
def test_common_gpus_have_presets(size):
    found = Topology.load(f"gpu-{size}")
    assert (found.gpu.memory, found.world_size) == (size * 10**9, 1) and found.source and found.date


@pytest.mark.parametrize(
    "given, share", [("1/8", 0.125), ("0.125", 0.125), ("1/1", 1.0), ("1", None), ("2/1", None), ("0/3", None)]
)
def test_shares_are_read_from_ratios(given, share):
    assert read_share(given) == share


def test_a_budget_may_be_a_share_of_the_gpu():
    plan = thermocline.make_plan(tables_of((10**6, 64)), {"t0": Curve.zipf(10**6, 1.05, 1e9)}, "gpu-16", budget="1/8")
    assert plan.budget == 2 * 10**9


def test_a_row_budget_may_be_a_ratio_to_fp32():
    eighth = thermocline.RowConfig("auto", budget="1/8")
    bag = thermocline.EmbeddingBag(15003, 64, rows=eighth)
    parts = bag.memory().parts
    assert sum(size for part, size in parts.items() if part != "optimizer state") <= 15003 * 64 * 4 / 8
    with pytest.raises(BadInput, check=has(parameter="budget", value="9/8")):
        thermocline.RowConfig("auto", budget="9/8")
