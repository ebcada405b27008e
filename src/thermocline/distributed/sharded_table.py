"""`ShardedEmbeddingBag` and `ShardedEmbedding`: shards of plain modules, such as those of `convert_`, with torch's arguments.

Each module exchanges its own batch when its forward is called, one module after the other; tables of a collection share one
message between two ranks. The padding row of an `Embedding` travels as any row, and the ranks that store it skip its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline._lazy import uncompiled
from thermocline.ids.idmap import IdMap
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.ops import without_padding
from thermocline.nn.backward_pass import trained_weight
from thermocline.nn.embedding import Embedding, EmbeddingBag, check_tensors, flat_weights, read_bags, read_ids
from thermocline.nn.inputs import JaggedIds, check_integers, read_features
from thermocline.nn.prefetch import PrefetchedInput
from thermocline.nn.read_only import ReadOnlyWeight, refuse_assignment

from .sharded_collection import ShardedCollection

Arguments = Sequence[Tensor | None]  # of forward


class ShardedTable(ShardedCollection):
    """Base of the two modules. `shard_` turns a plain module into one in place, so that it keeps its attributes."""

    plain: ClassVar[Any]  # the class of the module before `shard_`
    ids: IdMap
    num_embeddings: int
    embedding_dim: int

    @property
    def weight(self) -> Tensor:
        """A read-only copy of all rows, whose gradient updates them. Collective."""
        copied: Tensor = self._copy_rows().to(self.dtype)
        return copied.as_subclass(ReadOnlyWeight)

    @uncompiled
    def _copy_rows(self) -> Tensor:
        if not (torch.is_grad_enabled() and self.placeholder.requires_grad):
            return self.get_rows()
        if self.row_index.unsharded:
            return trained_weight(self.trained, self.read_table(0))
        return self.look_up_batch(None)[0]

    def _every_row(self) -> JaggedIds:
        rows = self.num_embeddings
        offsets = torch.arange(rows + 1) if self.mode != "none" else torch.tensor([0, rows], dtype=torch.int64)
        return JaggedIds(torch.arange(rows, device=self.arena.device), offsets.to(self.arena.device), None, offsets.numel() - 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            refuse_assignment()
        super().__setattr__(name, value)

    def get_rows(self, ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Rows by number, dequantized to fp32; all rows by default. Collective."""
        return super().get_rows(self.tables[0].name, ids)

    def set_rows(self, ids: Tensor, values: Tensor) -> None:  # type: ignore[override]
        """Set rows, rounded to nearest. Every rank calls this with the same rows."""
        super().set_rows(self.tables[0].name, ids, values)

    def _look_up_locally(self, input: Any, bags: JaggedIds) -> Tensor:
        out: Tensor = self.plain.forward(self, *input)
        return out


class ShardedEmbeddingBag(ShardedTable):
    """One rank's shard of an `EmbeddingBag`."""

    plain = EmbeddingBag
    include_last_offset: bool

    @uncompiled
    def forward(  # type: ignore[override]
        self, input: Tensor | PrefetchedInput, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up and pool bags of ids, as `EmbeddingBag.forward`. Collective."""
        arguments = input.arguments if isinstance(input, PrefetchedInput) else (input, offsets, per_sample_weights)
        return self.look_up_batch(arguments)[0]

    def prefetch(self, input: Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> None:
        super().prefetch((input, offsets, per_sample_weights))

    def _parse(self, input: Any) -> JaggedIds:
        if input is None:
            return self._every_row()
        ids, offsets, weights = (*input, None, None)[:3]
        check_tensors(ids, offsets)
        ids_N, offsets = read_bags(ids, offsets, self.include_last_offset)
        weights_N = None if weights is None else flat_weights(ids, weights, self.mode)
        bags = read_features(self.features, {self.features[0]: (ids_N, offsets, weights_N)})
        if self.padding_idx is None:
            return bags
        _, call = without_padding(LookupCall(*bags[:3], F.SUM), self.padding_idx)
        return JaggedIds(*call[:3], bags.batch)


class ShardedEmbedding(ShardedTable):
    """One rank's shard of an `Embedding`."""

    plain = Embedding

    @uncompiled
    def forward(self, input: Tensor | PrefetchedInput) -> Tensor:  # type: ignore[override]
        """Look up ids of any shape, as `Embedding.forward`. Collective."""
        (ids,) = arguments = input.arguments if isinstance(input, PrefetchedInput) else (input,)
        if self.padding_idx is not None and self._elastic is not None:
            return self._without_padding(ids)
        out_ND, _ = self.look_up_batch(arguments)
        return self._shaped(out_ND, ids)

    def _without_padding(self, ids: Tensor) -> Tensor:
        """Look up ids other than padding, which reads zeros: it has no row."""
        check_integers(ids)
        assert self.padding_idx is not None
        ids_N, _ = read_ids(ids)
        kept_K = ids_N.ne(self.padding_idx).nonzero()[:, 0]
        out_KD, _ = self.look_up_batch((ids_N[kept_K],))
        return self._shaped(out_KD.new_zeros(ids_N.numel(), self.embedding_dim).index_copy(0, kept_K, out_KD), ids)

    def _shaped(self, out_ND: Tensor, ids: Tensor) -> Tensor:
        if ids.is_nested:
            return torch.nested.nested_tensor_from_jagged(out_ND, ids.offsets())  # type: ignore[attr-defined]
        return out_ND.view(*ids.shape, self.embedding_dim)

    def prefetch(self, input: Any) -> None:
        super().prefetch((input,))

    def _parse(self, input: Any) -> JaggedIds:
        if input is None:
            return self._every_row()
        (ids,) = input
        check_integers(ids)
        return JaggedIds(*read_ids(ids), None, 1)

    def _look_up_locally(self, input: Any, bags: JaggedIds) -> Tensor:
        out_ND = super()._look_up_locally(input, bags)
        return out_ND.values() if out_ND.is_nested else out_ND.view(-1, self.embedding_dim)


SHARDED = {EmbeddingBag: ShardedEmbeddingBag, Embedding: ShardedEmbedding}
