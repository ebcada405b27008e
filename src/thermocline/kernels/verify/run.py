"""Compare the kernels of this machine with their references: the checks behind `thermocline verify`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch

from thermocline import formats as F
from thermocline.errors import BadInput

from . import checks as C
from .cases import CaseTable, VerifyCase
from .checks import Check, CheckResult, Implementation
from .id_maps import map_ids, ngram_rows

ReportProgress = Callable[[int, int, str], None]

DIMS = (1, 3, 48, 100, 128, 513)
FORMATS = range(len(F.NAMES))

# Every format with two dimensions; the last two tables make one run, and three features share them.
_ALL = [CaseTable(63, DIMS[(f + k) % 6], f) for f in FORMATS for k in (0, 3)] + [CaseTable(7, 100, F.INT8)] * 2
_MIXED = (CaseTable(63, 3, F.INT8), CaseTable(11, 48, F.INT4), CaseTable(63, 100, F.FP16))
_EQUAL = (CaseTable(63, 48, F.INT8), CaseTable(5, 48, F.INT8))
ALL = VerifyCase("every format", tuple(_ALL), (*range(len(_ALL)), 21, 20), batch=63, hot=True)
MIXED = VerifyCase("3 kinds of table", _MIXED, (0, 1, 2, 1), batch=63, hot=True)
ONE_KIND = VerifyCase("one kind of table", _EQUAL, (0, 1, 0), batch=200, hot=True)
TINY = MIXED._replace(batch=3, hot=False)
TINY_ONE = VerifyCase("one kind of table", (CaseTable(17, 5, F.INT8), CaseTable(5, 5, F.INT8)), (0, 1, 0), batch=3, hot=False)


def run(device: str | None, progress: ReportProgress) -> list[dict[str, str]]:
    """Check every implementation of this machine, or those of `device`; returns one dictionary for each check."""
    skipped: list[dict[str, str]] = []
    plan = [(implementation, check) for implementation, checks in _available(device, skipped) for check in checks]
    done = []
    for number, (implementation, (kernel, case, compared_with, call)) in enumerate(plan):
        progress(number, len(plan), f"{implementation.name}: {kernel}, {case}")
        try:
            result = call(implementation)
        except Exception as error:  # a broken kernel can raise anything
            result = CheckResult("FAILED", f"{type(error).__name__}: {error}".splitlines()[0])
        done.append(_line(kernel, case, implementation.device, implementation.name, compared_with, result))
    progress(len(plan), len(plan), "done")
    return done + skipped


def _line(kernel: str, case: str, device: str, name: str, compared_with: str, result: CheckResult) -> dict[str, str]:
    about = {"kernel": kernel, "case": case, "device": device, "implementation": name, "compared_with": compared_with}
    return {**about, **result._asdict()}


def _available(device: str | None, skipped: list[dict[str, str]]) -> Iterator[tuple[Implementation, list[Check]]]:
    """Implementations that can run on this machine, with their checks; `skipped` receives the reasons for the others."""
    if device == "cuda" and not torch.cuda.is_available():
        message = "this machine has no CUDA GPU that torch can use; check the CPU kernels with --device cpu"
        raise BadInput(message, parameter="device")
    if device in (None, "cpu"):
        yield Implementation("cpu", "Numba", "cpu"), _all_checks()
    if device == "cpu":
        return
    if find_spec("triton") is None:
        why = "Triton is not installed"
    elif _interpreted():
        yield Implementation("cpu", "Triton interpreter", "gpu"), _few_checks()
        return
    elif torch.cuda.is_available():
        yield Implementation("cuda", "Triton", "gpu"), _gpu_checks()
        return
    else:
        why = "no CUDA GPU; TRITON_INTERPRET=1 runs these kernels on the CPU, slowly"
    skipped.append(_line("all", "all", "cuda", "Triton", "reference", CheckResult("skipped", why)))


def _interpreted() -> bool:
    """Whether Triton interprets its kernels."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("0", ""):
        return False
    return bool(import_module("thermocline.kernels.gpu.launch").INTERPRETED)


# -- checks of each implementation ----------------------------------------------------------------------------------


