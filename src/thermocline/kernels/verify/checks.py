"""The cross-checks of `verify.py`, one function each. All take an implementation and return an `Outcome`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient, IdOutOfRange
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.layout import Cache
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.sum_gradients import reference as sum_gradients
from thermocline.kernels.update import reference as update

from . import cases as cases
from .cases import Lookup, Optimizer, Storage, Table

# fp32 sums of a few numbers around 1, in any order. (Half types: their last place, at magnitudes up to 64.)
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-2}


class Outcome(NamedTuple):
    """How a check ended: equal, close, FAILED or skipped, and what there is to say about it."""

    result: str
    detail: str = ""


class Implementation(NamedTuple):
    """Kernels that can run here: where their tensors lie, what to call them, and the name of their modules."""

    device: str
    name: str
    module: str

    def of(self, kernel: str) -> ModuleType:
        return import_module(f"thermocline.kernels.{kernel}.{self.module}")

    def settle(self, tensor: Tensor) -> None:
        """Wait for kernels and raise what they found."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        if self.module == "gpu":
            import_module("thermocline.kernels.gpu.errors").error_buffer(tensor).raise_pending()


class Scene(NamedTuple):
    """Tables, which of them each feature reads, and how much of them is looked up."""

    name: str
    tables: tuple[Table, ...]
    features: tuple[int, ...]
    batch: int
    hot: bool

    def build(self, mode: int, weighted: bool = False, seed: int = 0) -> tuple[Storage, Lookup]:
        storage = cases.store(self.tables, self.features)
        return storage, cases.look_up(storage, mode, self.batch, weighted, self.hot, seed)


# -- comparing ------------------------------------------------------------------------------------------------------

Pair = tuple[str, Tensor, Tensor]


