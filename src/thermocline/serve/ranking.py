"""Ranking: scores of N candidates for one user, by a model that was saved with its tables.

    DLRM        `<feature>` int64 [1]: shared by all candidates, or [N]: one for each; `dense` fp32 [I], or [N, I]
    sequence    `history` int64 [L], `candidates` int64 [N]
    both        `score` fp32 [N]

What all candidates share is looked up and computed once for each request. For a DLRM that is the bottom MLP, the dot products
among shared rows, and their part of the top MLP's first layer: the layer is linear, so its columns may be summed in two parts.
For a sequence model it is the whole encoder; a candidate is one dot product. One launch looks up the rows of a whole batch.

The names and shapes of the checkpoint's dense tensors determine the architecture. Sums are taken in another order than in
training: scores agree up to rounding, not in every bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from thermocline.errors import BadInput

from .served_model import ServableModel, ShardStatus, TensorMetadata
from .tables.lookup import LookupResult
from .tables.served_tables import ServedTables
from .tables.version import TableVersion

Array = NDArray[Any]
DENSE, SCORE, HISTORY, CANDIDATES = "dense", "score", "history", "candidates"


class RankingModel:
    """A served model that scores candidates. Raises `BadInput` if the checkpoint has no ranking model."""

    def __init__(self, group: ServedTables, name: str = "rank") -> None:
        self.group, self.name = group, name
        self.outputs = [TensorMetadata(SCORE, "FP32", (-1,))]
        self._scored: Mapping[str, Tensor] | None = None  # of the scorer; a version would seem to be read
        self._last = self._scorer(group.current)

    @property
    def version(self) -> str:
        return self.group.version

    @property
    def inputs(self) -> Sequence[TensorMetadata]:
        return self._scorer(self.group.current).inputs

    def _scorer(self, version: TableVersion) -> DlrmScorer | SequenceScorer:
        """The scorer of a version: the last one, unless dense tensors have changed."""
        if self._scored is not version.dense:
            self._last, self._scored = make_scorer(version), version.dense
        return self._last

    @torch.no_grad()
    def infer(self, requests: Sequence[Mapping[str, Array]]) -> list[LookupResult | Exception]:
        """Scores of each request, or its error."""
        version = self.group.current
        scorer = self._scorer(version)
        results: dict[int, LookupResult | Exception] = {}
        lookups: dict[int, Mapping[str, Array]] = {}
        for number, request in enumerate(requests):
            try:
                lookups[number] = scorer.lookups(request)
            except BadInput as error:
                results[number] = error
        for number, found in zip(lookups, self.group.infer(list(lookups.values()), version), strict=True):
            if isinstance(found, Exception):
                results[number] = found
                continue
            scores_N = scorer.score(requests[number], {name: torch.from_numpy(rows) for name, rows in found.items()})
            results[number] = LookupResult({SCORE: scores_N.numpy()}, version.name)
        return [results[number] for number in range(len(requests))]

    def shards(self) -> Sequence[ShardStatus]:
        """The shards of the group."""
        return self.group.shards()

    def close(self) -> None:
        """Nothing to close: the shards belong to the group."""


def companion_models(model: ServableModel) -> list[ServableModel]:
    """The ranking model of a group whose checkpoint has one: `rank`, or `NAME-rank`."""
    if not isinstance(model, ServedTables) or not {"top.0.weight", "encoder.positions"} & model.current.dense.keys():
        return []
    return [RankingModel(model, "rank" if model.name == "tables" else f"{model.name}-rank")]


def make_scorer(version: TableVersion) -> DlrmScorer | SequenceScorer:
    """The scorer for a checkpoint's dense tensors."""
    if "top.0.weight" in version.dense:
        return DlrmScorer(version)
    if "encoder.positions" in version.dense:
        return SequenceScorer(version)
    has = ", ".join(list(version.dense)[:4]) or "no dense part"
    way_out = "save a DLRM or a SequenceModel with its tables, as in thermocline.save(model, folder)"
    raise BadInput(f"the checkpoint has no ranking model: it has {has}; {way_out}", parameter="folder")


def _check(name: str, array: Array | None, kind: type, dims: Sequence[int]) -> Array:
    if array is None:
        raise BadInput(f"input {name!r} is missing", parameter=name)
    if array.dtype != kind or array.ndim not in dims:
        wanted = f"{np.dtype(kind).name} of {' or '.join(map(str, dims))} dimensions"
        raise BadInput(f"input {name!r} is {array.dtype} of the shape {list(array.shape)}; it must be {wanted}", parameter=name)
    return array


