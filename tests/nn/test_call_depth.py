"""A lookup reaches its kernel in at most five Python calls, on CPU and GPU; `docs/pictures/forward.svg` shows them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thermocline as tc
from support import drawn_calls
from thermocline.kernels import dispatch
from thermocline.kernels.cpu.compile import Kernel
from thermocline.kernels.gather import gpu as gather_gpu
from thermocline.kernels.gpu import launch

MOST = 5
PACKAGE = Path(tc.__file__).parent
IDS = torch.tensor([[1, 2], [3, 1]])
KINDS = ["EmbeddingBag", "Embedding", "EmbeddingCollection"]


def _module(kind: str) -> Any:
    if kind == "EmbeddingCollection":
        return tc.EmbeddingCollection([tc.Table("a", 9, 4), tc.Table("b", 9, 4)])
    return getattr(tc, kind)(9, 4)


def calls_between(run: Callable[[], Any], first: Any, last: Any) -> list[str]:
    """Python calls after function `first` up to the first call of `last`, as file:function."""
    found: list[list[str]] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code is not last.__code__ or found:
            return
        names, at = [], frame.f_back
        while at is not None and at.f_code is not first.__code__:
            file = Path(at.f_code.co_filename)
            names.append(f"{file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file}:{at.f_code.co_name}")
            at = at.f_back
        if at is not None:
            found.append(names[::-1])

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert found, "the kernel was not called"
    return found[0]


@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_five_calls_from_forward_to_a_cpu_kernel(kind, trains):
    module = _module(kind).train(trains)
    names = calls_between(lambda: module(IDS), type(module).forward, Kernel.__call__)
    assert [name.rpartition("/")[2] for name in names] == [
        "rows_module.py:look_up", "ops.py:lookup", "cpu.py:gather_pool", "threads.py:run", "cpu.py:task",
    ]  # fmt: skip
    assert names == drawn_calls("forward", "cpu") and len(names) <= MOST


def test_five_calls_to_a_cpu_kernel_with_deferred_updates():
    module = tc.EmbeddingBag(9, 4, rows=tc.RowConfig(update="step"))
    assert len(calls_between(lambda: module(IDS), tc.EmbeddingBag.forward, Kernel.__call__)) <= MOST


@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_five_calls_from_forward_to_a_triton_launch(kind, trains, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter
    module = _module(kind).to(device).train(trains)
    monkeypatch.setattr(dispatch, "implementation_for", lambda *_: gather_gpu)
    names = calls_between(lambda: module(IDS.to(device)), type(module).forward, launch.launch)
    assert [name.rpartition("/")[2] for name in names] == ["rows_module.py:look_up", "ops.py:lookup", "gpu.py:gather_pool"]
    assert [*names, "kernels/gpu/launch.py:launch"] == drawn_calls("forward", "gpu") and len(names) < MOST
