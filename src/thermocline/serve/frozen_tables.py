"""Served tables as a module: replaces the embeddings of a model that serves.

    tables = group.module()                      ids [batch, features] -> [batch, width], as EmbeddingCollection's values()
    model = DLRM(tables, ...)                    the model as it was trained
    torch.export.export(model, (dense, ids))     the tables are one operator of the exported graph

The operator holds the name of the group, not its memory: an exported graph has no rows, uses the version that is current when
it runs, and finds its tables in any process that has opened a group of that name.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.serve.fields import ServedBags

from .errors import NotReady
from .tables.version import TableVersion

if TYPE_CHECKING:
    from .tables.shard_group import ShardGroup

_LIBRARY = torch.library.Library("thermocline", "FRAGMENT")
_LIBRARY.define("serve_lookup(Tensor ids, Tensor offsets, Tensor? weights, str group, int features, int width) -> Tensor")


_groups: weakref.WeakValueDictionary[str, ShardGroup] = weakref.WeakValueDictionary()


def _serve_lookup(ids: Tensor, offsets: Tensor, weights: Tensor | None, group: str, features: int, width: int) -> Tensor:
    found = _groups.get(group)
    if found is None or found.closed:
        way_out = f"open ShardGroup(..., name={group!r}).module() first"
        raise NotReady(f"no tables named {group!r} are open in this process; {way_out}")
    version = found.current
    if len(version.features) != features or sum(version.dims) != width:
        have = f"the tables {group!r} have {len(version.features)} features of {sum(version.dims)} columns"
        words = f"{have}, and this module was made for {features} and {width}; make it again with group.module()"
        raise BadInput(words, parameter="group", value=group)
    return look_up_columns(version, ids, offsets, weights, found.device)


def look_up_columns(
    version: TableVersion, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, device: torch.device
) -> Tensor:
    """Pool the bags of all features, given feature by feature with features * batch + 1 offsets, into [batch, width]."""
    features, width = len(version.features), sum(version.dims)
    batch = (offsets.numel() - 1) // features
    out = torch.zeros(batch, width, dtype=torch.float32, device=device)
    columns = [sum(version.dims[:n]) for n in range(features)]
    ends_F1, column_F = torch.arange(features + 1) * batch, torch.tensor(columns, dtype=torch.int64)
    target_F2 = torch.stack([column_F, torch.full_like(column_F, width)], 1)
    modes = {version.modes[feature] for feature in version.features}
    if len(modes) > 1 or F.MAX in modes:
        names = ", ".join(F.MODES[mode] for mode in sorted(modes))
        raise BadInput(f"features are pooled by {names}; a module pools all features by sum or by mean", parameter="mode")
    align = math.gcd(16, width, *columns)
    bags = ServedBags(ids_N, ends_F1, offsets, weights_N, modes.pop(), target_F2, features * batch, batch, align)
    version.look_up(bags.to(device), out)
    return out


def _fake(ids: Tensor, offsets: Tensor, weights: Tensor | None, group: str, features: int, width: int) -> Tensor:
    return ids.new_empty(((offsets.shape[0] - 1) // features, width), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("serve_lookup", _serve_lookup, _key)
torch.library.register_fake("thermocline::serve_lookup", _fake, lib=_LIBRARY)


class FrozenTables(nn.Module):
    """The tables of a `ShardGroup` as a module. It holds no rows and no parameters.

    Args:
        group: an open group; its name must be unique among the groups with a module

    Raises:
        BadInput: another open group has the same name

    Example:
        >>> model = torch.nn.Sequential(FrozenTables(group), torch.nn.Linear(32, 1))
        >>> model(torch.tensor([[3, 5], [17, 6]]))  # one id of each of two features
    """

    def __init__(self, group: ShardGroup) -> None:
        super().__init__()
        other = _groups.get(group.name)
        if other is not None and other is not group and not other.closed:
            words = f"other tables named {group.name!r} are open; give this group its own name: ShardGroup(..., name=)"
            raise BadInput(words, parameter="name", value=group.name)
        _groups[group.name] = group
        version = group.current
        self._group = group  # keeps the group open
        self.name, self.features, self.dims = group.name, version.features, tuple(version.dims)

    def forward(self, input: Tensor | Mapping[str, Sequence[Tensor]]) -> Tensor:
        """Look up one id, or one bag, of each feature.

        Args:
            input: ids [batch, features]; or by feature (ids, batch + 1 offsets), optionally with weights

        Returns:
            [batch, width]: the columns of each feature

        Raises:
            BadInput: ids of another shape, or a missing feature
        """
        if isinstance(input, Tensor):
            if input.dim() != 2 or input.shape[1] != len(self.features):
                words = f"ids are {tuple(input.shape)}; {len(self.features)} features need [batch, {len(self.features)}]"
                raise BadInput(words, parameter="input", value=tuple(input.shape))
            ids, weights = input.t().reshape(-1), None
            offsets = torch.arange(len(self.features) * input.shape[0] + 1, device=input.device)
        else:
            ids, offsets, weights = self._join(input)
        out: Tensor = torch.ops.thermocline.serve_lookup(ids, offsets, weights, self.name, len(self.features), sum(self.dims))
        return out

    def _join(self, input: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        if missing := [name for name in self.features if name not in input]:
            words = f"the input lacks {', '.join(missing)}; the features are {', '.join(self.features)}"
            raise BadInput(words, parameter=missing[0])
        parts = [tuple(input[name]) for name in self.features]
        begin, offsets = 0, [parts[0][1][:1]]
        for part in parts:
            offsets.append(part[1][1:] + begin)
            begin = begin + part[0].shape[0]
        weights = torch.cat([part[2] for part in parts]) if all(len(part) == 3 for part in parts) else None
        return torch.cat([part[0] for part in parts]), torch.cat(offsets), weights

    def __getstate__(self) -> dict[str, Any]:
        raise BadInput("served tables are not saved with a model: save their checkpoint, or export the model")

    def extra_repr(self) -> str:
        return f"{self.name!r}: {', '.join(f'{name} {dim}' for name, dim in zip(self.features, self.dims, strict=True))}"
