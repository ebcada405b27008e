"""torch.export of modules for inference, and the refusals of TorchScript and torch.func."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import thermocline as tc
from support import has

TABLES = [tc.Table("a", 31, 4), tc.Table("b", 31, 2)]


def flat(batch: int, count: int) -> tuple[Any, ...]:
    return torch.randint(0, 31, (count,)), torch.linspace(0, count, batch + 1).long()[:-1]


def square(batch: int, count: int) -> tuple[Any, ...]:
    return (torch.randint(0, 31, (batch, count)),)


def features(batch: int, count: int) -> tuple[Any, ...]:
    return ({name: (torch.randint(0, 31, (count,)), torch.linspace(0, count, batch + 1).long()) for name in "ab"},)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Any, ...]]]] = {
    "bags": (lambda: tc.EmbeddingBag(31, 6, mode="sum"), flat),
    "fp32 bags": (lambda: tc.EmbeddingBag(31, 6, mode="max", rows=tc.RowConfig("fp32")), square),
    "padded bags": (lambda: tc.EmbeddingBag(31, 6, padding_idx=3), square),
    "padded ids": (lambda: tc.Embedding(31, 6, padding_idx=3), square),
    "hashed ids": (lambda: tc.Embedding(31, 6, ids=tc.IdMap.hashed(31)), square),
    "features": (lambda: tc.EmbeddingCollection(TABLES), features),
    "unpooled features": (lambda: tc.EmbeddingCollection(TABLES, mode="none"), features),
}


def leaves(out: Any) -> list[Tensor]:
    return pytree.tree_leaves(out)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_module_looks_up_batches_of_other_sizes(kind, strict):
    torch.manual_seed(0)
    make, inputs = KINDS[kind]
    module, args = make(), inputs(13, 57)
    module(*args)
    sizes = pytree.tree_map(lambda tensor: dict.fromkeys(range(tensor.dim()), Dim.AUTO), args)
    exported = export(module, args, dynamic_shapes=sizes, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for run in (exported.module(), torch.export.load(file).module()):
        for other in [inputs(13, 57), inputs(5, 21)]:
            out, wanted = run(*other), module(*other)
            assert type(out) is type(wanted)
            assert all(torch.equal(a, b) for a, b in zip(leaves(out), leaves(wanted), strict=True))


def test_an_exported_module_does_not_train():
    bag = tc.EmbeddingBag(31, 6, mode="sum")
    ids = torch.tensor([[1, 2], [3, 4]])
    bag(ids).sum().backward()
    exported = export(bag, (ids,))
    with pytest.raises(RuntimeError, match="does not require grad"):
        exported.module()(ids).sum().backward()
    assert bag.trainer.clock.tolist() == [0, 1]
    bag(ids).sum().backward()  # the module itself trains on
    assert bag.trainer.clock.tolist() == [0, 2]


def test_a_bad_id_is_named_by_an_exported_collection():
    module = tc.EmbeddingCollection(TABLES)
    exported = export(module, (torch.zeros(3, 2, dtype=torch.int64),)).module()
    with pytest.raises(tc.IdOutOfRange, check=has(table="b", id=31)):
        exported(torch.tensor([[1, 2], [3, 31], [0, 0]]))


@pytest.mark.parametrize("mode", ["sum", "none"])
def test_outputs_of_a_collection_are_nodes_of_a_pytree(mode):
    out = tc.EmbeddingCollection(TABLES, mode=mode)(features(5, 21)[0])
    doubled = pytree.tree_map_only(torch.Tensor, lambda t: 2 * t if t.is_floating_point() else t, out)
    assert type(doubled) is type(out)
    assert doubled.keys() == out.keys()
    assert all(torch.equal(doubled[name], 2 * out[name]) for name in out)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(out)]
    assert paths == [".values"] if mode == "sum" else [".values", ".offsets"]


MODULES = {
    "EmbeddingBag": lambda: tc.EmbeddingBag(31, 6, padding_idx=3),
    "Embedding": lambda: tc.Embedding(31, 6),
    "EmbeddingCollection": lambda: tc.EmbeddingCollection(TABLES),
}
IDS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused(kind):
    module = MODULES[kind]()
    model = nn.Sequential(module) if kind == "Embedding" else module
    with pytest.raises(tc.BadInput, check=has(parameter="module", tool="torch.jit.trace")):
        torch.jit.trace(model, (IDS,))
    with pytest.raises(tc.BadInput, check=has(parameter="module", tool="torch.jit.script")):
        torch.jit.script(model)


@pytest.mark.parametrize("kind", MODULES)
def test_transforms_of_torch_func_are_refused(kind):
    module = MODULES[kind]()

    def total(scale: Tensor) -> Tensor:
        return scale * leaves(module(IDS))[0].sum()

    one, refused = torch.ones(()), has(parameter="module", tool="torch.func")
    transforms = [
        lambda: torch.vmap(lambda ids: leaves(module(ids))[0])(IDS.repeat(3, 1, 1)),
        lambda: torch.func.grad(total)(one),
        lambda: torch.func.jvp(total, (one,), (one,)),
        lambda: torch.func.jacrev(total)(one),
    ]
    for transform in transforms:
        with pytest.raises(tc.BadInput, check=refused):
            transform()
    torch.func.functional_call(module, dict(module.named_parameters()), (IDS,))  # is no transform


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_an_aotinductor_package_runs_in_another_process(tmp_path: Path):
    model = nn.ModuleDict({"tables": tc.EmbeddingCollection(TABLES), "top": nn.Linear(6, 1)})
    model.forward = lambda ids: model["top"](model["tables"](ids).values())
    exported = export(model, (torch.zeros(5, 2, dtype=torch.int64),), dynamic_shapes=({0: Dim("batch", max=4096)},))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    ids = torch.randint(0, 31, (7, 2))
    torch.save((ids, model(ids).detach()), tmp_path / "wanted.pt")
    code = (
        "import torch, thermocline; thermocline.lookup; ids, wanted = torch.load('wanted.pt'); "
        "torch.testing.assert_close(torch._inductor.aoti_load_package('model.pt2')(ids), wanted)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
