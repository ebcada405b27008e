"""The cross-checks of `thermocline verify`: they pass here, and they notice a broken kernel."""

from __future__ import annotations

import pytest
import torch

from support import has
from thermocline import BadInput
from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels.gather import cpu as gather
from thermocline.kernels.ids import cpu as ids
from thermocline.kernels.quantize import cpu as quantize
from thermocline.kernels.sum_gradients import cpu as sum_gradients
from thermocline.kernels.update import cpu as update
from thermocline.kernels.verify import checks
from thermocline.kernels.verify import run as verify
from thermocline.kernels.verify.checks import close_to, same_bits
from thermocline.kernels.verify.id_maps import map_ids, ngram_rows

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # NumPy's, in the interpreter
]

KEYS = ["kernel", "case", "device", "implementation", "compared_with", "result", "detail"]
ONE = verify._one(F.INT8, 48)
FEW = [
    checks.quantize(F.INT8, (48,), (False,)),
    checks.dequantize(F.INT4, (3,)),
    checks.gather(ONE, "sum"),
    checks.gather(ONE, "max"),
    checks.weight_gradient(ONE),
    checks.sums(ONE, "sum"),
    checks.repeatable(ONE, "sum"),
    checks.update_rows(ONE, F.SGD, True),
    checks.update_bags(ONE, F.ROWWISE_ADAGRAD, "sum"),
    checks.rounding(F.INT8, 48, 1000),
    checks.cache(F.INT8, 5, F.LFU),
    map_ids(7),
    ngram_rows(7),
    *verify._bad_input(ONE),
]
KERNELS = {kernel for kernel, *_ in FEW}


