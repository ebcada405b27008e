"""The checks of `run.py`: a function each, whose arguments without the implementation make a `Check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient, IdOutOfRange
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.gather import reference as gather_reference
from thermocline.kernels.layout import Cache
from thermocline.kernels.quantize import reference as quantize_reference
from thermocline.kernels.sum_gradients import reference as sum_gradients_reference
from thermocline.kernels.update import reference as update_reference

from . import cases
from .cases import VerifyCase, moved

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


Check = tuple[str, str, str, Callable[[Implementation], CheckResult]]  # kernel, case, compared with, function


def check(kernel: str, compared_with: str, case: Callable[..., str]) -> Callable[..., Callable[..., Check]]:
    """Decorate a function of an implementation and further arguments, which alone make a check; `case` describes them."""

    def decorate(function: Callable[..., CheckResult]) -> Callable[..., Check]:
        return lambda *about: (kernel, case(*about), compared_with, lambda ours: function(ours, *about))

    return decorate


LOOKUPS = {  # mode, weighted
    "sum": (F.SUM, False),
    "weighted sum": (F.SUM, True),
    "mean": (F.MEAN, False),
    "max": (F.MAX, False),
    "none": (F.NONE, False),
}


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
    same = same_bits((name, ours, theirs))
    if same.result == "equal" or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return same
    off = (ours.cpu().double() - theirs.double()).abs()
    worst = float((off / theirs.double().abs().clamp(min=1.0)).max())
    result = "close" if worst <= _TOLERANCE[theirs.dtype] else "FAILED"  # NaN is not below anything
    return CheckResult(result, f"{name}: largest difference {worst:.1e}")


def _first_failure(results: Iterator[CheckResult]) -> CheckResult:
    """The first failed result, else the last that was not equal, else equal."""
    last = CheckResult("equal")
    for result in results:
        if result.result == "FAILED":
            return result
        last = result if result.result != "equal" else last
    return last


# -- quantize -------------------------------------------------------------------------------------------------------


def _rounding(stochastic: bool) -> str:
    return "stochastic" if stochastic else "nearest"


def _case(format: int, dims: tuple[int, ...], roundings: tuple[bool, ...] = ()) -> str:
    return f"{F.NAMES[format]}, D={' '.join(map(str, dims))}" + ", " * bool(roundings) + " and ".join(map(_rounding, roundings))


@check("quantize", "reference", _case)
def quantize(ours: Implementation, format: int, dims: tuple[int, ...], roundings: tuple[bool, ...]) -> CheckResult:
    def compare(dim: int, stochastic: bool) -> CheckResult:
        values_ND = cases.extreme_rows(63, dim)
        seeds = (torch.tensor([2**40 + 7, 3], dtype=torch.int64), torch.arange(63) + 2**33) if stochastic else (None, None)
        expected = quantize_reference.quantize_rows(values_ND, format, *seeds)
        found = ours.of("quantize").quantize_rows(values_ND.to(ours.device), format, *moved(seeds, ours.device))
        words = f"D={dim} {_rounding(stochastic)}"
        return same_bits((f"{words} codes", found[0], expected[0]), (f"{words} meta", found[1], expected[1]))

    return _first_failure(compare(dim, stochastic) for dim in dims for stochastic in roundings)


@check("dequantize", "reference", _case)
def dequantize(ours: Implementation, format: int, dims: tuple[int, ...]) -> CheckResult:
    def compare(dim: int) -> CheckResult:
        stored = quantize_reference.quantize_rows(cases.extreme_rows(63, dim), format, None, None)
        found_ND = ours.of("quantize").dequantize_rows(*moved(stored, ours.device), format, dim)
        return same_bits((f"D={dim}", found_ND, quantize_reference.dequantize_rows(*stored, format, dim)))

    return _first_failure(compare(dim) for dim in dims)


@check("rounding", "its mean", lambda format, dim, rows: f"{F.NAMES[format]}, {rows} times a row")
def rounding(ours: Implementation, format: int, dim: int, rows: int) -> CheckResult:
    """Stochastic rounding of one row under many row numbers: steps differ, and the mean is the row."""
    values_D = cases.normal(format, dim) + 0.1
    values_ND, rows_N = values_D.expand(rows, dim).contiguous().to(ours.device), torch.arange(rows, device=ours.device)
    kernels, rounded = ours.of("quantize"), []
    for step in (1, 2):
        clock = torch.tensor([11, step], dtype=torch.int64, device=ours.device)
        stored = kernels.quantize_rows(values_ND, format, clock, rows_N)
        rounded.append(kernels.dequantize_rows(*stored, format, dim).cpu().double())
    if torch.equal(*rounded):
        return CheckResult("FAILED", "two steps rounded alike: the rounding is not stochastic")
    all_ND = torch.cat(rounded)
    # The ends of a row are clamped to the range of its metadata; between them the mean is the value.
    between_D = (values_D > values_D.min()) & (values_D < values_D.max())
    sigma_D = all_ND.std(0) / (2 * rows) ** 0.5 + 1e-7 * float(values_D.max() - values_D.min())
    worst = float(((all_ND.mean(0) - values_D.double()).abs() / sigma_D)[between_D].max())
    return CheckResult("close" if worst <= 5 else "FAILED", f"mean off by {worst:.1f} sigma")


# -- gather and sum gradients ---------------------------------------------------------------------------------------


def _lookup(case: VerifyCase, name: str, dtype: torch.dtype = torch.float32) -> str:
    return f"{case.name}, {name}" + ("" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')} output")


@check("gather", "reference", _lookup)
def gather(ours: Implementation, case: VerifyCase, name: str, dtype: torch.dtype = torch.float32) -> CheckResult:
    mode, weighted = LOOKUPS[name]

    def compare(seed: int) -> CheckResult:
        rows, call, _ = case.build(mode, weighted, seed)
        call = call._replace(dtype=dtype)
        there = moved(rows, ours.device)
        out, winners = ours.of("gather").gather_pool(there, moved(call, ours.device))
        ours.settle(there.codes)
        expected, expected_winners = gather_reference.gather_pool(rows, call)
        if mode in (F.MAX, F.NONE):
            return same_bits(("output", out, expected), ("winners", winners, expected_winners))
        return close_to("output", out, expected)

    return _first_failure(compare(seed) for seed in (0, 1))


@check("weight gradient", "reference", lambda case: case.name)
def weight_gradient(ours: Implementation, case: VerifyCase) -> CheckResult:
    built = case.build(F.SUM, weighted=True)
    found_N = ours.of("gather").weight_gradient(*moved(built, ours.device))
    return close_to("gradient", found_N / 32, gather_reference.weight_gradient(*built) / 32)  # a sum over up to 513 columns


def _summed(ours: Implementation, rows: RowArrays, call: LookupCall, winners: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows_U, grads_UW = ours.of("sum_gradients").sum_row_gradients(*moved((rows.layout, call, winners, grad), ours.device))
    return rows_U, grads_UW


@check("sum gradients", "reference", _lookup)
def sums(ours: Implementation, case: VerifyCase, name: str) -> CheckResult:
    rows, call, grad = case.build(*LOOKUPS[name])
    _, winners = gather_reference.gather_pool(rows, call)
    rows_U, grads_UW = _summed(ours, rows, call, winners, grad)
    expected = sum_gradients_reference.sum_row_gradients(rows.layout, call, winners, grad)
    same = same_bits(("rows", rows_U, expected[0]))
    # A hot row sums hundreds of gradients.
    return same if same.result == "FAILED" else close_to("sums", grads_UW / 8, expected[1] / 8)


@check("sum gradients", "itself", lambda case, name: f"{case.name}, {name}, again")
def repeatable(ours: Implementation, case: VerifyCase, name: str) -> CheckResult:
    """A second run has the same bits; on the CPU with one thread and with all."""
    rows, call, grad = case.build(*LOOKUPS[name])
    none, threads = torch.zeros(0, dtype=torch.int32), torch.get_num_threads()
    first = _summed(ours, rows, call, none, grad)
    torch.set_num_threads(1)
    try:
        again = _summed(ours, rows, call, none, grad)
    finally:
        torch.set_num_threads(threads)
    return same_bits(("rows", again[0], first[0]), ("sums", again[1], first[1]))


# -- update ---------------------------------------------------------------------------------------------------------

_State = tuple[RowArrays, OptimizerArrays]


def _same_state(ours: _State, theirs: _State) -> CheckResult:
    """Rows, states, clock, hyperparameters and cache."""
    names = ("codes", "meta", "clock", "hyper")
    mine, other = ((rows.codes, rows.meta, optimizer.clock, optimizer.hyper) for rows, optimizer in (ours, theirs))
    states = zip(ours[1].states, theirs[1].states, strict=True)
    return same_bits(
        *zip(names, mine, other, strict=True),
        *((f"state {n}", a, b) for n, (a, b) in enumerate(states)),
        *zip(Cache._fields, ours[0].cache or (), theirs[0].cache or (), strict=False),
    )


@check("update rows", "reference", lambda case, kind, by: f"{case.name}, {F.OPTIMIZERS[kind]}, {_rounding(by)}")
def update_rows(ours: Implementation, case: VerifyCase, optimizer: int, stochastic: bool) -> CheckResult:
    """Two steps from the same summed gradients."""
    rows = case.arena()
    theirs = rows, cases.make_optimizer(optimizer, rows)._replace(stochastic=stochastic)
    mine = moved(theirs, ours.device)
    for step in range(2):
        gradients = cases.make_gradients(rows, seed=step)
        update_reference.update_rows(*theirs, *gradients)
        ours.of("update").update_rows(*mine, *moved(gradients, ours.device))
    ours.settle(mine[0].codes)
    return _same_state(mine, theirs)


@check("update bags", "sum, then update", lambda case, kind, name: f"{case.name}, {F.OPTIMIZERS[kind]}, {name}")
def update_bags(ours: Implementation, case: VerifyCase, optimizer: int, name: str) -> CheckResult:
    """The fused update equals summing followed by updating on the same device."""
    rows, call, grad = case.build(*LOOKUPS[name])
    _, winners = gather_reference.gather_pool(rows, call)
    fused, apart = (moved((rows, cases.make_optimizer(optimizer, rows)), ours.device) for _ in range(2))
    ours.of("update").update_rows(*apart, *_summed(ours, rows, call, winners, grad))
    ours.of("update").update_bags(*fused, *moved((call, winners, grad), ours.device))
    ours.settle(fused[0].codes)
    return _same_state(fused, apart)


def _cached(format: int, dim: int, policy: int, int8_slots: int = 0) -> str:
    return f"{F.NAMES[format]}, D={dim}, {F.POLICIES[policy]}" + (", int8 slots" if int8_slots else "")


@check("cache", "reference", _cached)
def cache(ours: Implementation, format: int, dim: int, policy: int, int8_slots: int = 0) -> CheckResult:
    """Six training steps of a table with a small cache: rows are admitted, updated and evicted."""
    rows = cases.with_cache(cases.make_arena([cases.CaseTable(63, dim, format)], [0]), 9, policy, int8_slots)
    theirs = rows, cases.make_optimizer(F.ROWWISE_ADAGRAD, rows)
    mine = moved(theirs, ours.device)
    assert rows.cache is not None
    there = mine[0]._replace(cache=mine[0].cache._replace(steps=rows.cache.steps.clone()))  # which stays on the CPU
    for step in range(6):
        seen_N = (torch.rand(40, dtype=torch.float32, generator=torch.Generator().manual_seed(step)) ** 2 * 63).long().sort()[0]
        rows_U, counts_U = seen_N.unique(return_counts=True)
        grads_UW = cases.normal(step, rows_U.numel(), dim)
        update_reference.update_rows(*theirs, rows_U, grads_UW, counts_U)
        ours.of("update").update_rows(there, mine[1], *moved((rows_U, grads_UW, seen_N), ours.device))
    ours.settle(there.codes)
    return _same_state((there, mine[1]), theirs)


# -- bad input ------------------------------------------------------------------------------------------------------


@check("bad input", "an error", lambda case: "id out of range")
def bad_id(ours: Implementation, case: VerifyCase) -> CheckResult:
    rows, call, _ = case.build(F.SUM)
    position, limit = int(call.offsets[case.batch]) - 1, case.tables[case.features[0]].rows
    call.ids_N[position] = limit
    there = moved(rows, ours.device)
    try:
        ours.of("gather").gather_pool(there, moved(call, ours.device))
        ours.settle(there.codes)
    except IdOutOfRange as error:
        said, truth = (error.feature, error.position, error.id, error.rows), (0, position, limit, limit)
        return CheckResult("equal" if said == truth else "FAILED", f"feature, position, id, rows: {said}")
    return CheckResult("FAILED", f"id {limit} of a table of {limit} rows was looked up without an error")


@check("bad input", "an error", lambda case: "NaN in a gradient")
def bad_gradient(ours: Implementation, case: VerifyCase) -> CheckResult:
    """A NaN gradient is refused, its row and state are unchanged, and the other rows are updated."""
    rows = case.arena()
    theirs = rows, cases.make_optimizer(F.SGD, rows)
    rows_U, grads_UW = cases.make_gradients(rows)
    grads_UW[2, 1] = float("nan")
    mine, said = moved(theirs, ours.device), []
    both: tuple[tuple[Any, Any, str], ...] = ((update_reference, theirs, "cpu"), (ours.of("update"), mine, ours.device))
    for kernels, state, device in both:
        try:
            kernels.update_rows(*state, rows_U.to(device), grads_UW.to(device))
            ours.settle(mine[0].codes)
        except BadGradient as error:
            said.append((error.row, error.step))
    if said != [(int(rows_U[2]), 1)] * 2:
        return CheckResult("FAILED", f"row {int(rows_U[2])} at step 1 was not named, but {said}")
    return _same_state(mine, theirs)
