"""The tables of a model, found without a byte of them being made: what an estimate or a plan is for.

A model is built on torch's meta device, where tensors have shapes and no values, so that a model of terabytes is looked at on a
laptop. Found are torch's own `nn.Embedding` and `nn.EmbeddingBag`, also inside other modules, and the modules of this package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import formats as F
from ..errors import BadInput
from .base import RowsModule
from .tiers import Tiers

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Found = dict[str, Any]  # fields of a table, named as in a tables file


def load_model(path: str | Path, name: str) -> nn.Module:
    """The model that `name` in a Python file is or makes: a module, or a class or function to be called without arguments."""
    if not Path(path).exists():
        raise BadInput(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{str(path)!r} is not a Python file; name one, as in model.py:Model")
    source = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)  # as if the file were run
    try:
        with torch.device("meta"):
            spec.loader.exec_module(source)
            if not hasattr(source, name):
                known = [key for key, value in vars(source).items() if isinstance(value, (type, nn.Module)) and key[0] != "_"]
                raise BadInput(f"{path} has no {name!r}; it has {', '.join(known) or 'no classes'}")
            made = getattr(source, name)
            model = made if isinstance(made, nn.Module) else made()
    except TypeError as error:
        raise BadInput(f"{name}() of {path}: {error}; name a function of that file which needs no arguments") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise BadInput(f"{name} of {path} makes a {type(model).__name__}; it must be or make an nn.Module")
    return model


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
    return {F.OPTIMIZERS[m.storage.optimizer.code] for m in model.modules() if isinstance(m, RowsModule)}


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
