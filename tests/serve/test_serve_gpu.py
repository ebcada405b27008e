"""Triton through a table of base pointers: the answers of the reference, whatever the split, the formats and the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thermocline import IdOutOfRange
from thermocline import formats as F
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.serve import gpu, reference
from thermocline.kernels.serve.fields import ShardedTables

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # the interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def to_gpu(placed: ShardedTables) -> ShardedTables:
    """The same on a shard: every segment an allocation of its own, bases as distances."""
    segments = tuple(None if each is None else each.clone().to(DEVICE) for each in placed.segments)
    begin = segments[0].data_ptr()  # type: ignore[union-attr]
    far_C = torch.tensor([0 if each is None else each.data_ptr() - begin for each in segments])
    tensors = {
        n: t.to(DEVICE) for n, t in placed._asdict().items() if isinstance(t, Tensor) and n not in ("codes_FC", "meta_FC")
    }
    moved = placed._replace(**tensors, segments=segments)
    return moved._replace(bases_FC=(placed.codes_FC + far_C).to(DEVICE), meta_bases_FC=(placed.meta_FC + far_C).to(DEVICE))


SHAPES = [(1, 3, False), (20, 3, False), (5, 3, True)]  # rows a bag, bags, all features as many
CASES = [*((s, 3, *shape) for s in ("hash", "range", "feature", "plan") for shape in SHAPES), ("hash", 1, 20, 2, True)]


@pytest.mark.parametrize("split, shards, longest, most, even", [*CASES, ("hash", 3, 0, 4, False)])
def test_bags_have_the_sums_of_the_reference(
    split: str, shards: int, longest: int, most: int, even: bool, make_tables: Any, make_bags: Any
) -> None:
    tables = make_tables([(101, 8, "int8"), (57, 33, "int4"), (1, 5, "fp32"), (300, 16, "int8_affine")])
    placed = tables.version(shards, split, records=False).placed
    version = tables.version(shards, split, records=False)
    for seed, mode, weighted in ((1, F.SUM, True), (2, F.MEAN, False)):
        bags, out = make_bags(version, longest, most, seed, weighted=weighted, mode=mode, even=even)
        asked, got = out.clone(), out.to(DEVICE)
        reference.gather_pool(placed, bags, asked)
        gpu.gather_pool(to_gpu(placed), bags.to(DEVICE), got)
        torch.testing.assert_close(got.cpu(), asked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", F.NAMES)
def test_rows_that_are_not_pooled_are_those_of_the_reference_bit_for_bit(name: str, make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(101, 19, name), (57, 64, name)]).version(4, "hash", records=False)
    for even in (False, True):
        bags, out = make_bags(version, 1, 29, seed=5, pooled=False, even=even)
        asked, got = out.clone(), out.to(DEVICE)
        reference.gather_pool(version.placed, bags, asked)
        gpu.gather_pool(to_gpu(version.placed), bags.to(DEVICE), got)
        assert torch.equal(got.cpu(), asked)


@pytest.mark.parametrize("split", ["hash", "plan"])
def test_a_bad_row_is_reported_and_adds_nothing(split: str, make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(9, 4, "int8"), (7, 4, "fp32")]).version(2, split, records=False)
    bags, out = make_bags(version, 3, 9, seed=1)
    start = int(bags.offsets_B1[bags.ends_F1[1]])
    bags.rows_N[start + 2] = 7
    placed, got = to_gpu(version.placed), out.to(DEVICE)
    gpu.gather_pool(placed, bags.to(DEVICE), got)
    assert bool(got.isfinite().all())
    with pytest.raises(IdOutOfRange) as caught:
        error_buffer(got).raise_pending()
    assert (caught.value.feature, caught.value.position, caught.value.id, caught.value.rows) == (1, start + 2, 7, 7)


@pytest.mark.parametrize("name, dim", [("int8", 36), ("int8_affine", 8), ("int4", 40), ("int2", 64), ("fp8", 20), ("int8", 33)])
def test_long_bags_of_codes_have_the_sums_of_the_reference(name: str, dim: int, make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(101, dim, name), (7, dim, name)]).version(3, "hash", records=False)
    for seed, weighted in ((3, True), (4, False)):  # several rounds of 32 rows, the last of them not full
        bags, out = make_bags(version, 75, 3, seed, weighted=weighted, even=True)
        asked, got = out.clone(), out.to(DEVICE)
        reference.gather_pool(version.placed, bags, asked)
        gpu.gather_pool(to_gpu(version.placed), bags.to(DEVICE), got)
        torch.testing.assert_close(got.cpu(), asked, rtol=1e-5, atol=1e-5)


def test_a_bad_row_of_a_long_bag_adds_nothing(make_tables: Any, make_bags: Any) -> None:
    version = make_tables([(9, 8, "int8")]).version(2, "hash", records=False)
    bags, out = make_bags(version, 40, 1, seed=1, weighted=True, even=True)
    start, asked, got = 17, out.clone(), out.to(DEVICE)
    assert bags.weights_N is not None and bags.rows_N.numel() > start
    bad, none = bags.rows_N.clone(), bags.weights_N.clone()
    bad[start], none[start] = 9, 0.0
    gpu.gather_pool(to_gpu(version.placed), bags._replace(rows_N=bad).to(DEVICE), got)
    reference.gather_pool(version.placed, bags._replace(weights_N=none), asked)
    torch.testing.assert_close(got.cpu(), asked, rtol=1e-5, atol=1e-5)
    with pytest.raises(IdOutOfRange) as caught:
        error_buffer(got).raise_pending()
    assert (caught.value.position, caught.value.id) == (start, 9)
