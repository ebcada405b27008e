"""Set-up for every test: without a card, Triton kernels run in Triton's interpreter; hypothesis draws the same cases always."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

# Read when torch is imported. By default idle OpenMP threads spin, and on a busy machine they spin in the way of the one
# thread that works: 43 s instead of 7 for the tests of the definitions, on two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # xdist sets it in its workers, and tables would be printed in parts

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so before any test is


def _hasten(interpreter: Any) -> None:
    """Leave out two thirds of the work of Triton's interpreter, whose results nothing reads.

    It patches triton.language in every call of a function, where once a launch is enough, and computes whether sums overflow
    also where it does not check that (`debug` is off).
    """
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch, language = interpreter._patch_lang, interpreter.tl

    @cache
    def imported(fn: Callable[..., Any]) -> list[Any]:
        return [each for each in (language, language.core) if any(each is value for value in fn.__globals__.values())]

    def patch_once(fn: Callable[..., Any]) -> Any:
        if any(language.core.is_builtin(each.load) for each in imported(fn)):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _hasten(interpreter)

# Cases that are drawn slowly on a busy machine are no reason to fail.
slowly = [HealthCheck.too_slow]
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25, suppress_health_check=slowly)
settings.load_profile("fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `exhaustive` out, unless `-m` names the mark. Files with slow tests begin: no worker ends late."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
