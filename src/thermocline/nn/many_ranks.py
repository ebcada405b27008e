"""Refusals of wrappers that would let the rows of ranks diverge without a word: DDP, FSDP, or several ranks and no `shard_`.

Every rank updates rows from its own batch, and no wrapper of torch sums what it does not see. One check in each training
lookup covers them all, because what makes copies diverge is that several ranks train unsharded rows, whatever is wrapped.
Ranks that train different models, or rows that one rank alone has, look the same from inside: `RowConfig(independent=True)`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel

from thermocline.errors import BadInput

from .placeholder import PlaceholderParameter

_WAY = "shard the rows (thermocline.shard_) or freeze them (requires_grad_(False))"


def ranks() -> int:
    """Ranks of the job; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def refuse_ddp() -> None:
    """Raise within the forward of DistributedDataParallel."""
    if DistributedDataParallel._active_ddp_module is None:
        return
    raise BadInput(
        "each rank updates rows from its own batch, so copies under DistributedDataParallel would diverge; wrap only the dense "
        f"part of the model, and {_WAY}",
        parameter="module",
    )  # fmt: skip


def refuse_unsharded(ranks: int) -> NoReturn:
    raise BadInput(
        f"each of {ranks} ranks would train its own copy of the rows, and the copies would diverge, also beside dense parts in "
        f"DistributedDataParallel or FSDP; {_WAY}. If ranks train different models, or one rank alone has these rows, set "
        "RowConfig(independent=True)",
        parameter="independent", value=False, ranks=ranks,
    )  # fmt: skip


def check_placeholder(name: str, value: Any) -> None:
    """Raise if an attribute that is set would replace the placeholder parameter: freezing and clipping would miss the rows."""
    if name == "placeholder" and not isinstance(value, PlaceholderParameter):
        raise BadInput(
            f"the placeholder of rows would become a {type(value).__name__}, as in fully_shard(model); leave it out: "
            "fully_shard(model, ignored_params={module.placeholder}), for each thermocline module",
            parameter="ignored_params", value=type(value).__name__,
        )  # fmt: skip
