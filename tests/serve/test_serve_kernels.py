"""Lookups through a table of base pointers: the reference against torch's own embedding bags, the kernels against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import embedding_bag

from thermocline import IdOutOfRange
from thermocline import formats as F
from thermocline.kernels.quantize.reference import dequantize_rows
from thermocline.kernels.serve import cpu, reference
from thermocline.kernels.serve.fields import ShardMissing

EVERY = [(101, 7 + 4 * n, name) for n, name in enumerate(F.NAMES)]
SPLITS = ["hash", "range", "feature", "plan"]


def values_of(tables: Any, n: int) -> torch.Tensor:
    info = tables.infos[n]
    return dequantize_rows(torch.from_numpy(tables.codes[n]), torch.from_numpy(tables.meta[n]), info.format, info.dim)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", [F.SUM, F.MEAN])
@pytest.mark.parametrize("records", [True, False])
def test_the_reference_pools_as_torch_does(split: str, mode: int, records: bool, make_tables: Any, make_bags: Any) -> None:
    tables = make_tables(EVERY)
    version = tables.version(3, split, records=records)
    bags, out = make_bags(version, 9, 13, seed=3, mode=mode)
    reference.gather_pool(version.placed, bags, out)
    for n, (at, dim) in enumerate(bags.target_F2.tolist()):
        offsets = bags.offsets_B1[bags.ends_F1[n] : bags.ends_F1[n + 1] + 1]
        rows_N = bags.rows_N[int(offsets[0]) : int(offsets[-1])]
        asked = embedding_bag(
            rows_N, values_of(tables, n), offsets - offsets[0], mode=F.MODES[mode], include_last_offset=True
        ) if len(rows_N) else torch.zeros(len(offsets) - 1, dim)  # fmt: skip
        torch.testing.assert_close(out[at : at + asked.numel()].view(asked.shape), asked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("pooled, weighted", [(True, False), (True, True), (False, False)])
def test_the_cpu_kernel_gives_the_bits_of_the_reference(
    split: str, shards: int, pooled: bool, weighted: bool, make_tables: Any, make_bags: Any
) -> None:
    tables = make_tables([*EVERY, (1, 64, "int8"), (5000, 128, "int8"), (63, 130, "fp32")])
    version = tables.version(shards, split)
    for seed, mode in ((1, F.SUM), (2, F.MEAN if not weighted else F.SUM)):
        bags, out = make_bags(version, 40, 67, seed, pooled, weighted, mode)
        asked = out.clone()
        tally = cpu.gather_pool(version.placed, bags, out)
        assert torch.equal(tally, reference.gather_pool(version.placed, bags, asked))
        assert torch.equal(out.view(torch.int32), asked.view(torch.int32))


def test_a_row_out_of_range_is_named(make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(9, 4, "int8"), (7, 4, "fp32")]).version(2)
    bags, out = make_bags(version, 3, 9, seed=1)
    start = int(bags.offsets_B1[bags.ends_F1[1]])
    for bad in (7, -1, 1 << 40):
        bags.rows_N[start + 2] = bad
        for kernel in (cpu, reference):
            with pytest.raises(IdOutOfRange) as caught:
                kernel.gather_pool(version.placed, bags, out)
            assert (caught.value.feature, caught.value.position, caught.value.id, caught.value.rows) == (1, start + 2, bad, 7)


def test_a_shard_that_is_down_is_named_and_the_others_answer(make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(40, 4, "int8")]).version(4, "range")
    placed = version.placed._replace(bases_FC=version.placed.bases_FC.clone())
    placed.bases_FC[:, 2] = 0
    bags, out = make_bags(version, 3, 9, seed=1)
    bags.rows_N.remainder_(20)
    cpu.gather_pool(placed, bags, out)  # shards 0 and 1
    bags.rows_N[3] = 25
    with pytest.raises(ShardMissing) as caught:
        cpu.gather_pool(placed, bags, out)
    assert caught.value.shard == 2
