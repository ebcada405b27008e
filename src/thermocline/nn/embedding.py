"""`EmbeddingBag` and `Embedding`: drop-in `torch.nn` modules backed by quantized rows.

`padding_idx` removes ids before the lookup, so that the padding row is neither pooled nor updated. The host then waits for a
GPU.
"""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thermocline._lazy import uncompiled
from thermocline.errors import BadInput, BadMode, BadPadding, IdOutOfRange
from thermocline.ids.idmap import IdMap, check_map
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.ops import without_padding
from thermocline.rows.table_spec import check_sizes
from thermocline.rows.training import lookup

from .backward_pass import refuse_capture, trained_weight
from .config import AUTO, DEFAULT_CACHE, RowConfig, TableRequest, TorchArguments, check_rows, read_torch_arguments
from .elastic_maps import maps_for
from .heat_profile import Heat, counts_of_one, read_heat
from .inputs import check_integers, check_is_tensor, read_jagged
from .prefetch import PrefetchedInput, PrefetchRequest
from .read_only import ReadOnlyWeight, refuse_assignment
from .rows_module import RowsModule

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class _SingleTable(RowsModule):
    """Base of the two modules: one table, with the attributes of torch's modules."""

    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(
        self, shape: tuple[int, int], padding_idx: int | None, rows: RowConfig, ids: IdMap | None, given: TorchArguments
    ) -> None:
        device, dtype = read_torch_arguments(type(self).__name__, given)
        check_rows(rows)
        shape = check_sizes("table", *shape)
        if ids is not None:
            check_map(ids, shape[0], "table", "input")
            if padding_idx is not None and not ids.is_elastic:
                message = f"padding_idx is {padding_idx} and ids {ids}; padding_idx is a row: map ids before the module"
                raise BadInput(message, parameter="padding_idx", value=padding_idx)
        super().__init__([TableRequest(*shape, rows.precision)], [0], rows, device, dtype)
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx = padding_idx if ids is not None and ids.is_elastic else _row_of_padding(padding_idx, shape[0])
        self.ids = IdMap.identity(shape[0]) if ids is None else ids
        self.maps = maps_for(["input"], [ids], [shape[0]], self.arena.device)
        self.reset_parameters()

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **keywords: Any) -> Self:
        """Make a module with given rows.

        Args:
            embeddings: float tensor [rows, columns].
            freeze: whether training leaves the rows unchanged.
            keywords: arguments of the constructor.

        Returns:
            The module, on the device of `embeddings`.

        Raises:
            BadInput: `embeddings` is not a 2-D float tensor.

        Example::

            bag = thermocline.EmbeddingBag.from_pretrained(torch.randn(1000, 16), freeze=False, mode="sum")
        """
        if isinstance(embeddings, (str, Path)):
            message = f"embeddings is the path {str(embeddings)!r}; open a saved module with thermocline.load(folder)"
            raise BadInput(message, parameter="embeddings", value=embeddings)
        check_is_tensor(embeddings, "rows", kind="floats")
        if embeddings.dim() != 2:
            raise BadInput(f"embeddings are {embeddings.dim()}-D; use [rows, columns]", parameter="embeddings")
        place: TorchArguments = {"device": embeddings.device, "dtype": embeddings.dtype}
        chosen = {name: value for name, value in keywords.items() if value is not None or name not in place}
        module = cls.without_values(*embeddings.shape, **{**place, **chosen})
        module.write_table(0, embeddings)
        module.placeholder.requires_grad_(not freeze)
        return module

    @property
    def weight(self) -> Tensor:
        """A read-only copy of all rows in the output type of the module, whose gradient updates them. `set_rows` writes."""
        copied: Tensor = self._copy_rows().to(self.dtype)
        return copied if torch.compiler.is_compiling() else copied.as_subclass(ReadOnlyWeight)

    @uncompiled
    def _copy_rows(self) -> Tensor:
        """All rows, read outside of compiled graphs: their backward runs Python."""
        copied = self.read_table(0)
        if self.maps is not None and self.maps.elastic:
            self.maps.wait_for_backward()
        return trained_weight(self.trained, copied) if self._trains() else copied

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            refuse_assignment()
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw rows from N(0, 1), as torch does; the padding row is zero. Elastic rows: see `IdMap.elastic`."""
        if self.maps is not None and self.maps.elastic:
            self.maps.start(self)
            return
        self.draw_rows(0, 0, self.num_embeddings, Tensor.normal_)
        if self.padding_idx is not None:
            zeros_1D = torch.zeros(1, self.embedding_dim, dtype=torch.float32)
            self.set_rows(torch.tensor([self.padding_idx], dtype=torch.int64), zeros_1D)

    def warm(self, heat: Tensor | Heat) -> None:
        """Fill the cache with the hottest rows. Call it before rows are set: it flushes the cache first.

        Args:
            heat: lookup counts of each row, or a heat profile of one table, or the path of its file.

        Raises:
            BadInput: the counts have another shape, or the profile has several tables.
        """
        self.arena.warm([heat if isinstance(heat, Tensor) else counts_of_one(read_heat(heat), self.ids, self.num_embeddings)])

    def get_rows(self, ids: Tensor) -> Tensor:
        """The rows of these ids, dequantized to fp32."""
        return self.read_table(0, ids)

    def set_rows(self, ids: Tensor, values: Tensor) -> None:
        """Set the rows of these ids; rounds to nearest."""
        self.write_table(0, values, ids)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        rows = self.rows
        update = "" if rows.update == "backward" else f", update={rows.update!r}"
        precision = f"precision={rows.precision!r}"
        if rows.precision == AUTO:
            precision += f" ({self.tiers[0]})"
        elif isinstance(rows.precision, str):
            precision += f", cache={DEFAULT_CACHE if rows.cache is None else rows.cache!r}"
        ids = "" if self.maps is None else f", ids={self.ids}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {precision}, optimizer={rows.optimizer}{update}{ids}"


class EmbeddingBag(_SingleTable):
    """`torch.nn.EmbeddingBag` with rows in any precision, trained in place by a fused optimizer.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of a row.
        mode: "sum", "mean" or "max".
        padding_idx: row that is neither pooled nor updated; with elastic ids, the id.
        include_last_offset: whether `offsets` ends with the number of ids.
        rows: how rows are stored and trained.
        ids: map from raw ids to rows; by default ids are rows.
        torch_arguments: `device`, and `dtype` of the output.

    Raises:
        BadInput: an argument has a wrong type or value; `error.parameter` names it.

    Example::

        bag = thermocline.EmbeddingBag(1_000_000, 64, mode="sum", rows=thermocline.RowConfig("int8", cache=0.05))
        bag(torch.randint(0, 1_000_000, (32, 10))).sum().backward()  # updates the rows
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        rows: RowConfig = RowConfig(),
        ids: IdMap | None = None,
        **torch_arguments: Unpack[TorchArguments],
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            message = f"mode is {mode!r}; use sum, mean or max, or thermocline.Embedding for no pooling"
            raise BadInput(message, parameter="mode", value=mode)
        super().__init__((num_embeddings, embedding_dim), padding_idx, rows, ids, torch_arguments)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: Tensor | PrefetchedInput, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up and pool bags of ids.

        Args:
            input: ids: [batch, length], a nested jagged tensor, or flat ids with `offsets`.
            offsets: where bags begin in flat ids.
            per_sample_weights: a factor for each id, with mode "sum".

        Returns:
            [batch, embedding_dim].

        Raises:
            BadInput: an argument has a wrong type, shape or value.
            IdOutOfRange: an id is not a row of the table.
        """
        if isinstance(input, PrefetchedInput):
            return self.forward(*input.arguments)
        check_tensors(input, offsets)
        weights_N = None if per_sample_weights is None else flat_weights(input, per_sample_weights, self.mode)
        ids_N, offsets = self.take_prefetched([input, offsets]) or read_bags(input, offsets, self.include_last_offset)
        if self.padding_idx is None:
            return self.look_up(ids_N, offsets, weights_N, self.mode)
        if torch.compiler.is_compiling() and not self.ids.is_elastic:
            return self.look_up(ids_N, offsets, weights_N, self.mode, self.padding_idx)
        refuse_capture(ids_N.device, "padding_idx", "removing padding")
        kept, call = without_padding(LookupCall(ids_N, offsets, weights_N, 0), self.padding_idx)
        try:
            return self.look_up(*call[:3], self.mode)
        except IdOutOfRange as error:
            raise _as_given(error, kept) from None

    def prefetch_request(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> PrefetchRequest:
        check_tensors(input, offsets)
        bags = read_bags(input, offsets, self.include_last_offset)
        return PrefetchRequest([input, offsets], *bags, bags)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", mode={self.mode!r}"


class Embedding(_SingleTable):
    """`torch.nn.Embedding` with rows in any precision, trained in place by a fused optimizer.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of a row.
        padding_idx: row that is not updated; with elastic ids, the id, which reads zeros.
        rows: how rows are stored and trained.
        ids: map from raw ids to rows; by default ids are rows.
        torch_arguments: `device`, and `dtype` of the output.

    Raises:
        BadInput: an argument has a wrong type or value; `error.parameter` names it.

    Example::

        words = thermocline.Embedding(50_000, 256, padding_idx=0, rows=thermocline.RowConfig("int4"))
        words(torch.tensor([[3, 1, 0]])).shape  # [1, 3, 256]
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        rows: RowConfig = RowConfig(),
        ids: IdMap | None = None,
        **torch_arguments: Unpack[TorchArguments],
    ) -> None:
        super().__init__((num_embeddings, embedding_dim), padding_idx, rows, ids, torch_arguments)

    def forward(self, input: Tensor | PrefetchedInput) -> Tensor:
        """Look up ids of any shape, or a nested jagged tensor of them.

        Args:
            input: the ids.

        Returns:
            [*input.shape, embedding_dim].

        Raises:
            BadInput: the input is not a tensor of integers.
            IdOutOfRange: an id is not a row of the table.
        """
        if isinstance(input, PrefetchedInput):
            return self.forward(*input.arguments)
        check_is_tensor(input)
        ids_N, ends = self.take_prefetched([input]) or read_ids(input)
        if self.padding_idx is None:
            out_ND = self.look_up(ids_N, ends, None, "none")
        elif torch.compiler.is_compiling() and not self.ids.is_elastic:
            out_ND = self.look_up(ids_N, ends, None, "none", self.padding_idx)
        else:
            refuse_capture(ids_N.device, "padding_idx", "removing padding")
            kept = (ids_N != self.padding_idx).nonzero()[:, 0]
            padding_1 = torch.full((1,), self.padding_idx, dtype=torch.int64, device=ids_N.device)
            ends_2 = torch.arange(2, device=ids_N.device)
            if self.ids.is_elastic:
                padding_1D = torch.zeros(1, self.embedding_dim, dtype=self.dtype)
            else:
                padding_1D = lookup(self.arena, padding_1, ends_2, mode="none").to(self.dtype)
            try:
                out_KD = self.look_up(*read_ids(ids_N[kept]), None, "none")
            except IdOutOfRange as error:
                raise _as_given(error, kept) from None
            out_ND = padding_1D.repeat(ids_N.shape[0], 1).index_copy(0, kept, out_KD)
        if input.is_nested:
            return torch.nested.nested_tensor_from_jagged(out_ND, input.offsets())  # type: ignore[attr-defined]
        return out_ND.view(*input.shape, self.embedding_dim)

    def prefetch_request(self, input: Tensor) -> PrefetchRequest:
        check_is_tensor(input)
        read = read_ids(input)
        return PrefetchRequest([input], *read, read)


