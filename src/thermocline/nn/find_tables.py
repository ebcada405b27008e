"""The tables of a model, found without a byte of them being made: what an estimate or a plan is for.

A model is built on torch's meta device, where tensors have shapes and no values, so that a model of terabytes is looked at on a
laptop. Found are torch's own `nn.Embedding` and `nn.EmbeddingBag`, also inside other modules, and the modules of this package.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from thermocline import formats as F
from thermocline.errors import BadInput

from .precision_tiers import Tiers
from .rows_module import RowsModule

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Found = dict[str, Any]  # fields of a table, named as in a tables file


def load_model(path: str | Path, name: str) -> nn.Module:
    """The model that `name` in a Python file is or makes: a module, or a class or function to be called without arguments."""
    try:
        with torch.device("meta"):
            return _make(_run(path), path, name)
    except BadInput:
        raise
    except Exception as error:  # of the user's own code
        raise BadInput(
            f"{name} of {path} could not be made on the meta device: {type(error).__name__}: {error}; name a function of that "
            "file that makes the model without reading weights or data"
        ) from error


def _run(path: str | Path) -> ModuleType:
    """The file as a module, run as if it were run by itself: with the files beside it at hand."""
    if not Path(path).exists():
        raise BadInput(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"_model_of_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None, "only called with names that end in .py"
    source = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    sys.modules[spec.name] = source  # where dataclasses look for the names in their annotations
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(source)
    finally:
        sys.path.remove(folder)
    return source


def _make(source: ModuleType, path: str | Path, name: str) -> nn.Module:
    if not hasattr(source, name):
        known = [key for key, value in vars(source).items() if isinstance(value, (type, nn.Module)) and key[0] != "_"]
        raise BadInput(f"{path} has no {name!r}; it has {', '.join(known) or 'no classes'}")
    made = getattr(source, name)
    if callable(made) and not isinstance(made, nn.Module):
        needed = [
            p.name for p in inspect.signature(made).parameters.values() if p.default is p.empty and p.kind not in _VARIADIC
        ]
        if needed:
            raise BadInput(
                f"{name} of {path} needs {', '.join(needed)}; name a function of that file that makes the model without any"
            )
        made = made()
    if not isinstance(made, nn.Module):
        raise BadInput(f"{name} of {path} makes a {type(made).__name__}; it must be or make an nn.Module")
    return made


def find_tables(model: nn.Module) -> list[Found]:
    """Every table of a model, once, in the order of its modules."""
    found: list[Found] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, RowsModule):
            found += _ours(name, module)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            pooling = module.mode if isinstance(module, nn.EmbeddingBag) else "none"
            rows, dim = module.weight.shape
            own = {"name": name or type(module).__name__, "rows": rows, "dim": dim, "pooling": pooling}
            found.append(own | ({"precision": _DTYPES[dtype]} if (dtype := module.weight.dtype) in _DTYPES else {}))
    return found


def optimizers(model: nn.Module) -> set[str]:
    """The optimizers of the model's rows, as far as its modules say."""
    return {F.OPTIMIZERS[m.rows.optimizer.code] for m in model.modules() if isinstance(m, RowsModule)}


def _ours(name: str, module: RowsModule) -> Iterator[Found]:
    tables = getattr(module, "tables", None)  # of a collection
    for at, (spec, tiers) in enumerate(zip(module.arena.tables, module.tiers, strict=True)):
        own: Found = {"name": name or type(module).__name__}
        if tables is not None:
            own = {"name": f"{name}.{spec.name}".lstrip("."), "features": list(tables[at].features)}
        size = {"rows": spec.rows, "dim": spec.dim, "pooling": getattr(module, "mode", "none")}
        yield own | size | _stored(tiers)


def _stored(tiers: Tiers) -> Found:
    if tiers.near:
        return {"precision": tiers.precision}
    return {"precision": tiers.base} | ({"cache": tiers.full} if tiers.full else {})
