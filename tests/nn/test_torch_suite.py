"""PyTorch's own tests of `nn.Embedding` and `nn.EmbeddingBag` pass with Thermocline's modules, but for listed exceptions.

The file is PyTorch's `test/nn/test_embedding.py`, which is not part of this repository: `THERMOCLINE_ZOO` names the folder that
has it as `pytorch/test_embedding.py`. `torch_suite.py` adapts and runs it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
ZOO = Path(os.environ.get("THERMOCLINE_ZOO", HERE.parents[2] / "shared" / "zoo"))
FILE = ZOO / "pytorch" / "test_embedding.py"
PAGE = HERE.parents[1] / "docs" / "torch_tests.md"

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"PyTorch's tests are missing: {FILE}")


class Group(NamedTuple):
    """Tests that do not pass, for one reason."""

    verdict: str  # "failed", "skipped" or "torch only"
    tests: tuple[str, ...]  # patterns of names
    reason: str


EXCEPTIONS = [
    Group(
        "failed",
        ("test_embedding_max_norm", "test_embedding_from_pretrained_options", "test_embeddingbag_from_pretrained_options"),
        "`max_norm` is refused: it would rewrite rows in forward",
    ),
    Group("failed", ("test_embedding_from_pretrained_*int*",), "rows of integers are refused: the output is a float"),
    Group("failed", ("test_embedding_sparse_empty_tensor",), "a table has at least one row and one column"),
    Group(
        "failed",
        ("test_embeddingbag_include_last_offset",),
        "a last offset that is not the number of ids raises; torch ignores its value",
    ),
    Group(
        "failed",
        ("test_embedding_bag_2D_padding_idx_cpu_float64",),
        "float64 is an output type; rows and sums are fp32, and the test compares with a tolerance of 1e-7",
    ),
    Group("failed", ("test_embedding_dense_grad_cpu",), "`gradcheck` writes to `weight`, which is a copy of the rows"),
    Group(
        "failed",
        ("test_embedding_padding_idx_cpu_float32",),
        "`torch.autograd.grad` with respect to `parameters()`: rows are no parameter",
    ),
    Group(
        "skipped",
        ("test_embedding_max_norm_unsorted_repeating_indices", "test_embedding_max_norm_device_cpu_*"),
        "`max_norm` on a GPU",
    ),
    Group(
        "torch only",
        (
            "test_embedding_bag_dimension_errors_cpu", "test_embedding_scalar_weight_error_cpu",
            "test_embedding_max_norm_backward_cpu_float32", "test_embedding_max_norm_fwd_AD_cpu_float32",
        ),
        "functions of torch without a module",
    ),
]  # fmt: skip


def functions() -> list[str]:
    """Names of the test functions; each has one or more tests, for types and modes."""
    if not FILE.exists():
        return []
    found = (node for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.FunctionDef))
    return sorted({node.name for node in found if node.name.startswith("test_") and "self" in {a.arg for a in node.args.args}})


FUNCTIONS = functions()


def function_of(test: str) -> str:
    return max((name for name in FUNCTIONS if test.startswith(name)), key=len)


def group_of(test: str) -> Group | None:
    return next((group for group in EXCEPTIONS if any(fnmatchcase(test, pattern) for pattern in group.tests)), None)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[str, str]]:
    """Verdict of each test, and why."""
    paths = os.pathsep.join(path for path in (str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH")) if path)
    command = [sys.executable, str(HERE / "torch_suite.py"), str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: (verdict, why) for name, (verdict, why) in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_test(function: str, verdicts: dict[str, tuple[str, str]]) -> None:
    mine = {name: verdict for name, verdict in verdicts.items() if function_of(name) == function}
    assert mine
    for name, (verdict, why) in mine.items():
        group = group_of(name)
        if group is None:
            assert verdict == "passed", f"{name} {verdict}:\n{why[-3000:]}"
        else:
            assert verdict == group.verdict, f"{name} {verdict}, but is an exception: {group.reason}"


def test_every_exception_names_a_test(verdicts: dict[str, tuple[str, str]]) -> None:
    for pattern in (pattern for group in EXCEPTIONS for pattern in group.tests):
        assert any(fnmatchcase(name, pattern) for name in verdicts), pattern


def test_the_page_has_the_counts_and_the_exceptions(verdicts: dict[str, tuple[str, str]]) -> None:
    counts = [sum(group_of(name) is group for name in verdicts) for group in EXCEPTIONS]
    counted = [f"| {count} | {verdict} | {reason} |" for count, (verdict, _, reason) in zip(counts, EXCEPTIONS, strict=True)]
    passed = sum(verdict == "passed" for verdict, _ in verdicts.values())
    page = PAGE.read_text()
    assert f"**{passed} of {len(verdicts)}**" in page
    assert [line for line in page.splitlines() if line in counted] == counted
