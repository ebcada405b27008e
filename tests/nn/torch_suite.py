"""Runs PyTorch's own tests of `nn.Embedding` and `nn.EmbeddingBag` against Thermocline's modules, on a CPU.

    python torch_suite.py test_embedding.py   # prints {test: [verdict, traceback]} as JSON

`EDITS` lists all changes of the file; an edit that no longer applies is an error. The modules keep fp32 rows, and
`update="step"` keeps their gradients, which torch's tests read as `weight.grad`. A test that uses no module of ours ends with
the verdict "torch only", so that it is not counted.

A process of its own runs them: `torch.testing._internal` freezes the flags of `torch.backends` and imports `expecttest`.
"""

from __future__ import annotations

import json
import re
import sys
import types
import unittest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import thermocline


class Edit(NamedTuple):
    """A change of the file: a regular expression, its replacement, how often it applies, and why it is made."""

    pattern: str
    replacement: str
    count: int
    reason: str


GRADIENT = r"(\w+)\.weight\.grad"
EDITS = [
    Edit(r"\b(?:torch\.)?nn\.(Embedding|EmbeddingBag)\b", r"\1", 42, "the modules under test are Thermocline's"),
    Edit(
        r"(?:torch\.nn\.functional|(?<=contig = )F)\.embedding_bag\((?!y, x, z)", "embedding_bag(", 6,
        "calls of the function, except where its result is compared with a module's, call a module made with the given rows",
    ),
    Edit(
        rf"assertEqual\({GRADIENT}\._indices\(\), (\w+)\)\s+self\.assertEqual\({GRADIENT}\._values\(\), (\w+)\)",
        r"assertEqual(gradient_of(\1).to_dense(), torch.sparse_coo_tensor(\2, \4, \1.weight.shape).to_dense())", 3,
        "sparse gradients are compared as dense ones: torch's has an entry for each lookup, ours one for each row",
    ),
    Edit(r"(grad(?:_check)?) = (\w+)\.grad\n", r"\1 = \2.grad.to_dense()\n", 2, "the same; ours has none for padding"),
    Edit(GRADIENT, r"gradient_of(\1)", 19, "the module, not its `weight`, keeps gradients of rows"),
    Edit(r"(\w+)\.weight\.data\.copy_\(", r"set_all_rows(\1, ", 5, "`weight` is a copy; `set_rows` changes rows"),
    Edit(r"(\w+)\.weight\.data = (.+)", r"set_all_rows(\1, \2)", 1, "the same"),
    Edit(r"(\w+)\.weight = torch\.nn\.Parameter\((.+)\)", r"set_all_rows(\1, \2)", 1, "the same"),
    Edit(r"(\w+)\.weight\[2\] = (\w+)", r"\1.set_rows(torch.tensor([2]), \2[None])", 1, "the same"),
    Edit(r"weight\.detach\(\)\.requires_grad_", "weight.detach().clone().requires_grad_", 3, "the same"),
    Edit(r"for max_norm in \(None, 3\)", "for max_norm in (None,)", 1, "`max_norm` is refused"),
    Edit(
        r'with self\.assertRaisesRegex\(RuntimeError, "have the same type as"\)', "if True", 1,
        "`per_sample_weights` of every float type are accepted",
    ),
    Edit('"Expected idx >= 0 && idx < num_embeddings"', '"has 10 rows"', 1, "the error has torch's type, and its own words"),
]  # fmt: skip

made = 0  # modules of ours


def _adapted(kind: Any) -> Any:
    class Adapted(kind):  # type: ignore[misc]
        """A module with fp32 rows whose gradients can be read."""

        def __init__(self, *args: Any, sparse: bool = False, **keywords: Any) -> None:
            global made
            made += 1
            super().__init__(*args, rows=thermocline.RowConfig("fp32", update="step"), **keywords)
            self.sparse = sparse

    return Adapted


Embedding, EmbeddingBag = _adapted(thermocline.Embedding), _adapted(thermocline.EmbeddingBag)


def gradient_of(module: Any) -> Tensor | None:
    """The gradient of all rows: sparse if the module was made with `sparse=True`."""
    pending = module.placeholder.pending
    if pending is None:
        return None
    grad_RD = torch.sparse_coo_tensor(pending.rows_U[None], pending.grads_UW.to(module.dtype), module.weight.shape)
    return grad_RD if module.sparse else grad_RD.to_dense()


def set_all_rows(module: Any, values_RD: Tensor) -> None:
    module.set_rows(torch.arange(module.num_embeddings), values_RD.detach())


class _OfModule(torch.autograd.Function):
    """The output of a module as a function of its rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, module: Any, arguments: tuple[Any, ...]) -> Tensor:
        with torch.enable_grad():
            ctx.module, ctx.out = module, module(*arguments)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.out.backward(grad)
        return gradient_of(ctx.module), None, None


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None, **keywords: Any
) -> Tensor:
    """`torch.nn.functional.embedding_bag` by a module."""
    module = EmbeddingBag.from_pretrained(weight.detach(), freeze=False, **keywords)
    return _OfModule.apply(weight, module, (input, offsets, per_sample_weights))


def edited(source: str) -> str:
    for edit in EDITS:
        source, count = re.subn(edit.pattern, edit.replacement, source)
        if count != edit.count:
            raise SystemExit(f"{edit.pattern!r} was replaced {count} times, not {edit.count}: update EDITS for this file")
    return source


def load(path: Path) -> list[unittest.TestCase]:
    """The tests of the file that run on a CPU, adapted."""
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    module = sys.modules["test_embedding"] = types.ModuleType("test_embedding")
    for adapted in (Embedding, EmbeddingBag, embedding_bag, gradient_of, set_all_rows):
        module.__dict__[getattr(adapted, "__bases__", [adapted])[0].__name__] = adapted
    exec(compile(edited(path.read_text()), str(path), "exec"), module.__dict__)
    kinds = [module.__dict__[name] for name in ("TestEmbeddingNN", "TestEmbeddingNNDeviceTypeCPU")]
    return [kind(name) for kind in kinds for name in unittest.TestLoader().getTestCaseNames(kind)]


def run(test: unittest.TestCase) -> tuple[str, str]:
    """Verdict of a test, and why."""
    before, result = made, unittest.TestResult()
    test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.errors or result.failures:
        return "failed", "".join(text for _, text in [*result.errors, *result.failures])
    return "passed" if made > before else "torch only", ""


if __name__ == "__main__":
    print(json.dumps({test._testMethodName: run(test) for test in load(Path(sys.argv[1]))}))
