"""Whole requests: one user, N candidates, with a model that was saved with its tables.

    DLRM        `<feature>` int64 [1]: shared by all candidates, or [N]: one for each; `dense` fp32 [I], or [N, I]
    sequence    `history` int64 [L], `candidates` int64 [N]
    both        `score` fp32 [N]

What all candidates share is looked up and worked out once a request. Of a DLRM that is the bottom MLP, the dot products among
shared rows, and their part of the top MLP's first layer, which is most of it: the layer is linear, so its columns may be summed
in two parts. Of a sequence model it is the whole encoder; a candidate is one dot product. The rows of all requests of a
micro-batch are looked up by one launch.

The dense part is read from the checkpoint's tensors, whose names and shapes tell the architecture; nothing of `models` is
imported. It belongs to the version, so rows and dense part of a request are of one save. Sums are taken in another order than
the trained model takes them: scores agree to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from thermocline.errors import BadInput

from .server.served_model import CardStatus, TensorInfo
from .tables.lookup import Answer
from .tables.shard_group import CardGroup
from .tables.version import Version

Array = NDArray[Any]
DENSE, SCORE, HISTORY, CANDIDATES = "dense", "score", "history", "candidates"


class Scorer(Protocol):
    """A model around the tables of one version."""

    @property
    def inputs(self) -> Sequence[TensorInfo]: ...

    def lookups(self, request: Mapping[str, Array]) -> Mapping[str, Array]:
        """What to ask the tables for. `BadInput` for a request that cannot be right."""
        ...

    def score(self, request: Mapping[str, Array], rows: Mapping[str, Tensor]) -> Tensor:
        """Of each candidate."""
        ...


class RankModel:
    """Answers requests with scores of candidates."""

    def __init__(self, group: CardGroup, name: str = "rank") -> None:
        self.group, self.name = group, name
        self._scorers: dict[int, tuple[Version, Scorer]] = {}
        self.outputs = [TensorInfo(SCORE, "FP32", (-1,))]
        self._scorer(group.current)  # refuse a checkpoint that has no such model

    @property
    def version(self) -> str:
        return self.group.version

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        return self._scorer(self.group.current).inputs

    def _scorer(self, version: Version) -> Scorer:
        """Made once for a version."""
        known = self._scorers.get(id(version))
        if known is None or known[0] is not version:
            known = (version, make_scorer(version))
            self._scorers = {id(version): known}
        return known[1]

    @torch.no_grad()
    def infer(self, requests: Sequence[Mapping[str, Array]]) -> list[Answer | Exception]:
        """Scores for each request, or what is wrong with it."""
        version = self.group.current
        scorer = self._scorer(version)
        answers: dict[int, Answer | Exception] = {}
        asked: dict[int, Mapping[str, Array]] = {}
        for number, request in enumerate(requests):
            try:
                asked[number] = scorer.lookups(request)
            except BadInput as error:
                answers[number] = error
        for number, found in zip(asked, self.group.answer(version, list(asked.values())), strict=True):
            if isinstance(found, Exception):
                answers[number] = found
                continue
            scores_N = scorer.score(requests[number], {name: torch.from_numpy(rows) for name, rows in found.items()})
            answers[number] = Answer({SCORE: scores_N.numpy()}, version.name)
        return [answers[number] for number in range(len(requests))]

    def cards(self) -> list[CardStatus]:
        return self.group.cards()

    def close(self) -> None:
        """Nothing of its own: the cards are the group's."""


def ranks(version: Version) -> bool:
    """Whether a checkpoint has a model that scores candidates."""
    return "top.0.weight" in version.dense or "encoder.positions" in version.dense


def make_scorer(version: Version) -> Scorer:
    """The model that a checkpoint's tensors are of."""
    if "top.0.weight" in version.dense:
        return DlrmScorer(version)
    if "encoder.positions" in version.dense:
        return SequenceScorer(version)
    raise BadInput(
        f"the checkpoint has no model that ranks: it has {', '.join(list(version.dense)[:4]) or 'no dense part'}; save a DLRM "
        "or a SequenceModel with its tables, as in thermocline.save(model, folder)"
    )


