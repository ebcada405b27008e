"""Shards on GPUs: one segment of device memory for each, filled a block at a time.

One process drives all GPUs of the host. The lookup runs on the first and reads the others through peer access.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput

from .checkpoint_source import CheckpointSource
from .memory_limits import check_fits
from .row_split import Rows
from .segments import Bytes, ShardedTableLayout, ShardLayout, Words


def load(source: CheckpointSource, layout: ShardLayout, shards: int) -> list[Tensor]:
    """Verify the checksums of a checkpoint, and load its rows into device memory. Returns the segments of all shards."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        words = f"device is 'cuda', and torch {torch.__version__} sees no GPU here; use 'cpu', or run thermocline doctor"
        raise BadInput(words, parameter="device", value="cuda")
    devices = [torch.device("cuda", shard % gpus) for shard in range(shards)]
    for device in set(devices):
        needed = sum(size for size, own in zip(layout.sizes_S, devices, strict=True) if own == device)
        check_fits(needed, f"'{source.checkpoint.folder}' on {device}", torch.cuda.mem_get_info(device)[0])
        _connect(devices[0], device)
    source.checkpoint.verify()
    sizes = zip(layout.sizes_S, devices, strict=True)
    segments = [torch.empty(size, dtype=torch.uint8, device=device) for size, device in sizes]
    fill(source, layout, segments)
    return segments


def _connect(reader: torch.device, owner: torch.device) -> None:
    """Map the memory of one GPU for the kernels of another."""
    if reader == owner:
        return
    if not torch.cuda.can_device_access_peer(reader, owner):
        way_out = "use GPUs with peer access, or fewer of them"
        raise BadInput(f"{reader} cannot read the memory of {owner} directly; {way_out}", parameter="device")
    torch.zeros(1, dtype=torch.float32, device=owner).to(reader)  # the first copy enables peer access


def fill(source: CheckpointSource, layout: ShardLayout, segments: Sequence[Tensor]) -> None:
    """Write every row to its shard."""
    for each in layout.tables:
        name = each.table.name
        if len(source.checkpoint.manifest.table(name).precisions) == 1:
            for first, codes_RB, meta_RW, _ in source.checkpoint.blocks(name):
                rows_R = np.arange(first, first + len(codes_RB))
                put_rows(each, segments, rows_R, codes_RB.numpy(), meta_RW.numpy())
    source.put_rest(layout.tables, lambda each, *rows: put_rows(each, segments, *rows))


def put_rows(layout: ShardedTableLayout, segments: Sequence[Tensor], rows_K: Rows, codes_KB: Bytes, meta_KW: Words) -> None:
    """Write any rows, each at most once, to the shards that hold them."""
    for shard, which_K, at_K in layout.split.placed(range(len(segments)), rows_K):
        places, codes, meta = layout.split.places(shard), layout.codes_S[shard], layout.meta_S[shard]
        codes_PB = segments[shard][codes : codes + places * layout.stride].view(places, layout.stride)
        meta_P = segments[shard][meta : meta + places * layout.meta_stride].view(torch.int32)
        at = torch.from_numpy(at_K).to(codes_PB.device)
        codes_PB[at] = torch.from_numpy(codes_KB[which_K]).to(codes_PB.device)
        meta_P.view(places, layout.meta_stride // 4)[at] = torch.from_numpy(meta_KW[which_K]).to(codes_PB.device)
