"""Embedding modules backed by quantized rows, and the conversion of models to them. Names are imported on first use.

`docs/api.md` describes each name:

    Embedding, EmbeddingBag      drop-in `torch.nn` modules with one table
    EmbeddingCollection, Table   many tables in one module; `unify` makes one table of several
    NGramEmbedding, NGramHash    memory table of a language model: hashed n-grams, and their map from tokens to rows
    RowConfig                    how rows are stored and trained
    convert_, from_torchrec      modules of an existing model; `KeyedCollection` keeps TorchRec's input and output
    revert_                      torch's modules back
    PreTrainedRows               from_pretrained of transformers for models that make these modules
    fused_optimizer              the optimizer of all rows of a model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from thermocline.ids.ngram_hash import NGramHash

    from .collection import EmbeddingCollection, Table, unify
    from .config import RowConfig
    from .conversion_report import ConversionReport, ConvertedTable
    from .convert import convert_, revert_
    from .embedding import Embedding, EmbeddingBag
    from .inputs import Pooled, Unpooled
    from .interop.huggingface import PreTrainedRows
    from .interop.torchrec import KeyedCollection, from_torchrec, to_torchrec
    from .language.ngram_embedding import NGramEmbedding
    from .optimizer import FusedOptimizer
    from .prefetch import PrefetchedInput
    from .rows_module import fused_optimizer

__all__ = [
    "ConversionReport", "ConvertedTable", "Embedding", "EmbeddingBag", "EmbeddingCollection", "FusedOptimizer",
    "KeyedCollection", "NGramEmbedding", "NGramHash", "Pooled", "PreTrainedRows", "PrefetchedInput", "RowConfig", "Table",
    "Unpooled", "convert_", "from_torchrec", "fused_optimizer", "revert_", "to_torchrec", "unify",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