def _check(name: str, array: Array | None, kind: type, dims: Sequence[int]) -> Array:
    if array is None:
        raise BadInput(f"input {name!r} is missing")
    if array.dtype != kind or array.ndim not in dims:
        asked = f"{np.dtype(kind).name} of {' or '.join(map(str, dims))} dimensions"
        raise BadInput(f"input {name!r} is {array.dtype} of the shape {list(array.shape)}; it must be {asked}")
    return array


# -- DLRM ---------------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The first layer of the top MLP in two parts, for one choice of what candidates share: (weights of shared columns, of
    others), and where among all columns each part is found."""

    weight_shared: Tensor
    weight_varying: Tensor
    pairs_shared: Tensor  # numbers of products among shared vectors
    pairs_mixed: Tensor  # of products of a candidate's vector with a shared one
    pairs_varying: Tensor  # of products among a candidate's vectors


class DlrmScorer:
    """`models/dlrm.py` from its tensors."""

    def __init__(self, version: Version) -> None:
        self.features, self.dim = version.features, version.dims[0]
        self.bottom, self.top = _layers(version.dense, "bottom"), _layers(version.dense, "top")
        vectors = len(self.features) + bool(self.bottom)
        beside = self.dim if self.bottom else len(self.features) * self.dim
        wide = beside + vectors * (vectors - 1) // 2
        if set(version.dims) != {self.dim} or self.top[0][0].shape[1] != wide:
            raise BadInput(
                f"the top of the model takes {self.top[0][0].shape[1]} numbers, and {len(self.features)} features of "
                f"{self.dim} columns make {wide}; save the model with all of its tables, and no other"
            )
        self.inputs = [TensorInfo(feature, "INT64", (-1,)) for feature in self.features]
        if self.bottom:
            self.inputs.append(TensorInfo(DENSE, "FP32", (-1, self.bottom[0][0].shape[1])))
        self._split = lru_cache(maxsize=64)(self._make_split)

    def lookups(self, request: Mapping[str, Array]) -> Mapping[str, Array]:
        known = {info.name for info in self.inputs}
        if strangers := [name for name in request if name not in known]:
            raise BadInput(f"input {strangers[0]!r} is not known; a request has {', '.join(sorted(known))}")
        found = {feature: _check(feature, request.get(feature), np.int64, (1,)) for feature in self.features}
        lengths = {name: len(array) for name, array in found.items()}
        if self.bottom:
            dense, wide = _check(DENSE, request.get(DENSE), np.float32, (1, 2)), self.bottom[0][0].shape[1]
            if dense.shape[-1] != wide:
                raise BadInput(f"input 'dense' has {dense.shape[-1]} numbers a candidate; the model takes {wide}")
            if not np.isfinite(dense).all():
                raise BadInput("input 'dense' has a number that is not finite")
            lengths[DENSE] = 1 if dense.ndim == 1 else len(dense)
        count = max(lengths.values())
        if wrong := [name for name, length in lengths.items() if length not in (1, count) or not length]:
            raise BadInput(f"input {wrong[0]!r} is of {lengths[wrong[0]]} candidates; there are {count}: give 1 or {count}")
        return found

    def score(self, request: Mapping[str, Array], rows: Mapping[str, Tensor]) -> Tensor:
        """One line of the first layer is shared; then the MLP, one line a candidate."""
        vectors = [rows[feature] for feature in self.features]
        if self.bottom:
            below = torch.tensor(np.atleast_2d(request[DENSE]))  # a copy: what came with a request cannot be written to
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
        self, vectors: list[Tensor], varies: tuple[bool, ...], shared_SD: Tensor, varying_NKD: Tensor, split: Split
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What goes into the first layer: shared numbers, and those of each candidate."""
        beside = list(zip(vectors, varies, strict=True))[: 1 if self.bottom else len(vectors)]
        shared = [vector[0] for vector, other in beside if not other]
        varying = [vector for vector, other in beside if other]
        shared.append((shared_SD @ shared_SD.T).flatten()[split.pairs_shared])
        varying.append((varying_NKD @ shared_SD.T).flatten(1)[:, split.pairs_mixed])
        varying.append(torch.bmm(varying_NKD, varying_NKD.transpose(1, 2)).flatten(1)[:, split.pairs_varying])
        return torch.cat(shared), torch.cat(varying, 1)

    def _make_split(self, varies: tuple[bool, ...]) -> Split:
        """Columns of the first layer, in the order of `_columns`."""
        count, place = len(varies), [sum(varies[:v]) if varies[v] else v - sum(varies[:v]) for v in range(len(varies))]
        shared, varying = count - sum(varies), sum(varies)
        besides = [range(self.dim * n, self.dim * (n + 1)) for n in range(1 if self.bottom else count)]
        columns: dict[str, list[int]] = {"shared": [], "varying": [], "mixed": [], "both": []}
        numbers: dict[str, list[int]] = {"shared": [], "mixed": [], "both": []}
        for n, block in enumerate(besides):
            columns["varying" if varies[n] else "shared"] += block
        column = self.dim * len(besides)
        for i in range(count):
            for j in range(i + 1, count):
                if varies[i] and varies[j]:
                    kind, number = "both", place[i] * varying + place[j]
                elif varies[i] or varies[j]:
                    several, one = (i, j) if varies[i] else (j, i)
                    kind, number = "mixed", place[several] * shared + place[one]
                else:
                    kind, number = "shared", place[i] * shared + place[j]
                columns[kind].append(column)
                numbers[kind].append(number)
                column += 1
        weight = self.top[0][0]
        others = columns["varying"] + columns["mixed"] + columns["both"]
        at = (torch.tensor(numbers[kind], dtype=torch.int64) for kind in ("shared", "mixed", "both"))
        return Split(weight[:, columns["shared"]].contiguous(), weight[:, others].contiguous(), *at)


