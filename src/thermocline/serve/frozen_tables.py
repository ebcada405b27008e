"""Served tables as a module: what a ranking model has in place of its embeddings when it serves.

    tables = group.module()                      ids [batch, features] -> [batch, width], as EmbeddingCollection's values()
    model = DLRM(tables, ...)                    the model as it was trained
    torch.export.export(model, (dense, ids))     exported, the tables are one operator

The operator names the group, not its memory: an exported graph has no rows in it, takes the version that is current when it
runs, and finds its tables in whatever process has opened a group of that name. A lookup takes one version for all its features.
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
from thermocline.kernels.serve.fields import Bags

from .errors import NotReady
from .tables.version import Version

if TYPE_CHECKING:
    from .tables.shard_group import CardGroup

_LIBRARY = torch.library.Library("thermocline", "FRAGMENT")
_LIBRARY.define("serve_lookup(Tensor ids, Tensor offsets, Tensor? weights, str group, int features, int width) -> Tensor")
_groups: weakref.WeakValueDictionary[str, CardGroup] = weakref.WeakValueDictionary()


def _found(name: str) -> CardGroup:
    group = _groups.get(name)
    if group is None or group.closed:
        raise NotReady(f"no tables named {name!r} are open in this process; open CardGroup(..., name={name!r}).module() first")
    return group


def _look_up(ids: Tensor, offsets: Tensor, weights: Tensor | None, group: str, features: int, width: int) -> Tensor:
    found = _found(group)
    version = found.current
    if len(version.features) != features or sum(version.dims) != width:
        raise BadInput(
            f"the tables {group!r} have {len(version.features)} features of {sum(version.dims)} columns, and this module was "
            f"made for {features} and {width}; make it again with group.module()"
        )
    return pooled(version, ids, offsets, weights, found.device)


def pooled(version: Version, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, device: torch.device) -> Tensor:
    """Bags of all features, feature-major with features * batch + 1 offsets, as [batch, width]."""
    features, width = len(version.features), sum(version.dims)
    batch = (offsets.numel() - 1) // features
    out = torch.zeros(batch, width, device=device)
    columns = [sum(version.dims[:n]) for n in range(features)]
    ends_F1, column_F = torch.arange(features + 1) * batch, torch.tensor(columns)
    target_F2 = torch.stack([column_F, torch.full_like(column_F, width)], 1)
    modes = {version.modes[feature] for feature in version.features}
    if len(modes) > 1 or F.MAX in modes:
        raise BadInput(
            f"features are pooled by {', '.join(F.MODES[m] for m in sorted(modes))}; a module pools by sum or by mean"
        )
    align = math.gcd(16, width, *columns)
    bags = Bags(ids_N, ends_F1, offsets, weights_N, modes.pop(), target_F2, features * batch, batch, align).to(device)
    version.look_up(bags.rows_N, bags, out)
    return out


def _fake(ids: Tensor, offsets: Tensor, weights: Tensor | None, group: str, features: int, width: int) -> Tensor:
    return ids.new_empty(((offsets.shape[0] - 1) // features, width), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("serve_lookup", _look_up, _key)
torch.library.register_fake("thermocline::serve_lookup", _fake, lib=_LIBRARY)


class FrozenTables(nn.Module):
    """The tables of a group, in its features' order. It holds no rows and nothing to train."""

    def __init__(self, group: CardGroup) -> None:
        super().__init__()
        other = _groups.get(group.name)
        if other is not None and other is not group and not other.closed:
            raise BadInput(
                f"other tables named {group.name!r} are open; give this group a name of its own: CardGroup(..., name=)"
            )
        _groups[group.name] = group
        version = group.current
        self._group = group  # which lives as long as the module
        self.name, self.features, self.dims = group.name, version.features, tuple(version.dims)

    def forward(self, input: Tensor | Mapping[str, Sequence[Tensor]]) -> Tensor:
        """`input`: one id of each feature, [batch, features], or of each feature (ids, batch + 1 offsets) and perhaps weights.
        Returns [batch, width], a block of columns for each feature."""
        if isinstance(input, Tensor):
            if input.dim() != 2 or input.shape[1] != len(self.features):
                raise BadInput(
                    f"ids are {tuple(input.shape)}; {len(self.features)} features need [batch, {len(self.features)}]"
                )
            ids, weights = input.t().reshape(-1), None
            offsets = torch.arange(len(self.features) * input.shape[0] + 1, device=input.device)
        else:
            ids, offsets, weights = self._join(input)
        out: Tensor = torch.ops.thermocline.serve_lookup(ids, offsets, weights, self.name, len(self.features), sum(self.dims))
        return out

    def _join(self, input: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        if missing := [name for name in self.features if name not in input]:
            raise BadInput(f"the input lacks {', '.join(missing)}; the features are {', '.join(self.features)}")
        parts = [tuple(input[name]) for name in self.features]
        begin, offsets = 0, [parts[0][1][:1]]
        for part in parts:
            offsets.append(part[1][1:] + begin)
            begin = begin + part[0].shape[0]
        weights = torch.cat([part[2] for part in parts]) if all(len(part) == 3 for part in parts) else None
        return torch.cat([part[0] for part in parts]), torch.cat(offsets), weights

    def __getstate__(self) -> dict[str, Any]:
        raise BadInput("served tables are not saved with a model: save the checkpoint they come from, or export the model")

    def extra_repr(self) -> str:
        return f"{self.name!r}: {', '.join(f'{name} {dim}' for name, dim in zip(self.features, self.dims, strict=True))}"
