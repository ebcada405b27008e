"""The checks of `run.py`, one function each. Each takes an implementation and returns a `CheckResult`."""

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

from . import cases
from .cases import CaseArena, CaseLookup, CaseOptimizer, CaseTable

# fp32 sums of a few numbers around 1, in any order. (Half types: their last place, at magnitudes up to 64.)
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-2}


class CheckResult(NamedTuple):
    """Result of a check: equal, close, FAILED or skipped, and a detail."""

    result: str
    detail: str = ""


class Implementation(NamedTuple):
    """Kernels that can run on this machine: device, name, and name of their modules."""

    device: str
    name: str
    module: str

    def of(self, kernel: str) -> ModuleType:
        return import_module(f"thermocline.kernels.{kernel}.{self.module}")

    def settle(self, tensor: Tensor) -> None:
        """Wait for kernels and raise their errors."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        if self.module == "gpu":
            import_module("thermocline.kernels.gpu.errors").error_buffer(tensor).raise_pending()


class VerifyCase(NamedTuple):
    """Tables, the table of each feature, and the size of a lookup."""

    name: str
    tables: tuple[CaseTable, ...]
    features: tuple[int, ...]
    batch: int
    hot: bool

    def build(self, mode: int, weighted: bool = False, seed: int = 0) -> tuple[CaseArena, CaseLookup]:
        arena = cases.make_arena(self.tables, self.features)
        return arena, cases.make_lookup(arena, mode, self.batch, weighted, self.hot, seed)


# -- comparing ------------------------------------------------------------------------------------------------------

Pair = tuple[str, Tensor, Tensor]


def _bits(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().cpu().contiguous().view(sizes[x.element_size()])


def same_bits(*pairs: Pair) -> CheckResult:
    """Compare tensors bit for bit."""
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            said = f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}"
            return CheckResult("FAILED", f"{name}: {said}")
        wrong = (_bits(ours) != _bits(theirs)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            said = f"first at {at}: {ours.cpu()[at].item():g} instead of {theirs.cpu()[at].item():g}"
            return CheckResult("FAILED", f"{name}: {len(wrong)} of {ours.numel()} differ, {said}")
    return CheckResult("equal")


def close_to(name: str, ours: Tensor, theirs: Tensor) -> CheckResult:
    """Compare sums, whose order of additions may differ."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return same_bits((name, ours, theirs))
    if ours.numel() == 0 or torch.equal(_bits(ours), _bits(theirs)):
        return CheckResult("equal")
    off = (ours.cpu().double() - theirs.double()).abs()
    worst = float((off / theirs.double().abs().clamp(min=1.0)).max())
    result = "close" if worst <= _TOLERANCE[theirs.dtype] else "FAILED"  # NaN is not below anything
    return CheckResult(result, f"{name}: largest difference {worst:.1e}")


def first_failure(results: Iterator[CheckResult]) -> CheckResult:
    """The first failed result, else the last that was not equal, else equal."""
    last = CheckResult("equal")
    for result in results:
        if result.result == "FAILED":
            return result
        last = result if result.result != "equal" else last
    return last


# -- quantize -------------------------------------------------------------------------------------------------------


def check_quantize(ours: Implementation, format: int, dims: tuple[int, ...], roundings: tuple[bool, ...]) -> CheckResult:
    return first_failure(_quantize(ours, format, dim, stochastic) for dim in dims for stochastic in roundings)


def _quantize(ours: Implementation, format: int, dim: int, stochastic: bool) -> CheckResult:
    values_ND = cases.extreme_rows(63, dim)
    clock, rows_N = (torch.tensor([2**40 + 7, 3]), torch.arange(63) + 2**33) if stochastic else (None, None)
    expected = quantize.quantize_rows(values_ND, format, clock, rows_N)
    there = [None if t is None else t.to(ours.device) for t in (clock, rows_N)]
    found = ours.of("quantize").quantize_rows(values_ND.to(ours.device), format, *there)
    words = f"D={dim} {'stochastic' if stochastic else 'nearest'}"
    return same_bits((f"{words} codes", found[0], expected[0]), (f"{words} meta", found[1], expected[1]))


def check_dequantize(ours: Implementation, format: int, dims: tuple[int, ...]) -> CheckResult:
    return first_failure(_dequantize(ours, format, dim) for dim in dims)


def _dequantize(ours: Implementation, format: int, dim: int) -> CheckResult:
    codes_NB, meta_NW = quantize.quantize_rows(cases.extreme_rows(63, dim), format, None, None)
    found_ND = ours.of("quantize").dequantize_rows(codes_NB.to(ours.device), meta_NW.to(ours.device), format, dim)
    return same_bits((f"D={dim}", found_ND, quantize.dequantize_rows(codes_NB, meta_NW, format, dim)))


