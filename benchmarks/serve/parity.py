"""Lookups in tables of a fixed total size, on one shard and split over 2, 4 and 8: the cost of the table of base pointers.

    parity/cuda/B/zipf/int8/4/allocations    four shards on one GPU, each in its own allocation
    parity/cuda/B/zipf/int8/4/processes      the same, each in the memory of another process (CUDA IPC)
    parity/cpu/8x1M/zipf/int8/4/allocations  shared memory

No link between GPUs is crossed: this is the overhead of the pointers. The time on one shard is the faster of two: a plain
lookup without shards, and the same kernel with one shard. Results are compared with the plain lookup before anything is timed.
All contenders are timed in turn. A row's ratio is the time on one shard over the time on several.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.cases import CPU_SHAPES, GPU_SHAPES, UNIFORM, ZIPF, Shape
from benchmarks.kernels.contender import WrongResult
from benchmarks.kernels.ids import Batch, batches
from benchmarks.runner.race import TimingBudget, race
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import SETS, Times, chunk_on
from thermocline import formats as F
from thermocline.kernels.serve import gather_pool
from thermocline.kernels.serve.fields import ServedBags
from thermocline.rows.arena import Arena
from thermocline.rows.precision import format_of
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import lookup
from thermocline.serve.tables import gpu_shards
from thermocline.serve.tables.partition import split_tables
from thermocline.serve.tables.segments import BlockWriter, ServedTable, ShardLayout, SharedSegment, make_layout
from thermocline.serve.tables.version import TableVersion

CARDS = (2, 4, 8)
PRECISIONS = ("int8", "fp32")
ALLOCATIONS, PROCESSES = "allocations", "processes"
EFFORT = TimingBudget(rounds=6, chunk_ms=15.0, least=10, most=25)
QUICK = TimingBudget(rounds=2, chunk_ms=1.0, least=2, most=3)
PLAIN, ONE = "plain lookup", "one card"
_CHUNK = 1 << 20


class Call(NamedTuple):
    """Arguments of one lookup."""

    ids: Tensor
    offsets: Tensor  # as a plain lookup takes them
    bags: ServedBags


class Opponents(NamedTuple):
    """Shared by all races of one shape and precision: the tables, one shard with all of them, lookups by kind of ids."""

    shape: Shape
    precision: str
    arena: Arena
    ones: TableVersion
    calls: dict[str, list[Call]]


def run(
    recorder: Recorder, device: str, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]
) -> None:
    """Measure every wanted row on a device."""
    shapes = [s.quick() if quick else s for s in (GPU_SHAPES if device == "cuda" else CPU_SHAPES)]
    kinds = (ZIPF, UNIFORM) if device == "cuda" else (ZIPF,)
    memories = (ALLOCATIONS, PROCESSES) if device == "cuda" else (ALLOCATIONS,)
    pairs = [(shape, precision) for shape in shapes for precision in PRECISIONS]
    for n, (shape, precision) in enumerate(pairs):
        field: Opponents | None = None
        for memory in memories:
            names = {
                (kind, c): f"parity/{device}/{shape.name}/{kind}/{precision}/{c}/{memory}" for kind in kinds for c in CARDS
            }
            cases = {key: case for key, case in names.items() if wanted(case)}
            progress(n, len(pairs), f"{device} {shape.name} {precision} {memory}")
            if cases:
                try:
                    field = field or _field(shape, precision, kinds, device)
                    _race(recorder, field, memory, cases, QUICK if quick else EFFORT)
                except Exception as error:
                    for case in cases.values():
                        recorder.fail(case, brief(error))
        del field
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _field(shape: Shape, precision: str, kinds: Sequence[str], device: str) -> Opponents:
    arena = Arena([TableSpec(shape.rows, shape.dim, precision, f"t{n}") for n in range(shape.tables)], device=device)
    arena.randomize_(1.0, torch.Generator(device=device).manual_seed(5))
    calls = {kind: [_call(shape, batch) for batch in batches(shape, kind, SETS, device=device)] for kind in kinds}
    return Opponents(shape, precision, arena, _placed(arena, shape, precision, 1, device, None), calls)


def _race(recorder: Recorder, field: Opponents, memory: str, cases: dict[tuple[str, int], str], effort: TimingBudget) -> None:
    shape, precision, arena, device = field.shape, field.precision, field.arena, field.arena.device.type
    counts = sorted({cards for _, cards in cases})
    with _segments(counts, shape, precision, device, memory) as given:
        for cards in counts:
            version = _placed(arena, shape, precision, cards, device, given.pop(cards, None))
            for kind in [kind for kind, c in cases if c == cards]:
                _add(recorder, cases[kind, cards], _raced(arena, field.ones, version, shape, field.calls[kind], effort))
            del version  # before its owners are gone
            gc.collect()


def _raced(
    arena: Arena, ones: TableVersion, version: TableVersion, shape: Shape, calls: Sequence[Call], effort: TimingBudget
) -> dict[str, Times]:  # fmt: skip
    """Times of all contenders, after a comparison of their results."""
    mode = "sum" if shape.pooled else "none"
    contenders: dict[str, Callable[[Call], Tensor]] = {
        PLAIN: lambda call: lookup(arena, call.ids, call.offsets, mode=mode),
        ONE: lambda call: _look_up(ones, shape, call),
        "ours": lambda call: _look_up(version, shape, call),
    }
    _check(contenders, calls[0])
    return race({name: chunk_on(arena.device.type, run, calls) for name, run in contenders.items()}, effort)


def _add(recorder: Recorder, case: str, times: dict[str, Times]) -> None:
    ours, best = times["ours"], min((PLAIN, ONE), key=lambda name: times[name].median)
    further = {"plain": times[PLAIN].median, "one_card": times[ONE].median, "rounds": ours.rounds}
    ratio = times[best].median / ours.median
    recorder.add(case, ours.median, "ms", f"{best}, one card", times[best].median, ratio, ours.spread, **further)


def _check(contenders: dict[str, Callable[[Call], Tensor]], call: Call) -> None:
    """Compare every contender with the plain lookup."""
    asked = contenders[PLAIN](call)
    for name, run in contenders.items():
        if not torch.allclose(run(call), asked, rtol=1e-5, atol=1e-5):
            raise WrongResult(f"{name} differs from a plain lookup")


def _call(shape: Shape, batch: Batch) -> Call:
    device = batch.ids.device
    each = shape.batch if shape.pooled else shape.batch * shape.pooling
    ends_F1 = torch.arange(shape.tables + 1, device=device) * each
    width = shape.tables * shape.dim
    at_F = torch.arange(shape.tables, device=device) * (shape.dim if shape.pooled else each * shape.dim)
    target_F2 = torch.stack([at_F, torch.full_like(at_F, width if shape.pooled else shape.dim)], 1)
    offsets = batch.offsets if shape.pooled else None
    align = 16 if shape.dim % 16 == 0 else 1
    plain = batch.offsets if shape.pooled else batch.offsets[:: shape.batch].contiguous()
    bags = ServedBags(batch.ids, ends_F1, offsets, None, F.SUM, target_F2, shape.tables * each, each, align)
    return Call(batch.ids, plain, bags)


def _look_up(version: TableVersion, shape: Shape, call: Call) -> Tensor:
    out = torch.empty(shape.out_shape, device=version.device)
    gather_pool(version.placed, call.bags, out)
    return out


# -- tables on cards -----------------------------------------------------------------------------------------------------


def _arranged(shape: Shape, precision: str, cards: int, device: str) -> ShardLayout:
    infos = [ServedTable(f"t{n}", shape.rows, shape.dim, format_of(precision), (f"t{n}",)) for n in range(shape.tables)]
    splits = split_tables(infos, cards, "hash")
    return make_layout(infos, splits, records=device == "cpu")


def _placed(
    arena: Arena, shape: Shape, precision: str, cards: int, device: str, given: Sequence[Tensor] | None
) -> TableVersion:  # fmt: skip
    """The rows of an arena on shards, in given memory or in their own allocations."""
    layout = _arranged(shape, precision, cards, device)
    memory = [SharedSegment(size) for size in layout.sizes_S] if device == "cpu" else []
    if given is None:
        given = [torch.from_numpy(each.memory) for each in memory] or [_memory(size, device) for size in layout.sizes_S]
    for table, table_layout in enumerate(layout.tables):
        codes_RB, meta_RW, *_ = arena.views(table)
        for begin in range(0, shape.rows, _CHUNK):
            part = slice(begin, min(begin + _CHUNK, shape.rows))
            if device == "cpu":
                BlockWriter(table_layout, memory).put(begin, codes_RB[part].numpy(), meta_RW[part].numpy())
                continue
            rows_R = np.arange(part.start, part.stop)
            gpu_shards.put_rows(table_layout, given, rows_R, codes_RB[part].cpu().numpy(), meta_RW[part].cpu().numpy())
    modes = {info: F.SUM for info in (table_layout.table.name for table_layout in layout.tables)}
    return TableVersion.of("bench", layout, list(given), {}, modes)


def _memory(size: int, device: str) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _segments(
    counts: Sequence[int], shape: Shape, precision: str, device: str, memory: str
) -> Iterator[dict[int, list[Tensor]]]:  # fmt: skip
    """Memory of other processes by number of shards; without it, shards are allocations of this process.

    Processes take seconds to start, so each owns a segment of every race that it is in.
    """
    if memory != PROCESSES:
        yield {}
        return
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    lent: Any = context.Queue()
    done = context.Event()
    sizes = {cards: _arranged(shape, precision, cards, device).sizes_S for cards in counts}
    owned = [{cards: sizes[cards][n] for cards in counts if n < cards} for n in range(max(counts))]
    owners = [context.Process(target=_own, args=(n, mine, lent, done), daemon=True) for n, mine in enumerate(owned)]
    for owner in owners:
        owner.start()
    try:
        found = dict(lent.get(timeout=120) for mine in owned for _ in mine)
        given = {cards: [found.pop((cards, n)) for n in range(cards)] for cards in counts}
        yield given
        given.clear()
    finally:
        done.set()
        for owner in owners:
            owner.join(30)


def _own(number: int, sizes: dict[int, int], lent: Any, done: Any) -> None:
    """A process that owns and shares the memory of a shard, for each number of shards."""
    segments = {cards: torch.empty(size, dtype=torch.uint8, device="cuda") for cards, size in sizes.items()}
    for cards, segment in segments.items():
        lent.put(((cards, number), segment))
    done.wait()
