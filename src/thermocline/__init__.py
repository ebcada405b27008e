"""Thermocline: embedding tables that do not fit, with heat deciding each row's precision, copies and place.

Public names are loaded when first used, so that `import thermocline` (and with it the command line) does not pay for
torch. To add one: a line in `PUBLIC`, its name in `__all__`, and the same import under `TYPE_CHECKING`, where editors
and type checkers look. A test keeps the three equal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.checkpoint import load, load_into, resume, save, save_async
    from thermocline.distributed.replanning.replan import replan
    from thermocline.distributed.shard import shard_
    from thermocline.errors import BadGradient, BadInput, FormatError, IdOutOfRange, ThermoclineError
    from thermocline.ids.idmap import IdMap
    from thermocline.nn.collection import EmbeddingCollection, Table, unify
    from thermocline.nn.config import RowConfig
    from thermocline.nn.convert import convert_
    from thermocline.nn.embedding import Embedding, EmbeddingBag
    from thermocline.nn.rows_module import fused_optimizer
    from thermocline.plan.make import make_plan
    from thermocline.plan.model import Plan
    from thermocline.rows.arena import Arena
    from thermocline.rows.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad
    from thermocline.rows.precision import PRECISIONS, bytes_per_row
    from thermocline.rows.table_spec import TableSpec
    from thermocline.rows.training import Trainer, lookup, synchronize

__version__ = "0.1.0"

# Public name -> the module that defines it.
PUBLIC = {
    "Adagrad": "thermocline.rows.optimizers",
    "Adam": "thermocline.rows.optimizers",
    "Arena": "thermocline.rows.arena",
    "BadGradient": "thermocline.errors",
    "BadInput": "thermocline.errors",
    "Embedding": "thermocline.nn.embedding",
    "EmbeddingBag": "thermocline.nn.embedding",
    "EmbeddingCollection": "thermocline.nn.collection",
    "FormatError": "thermocline.errors",
    "IdMap": "thermocline.ids.idmap",
    "IdOutOfRange": "thermocline.errors",
    "PRECISIONS": "thermocline.rows.precision",
    "Plan": "thermocline.plan.model",
    "RowConfig": "thermocline.nn.config",
    "RowwiseAdagrad": "thermocline.rows.optimizers",
    "SGD": "thermocline.rows.optimizers",
    "Table": "thermocline.nn.collection",
    "TableSpec": "thermocline.rows.table_spec",
    "ThermoclineError": "thermocline.errors",
    "Trainer": "thermocline.rows.training",
    "bytes_per_row": "thermocline.rows.precision",
    "convert_": "thermocline.nn.convert",
    "fused_optimizer": "thermocline.nn.rows_module",
    "load": "thermocline.checkpoint",
    "load_into": "thermocline.checkpoint",
    "lookup": "thermocline.rows.training",
    "make_plan": "thermocline.plan.make",
    "replan": "thermocline.distributed.replanning.replan",
    "resume": "thermocline.checkpoint",
    "save": "thermocline.checkpoint",
    "save_async": "thermocline.checkpoint",
    "shard_": "thermocline.distributed.shard",
    "synchronize": "thermocline.rows.training",
    "unify": "thermocline.nn.collection",
}

__all__ = [
    "PRECISIONS",
    "SGD",
    "Adagrad",
    "Adam",
    "Arena",
    "BadGradient",
    "BadInput",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FormatError",
    "IdMap",
    "IdOutOfRange",
    "Plan",
    "RowConfig",
    "RowwiseAdagrad",
    "Table",
    "TableSpec",
    "ThermoclineError",
    "Trainer",
    "__version__",
    "bytes_per_row",
    "convert_",
    "fused_optimizer",
    "load",
    "load_into",
    "lookup",
    "make_plan",
    "replan",
    "resume",
    "save",
    "save_async",
    "shard_",
    "synchronize",
    "unify",
]


if not TYPE_CHECKING:  # a type checker would take any misspelt name for an attribute

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f"module 'thermocline' has no attribute '{name}'")
        value = getattr(importlib.import_module(PUBLIC[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
