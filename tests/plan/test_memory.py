"""The bytes of the planner equal those of real modules; no torch is needed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline import BadInput
from thermocline import formats as F
from thermocline.kernels.cache.reference import COUNTERS
from thermocline.kernels.ids.bitmap import RankBitmap
from thermocline.plan.cost import memory
from thermocline.plan.cost.step_work import map_bytes
from thermocline.rows import cache as rows_cache

OPTIMIZERS = {
    "sgd": thermocline.SGD,
    "adagrad": thermocline.Adagrad,
    "rowwise_adagrad": thermocline.RowwiseAdagrad,
    "adam": thermocline.Adam,
}
TIERS = [
    {"fp32": 0.05, "int8": 0.95},
    {"fp32": 0.01, "int8": 0.05, "int4": 0.94},
    {"fp32": 0.01, "int8": 0.05, "int2": 0.94},
    {"int8": 0.02, "int2": 0.98},
    {"fp32": 0.6, "int8": 0.4, "int4": 0.0},
]


def real(rows, dim, precision, cache=None, optimizer="rowwise_adagrad"):
    module = thermocline.EmbeddingBag(
        rows, dim, rows=thermocline.RowConfig(precision, cache=cache, optimizer=OPTIMIZERS[optimizer](lr=0.1))
    )
    return module.memory()


@pytest.mark.parametrize("precision", F.NAMES)
@pytest.mark.parametrize("rows, dim", [(1, 1), (63, 7), (1000, 64), (4097, 33), (501, 2048)])
def test_table_bytes_equal_module_memory_in_every_precision(rows, dim, precision):
    assert memory.table_bytes(rows, dim, precision, 0.05) == real(rows, dim, precision, 0.05).parts


@pytest.mark.parametrize("precision", TIERS)
@pytest.mark.parametrize("rows, dim", [(1, 5), (999, 64), (3001, 17)])
def test_table_bytes_equal_module_memory_with_slots(rows, dim, precision):
    assert memory.table_bytes(rows, dim, precision) == real(rows, dim, precision).parts


@pytest.mark.parametrize("cache", [0.0, 0.001, 0.013, 0.5, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_table_bytes_equal_module_memory_with_caches_and_optimizers(cache, optimizer):
    parts = memory.table_bytes(1501, 48, "int4", cache, optimizer=optimizer)
    assert parts == real(1501, 48, "int4", cache, optimizer).parts


def test_collection_takes_the_sum_of_its_tables_within_one_percent():
    generator = torch.Generator().manual_seed(5)
    shapes = [(int(torch.randint(200, 9000, (), generator=generator)), 8 * n + 3) for n in range(11)]
    precisions = [*TIERS, "fp32", "fp16", "int8", "int8_affine", "int4", "int2"]
    tables = [
        thermocline.Table(f"t{n}", *shape, row_config=thermocline.RowConfig(precision))
        for n, (shape, precision) in enumerate(zip(shapes, precisions, strict=True))
    ]
    found = thermocline.EmbeddingCollection(tables).memory().parts
    sums = dict.fromkeys(memory.PARTS, 0)
    for table in tables:
        cache = 0.05 if isinstance(table.precision, str) else 0.0
        for part, size in memory.table_bytes(table.rows, table.dim, table.precision, cache).items():
            sums[part] += size
    assert sums == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("precision", [*F.NAMES, *TIERS])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
def test_table_bytes_are_rows_times_bytes_per_row(precision, optimizer):
    rows, dim, cache = 1_000_003, 96, 0.03 if isinstance(precision, str) else 0.0
    each = memory.bytes_per_row(dim, precision, cache, optimizer=optimizer)
    whole = memory.table_bytes(rows, dim, precision, cache, optimizer=optimizer)
    assert {part: rows * size for part, size in each.items()} == pytest.approx(whole, rel=1e-3)


def test_slot_bytes_equal_those_of_the_cache():
    assert memory.SLOT_MAPS == rows_cache.SLOT_BYTES == 16 + 2 * COUNTERS
    assert tuple(F.NAMES[format] for format in rows_cache.INT8_SLOT_FORMATS) == memory.INT8_SLOTS_OVER
    for dim in (1, 3, 64, 127):
        assert memory.slot_bytes(dim) == rows_cache.slot_bytes(dim)
        assert memory.slot_bytes(dim, near=True) == rows_cache.slot_bytes(dim, near=True)
    for precision in F.NAMES:
        assert memory.row_bytes(77, precision) == thermocline.bytes_per_row(precision, 77)


def test_buffers_hold_two_batches_of_ids_and_rows_and_one_of_gradients():
    found = memory.exchange_bytes(1000, 500, 64, "int8")
    assert found == {"ids": 2 * 1500 * 4, "rows": 2 * 1500 * 68, "gradients": 1500 * 256}
    assert memory.exchange_bytes(1000, 500, 64, "int8", gradient=None)["gradients"] == 0


@pytest.mark.parametrize("hot", [1, 63, 50_000])
def test_map_bytes_equal_those_of_a_tier_bitmap(hot):
    rows = 1_000_003
    ids = np.random.default_rng(3).choice(rows, hot, replace=False)
    expected = map_bytes(np.array([float(rows)]), np.array([float(hot)]))
    assert RankBitmap(rows, ids, torch.device("cpu")).bytes == pytest.approx(expected[0], rel=0.001)
    assert map_bytes(np.array([float(rows)]), np.array([0.0]))[0] == 0


@pytest.mark.parametrize(
    "precision, cache, near, parameter",
    [
        ("int3", 0, 0, "precision"),
        ("int8", 1.5, 0, "cache"),
        ("int8", 0.1, 0.1, "near"),
        ({"fp32": 0.5, "int4": 0.6}, 0, 0, "precision"),
        ({"fp32": 0.1, "int8": 0.9}, 0.2, 0, "cache"),
        ({"fp32": -0.1, "int8": 1.1}, 0, 0, "precision 'fp32'"),
        ({"fp16": 0.1, "int8": 0.9}, 0, 0, "precision"),
    ],
)
def test_impossible_precisions_are_refused(precision, cache, near, parameter):
    with pytest.raises(BadInput, check=has(parameter=parameter)):
        memory.table_bytes(10, 8, precision, cache, near)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    known = ("sgd", "adagrad", "rowwise_adagrad", "adam")
    with pytest.raises(BadInput, check=has(parameter="optimizer", value="lamb", available=known)):
        memory.state_bytes(8, "lamb")


def test_no_torch_is_needed():
    code = "import sys, thermocline.plan.cost.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