class InteractionSplit(NamedTuple):
    """The first layer of the top MLP in two parts, for one choice of shared vectors: weights, and the products in each part."""

    weight_shared: Tensor
    weight_varying: Tensor
    pairs_shared: Tensor  # products among shared vectors
    pairs_mixed: Tensor  # products of a candidate's vector and a shared one
    pairs_varying: Tensor  # products among a candidate's vectors


class DlrmScorer:
    """The DLRM of `models/dlrm.py`, from its tensors."""

    def __init__(self, version: TableVersion) -> None:
        self.features, self.dim = version.features, version.dims[0]
        self.bottom, self.top = _layers(version.dense, "bottom"), _layers(version.dense, "top")
        vectors = len(self.features) + bool(self.bottom)
        beside = self.dim if self.bottom else len(self.features) * self.dim
        wide = beside + vectors * (vectors - 1) // 2
        if set(version.dims) != {self.dim} or self.top[0][0].shape[1] != wide:
            takes = self.top[0][0].shape[1]
            makes = f"{len(self.features)} features of {self.dim} columns make {wide}"
            words = (
                f"the top of the model takes {takes} numbers, and {makes}; save the model with all of its tables, and no other"
            )
            raise BadInput(words, needed=takes, available=wide)
        self.inputs = [TensorMetadata(feature, "INT64", (-1,)) for feature in self.features]
        if self.bottom:
            self.inputs.append(TensorMetadata(DENSE, "FP32", (-1, self.bottom[0][0].shape[1])))
        self._split = lru_cache(maxsize=64)(self._make_split)

    def lookups(self, request: Mapping[str, Array]) -> Mapping[str, Array]:
        known = {info.name for info in self.inputs}
        if unknown := [name for name in request if name not in known]:
            raise BadInput(f"input {unknown[0]!r} is not known; use {', '.join(sorted(known))}", parameter=unknown[0])
        found = {feature: _check(feature, request.get(feature), np.int64, (1,)) for feature in self.features}
        lengths = {name: len(array) for name, array in found.items()}
        if self.bottom:
            dense, wide = _check(DENSE, request.get(DENSE), np.float32, (1, 2)), self.bottom[0][0].shape[1]
            if dense.shape[-1] != wide:
                words = f"input 'dense' has {dense.shape[-1]} numbers a candidate; the model takes {wide}"
                raise BadInput(words, parameter=DENSE)
            if not np.isfinite(dense).all():
                raise BadInput("input 'dense' has a number that is not finite", parameter=DENSE)
            lengths[DENSE] = 1 if dense.ndim == 1 else len(dense)
        count = max(lengths.values())
        if wrong := [name for name, length in lengths.items() if length not in (1, count) or not length]:
            words = f"input {wrong[0]!r} has {lengths[wrong[0]]} candidates, and others {count}; give 1 or {count}"
            raise BadInput(words, parameter=wrong[0])
        return found

    def score(self, request: Mapping[str, Array], rows: Mapping[str, Tensor]) -> Tensor:
        """The shared part of the first layer is computed once, the rest of the MLP for each candidate."""
        vectors = [rows[feature] for feature in self.features]
        if self.bottom:
            below = torch.tensor(np.atleast_2d(request[DENSE]), dtype=torch.float32)  # a copy: arrays of requests are read-only
            for weight, bias in self.bottom:
                below = linear(below, weight, bias).relu()
            vectors.insert(0, below)
        varies = tuple(len(vector) > 1 for vector in vectors)
        split = self._split(varies)
        shared_SD = torch.cat([v for v, other in zip(vectors, varies, strict=True) if not other] or [vectors[0][:0]])
        several = [v for v, other in zip(vectors, varies, strict=True) if other]
        varying_NKD = torch.stack(several, 1) if several else shared_SD.new_zeros(1, 0, self.dim)
        shared_C, varying_NC = self._columns(vectors, varies, shared_SD, varying_NKD, split)
        hidden = linear(varying_NC, split.weight_varying) + (split.weight_shared @ shared_C + self.top[0][1])
        for weight, bias in self.top[1:]:
            hidden = linear(hidden.relu(), weight, bias)
        return hidden[:, 0]

    def _columns(
        self, vectors: list[Tensor], varies: tuple[bool, ...], shared_SD: Tensor, varying_NKD: Tensor, split: InteractionSplit
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Inputs of the first layer: shared columns, and those of each candidate."""
        beside = list(zip(vectors, varies, strict=True))[: 1 if self.bottom else len(vectors)]
        shared = [vector[0] for vector, other in beside if not other]
        varying = [vector for vector, other in beside if other]
        shared.append((shared_SD @ shared_SD.T).flatten()[split.pairs_shared])
        varying.append((varying_NKD @ shared_SD.T).flatten(1)[:, split.pairs_mixed])
        varying.append(torch.bmm(varying_NKD, varying_NKD.transpose(1, 2)).flatten(1)[:, split.pairs_varying])
        return torch.cat(shared), torch.cat(varying, 1)

    def _make_split(self, varies: tuple[bool, ...]) -> InteractionSplit:
        """Split the columns of the first layer, in the order of `_columns`."""
        varies_V, count = torch.tensor(varies, dtype=torch.bool), len(varies)
        varying, besides = int(varies_V.sum()), 1 if self.bottom else count
        shared = count - varying
        place_V = torch.where(varies_V, varies_V.cumsum(0), (~varies_V).cumsum(0)) - 1  # among vectors of its own kind
        first_P, second_P = torch.triu_indices(count, count, 1)
        both_P, none_P = varies_V[first_P] & varies_V[second_P], ~(varies_V[first_P] | varies_V[second_P])
        mixed_P = ~(both_P | none_P)
        several_P = torch.where(varies_V[first_P], first_P, second_P)  # of mixed pairs, the vector of the candidate
        one_P = first_P + second_P - several_P
        column_P = self.dim * besides + torch.arange(len(first_P))
        beside_C = varies_V[:besides].repeat_interleave(self.dim)
        weight = self.top[0][0]
        columns = torch.cat([beside_C.nonzero()[:, 0], column_P[mixed_P], column_P[both_P]])
        return InteractionSplit(
            weight[:, torch.cat([(~beside_C).nonzero()[:, 0], column_P[none_P]])].contiguous(),
            weight[:, columns].contiguous(),
            (place_V[first_P] * shared + place_V[second_P])[none_P],
            (place_V[several_P] * shared + place_V[one_P])[mixed_P],
            (place_V[first_P] * varying + place_V[second_P])[both_P],
        )


def _layers(dense: Mapping[str, Tensor], part: str) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of an MLP."""
    found: list[tuple[Tensor, Tensor]] = []
    while f"{part}.{2 * len(found)}.weight" in dense:
        name = f"{part}.{2 * len(found)}"
        found.append((dense[f"{name}.weight"], dense[f"{name}.bias"]))
    return found


class SequenceScorer:
    """The model of `models/sequence.py`, from its tensors. History and candidates are rows of one table."""

    def __init__(self, version: TableVersion) -> None:
        self.dense = version.dense
        # The length of this tensor is the number of heads. Older checkpoints lack it; nearly all of them have two.
        self.heads = len(self.dense["encoder.heads"]) if "encoder.heads" in self.dense else 2
        self.history, self.candidates = version.features[:2]
        self.length, self.dim = version.dense["encoder.positions"].shape
        self.inputs = [TensorMetadata(HISTORY, "INT64", (-1,)), TensorMetadata(CANDIDATES, "INT64", (-1,))]

    def lookups(self, request: Mapping[str, Array]) -> Mapping[str, Array]:
        if unknown := [name for name in request if name not in (HISTORY, CANDIDATES)]:
            raise BadInput(f"input {unknown[0]!r} is not known; use {HISTORY} and {CANDIDATES}", parameter=unknown[0])
        history = _check(HISTORY, request.get(HISTORY), np.int64, (1,))
        if not 1 <= len(history) <= self.length:
            raise BadInput(f"the history has {len(history)} items; the model takes 1 to {self.length}", parameter=HISTORY)
        return {self.history: history, self.candidates: _check(CANDIDATES, request.get(CANDIDATES), np.int64, (1,))}

    def score(self, request: Mapping[str, Array], rows: Mapping[str, Tensor]) -> Tensor:
        return rows[self.candidates] @ self.encode(rows[self.history][None])[0]

    def encode(self, rows_BLD: Tensor) -> Tensor:
        """The state after the last item of each history: [B, D]."""
        hidden = rows_BLD * self.dim**0.5 + self.dense["encoder.positions"][: rows_BLD.shape[1]]
        number = 0
        while f"encoder.blocks.{number}.out.weight" in self.dense:
            hidden = self._block(hidden, f"encoder.blocks.{number}")
            number += 1
        return self._norm(hidden[:, -1], "encoder.norm")

    def _block(self, hidden: Tensor, name: str) -> Tensor:
        batch, length, dim = hidden.shape
        three = self._linear(self._norm(hidden, f"{name}.before_attention"), f"{name}.query_key_value")
        query, key, value = three.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self._linear(seen.transpose(1, 2).reshape(batch, length, dim), f"{name}.out")
        inner = self._linear(self._norm(hidden, f"{name}.before_mlp"), f"{name}.mlp.0").relu()
        return hidden + self._linear(inner, f"{name}.mlp.2")

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return layer_norm(hidden, hidden.shape[-1:], self.dense[f"{name}.weight"], self.dense[f"{name}.bias"])

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return linear(hidden, self.dense[f"{name}.weight"], self.dense.get(f"{name}.bias"))
