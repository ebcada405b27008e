"""Inputs and outputs of a collection.

    input                                     ids of a feature
    {feature: (values, offsets)}              flat ids and batch + 1 offsets; optional weights are a third item
    {feature: nested jagged tensor}           made with layout=torch.jagged
    tensor [batch, features]                  one id each, features in the order of the collection
    TorchRec's KeyedJaggedTensor              anything with keys(), values(), and offsets() or lengths()

Each form is converted to one flat tensor of ids, feature after feature, with features * batch + 1 offsets and optional weights.
Offsets must begin at 0 and end at the number of ids. They are checked here on a CPU, and by the kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from thermocline.errors import BadInput

Given = Tensor | tuple[str, ...] | None  # part of an input: a tensor, or the keys of a keyed input

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # no bools: joining features would convert them


def is_transformed() -> bool:
    """Whether TorchScript traces, or torch.func transforms, what runs: kernels would get addresses of no data."""
    return torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()


def refuse_transforms() -> NoReturn:
    """Raise the error of a caller that `is_transformed`."""
    if torch._C._get_tracing_state() is not None:
        refuse_torchscript("torch.jit.trace")
    raise BadInput(
        "transforms of torch.func (vmap, grad, jvp) do not reach rows, which the backward of a loss updates in place; call "
        "the module with a whole batch outside of the transform, and transform a function of its output",
        parameter="module", tool="torch.func",
    )  # fmt: skip


def refuse_torchscript(tool: str) -> NoReturn:
    message = f"{tool} cannot record lookups, whose kernels are no TorchScript; use torch.export.export(model, args) instead"
    raise BadInput(message, parameter="module", tool=tool)


class JaggedIds(NamedTuple):
    """Ids of all features, in the form that kernels take."""

    ids_N: Tensor
    offsets: Tensor  # features * batch + 1
    weights_N: Tensor | None
    batch: int


def read_features(features: Sequence[str], input: Any) -> JaggedIds:
    """Convert any form of input, with features in this order."""
    if isinstance(input, Tensor):
        return _one_each(features, input)
    if isinstance(input, Mapping):
        _check_names(features, list(input))
        return _join(features, [_one_feature(name, input[name]) for name in features])
    if all(hasattr(input, method) for method in ("keys", "values")):
        return _keyed(features, input)
    raise BadInput(
        f"input is a {type(input).__name__}; use a dict of feature -> (values, offsets) or nested jagged tensor, a tensor "
        "[batch, features], or a KeyedJaggedTensor",
        parameter="input", value=type(input).__name__,
    )  # fmt: skip


def tensors_of(features: Sequence[str], input: Any) -> list[Given]:
    """The tensors and keys of an input, by which a batch is recognised; empty for unknown forms."""
    found: list[Any] = []
    keys: list[tuple[str, ...]] = []
    if isinstance(input, Tensor):
        found = [input]
    elif isinstance(input, Mapping):
        for given in (input.get(name) for name in features):
            found += (*given, None)[:3] if isinstance(given, (tuple, list)) else (given, None, None)
    elif hasattr(input, "keys") and hasattr(input, "values"):
        found = [input.values(), input.offsets() if hasattr(input, "offsets") else input.lengths(), _weights_of(input)]
        keys = [tuple(input.keys())]
    return [*found, *keys] if all(tensor is None or isinstance(tensor, Tensor) for tensor in found) else []


def _one_each(features: Sequence[str], ids_BF: Tensor) -> JaggedIds:
    if ids_BF.dim() != 2 or ids_BF.shape[1] != len(features):
        message = f"ids are {tuple(ids_BF.shape)}; {len(features)} features need [batch, {len(features)}]"
        raise BadInput(message, parameter="input", value=tuple(ids_BF.shape), features=len(features))
    batch = ids_BF.shape[0]
    return JaggedIds(ids_BF.t().reshape(-1), torch.arange(len(features) * batch + 1, device=ids_BF.device), None, batch)


def _check_names(features: Sequence[str], given: Sequence[str]) -> None:
    if set(given) == set(features):
        return
    missing = [name for name in features if name not in given]
    unknown = [name for name in given if name not in features]
    message = f"the input has the features {', '.join(map(str, given))}; this collection has {', '.join(features)}"
    raise BadInput(message, parameter="input", missing=missing, unknown=unknown)


def _one_feature(name: str, given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if isinstance(given, Tensor) and given.is_nested:
        values, offsets, weights = *read_jagged(given), None
    elif isinstance(given, (tuple, list)) and len(given) in (2, 3):
        values, offsets, weights = (*given, None)[:3]
    else:
        message = f"feature {name!r} is a {type(given).__name__}; give (values, offsets) or a nested jagged tensor"
        raise BadInput(message, feature=name, value=type(given).__name__)
    of = f" of feature {name!r}"
    check_integers(values, "ids", of)
    check_integers(offsets, "offsets", of)
    if values.dim() != 1 or offsets.dim() != 1:
        message = f"ids{of} are {values.dim()}-D and offsets {offsets.dim()}-D; both must be flat"
        raise BadInput(message, feature=name, value=(values.dim(), offsets.dim()))
    if weights is not None:
        check_is_tensor(weights, "weights", of, "floats")
        if weights.shape != values.shape:
            message = f"weights{of} are {tuple(weights.shape)}, its ids {tuple(values.shape)}; give one for each id"
            raise BadInput(message, feature=name, parameter="weights", value=tuple(weights.shape), needed=tuple(values.shape))
    return values, offsets, _as_read(weights)


def check_is_tensor(given: Any, what: str = "ids", of: str = "", kind: str = "torch.int32 or torch.int64") -> None:
    if not isinstance(given, Tensor):
        message = f"{what}{of} are a {type(given).__name__}; use a tensor of {kind}"
        raise BadInput(message, parameter=what, value=type(given).__name__)


def check_integers(given: Any, what: str = "ids", of: str = "") -> None:
    """Raise unless `given` is a tensor of integers."""
    check_is_tensor(given, what, of)
    if given.dtype not in _INTEGERS:
        raise BadInput(f"{what}{of} are {given.dtype}; use torch.int32 or torch.int64", parameter=what, value=given.dtype)


def read_jagged(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Values and offsets of a nested tensor."""
    if nested.layout != torch.jagged or nested.lengths() is not None:  # type: ignore[attr-defined]
        message = "nested ids must be jagged and without holes; make them with layout=torch.jagged, or call .contiguous()"
        raise BadInput(message, parameter="ids", value=nested.layout)
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def _join(features: Sequence[str], parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> JaggedIds:
    batch = parts[0][1].shape[0] - 1
    if batch < 0:
        message = f"feature {features[0]!r} has no offsets; give batch + 1 offsets, a 0 for an empty batch"
        raise BadInput(message, feature=features[0], parameter="offsets", value=0)
    for name, (_, offsets, _) in zip(features, parts, strict=True):
        if offsets.shape[0] != batch + 1:
            message = f"feature {name!r} has {offsets.shape[0]} offsets, {features[0]!r} {batch + 1}; make batches equal"
            raise BadInput(message, feature=name, parameter="offsets", value=offsets.shape[0], needed=batch + 1)
    offsets_FB = torch.cat([offsets for _, offsets, _ in parts]).view(len(features), batch + 1)
    ends_F = offsets_FB[:, -1]
    if offsets_FB.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths = [values.shape[0] for values, _, _ in parts]
        for name, begin, end, length in zip(features, offsets_FB[:, 0].tolist(), ends_F.tolist(), lengths, strict=True):
            if begin != 0 or end != length:
                message = f"offsets of feature {name!r} run from {begin} to {end}; use 0 to {length}, its number of ids"
                raise BadInput(message, feature=name, parameter="offsets", value=(begin, end), needed=length)
    begins_F = ends_F.cumsum(0) - ends_F  # no synchronization
    offsets = torch.cat([offsets_FB[0, :1], (offsets_FB[:, 1:] + begins_F[:, None]).reshape(-1)])
    weighted = [weights is not None for _, _, weights in parts]
    if any(weighted) and not all(weighted):
        feature = features[weighted.index(False)]
        raise BadInput(f"feature {feature!r} has no weights, but others do", feature=feature, parameter="weights")
    weights_N = torch.cat([weights for _, _, weights in parts if weights is not None]) if all(weighted) else None
    return JaggedIds(torch.cat([values for values, _, _ in parts]), offsets, weights_N, batch)


def _keyed(features: Sequence[str], keyed: Any) -> JaggedIds:
    keys = list(keyed.keys())
    _check_names(features, keys)
    values_N, weights_N = keyed.values(), _as_read(_weights_of(keyed))
    check_is_tensor(values_N)
    if hasattr(keyed, "offsets"):
        offsets = keyed.offsets()
        check_is_tensor(offsets, "offsets")
    elif hasattr(keyed, "lengths"):
        lengths = keyed.lengths()
        check_integers(lengths, "lengths")
        if lengths.dim() != 1:
            raise BadInput(f"lengths are {lengths.dim()}-D; use flat lengths", parameter="lengths", value=lengths.dim())
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    else:
        message = f"input is a {type(keyed).__name__} with keys() and values(); it needs offsets() or lengths()"
        raise BadInput(message, parameter="input", value=type(keyed).__name__)
    if (offsets.shape[0] - 1) % len(keys):
        message = f"{offsets.shape[0]} offsets for {len(keys)} keys; use keys * batch + 1"
        raise BadInput(message, parameter="offsets", value=offsets.shape[0], keys=len(keys))
    batch = (offsets.shape[0] - 1) // len(keys)
    if keys == list(features):
        return JaggedIds(values_N, offsets, weights_N, batch)
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    begins = offsets[:: max(1, batch)].tolist()  # keys in another order: waits for a GPU
    for name in features:
        at = keys.index(name)
        first, last = (begins[at], begins[at + 1]) if batch else (0, 0)
        mine = offsets[at * batch : (at + 1) * batch + 1] - first
        parts.append((values_N[first:last], mine, None if weights_N is None else weights_N[first:last]))
    return _join(features, parts)


def _weights_of(keyed: Any) -> Any:
    """The weights of a keyed input, or None. TorchRec's `weights()` raises where there are none."""
    ask = next((name for name in ("weights_or_none", "weights") if hasattr(keyed, name)), None)
    found = None if ask is None else getattr(keyed, ask)
    return found() if callable(found) else found


def _as_read(weights: Any) -> Any:
    """Weights in a type that kernels read."""
    return weights.float() if isinstance(weights, Tensor) and weights.dtype == torch.float64 else weights


class _ByFeature:
    """The dict interface of outputs."""

    _names: tuple[str, ...]

    def keys(self) -> list[str]:
        return list(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Pooled(_ByFeature):
    """Pooled output by feature: one vector for each sample, in one tensor [batch, sum of dimensions].

    Args:
        values: the tensor.
        names: the features.
        dims: columns of each feature.

    Example::

        out = collection(batch)
        out["user"], out.values(), out.to_dict()
    """

    def __init__(self, values: Tensor, names: Sequence[str], dims: Sequence[int]) -> None:
        self._values, self._names, self._dims = values, tuple(names), tuple(dims)

    def values(self) -> Tensor:
        return self._values

    def length_per_key(self) -> list[int]:
        return list(self._dims)

    def __getitem__(self, name: str) -> Tensor:
        at = _position(name, self._names)
        first = sum(self._dims[:at])
        return self._values[:, first : first + self._dims[at]]

    def to_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._values.split(self._dims, dim=1), strict=True))