def _layers(dense: Mapping[str, Tensor], part: str) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of an MLP, which has an activation after each layer."""
    found: list[tuple[Tensor, Tensor]] = []
    while f"{part}.{2 * len(found)}.weight" in dense:
        name = f"{part}.{2 * len(found)}"
        found.append((dense[f"{name}.weight"], dense[f"{name}.bias"]))
    return found


# -- sequences ----------------------------------------------------------------------------------------------------------------


class SequenceScorer:
    """`models/sequence.py` from its tensors: history and candidates are rows of one table."""

    def __init__(self, version: Version) -> None:
        self.dense = version.dense
        # Checkpoints tell the number of heads by the length of a tensor; old ones do not, and nearly all of them have two.
        self.heads = len(self.dense["encoder.heads"]) if "encoder.heads" in self.dense else 2
        self.history, self.candidates = version.features[:2]
        self.length, self.dim = version.dense["encoder.positions"].shape
        self.inputs = [TensorInfo(HISTORY, "INT64", (-1,)), TensorInfo(CANDIDATES, "INT64", (-1,))]

    def lookups(self, request: Mapping[str, Array]) -> Mapping[str, Array]:
        if strangers := [name for name in request if name not in (HISTORY, CANDIDATES)]:
            raise BadInput(f"input {strangers[0]!r} is not known; a request has {HISTORY} and {CANDIDATES}")
        history = _check(HISTORY, request.get(HISTORY), np.int64, (1,))
        if not 1 <= len(history) <= self.length:
            raise BadInput(f"the history has {len(history)} items; the model looks back on 1 to {self.length}")
        return {self.history: history, self.candidates: _check(CANDIDATES, request.get(CANDIDATES), np.int64, (1,))}

    def score(self, request: Mapping[str, Array], rows: Mapping[str, Tensor]) -> Tensor:
        return rows[self.candidates] @ self.encode(rows[self.history][None])[0]

    def encode(self, rows_BLD: Tensor) -> Tensor:
        """What is known after the last item of each history: [B, D]."""
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
