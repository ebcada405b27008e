"""`NGramEmbedding`: a memory table of a language model. Tokens go in, one vector for each token comes out.

    tokens [B, L] -> NGramHash -> rows [B, L, slots] -> one table -> heads concatenated or summed -> projection -> gate

Rows are an `EmbeddingCollection` with one table: checkpoints, prefetching, plans and sharding are those of collections.
Projection and gate are the ones of Engram (arXiv:2601.07372), without its convolution and branches: the gate is
sigmoid(sqrt(s)), with the sign of s kept, of the scaled product s of the normalized hidden state and key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.ids.ngram_hash import NGramHash
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig, TorchArguments
from thermocline.nn.inputs import check_integers
from thermocline.nn.prefetch import AT_ONCE, PrefetchedInput

if TYPE_CHECKING:
    from typing_extensions import Unpack

TABLE = "ngrams"  # name of the table and of its feature
MODES = {"concatenate": "none", "sum": "sum"}  # mode of the collection
T = TypeVar("T")


class NGramBags(dict[str, tuple[Tensor, Tensor]]):
    """The input of the table for a batch of rows [batch, length, slots]."""

    def __init__(self, rows_BLS: Tensor, pooled: bool) -> None:
        slots, count = rows_BLS.shape[2], rows_BLS.numel()
        step = slots if pooled else max(1, count)
        offsets = torch.arange(0, count // step + 1, device=rows_BLS.device) * step
        super().__init__({TABLE: (rows_BLS.reshape(-1), offsets)})
        self.rows_BLS = rows_BLS


class NGramEmbedding(nn.Module):
    """A hashed n-gram embedding: the rows of the n-grams that end at each token, as one vector.

    Attributes:
        table: the rows, an `EmbeddingCollection` (`table.memory()`, `table.stats()`).

    Args:
        ngrams: the n-grams, and their rows.
        embedding_dim: columns of a row.
        mode: "concatenate" or "sum" the rows of a token.
        out_features: size of the vectors after a linear projection; by default there is none.
        gate: whether the hidden state of a token scales its vector; needs `out_features`, the size of hidden states.
        rows: how rows are stored and trained.
        torch_arguments: `device`, and `dtype` of the output. Under autocast the output has the type of autocast.

    Raises:
        BadInput: an argument has a wrong type or value; `error.parameter` names it.

    Example::

        ngrams = thermocline.nn.NGramHash(1_000_000, vocabulary=50_257, orders=(2, 3), heads=4)
        memory = thermocline.nn.NGramEmbedding(ngrams, 32, out_features=768, rows=thermocline.RowConfig("int8", cache=0.05))
        memory(torch.tensor([[11, 12, 13]])).shape  # [1, 3, 768]
    """

    saved_texts = (TABLE,)  # of the state dict, which a loaded one must equal

    def __init__(
        self,
        ngrams: NGramHash,
        embedding_dim: int,
        *,
        mode: str = "concatenate",
        out_features: int | None = None,
        gate: bool = False,
        rows: RowConfig = RowConfig(),
        **torch_arguments: Unpack[TorchArguments],
    ) -> None:
        super().__init__()
        if not isinstance(ngrams, NGramHash):
            message = f"ngrams is a {type(ngrams).__name__}; use an NGramHash, as in NGramHash(1_000_000, vocabulary=50_257)"
            raise BadInput(message, parameter="ngrams", value=type(ngrams).__name__)
        if mode not in MODES:
            raise BadInput(f"mode is {mode!r}; use one of {', '.join(MODES)}", parameter="mode", value=mode)
        if gate and out_features is None:
            message = "a gate compares vectors with hidden states; give their size as out_features"
            raise BadInput(message, parameter="gate", value=gate)
        self.ngrams, self.mode = ngrams, mode
        table = Table(TABLE, ngrams.rows, embedding_dim)
        self.table = EmbeddingCollection([table], mode=MODES[mode], rows=rows, **torch_arguments)
        self.table.follows_autocast = True
        self.width = width = table.dim * (ngrams.slots if mode == "concatenate" else 1)
        self.projection: nn.Linear | None = None
        if out_features is not None:
            self.projection = nn.Linear(width, out_features, bias=False, **torch_arguments)
        self.key: nn.Sequential | None = None
        if gate and out_features is not None:
            norm = nn.RMSNorm(out_features, **torch_arguments)
            self.key = nn.Sequential(nn.Linear(width, out_features, bias=False, **torch_arguments), norm)
            self.query = nn.RMSNorm(out_features, **torch_arguments)
        self._arrays = ngrams.arrays(self.table.arena.device)

    def forward(self, input: Tensor | PrefetchedInput, hidden: Tensor | None = None) -> Tensor:
        """Look up the n-grams that end at each token.

        Args:
            input: tokens [batch, length], or their rows [batch, length, slots] (`ngrams(tokens)`), or an input of `prefetched`.
            hidden: hidden states [batch, length, out_features], with a gate.

        Returns:
            [batch, length, size]; zeros at excluded tokens.

        Raises:
            BadInput: the input has another form, or `hidden` is missing.
            IdOutOfRange: a token is not in the vocabulary.
        """
        if (hidden is None) == (self.key is not None):
            message = f"hidden is {'missing' if hidden is None else 'given'}; modules with a gate take it, others do not"
            raise BadInput(message, parameter="hidden")
        bags = input.arguments[0] if isinstance(input, PrefetchedInput) else NGramBags(self._rows(input), self.mode == "sum")
        rows_BLS = bags.rows_BLS
        values = self.table(bags).values().view(*rows_BLS.shape[:2], self.width)
        if torch.is_autocast_enabled(values.device.type):  # of a sharded table
            values = values.to(torch.get_autocast_dtype(values.device.type))
        out: Tensor = values if self.projection is None else self.projection(values)
        if self.key is not None and hidden is not None:
            score_BL1 = (self.query(hidden) * self.key(values)).sum(-1, keepdim=True) * hidden.shape[-1] ** -0.5
            out = out * torch.sigmoid(score_BL1.abs().clamp_min(1e-6).sqrt() * score_BL1.sign())
        if self.ngrams.exclude:
            out = out.masked_fill(rows_BLS[..., :1] == self.ngrams.slots * self.ngrams.part, 0)
        return out

    def _rows(self, input: Tensor) -> Tensor:
        """Rows [batch, length, slots] of tokens, or of given rows."""
        check_integers(input, "tokens")
        if input.dim() != 3:
            return self.ngrams(input, self._arrays)
        if input.shape[2] != self.ngrams.slots:
            message = f"rows are {tuple(input.shape)}; use [batch, length, {self.ngrams.slots}], as ngrams(tokens) gives"
            raise BadInput(message, parameter="rows", value=tuple(input.shape), needed=self.ngrams.slots)
        return input

    def prefetched(
        self, loader: Iterable[T], ids: Callable[[T], Tensor] | None = None, at_once: int = AT_ONCE
    ) -> Iterator[tuple[T, PrefetchedInput]]:
        """Iterate over batches, and prefetch the rows of later ones to the GPU (residency="host").

        Args:
            loader: batches on the device of the table.
            ids: returns the tokens of a batch, or their rows, which `ngrams` may compute in a DataLoader worker; by default the
                batch.
            at_once: batches whose rows are copied together.

        Yields:
            Each batch and its input, which forward takes in place of tokens.

        Raises:
            BadInput: `at_once` is less than 1.

        Example::

            for batch, rows in memory.prefetched(loader, ids=lambda batch: batch["tokens"]):
                loss = model(batch["tokens"], rows)
        """

        def bags(batch: T) -> NGramBags:
            return NGramBags(self._rows(batch if ids is None else ids(batch)), self.mode == "sum")  # type: ignore[arg-type]

        return self.table.prefetched(loader, bags, at_once)

    def extra_repr(self) -> str:
        return f"{self.ngrams}, mode={self.mode!r}"

    # -- nn.Module ----------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NGramEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._arrays = self.ngrams.arrays(self.table.arena.device)
        return self

    def _text(self) -> Tensor:
        """What decides the rows of n-grams, as a state dict holds it."""
        text = json.dumps(self.ngrams.to_json(), sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + TABLE] = self._text()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        saved = state_dict.pop(prefix + TABLE, None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if saved is None:
            missing_keys += [prefix + TABLE] if strict else []
        elif not torch.equal(saved.cpu(), self._text()):
            texts = [bytes(text.cpu().tolist()).decode(errors="replace") for text in (saved, self._text())]
            error_msgs.append(f"{prefix}{TABLE}: rows were saved for the n-grams {texts[0]}, this module has {texts[1]}")
