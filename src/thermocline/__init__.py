"""Thermocline: embedding tables that do not fit, with heat deciding each row's precision, copies and place.

Names are imported on first use, so that `import thermocline` (and with it the command line) does not pay for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from thermocline.checkpoint import load, load_into, resume, save, save_async
    from thermocline.distributed.replanning.replan import replan
    from thermocline.distributed.shard import shard_
    from thermocline.errors import BadGradient, BadInput, BadPublish, FormatError, IdOutOfRange, ThermoclineError
    from thermocline.ids.idmap import IdMap
    from thermocline.nn.collection import EmbeddingCollection, Table, unify
    from thermocline.nn.config import RowConfig
    from thermocline.nn.convert import convert_, revert_
    from thermocline.nn.embedding import Embedding, EmbeddingBag
    from thermocline.nn.rows_module import fused_optimizer
    from thermocline.plan.make import make_plan
    from thermocline.plan.model import Plan
    from thermocline.publishing.publisher import Publisher, publish
    from thermocline.rows.arena import Arena
    from thermocline.rows.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad
    from thermocline.rows.precision import PRECISIONS, bytes_per_row
    from thermocline.rows.table_spec import TableSpec
    from thermocline.rows.training import Trainer, lookup, synchronize

__version__ = "0.1.0"
"""The version of this package."""

__all__ = [
    "PRECISIONS", "SGD", "Adagrad", "Adam", "Arena", "BadGradient", "BadInput", "BadPublish", "Embedding", "EmbeddingBag",
    "EmbeddingCollection", "FormatError", "IdMap", "IdOutOfRange", "Plan", "Publisher", "RowConfig", "RowwiseAdagrad",
    "Table", "TableSpec", "ThermoclineError", "Trainer", "__version__", "bytes_per_row", "convert_", "fused_optimizer",
    "load", "load_into", "lookup", "make_plan", "publish", "replan", "resume", "revert_", "save", "save_async", "shard_",
    "synchronize", "unify",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