class Unpooled(_ByFeature):
    """Unpooled output by feature: one vector for each id, with the offsets of the samples.

    Args:
        values: vectors of all features, padded to the largest dimension.
        offsets: features * batch + 1 offsets of the samples, feature after feature.
        names: the features.
        dims: columns of each feature.

    Example::

        out = thermocline.EmbeddingCollection(tables, mode="none")(batch)
        out["user"], out.offsets("user")
    """

    def __init__(self, values: Tensor, offsets: Tensor, names: Sequence[str], dims: Sequence[int]) -> None:
        self._values, self._offsets, self._names, self._dims = values, offsets, tuple(names), tuple(dims)

    @property
    def _batch(self) -> int:
        return (self._offsets.shape[0] - 1) // len(self._names)

    def values(self) -> Tensor:
        """[ids of all features, largest dimension], padded with zeros."""
        return self._values

    def offsets(self, name: str) -> Tensor:
        """batch + 1 offsets of the samples in the vectors of a feature."""
        at = _position(name, self._names) * self._batch
        mine = self._offsets[at : at + self._batch + 1]
        return mine - mine[:1]

    def __getitem__(self, name: str) -> Tensor:
        at = _position(name, self._names)
        first, last = (int(self._offsets[(at + i) * self._batch]) for i in (0, 1))
        return self._values[first:last, : self._dims[at]]

    def to_dict(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self._names}


def _register(kind: type[Any], tensors: Sequence[str]) -> None:
    """Make outputs nodes of a pytree, so that torch.export, torch.func and wrappers of modules find their tensors."""

    def flatten(out: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
        return [getattr(out, name) for name in tensors], (out._names, out._dims)

    def flatten_with_keys(out: Any) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], tuple[Any, ...]]:
        return [(pytree.GetAttrKey(name[1:]), getattr(out, name)) for name in tensors], (out._names, out._dims)

    pytree.register_pytree_node(
        kind, flatten, lambda parts, context: kind(*parts, *context), serialized_type_name=f"thermocline.{kind.__name__}",
        to_dumpable_context=list, from_dumpable_context=lambda context: tuple(tuple(each) for each in context),
        flatten_with_keys_fn=flatten_with_keys,
    )  # fmt: skip


_register(Pooled, ["_values"])
_register(Unpooled, ["_values", "_offsets"])


def _position(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise BadInput(f"feature {name!r} is not in this output; it has {', '.join(names)}", feature=name, available=names)
    return names.index(name)