def silent(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture
def failed(monkeypatch):
    """The kernels that a short run on the CPU reports as failed."""
    monkeypatch.setattr(verify, "_all_checks", lambda: FEW)

    def run() -> set[str]:
        lines = verify.run("cpu", silent)
        assert len(lines) == len(FEW), "a failing check must not stop the others"
        assert {line["kernel"] for line in lines} == KERNELS
        assert all(line["detail"] for line in lines if line["result"] == "FAILED")
        return {line["kernel"] for line in lines if line["result"] == "FAILED"}

    return run


def test_every_implementation_of_this_machine_passes_and_progress_is_told():
    told = []
    lines = verify.run(None, lambda done, total, what: told.append((done, total)))
    assert [list(line) for line in lines] == [KEYS] * len(lines)
    assert [line for line in lines if line["result"] == "FAILED"] == []
    assert {line["implementation"] for line in lines} >= {"Numba"}
    ran = sum(line["result"] != "skipped" for line in lines)
    assert told == [(number, ran) for number in range(ran + 1)]
    covered = {line["kernel"] for line in lines if line["implementation"] == "Numba"}
    assert covered == KERNELS
    triton = {line["kernel"] for line in lines if line["implementation"].startswith("Triton")}
    assert triton in (KERNELS, {"all"})


def test_nothing_fails_before_anything_is_broken(failed):
    assert failed() == set()


def off_by_one_code(values_ND, *args, original=quantize.quantize_rows):
    codes_NB, meta_NW = original(values_ND, *args)
    codes_NB[-1, -1] ^= 1
    return codes_NB, meta_NW


def one_ulp(codes_NB, *args, original=quantize.dequantize_rows):
    values_ND = original(codes_NB, *args)
    values_ND.view(torch.int32)[0, 0] += 1
    return values_ND


def always_nearest(values_ND, format, clock, rows_N, original=quantize.quantize_rows):
    return original(values_ND, format, None, None)


def biased(values_ND, format, clock, rows_N, original=quantize.quantize_rows):
    return original(values_ND if clock is None else values_ND + 0.002, format, clock, rows_N)


def a_little_more(*args, original=gather.gather_pool):
    out, winners = original(*args)
    return out + 1e-3, winners


def nan_in_a_corner(*args, original=gather.gather_pool):
    out, winners = original(*args)
    out[-1, -1] = float("nan")
    return out, winners


def silent_row_zero(rows, call, original=gather.gather_pool):
    try:
        return original(rows, call)
    except IdOutOfRange:
        return original(rows, call._replace(ids_N=torch.zeros_like(call.ids_N)))


def half_the_gradient(*args, original=gather.weight_gradient):
    return original(*args) * 0.5


def row_forgotten(*args, original=sum_gradients.sum_row_gradients):
    rows_U, grads_UW = original(*args)
    return rows_U[:-1], grads_UW[:-1]


def never_twice_the_same(*args, original=sum_gradients.sum_row_gradients, calls=[0]):  # noqa: B006
    rows_U, grads_UW = original(*args)
    calls[0] += 1
    return rows_U, grads_UW * (1 + calls[0] * 2.0**-23)


def clock_stands_still(rows, optimizer, *args, original=update.update_rows):
    original(rows, optimizer, *args)
    optimizer.clock[F.STEP] -= 1


def next_row(*args, original=ids.map_ids):
    rows_N = original(*args)
    rows_N[-1] += 1
    return rows_N


def nothing(*args):
    return None


def broken(*args):
    raise RuntimeError("segmentation fault, or nearly")


@pytest.mark.parametrize(
    "module, name, fake, expected",
    [
        (quantize, "quantize_rows", off_by_one_code, {"quantize"}),
        (quantize, "quantize_rows", always_nearest, {"rounding"}),
        (quantize, "quantize_rows", biased, {"rounding"}),
        (quantize, "dequantize_rows", one_ulp, {"dequantize"}),
        (gather, "gather_pool", a_little_more, {"gather"}),
        (gather, "gather_pool", nan_in_a_corner, {"gather"}),
        (gather, "gather_pool", silent_row_zero, {"bad input"}),
        (gather, "weight_gradient", half_the_gradient, {"weight gradient"}),
        (sum_gradients, "sum_row_gradients", row_forgotten, {"sum gradients", "update bags"}),
        (sum_gradients, "sum_row_gradients", never_twice_the_same, {"sum gradients", "update bags"}),
        (update, "update_rows", clock_stands_still, {"update rows", "update bags", "cache", "bad input"}),
        (update, "update_rows", nothing, {"update rows", "update bags", "cache", "bad input"}),
        (update, "update_bags", nothing, {"update bags"}),
        (ids, "map_ids", next_row, {"map ids"}),
        (gather, "weight_gradient", broken, {"weight gradient"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_kernel_is_reported_and_no_other(failed, monkeypatch, module, name, fake, expected):
    monkeypatch.setattr(module, name, fake)
    reported = failed()
    # A fake that breaks the clock breaks the check of bad gradients only where it returns at all.
    assert reported == expected or (fake is clock_stands_still and reported == expected - {"bad input"})


def test_a_kernel_that_raises_is_reported_with_its_error(failed, monkeypatch):
    monkeypatch.setattr(gather, "weight_gradient", broken)
    failed()
    (line,) = [line for line in verify.run("cpu", silent) if line["result"] == "FAILED"]
    assert line["detail"] == "RuntimeError: segmentation fault, or nearly"


def test_triton_is_skipped_without_gpu_and_interpreter(failed, monkeypatch):
    monkeypatch.setattr(verify, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    last = verify.run(None, silent)[-1]
    assert (last["implementation"], last["result"]) == ("Triton", "skipped")
    assert "TRITON_INTERPRET=1" in last["detail"]


def test_cuda_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, check=has(parameter="device")):
        verify.run("cuda", silent)


def test_differences_are_counted_and_the_first_is_shown():
    ours, theirs = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[1.0, 2.0], [-0.0, 5.0]])
    assert same_bits(("x", ours, ours.clone())).result == "equal"
    assert same_bits(("x", ours, theirs)) == ("FAILED", "x: 2 of 4 differ, first at (1, 0): 0 instead of -0")
    assert same_bits(("x", ours, ours[:1])).detail == "x: (2, 2) torch.float32 instead of (1, 2) torch.float32"
    assert close_to("x", ours, theirs).result == "FAILED"
    assert close_to("x", ours, ours + 1e-6).result == "close"
    assert close_to("x", ours, ours.half()).result == "FAILED"
    assert close_to("x", torch.full((2,), float("nan")), torch.zeros(2)).result == "FAILED"