def check_rounding(ours: Implementation, format: int, dim: int, rows: int) -> CheckResult:
    """Stochastic rounding of one row under many row numbers: steps differ, and the mean is the row."""
    values_D = cases.normal(format, dim) + 0.1
    values_ND, rows_N = values_D.expand(rows, dim).contiguous().to(ours.device), torch.arange(rows, device=ours.device)
    kernels, rounded = ours.of("quantize"), []
    for step in (1, 2):
        clock = torch.tensor([11, step], device=ours.device)
        codes_NB, meta_NW = kernels.quantize_rows(values_ND, format, clock, rows_N)
        rounded.append(kernels.dequantize_rows(codes_NB, meta_NW, format, dim).cpu().double())
    if torch.equal(*rounded):
        return CheckResult("FAILED", "two steps rounded alike: the rounding is not stochastic")
    all_ND = torch.cat(rounded)
    # The ends of a row are clamped to the range of its metadata; between them the mean is the value.
    between_D = (values_D > values_D.min()) & (values_D < values_D.max())
    sigma_D = all_ND.std(0) / (2 * rows) ** 0.5 + 1e-7 * float(values_D.max() - values_D.min())
    worst = float(((all_ND.mean(0) - values_D.double()).abs() / sigma_D)[between_D].max())
    return CheckResult("close" if worst <= 5 else "FAILED", f"mean off by {worst:.1f} sigma")


# -- gather ---------------------------------------------------------------------------------------------------------


def _gathered(kernels: ModuleType, arena: CaseArena, lookup: CaseLookup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, winners = kernels.gather_pool(arena.arrays, lookup.call._replace(dtype=dtype))
    return out, winners


def check_gather(ours: Implementation, tables_case: VerifyCase, mode: int, weighted: bool, dtype: torch.dtype) -> CheckResult:
    return first_failure(_gather(ours, tables_case, mode, weighted, dtype, seed) for seed in (0, 1))


def _gather(
    ours: Implementation, tables_case: VerifyCase, mode: int, weighted: bool, dtype: torch.dtype, seed: int
) -> CheckResult:
    """Odd seeds have 32-bit ids."""
    arena, lookup = tables_case.build(mode, weighted, seed)
    there = arena.to(ours.device)
    out, winners = _gathered(ours.of("gather"), there, lookup.to(ours.device), dtype)
    ours.settle(there.codes)
    expected, expected_winners = _gathered(gather, arena, lookup, dtype)
    if mode in (F.MAX, F.NONE):
        return same_bits(("output", out, expected), ("winners", winners, expected_winners))
    return close_to("output", out, expected)


def check_weight_gradient(ours: Implementation, tables_case: VerifyCase) -> CheckResult:
    arena, lookup = tables_case.build(F.SUM, weighted=True)
    there, looked_up = arena.to(ours.device), lookup.to(ours.device)
    found_N = ours.of("gather").weight_gradient(there.arrays, looked_up.call, looked_up.grad)
    expected_N = gather.weight_gradient(arena.arrays, lookup.call, lookup.grad)
    return close_to("gradient", found_N / 32, expected_N / 32)  # a sum over up to 513 columns


# -- sum gradients --------------------------------------------------------------------------------------------------


def _summed(ours: Implementation, arena: CaseArena, lookup: CaseLookup, winners: Tensor) -> tuple[Tensor, Tensor]:
    there = lookup.to(ours.device)
    rows_U, grads_UW = ours.of("sum_gradients").sum_row_gradients(
        arena.to(ours.device).layout, there.call, winners.to(ours.device), there.grad
    )
    return rows_U, grads_UW


def check_sums(ours: Implementation, tables_case: VerifyCase, mode: int, weighted: bool) -> CheckResult:
    arena, lookup = tables_case.build(mode, weighted)
    _, winners = _gathered(gather, arena, lookup, torch.float32)
    rows_U, grads_UW = _summed(ours, arena, lookup, winners)
    expected = sum_gradients.sum_row_gradients(arena.layout, lookup.call, winners, lookup.grad)
    rows = same_bits(("rows", rows_U, expected[0]))
    if rows.result == "FAILED":
        return rows
    return close_to("sums", grads_UW / 8, expected[1] / 8)  # a hot row sums hundreds of gradients


def check_repeatable(ours: Implementation, tables_case: VerifyCase, mode: int, weighted: bool) -> CheckResult:
    """A second run has the same bits; on the CPU with one thread and with all."""
    arena, lookup = tables_case.build(mode, weighted)
    none = torch.zeros(0, dtype=torch.int32)
    first = _summed(ours, arena, lookup, none)
    with _one_thread():
        again = _summed(ours, arena, lookup, none)
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
    kernels: ModuleType, arena: CaseArena, state: CaseOptimizer, rows_U: Tensor, grads_UW: Tensor, stochastic: bool
) -> None:
    kernels.update_rows(arena.arrays, state.arrays._replace(stochastic=stochastic), rows_U, grads_UW)


def _same_state(ours: tuple[CaseArena, CaseOptimizer], theirs: tuple[CaseArena, CaseOptimizer]) -> CheckResult:
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


