"""Find the tables of a model without allocating them, for estimates and plans.

The model is built on torch's meta device. Its tables are those of `nn.Embedding`, `nn.EmbeddingBag` and this package's modules.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.nn.rows_module import RowsModule

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Found = dict[str, Any]  # fields of a table, named as in a tables file


def load_model(path: str | Path, name: str) -> nn.Module:
    """The model called `name` in a Python file: a module, or a class or function that makes one without arguments."""
    try:
        with torch.device("meta"):
            return _make(_run(path), path, name)
    except BadInput:
        raise
    except Exception as error:  # of the user's own code
        raise BadInput(
            f"{name} of {path} failed on the meta device: {type(error).__name__}: {error}; name a function that makes the "
            "model without reading weights or data",
            parameter="model", value=name, path=path,
        ) from error  # fmt: skip


def _run(path: str | Path) -> dict[str, Any]:
    """The names of the file, which may import the files beside it."""
    if not Path(path).exists():
        raise BadInput(f"there is no file {str(path)!r}", parameter="path", path=path)
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(str(path), run_name=f"_model_of_{Path(path).stem}")
    finally:
        sys.path.remove(folder)


def _make(source: dict[str, Any], path: str | Path, name: str) -> nn.Module:
    made = source.get(name)
    if made is None:
        known = [key for key, value in source.items() if isinstance(value, (type, nn.Module)) and key[0] != "_"]
        message = f"{path} has no {name!r}; it has {', '.join(known) or 'no classes'}"
        raise BadInput(message, parameter="model", value=name, available=known)
    if callable(made) and not isinstance(made, nn.Module):
        parameters = inspect.signature(made).parameters.values()
        if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]:
            message = f"{name} of {path} needs {', '.join(needed)}; name a function that makes the model without arguments"
            raise BadInput(message, parameter="model", value=name, needed=needed)
        made = made()
    if not isinstance(made, nn.Module):
        message = f"{name} of {path} is a {type(made).__name__}, not an nn.Module"
        raise BadInput(message, parameter="model", value=type(made).__name__)
    return made


def find_tables(model: nn.Module) -> list[Found]:
    """Every table of a model, once, in the order of its modules."""
    found: list[Found] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, RowsModule):
            found += _tables_of(name, module)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            stored = {"precision": _DTYPES[dtype]} if (dtype := module.weight.dtype) in _DTYPES else {}
            found.append({"name": name or type(module).__name__} | _shape(module, *module.weight.shape) | stored)
    return found


def optimizers(model: nn.Module) -> set[str]:
    """The row optimizers of a model's thermocline modules."""
    return {F.OPTIMIZERS[m.rows.optimizer.code] for m in model.modules() if isinstance(m, RowsModule)}


def _shape(module: nn.Module, rows: int, dim: int) -> Found:
    return {"rows": rows, "dim": dim, "pooling": getattr(module, "mode", "none")}


def _tables_of(name: str, module: RowsModule) -> Iterator[Found]:
    tables = getattr(module, "tables", None)  # of a collection
    for at, (spec, tiers) in enumerate(zip(module.arena.tables, module.tiers, strict=True)):
        own: Found = {"name": name or type(module).__name__}
        if tables is not None:
            own = {"name": f"{name}.{spec.name}".lstrip("."), "features": list(tables[at].features)}
        stored = {"precision": tiers.precision if tiers.near else tiers.base}
        cache = {"cache": tiers.full} if tiers.full and not tiers.near else {}
        yield own | _shape(module, spec.rows, spec.dim) | stored | cache