def read_ids(input: Tensor) -> tuple[Tensor, Tensor]:
    """Flat ids, and their two offsets."""
    ids_N = read_jagged(input)[0] if input.is_nested else input.reshape(-1)
    return ids_N, torch.arange(2, device=ids_N.device).mul_(ids_N.shape[0])  # on the device: a copy to it would wait


def read_bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, Tensor]:
    """Flat ids, and offsets with the end included, of tensors that `check_tensors` has seen."""
    if input.is_nested:
        return read_jagged(input)
    if input.dim() == 2:
        if offsets is not None:
            raise BadInput("ids are 2-D, so each row is a bag; drop offsets, or use flat ids", parameter="offsets")
        batch, length = input.shape
        if length == 0:
            return input.reshape(-1), input.new_zeros(batch + 1)
        return input.reshape(-1), torch.arange(0, batch * length + 1, length, device=input.device)
    if input.dim() != 1 or offsets is None:
        given = "missing" if offsets is None else "given"
        message = f"ids are {input.dim()}-D and offsets {given}; use 2-D ids, or flat ids with offsets"
        raise BadInput(message, parameter="offsets" if input.dim() == 1 else "ids", value=input.dim())
    check_integers(offsets, "offsets")
    if offsets.dim() != 1:
        raise BadInput(f"offsets are {offsets.dim()}-D; use flat offsets", parameter="offsets", value=offsets.dim())
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
    return input, offsets