def _bits(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().cpu().contiguous().view(sizes[x.element_size()])


def same_bits(*pairs: Pair) -> Outcome:
    """Equal in every bit, or what is not."""
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            said = f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}"
            return Outcome("FAILED", f"{name}: {said}")
        wrong = (_bits(ours) != _bits(theirs)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            said = f"first at {at}: {ours.cpu()[at].item():g} instead of {theirs.cpu()[at].item():g}"
            return Outcome("FAILED", f"{name}: {len(wrong)} of {ours.numel()} differ, {said}")
    return Outcome("equal")


def close_to(name: str, ours: Tensor, theirs: Tensor) -> Outcome:
    """Equal but for the order of additions, or by how much not."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return same_bits((name, ours, theirs))
    if ours.numel() == 0 or torch.equal(_bits(ours), _bits(theirs)):
        return Outcome("equal")
    off = (ours.cpu().double() - theirs.double()).abs()
    worst = float((off / theirs.double().abs().clamp(min=1.0)).max())
    result = "close" if worst <= _TOLERANCE[theirs.dtype] else "FAILED"  # NaN is not below anything
    return Outcome(result, f"{name}: largest difference {worst:.1e}")


def first_failure(outcomes: Iterator[Outcome]) -> Outcome:
    """The first that failed, else the last that was not equal, else equal."""
    last = Outcome("equal")
    for outcome in outcomes:
        if outcome.result == "FAILED":
            return outcome
        last = outcome if outcome.result != "equal" else last
    return last


# -- quantize -------------------------------------------------------------------------------------------------------


def check_quantize(ours: Implementation, format: int, dims: tuple[int, ...], roundings: tuple[bool, ...]) -> Outcome:
    return first_failure(_quantize(ours, format, dim, stochastic) for dim in dims for stochastic in roundings)


def _quantize(ours: Implementation, format: int, dim: int, stochastic: bool) -> Outcome:
    values_ND = cases.awkward_rows(63, dim)
    clock, rows_N = (torch.tensor([2**40 + 7, 3]), torch.arange(63) + 2**33) if stochastic else (None, None)
    expected = quantize.quantize_rows(values_ND, format, clock, rows_N)
    there = [None if t is None else t.to(ours.device) for t in (clock, rows_N)]
    found = ours.of("quantize").quantize_rows(values_ND.to(ours.device), format, *there)
    words = f"D={dim} {'stochastic' if stochastic else 'nearest'}"
    return same_bits((f"{words} codes", found[0], expected[0]), (f"{words} meta", found[1], expected[1]))


def check_dequantize(ours: Implementation, format: int, dims: tuple[int, ...]) -> Outcome:
    return first_failure(_dequantize(ours, format, dim) for dim in dims)


def _dequantize(ours: Implementation, format: int, dim: int) -> Outcome:
    codes_NB, meta_NW = quantize.quantize_rows(cases.awkward_rows(63, dim), format, None, None)
    found_ND = ours.of("quantize").dequantize_rows(codes_NB.to(ours.device), meta_NW.to(ours.device), format, dim)
    return same_bits((f"D={dim}", found_ND, quantize.dequantize_rows(codes_NB, meta_NW, format, dim)))


def check_rounding(ours: Implementation, format: int, dim: int, rows: int) -> Outcome:
    """Stochastic rounding of one row under many row numbers: another step rounds otherwise, the mean is the row."""
    values_D = cases.draw(format, dim) + 0.1
    values_ND, rows_N = values_D.expand(rows, dim).contiguous().to(ours.device), torch.arange(rows, device=ours.device)
    kernels, rounded = ours.of("quantize"), []
    for step in (1, 2):
        clock = torch.tensor([11, step], device=ours.device)
        codes_NB, meta_NW = kernels.quantize_rows(values_ND, format, clock, rows_N)
        rounded.append(kernels.dequantize_rows(codes_NB, meta_NW, format, dim).cpu().double())
    if torch.equal(*rounded):
        return Outcome("FAILED", "two steps rounded alike: the rounding is not stochastic")
    all_ND = torch.cat(rounded)
    # The ends of a row are clamped to what its metadata can say; between them the mean is the value.
    between_D = (values_D > values_D.min()) & (values_D < values_D.max())
    sigma_D = all_ND.std(0) / (2 * rows) ** 0.5 + 1e-7 * float(values_D.max() - values_D.min())
    worst = float(((all_ND.mean(0) - values_D.double()).abs() / sigma_D)[between_D].max())
    return Outcome("close" if worst <= 5 else "FAILED", f"mean off by {worst:.1f} sigma")


# -- gather ---------------------------------------------------------------------------------------------------------


def _gathered(kernels: ModuleType, storage: Storage, lookup: Lookup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, winners = kernels.gather_pool(storage.arrays, lookup.call._replace(dtype=dtype))
    return out, winners


def check_gather(ours: Implementation, scene: Scene, mode: int, weighted: bool, dtype: torch.dtype) -> Outcome:
    return first_failure(_gather(ours, scene, mode, weighted, dtype, seed) for seed in (0, 1))


def _gather(ours: Implementation, scene: Scene, mode: int, weighted: bool, dtype: torch.dtype, seed: int) -> Outcome:
    """Odd seeds have 32-bit ids."""
    storage, lookup = scene.build(mode, weighted, seed)
    there = storage.to(ours.device)
    out, winners = _gathered(ours.of("gather"), there, lookup.to(ours.device), dtype)
    ours.settle(there.codes)
    expected, expected_winners = _gathered(gather, storage, lookup, dtype)
    if mode in (F.MAX, F.NONE):
        return same_bits(("output", out, expected), ("winners", winners, expected_winners))
    return close_to("output", out, expected)


def check_weight_gradient(ours: Implementation, scene: Scene) -> Outcome:
    storage, lookup = scene.build(F.SUM, weighted=True)
    there, looked_up = storage.to(ours.device), lookup.to(ours.device)
    found_N = ours.of("gather").weight_gradient(there.arrays, looked_up.call, looked_up.grad)
    expected_N = gather.weight_gradient(storage.arrays, lookup.call, lookup.grad)
    return close_to("gradient", found_N / 32, expected_N / 32)  # a sum over up to 513 columns


# -- sum gradients --------------------------------------------------------------------------------------------------


def _summed(ours: Implementation, storage: Storage, lookup: Lookup, winners: Tensor) -> tuple[Tensor, Tensor]:
    there = lookup.to(ours.device)
    rows_U, grads_UW = ours.of("sum_gradients").sum_row_gradients(
        storage.to(ours.device).layout, there.call, winners.to(ours.device), there.grad
    )
    return rows_U, grads_UW


def check_sums(ours: Implementation, scene: Scene, mode: int, weighted: bool) -> Outcome:
    storage, lookup = scene.build(mode, weighted)
    _, winners = _gathered(gather, storage, lookup, torch.float32)
    rows_U, grads_UW = _summed(ours, storage, lookup, winners)
    expected = sum_gradients.sum_row_gradients(storage.layout, lookup.call, winners, lookup.grad)
    rows = same_bits(("rows", rows_U, expected[0]))
    if rows.result == "FAILED":
        return rows
    return close_to("sums", grads_UW / 8, expected[1] / 8)  # a hot row sums hundreds of gradients


def check_repeatable(ours: Implementation, scene: Scene, mode: int, weighted: bool) -> Outcome:
    """The same bits again; on the CPU with one thread as with all."""
    storage, lookup = scene.build(mode, weighted)
    none = torch.zeros(0, dtype=torch.int32)
    first = _summed(ours, storage, lookup, none)
    with _one_thread():
        again = _summed(ours, storage, lookup, none)
    return same_bits(("rows", again[0], first[0]), ("sums", again[1], first[1]))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- update ---------------------------------------------------------------------------------------------------------


def _update(
    kernels: ModuleType, storage: Storage, state: Optimizer, rows_U: Tensor, grads_UW: Tensor, stochastic: bool
) -> None:
    kernels.update_rows(storage.arrays, state.arrays._replace(stochastic=stochastic), rows_U, grads_UW)


def _same_state(ours: tuple[Storage, Optimizer], theirs: tuple[Storage, Optimizer]) -> Outcome:
    """Rows, states, clock and hyperparameters."""
    (our_rows, our_state), (their_rows, their_state) = ours, theirs
    states = zip(our_state.states, their_state.states, strict=True)
    return same_bits(
        ("codes", our_rows.codes, their_rows.codes),
        ("meta", our_rows.meta, their_rows.meta),
        *((f"state {n}", a, b) for n, (a, b) in enumerate(states)),
        ("clock", our_state.clock, their_state.clock),
        ("hyper", our_state.hyper, their_state.hyper),
    )


def check_update_rows(ours: Implementation, scene: Scene, optimizer: int, stochastic: bool) -> Outcome:
    """Two steps from the same summed gradients."""
    storage = cases.store(scene.tables, scene.features)
    state = cases.optimizer(optimizer, storage)
    our_rows, our_state = storage.to(ours.device), state.to(ours.device)
    for step in range(2):
        rows_U, grads_UW = cases.some_rows(storage, seed=step)
        _update(update, storage, state, rows_U, grads_UW, stochastic)
        there = (rows_U.to(ours.device), grads_UW.to(ours.device))
        _update(ours.of("update"), our_rows, our_state, *there, stochastic)
    ours.settle(our_rows.codes)
    return _same_state((our_rows, our_state), (storage, state))


def check_update_bags(ours: Implementation, scene: Scene, optimizer: int, mode: int, weighted: bool) -> Outcome:
    """The fused update does what summing and updating do one after the other, on the same device."""
    storage, lookup = scene.build(mode, weighted)
    _, winners = _gathered(gather, storage, lookup, torch.float32)
    fused, apart = ((storage.to(ours.device), cases.optimizer(optimizer, storage).to(ours.device)) for _ in range(2))
    _update(ours.of("update"), *apart, *_summed(ours, storage, lookup, winners), stochastic=True)
    rows, state = fused
    there = lookup.to(ours.device)
    ours.of("update").update_bags(rows.arrays, state.arrays, there.call, winners.to(ours.device), there.grad)
    ours.settle(rows.codes)
    return _same_state(fused, apart)


def check_cache(ours: Implementation, format: int, dim: int, policy: int, near: int) -> Outcome:
    """Six training steps of a table with a small cache: rows come, are trained in full precision and leave."""
    storage, cache = cases.add_cache(cases.store([cases.Table(63, dim, format)]), 9, policy, near)
    state = cases.optimizer(F.ROWWISE_ADAGRAD, storage)
    there, our_state = storage.to(ours.device), state.to(ours.device)
    our_cache = Cache(*(part.to(ours.device, copy=True) for part in cache))._replace(steps=cache.steps.clone())
    for step in range(6):
        seen_N = (torch.rand(40, generator=torch.Generator().manual_seed(step)) ** 2 * 63).long().sort()[0]
        rows_U, counts_U = seen_N.unique(return_counts=True)
        grads_UW = cases.draw(step, rows_U.numel(), dim)
        for kernels, rows, each, kept, seen in (
            (update, storage, state, cache, counts_U),
            (ours.of("update"), there, our_state, our_cache, seen_N.to(ours.device)),
        ):
            place = rows.meta.device
            arrays = rows.arrays._replace(cache=kept)
            kernels.update_rows(arrays, each.arrays, rows_U.to(place), grads_UW.to(place), seen)
    ours.settle(there.codes)
    same = _same_state((there, our_state), (storage, state))
    if same.result == "FAILED":
        return same
    return same_bits(*((name, getattr(our_cache, name), getattr(cache, name)) for name in Cache._fields))


# -- bad input ------------------------------------------------------------------------------------------------------


def check_bad_id(ours: Implementation, scene: Scene) -> Outcome:
    storage, lookup = scene.build(F.SUM)
    position = int(lookup.offsets[scene.batch]) - 1
    rows = scene.tables[scene.features[0]].rows
    lookup.ids_N[position] = rows
    there = storage.to(ours.device)
    error: Any = None
    try:
        _gathered(ours.of("gather"), there, lookup.to(ours.device), torch.float32)
        ours.settle(there.codes)
    except IdOutOfRange as found:
        error = found
    if error is None:
        return Outcome("FAILED", f"id {rows} of a table of {rows} rows was looked up without an error")
    said, truth = (error.feature, error.position, error.id, error.rows), (0, position, rows, rows)
    return Outcome("equal" if said == truth else "FAILED", f"feature, position, id, rows: {said}")


def check_bad_gradient(ours: Implementation, scene: Scene) -> Outcome:
    """NaN is refused, its row and state are left alone, and the other rows are updated."""
    storage = cases.store(scene.tables, scene.features)
    state = cases.optimizer(F.SGD, storage)
    rows_U, grads_UW = cases.some_rows(storage)
    grads_UW[2, 1] = float("nan")
    there = (storage.to(ours.device), state.to(ours.device))
    said = []
    for kernels, (rows, each) in ((update, (storage, state)), (ours.of("update"), there)):
        try:
            _update(kernels, rows, each, rows_U.to(rows.codes.device), grads_UW.to(rows.codes.device), True)
            ours.settle(there[0].codes)
        except BadGradient as error:
            said.append((error.row, error.step))
    if said != [(int(rows_U[2]), 1)] * 2:
        return Outcome("FAILED", f"row {int(rows_U[2])} at step 1 was not named, but {said}")
    return _same_state(there, (storage, state))