def check_update_rows(ours: Implementation, tables_case: VerifyCase, optimizer: int, stochastic: bool) -> CheckResult:
    """Two steps from the same summed gradients."""
    arena = cases.make_arena(tables_case.tables, tables_case.features)
    state = cases.optimizer(optimizer, arena)
    our_rows, our_state = arena.to(ours.device), state.to(ours.device)
    for step in range(2):
        rows_U, grads_UW = cases.make_gradients(arena, seed=step)
        _update(update, arena, state, rows_U, grads_UW, stochastic)
        there = (rows_U.to(ours.device), grads_UW.to(ours.device))
        _update(ours.of("update"), our_rows, our_state, *there, stochastic)
    ours.settle(our_rows.codes)
    return _same_state((our_rows, our_state), (arena, state))


def check_update_bags(ours: Implementation, tables_case: VerifyCase, optimizer: int, mode: int, weighted: bool) -> CheckResult:
    """The fused update equals summing followed by updating on the same device."""
    arena, lookup = tables_case.build(mode, weighted)
    _, winners = _gathered(gather, arena, lookup, torch.float32)
    fused, apart = ((arena.to(ours.device), cases.optimizer(optimizer, arena).to(ours.device)) for _ in range(2))
    _update(ours.of("update"), *apart, *_summed(ours, arena, lookup, winners), stochastic=True)
    rows, state = fused
    there = lookup.to(ours.device)
    ours.of("update").update_bags(rows.arrays, state.arrays, there.call, winners.to(ours.device), there.grad)
    ours.settle(rows.codes)
    return _same_state(fused, apart)


def check_cache(ours: Implementation, format: int, dim: int, policy: int, int8_slots: int) -> CheckResult:
    """Six training steps of a table with a small cache: rows are admitted, updated and evicted."""
    arena, cache = cases.with_cache(cases.make_arena([cases.CaseTable(63, dim, format)]), 9, policy, int8_slots)
    state = cases.optimizer(F.ROWWISE_ADAGRAD, arena)
    there, our_state = arena.to(ours.device), state.to(ours.device)
    our_cache = Cache(*(part.to(ours.device, copy=True) for part in cache))._replace(steps=cache.steps.clone())
    for step in range(6):
        seen_N = (torch.rand(40, generator=torch.Generator().manual_seed(step)) ** 2 * 63).long().sort()[0]
        rows_U, counts_U = seen_N.unique(return_counts=True)
        grads_UW = cases.normal(step, rows_U.numel(), dim)
        for kernels, rows, each, kept, seen in (
            (update, arena, state, cache, counts_U),
            (ours.of("update"), there, our_state, our_cache, seen_N.to(ours.device)),
        ):
            place = rows.meta.device
            arrays = rows.arrays._replace(cache=kept)
            kernels.update_rows(arrays, each.arrays, rows_U.to(place), grads_UW.to(place), seen)
    ours.settle(there.codes)
    same = _same_state((there, our_state), (arena, state))
    if same.result == "FAILED":
        return same
    return same_bits(*((name, getattr(our_cache, name), getattr(cache, name)) for name in Cache._fields))


# -- bad input ------------------------------------------------------------------------------------------------------


def check_bad_id(ours: Implementation, tables_case: VerifyCase) -> CheckResult:
    arena, lookup = tables_case.build(F.SUM)
    position = int(lookup.offsets[tables_case.batch]) - 1
    rows = tables_case.tables[tables_case.features[0]].rows
    lookup.ids_N[position] = rows
    there = arena.to(ours.device)
    error: Any = None
    try:
        _gathered(ours.of("gather"), there, lookup.to(ours.device), torch.float32)
        ours.settle(there.codes)
    except IdOutOfRange as found:
        error = found
    if error is None:
        return CheckResult("FAILED", f"id {rows} of a table of {rows} rows was looked up without an error")
    said, truth = (error.feature, error.position, error.id, error.rows), (0, position, rows, rows)
    return CheckResult("equal" if said == truth else "FAILED", f"feature, position, id, rows: {said}")


def check_bad_gradient(ours: Implementation, tables_case: VerifyCase) -> CheckResult:
    """A NaN gradient is refused, its row and state are unchanged, and the other rows are updated."""
    arena = cases.make_arena(tables_case.tables, tables_case.features)
    state = cases.optimizer(F.SGD, arena)
    rows_U, grads_UW = cases.make_gradients(arena)
    grads_UW[2, 1] = float("nan")
    there = (arena.to(ours.device), state.to(ours.device))
    said = []
    for kernels, (rows, each) in ((update, (arena, state)), (ours.of("update"), there)):
        try:
            _update(kernels, rows, each, rows_U.to(rows.codes.device), grads_UW.to(rows.codes.device), True)
            ours.settle(there[0].codes)
        except BadGradient as error:
            said.append((error.row, error.step))
    if said != [(int(rows_U[2]), 1)] * 2:
        return CheckResult("FAILED", f"row {int(rows_U[2])} at step 1 was not named, but {said}")
    return _same_state(there, (arena, state))
