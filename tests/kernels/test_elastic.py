"""Key tables on CPU and GPU: the bits of the reference, whatever the rows, the batches and the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thermocline import formats as F
from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.gpu_keys import known_moves
from thermocline.ids.moved_ids import Moved
from thermocline.kernels.elastic import cpu, gpu, reference
from thermocline.kernels.elastic.fields import BYTES_PER_ROW, PINNED, READ, GpuBatch, KeyArrays, KeyRules, StepRule, TableRows
from thermocline.kernels.ids.reference import hash_ids

pytestmark = [
    pytest.mark.usefixtures("poisoned_scratch"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]


def _empty(rules: KeyRules) -> KeyArrays:
    words = -(-rules.rows // 64) * 16
    sizes = (rules.rows, words, words, 2 * words)
    last, tags, heat, sketch = (torch.zeros(size, dtype=torch.int32) for size in sizes)
    return KeyArrays(torch.zeros(rules.rows, dtype=torch.int64), last, tags, heat, sketch)


def _step(
    kernels: Any, arrays: KeyArrays, rules: KeyRules, ids_N: torch.Tensor, step: int, after: int = 1
) -> list[torch.Tensor]:
    found = kernels.find(arrays, rules, ids_N)
    rows_N, missed_M = kernels.look_up(arrays, rules, ids_N, step)
    assert all(torch.equal(*pair) for pair in zip(found, (rows_N, missed_M), strict=True))
    chance = (1.0, 0.6)[after == 2]
    came = kernels.admit(arrays, rules, ids_N, rows_N, missed_M, after, chance, step, step - step % 3)
    lists = [each[order] for rows, ids in (came[1::-1], came[3:1:-1]) for order in [rows.argsort()] for each in (rows, ids)]
    return [rows_N, missed_M, *lists, torch.tensor(came[4:])]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sampled_from([1, 2, 63, 64, 65, 130]), lru=st.booleans(), half_life=st.integers(1, 5), after=st.integers(1, 3),
    batches=st.lists(st.lists(st.integers(-40, 90), max_size=80), min_size=1, max_size=8),
    far=st.sampled_from([1, 7919 << 40]),
)  # fmt: skip
def test_steps_give_the_bits_of_the_reference(rows: int, lru: bool, half_life: int, after: int, batches: list[Any], far: int):
    rules = KeyRules(rows, 3, -5, half_life, lru)
    both = _empty(rules), _empty(rules)
    for step, batch in enumerate(batches, 1):
        ids_N = torch.tensor(batch, dtype=torch.int64) * far
        found = [
            _step(kernels, arrays, rules, ids_N, step, after) for kernels, arrays in zip((reference, cpu), both, strict=True)
        ]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
    new = torch.arange(500, 560) * far, torch.arange(60) % 7, step + 9, step
    found = [kernels.place(arrays, rules, *new) for kernels, arrays in zip((reference, cpu), both, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_threads_change_no_bit(count: int, threads: Callable[[int], None]):
    threads(count)
    rules = KeyRules(3000, 16, 99, 4, False)
    both, generator = (_empty(rules), _empty(rules)), torch.Generator().manual_seed(1)
    for step in range(1, 4):
        ids_N = torch.randint(-3000, 3000, (20_001,), generator=generator)
        found = [_step(kernels, arrays, rules, ids_N, step) for kernels, arrays in zip((reference, cpu), both, strict=True)]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_the_order_of_a_batch_changes_no_bit():
    rules = KeyRules(100, 16, 99, 4, False)
    ids_N = torch.randint(0, 400, (2000,), generator=torch.Generator().manual_seed(2))
    both = _empty(rules), _empty(rules)
    for step in (1, 2):
        _step(cpu, both[0], rules, ids_N, step)
        _step(cpu, both[1], rules, ids_N.flip(0), step)
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_an_estimate_is_never_too_low():
    rules = KeyRules(128, 16, 99, 4, False)
    arrays, seen = _empty(rules), torch.zeros(500, dtype=torch.int64)
    for seed in range(8):
        ids_N = torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(seed))
        ids_U, counts_U = ids_N.unique(return_counts=True)
        seen[ids_U] += counts_U
        assert bool((reference.count(arrays, rules, ids_U, counts_U) >= seen[ids_U]).all())


def test_chosen_ids_compete_for_one_bucket_and_leave_the_others_alone():
    rules = KeyRules(640, 16, 99, 4, False)
    arrays = _empty(rules)
    many = torch.arange(40_000)
    victims = many[reference.bucket_of(hash_ids(many, rules.key), rules.rows) == 3]
    calm = many[reference.bucket_of(hash_ids(many, rules.key), rules.rows) == 4][:64]
    _step(cpu, arrays, rules, calm, 1)
    for step in range(2, 5):
        _step(cpu, arrays, rules, victims, step)
    assert not cpu.find(arrays, rules, calm)[1].numel()
    assert int((arrays.tags.view(torch.uint8) != 0).sum()) == 128


def test_pinned_rows_and_rows_in_use_are_never_taken():
    rules = KeyRules(64, 16, 99, 1, False)
    arrays = _empty(rules)
    _step(cpu, arrays, rules, torch.arange(64), 3)
    arrays.last[:10] = PINNED
    pinned = arrays.keys[:10].clone()
    for step in range(6, 60, 3):
        _step(cpu, arrays, rules, torch.arange(1000 * step, 1000 * step + 200), step)
    assert torch.equal(arrays.keys[:10], pinned) and int(arrays.keys[10:].min()) >= 1000


def test_a_table_takes_at_most_16_bytes_a_row():
    rules = KeyRules(64 * 1000, 16, 0, 1, False)
    assert sum(t.numel() * t.element_size() for t in _empty(rules)) <= BYTES_PER_ROW * rules.rows


PRECISIONS = ("fp32", "fp16", "int8", "int8_affine", "int4", "int2", "fp8")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [F.SGD, F.ROWWISE_ADAGRAD, F.ADAM])
def test_rows_begin_with_the_bits_of_the_reference(
    precision: str, optimizer: int, make_arena: Any, make_training: Any, on: Any
):
    made = _training(make_arena, make_training, precision, optimizer)
    wanted, *others = (made.to("cpu"), made.to("cpu"), on(made))
    ids_K, rows_K = torch.tensor([0, -1, 1 << 40, 7]), torch.tensor([36, 2, 0, 19])
    for kernels, training in ((reference, wanted), *zip((cpu, gpu), others, strict=True)):
        device = training.codes.device
        kernels.begin_rows(_table(training, optimizer), ids_K.to(device), rows_K.to(device), 5, 0.1)
    assert all(torch.equal(*pair) for each in others for pair in zip(wanted.changed(), each.changed(), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(wanted.changed(), made.changed(), strict=True))


def _training(make_arena: Any, make_training: Any, precision: str, optimizer: int) -> Any:
    """Two tables of which the second has rows in fp32 slots and, at 4 bits and less, in int8 slots."""
    small = precision in ("int4", "int2")
    slots = {"slots": [0, 8], "near": [0, 8 if small else 0]} if F.META_WORDS[F.NAMES.index(precision)] else {}
    arena = make_arena([(9, 16, "fp32"), (37, 33, precision)], **slots)
    if slots:
        arena.warm([torch.ones(9), torch.arange(37.0)])
    return make_training(arena, optimizer)


def _table(training: Any, optimizer: int) -> TableRows:
    _, field = training.layout.tables.distinct
    codes, meta, row, element, rows, dim, format, _ = field
    width, words = F.row_bytes(format, dim), F.META_WORDS[format]
    codes_RB = training.codes[codes : codes + rows * width].view(rows, width)
    states = [
        each[row : row + rows] if optimizer == F.ROWWISE_ADAGRAD else each[element : element + rows * dim].view(rows, dim)
        for each in training.states
    ]
    pool = next(iter(enumerate(training.layout.tables.pools)), None)
    meta_RW = training.meta[meta : meta + rows * words].view(rows, words)
    return TableRows(codes_RB, meta_RW, format, dim, row, training.cache, pool, states)


def _batches() -> Iterator[Tensor]:
    """Drifting ids, none, ids that were chosen to collide, and five times as many as there are rows."""
    draw, many = torch.Generator().manual_seed(4), torch.arange(9000)
    for step in range(4):
        yield torch.randint(60 * step, 60 * step + 150, (200,), generator=draw)
    yield many[:0]
    yield many[reference.bucket_of(hash_ids(many, 12345), 128) == 1][:150]
    yield many[:640] * 7919
    yield torch.randint(180, 330, (200,), generator=draw)


@pytest.mark.parametrize(
    "evict, rule",
    [("lfu", StepRule()), ("lru", StepRule(2)), ("lfu", StepRule(2, ttl=5)), ("lfu", StepRule(1, 0.25, 5, 1, True))],
)
def test_steps_on_a_gpu_give_the_bits_of_those_on_a_cpu(evict: str, rule: StepRule, on: Any):
    after, chance, ttl = rule[:3]
    policy = ElasticRows(130, after, 2, evict, 3, ttl, admit_chance=chance, grow_from=9 if rule.grows else None)
    host, device = KeyTable(policy, 12345), KeyTable(policy, 12345)
    for name, tensor in device.tensors().items():
        setattr(device, name, on(tensor))
    device.open = on(device.open)
    for number, ids_N in enumerate(_batches()):
        protect = number in (2, 5)
        wanted_N, moved = host.step(ids_N, protect)
        rows_N, one = on(torch.full_like(ids_N, -9)), on(torch.ones(2, dtype=torch.int32))
        batch = GpuBatch(on(ids_N), one, one[:1], rows_N, 7)
        came = gpu.step(device.arrays, device.rules, device.counts, device.open, batch, rule, protect)
        came = came._replace(rows_C=host.places.rows(came.rows_C))
        assert torch.equal(host.places.rows(rows_N.cpu() - 7), wanted_N) and int(device.open) == int(host.open)
        assert all(torch.equal(*map(torch.Tensor.cpu, pair)) for pair in zip(host.arrays, device.arrays, strict=True))
        assert host.counts.tolist() == device.counts.tolist()
        order_K = moved.rows_K.argsort()
        found = known_moves(Moved(*(on(ids_N[:0]) for _ in range(4))), came)
        assert torch.equal(found.came_K.cpu(), moved.came_K[order_K])
        assert ttl is not None or sorted(found.went_E.tolist()) == sorted(moved.went_E.tolist())
    assert host.state()["evicted"] > 50 and int(host.open) > 5


def test_a_gpu_finds_rows_of_the_features_that_are_asked_for(on: Any):
    table = KeyTable(ElasticRows(130, 1, 2), 12345)
    table.step(torch.arange(60), protect=False)
    ids_N, offsets = torch.arange(40, 340), torch.tensor([0, 3, 150, 160, 170, 290, 300])
    rows_N, counts = torch.full_like(ids_N, -9), on(table.counts)
    batch = GpuBatch(*on((ids_N, offsets, torch.tensor([1, 0, 1], dtype=torch.int32), rows_N)), 5)
    gpu.find_rows(on(table.arrays), table.rules, counts, batch, READ)
    meant_N = torch.arange(300).ge(170) | torch.arange(300).lt(150)
    assert torch.equal(batch.rows_N.cpu(), torch.where(meant_N, table.find(ids_N)[0] + 5, -9))
    table.read(ids_N[meant_N], trains=False)
    assert counts.tolist() == table.counts.tolist()


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_a_range_of_buckets_does_what_the_whole_table_does_there(kernels: Any):
    whole = KeyRules(300, 16, 99, 4, False)
    parts = [whole._replace(first=64 * first) for first in (0, 2, 3)]
    rows = [128, 64, 108]
    arrays = [_empty(rules._replace(rows=count)) for rules, count in zip(parts, rows, strict=True)]
    all_arrays, draw = _empty(whole), torch.Generator().manual_seed(3)
    for step in range(1, 9):
        ids_N = torch.randint(0, 600, (300,), generator=draw)
        expected = _step(kernels, all_arrays, whole, ids_N, step, 2)[0]
        bucket_N = reference.bucket_of(hash_ids(ids_N, whole.key), whole.rows)
        for rules, own, at in zip(parts, arrays, [bucket_N < 2, bucket_N == 2, bucket_N > 2], strict=True):
            assert torch.equal(_step(kernels, own, rules, ids_N[at], step, 2)[0], expected[at])
    for joined, one in zip(zip(*arrays, strict=True), all_arrays, strict=True):
        assert torch.equal(torch.cat(joined), one)