def _row_of_padding(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not (isinstance(padding_idx, Integral) and -rows <= padding_idx < rows):
        message = f"padding_idx must be within num_embeddings: it is {padding_idx!r}; use an int from {-rows} to {rows - 1}"
        raise BadPadding(message, parameter="padding_idx", value=padding_idx)
    return int(padding_idx) % rows


def check_tensors(input: Tensor, offsets: Tensor | None) -> None:
    check_is_tensor(input)
    if offsets is not None:
        check_is_tensor(offsets, "offsets")


def flat_weights(input: Tensor, weights: Tensor, mode: str) -> Tensor:
    if mode != "sum":
        message = f"per_sample_weights are only supported for mode='sum', not for {mode!r}"
        raise BadMode(message, parameter="per_sample_weights", mode=mode)
    check_is_tensor(weights, "per_sample_weights", kind="floats")
    if input.is_nested != weights.is_nested or (not input.is_nested and input.shape != weights.shape):
        given, needed = tuple(weights.shape), tuple(input.shape)
        message = f"per_sample_weights need the same shape as the input: they are {given}; use {needed}"
        raise BadInput(message, parameter="per_sample_weights", value=given, needed=needed)
    flat_N = weights.values() if weights.is_nested else weights.reshape(-1)
    return flat_N.float() if flat_N.dtype == torch.float64 else flat_N


def _as_given(error: IdOutOfRange, kept: Tensor) -> IdOutOfRange:
    """The error with its position among all ids, also padding. A GPU reports an earlier batch, whose ids are gone."""
    return error if kept.is_cuda else error.at(int(kept[error.position]))