def _all_checks() -> list[Check]:
    """Checks of the Numba kernels."""
    checks = [C.quantize(format, DIMS, (False, True)) for format in FORMATS]
    checks += [C.dequantize(format, DIMS) for format in FORMATS]
    checks += [C.gather(ALL, name) for name in C.LOOKUPS]
    checks += [C.gather(ONE_KIND, name, dtype) for name in ("sum", "max") for dtype in (torch.float16, torch.bfloat16)]
    checks += [C.weight_gradient(ALL)]
    checks += [C.sums(ALL, name) for name in C.LOOKUPS] + [C.sums(ONE_KIND, "sum")]
    checks += [C.repeatable(ALL, "sum")]
    checks += [C.update_rows(ALL, optimizer, rounding) for optimizer in range(4) for rounding in (False, True)]
    checks += [C.update_bags(ALL, optimizer, name) for optimizer, name in enumerate(("sum", "mean", "weighted sum", "max"))]
    checks += [C.update_bags(ALL, F.ROWWISE_ADAGRAD, "none")]
    checks += [C.rounding(format, 48, 20_000) for format in (F.BF16, F.FP8, F.INT8, F.INT4)]
    checks += [C.cache(format, 48, policy) for format in (F.FP8, F.INT8, F.INT4, F.INT2) for policy in range(len(F.POLICIES))]
    with_int8 = ((F.INT4, 48, F.LFU), (F.INT2, 100, F.LRU), (F.INT4, 3, F.ADAPTIVE))
    checks += [C.cache(*case, 6) for case in with_int8]
    return [*checks, map_ids(5000), ngram_rows(5000), *_bad_input(ONE_KIND)]


def _gpu_checks() -> list[Check]:
    """Checks of the Triton kernels: about 55 compilations of a second or two."""
    checks = [C.quantize(format, (_dim(format),), (format != F.FP32,)) for format in FORMATS]
    checks += [C.quantize(format, (_dim(format),), (False,)) for format in (F.FP16, F.FP8, F.INT8, F.INT4)]
    checks += [C.dequantize(format, (_dim(format),)) for format in FORMATS]
    checks += [C.gather(MIXED, name) for name in C.LOOKUPS]
    checks += [C.weight_gradient(MIXED)]
    checks += [C.sums(ONE_KIND, name) for name in ("sum", "max")]
    checks += [C.repeatable(ONE_KIND, "sum")]
    checks += [C.update_rows(ONE_KIND, F.SGD, True), C.update_rows(ONE_KIND, F.ADAM, True)]
    checks += [C.update_rows(_one(F.BF16, 100), F.ADAGRAD, True), C.update_rows(_one(F.INT4, 100), F.ROWWISE_ADAGRAD, True)]
    checks += [C.update_bags(ONE_KIND, F.SGD, "sum"), C.update_bags(_one(F.INT4, 100), F.ROWWISE_ADAGRAD, "sum")]
    checks += [C.rounding(format, _dim(format), 20_000) for format in (F.BF16, F.INT8)]
    checks += [C.cache(F.INT8, 48, F.LFU), C.cache(F.INT4, 100, F.ADAPTIVE), C.cache(F.INT8, 48, F.LRU)]
    checks += [C.cache(F.INT4, 48, F.LFU, 6), C.cache(F.INT2, 100, F.ADAPTIVE, 6)]
    return [*checks, map_ids(5000), ngram_rows(5000), *_bad_input(ONE_KIND)]


def _few_checks() -> list[Check]:
    """Checks of the Triton interpreter: about a minute."""
    few = (F.FP32, F.BF16, F.FP8, F.INT8, F.INT4, F.INT2_AFFINE)
    checks = [C.quantize(format, (3, 48), (False, True)) for format in few]
    checks += [C.dequantize(format, (3, 48)) for format in few]
    checks += [C.gather(TINY, name) for name in C.LOOKUPS]
    checks += [C.weight_gradient(TINY)]
    checks += [C.sums(TINY_ONE, name) for name in ("sum", "max")]
    checks += [C.repeatable(TINY_ONE, "sum")]
    checks += [C.update_rows(TINY_ONE, optimizer, True) for optimizer in range(4)]
    checks += [C.update_bags(TINY_ONE, F.ROWWISE_ADAGRAD, "mean")]
    checks += [C.rounding(F.INT8, 48, 300), C.cache(F.INT4, 5, F.LFU), C.cache(F.INT2, 5, F.LFU, 6)]
    return [*checks, map_ids(20), ngram_rows(20), *_bad_input(TINY_ONE)]


def _dim(format: int) -> int:
    return DIMS[format % len(DIMS)]


def _one(format: int, dim: int) -> VerifyCase:
    return VerifyCase("one table", (CaseTable(63, dim, format),), (0,), batch=63, hot=True)


def _bad_input(case: VerifyCase) -> list[Check]:
    return [C.bad_id(case), C.bad_gradient(case)]
