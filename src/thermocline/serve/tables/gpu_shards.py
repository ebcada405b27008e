"""Shards on GPUs: one segment of device memory for each, filled a block at a time.

One process drives all GPUs of the host. With fewer GPUs than shards, several shards share one. The lookup runs on the first GPU
and reads the memory of the others through peer access. Rows are copied in blocks: host memory holds one block, not the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput

from .checkpoint_source import CheckpointSource
from .row_split import Rows
from .segments import Bytes, ShardedTableLayout, ShardLayout, Words, check_fits


def load(source: CheckpointSource, layout: ShardLayout, shards: int) -> list[Tensor]:
    """Verify the checksums of a checkpoint, and load its rows into device memory. Returns the segments of all shards."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BadInput(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU here; use 'cpu', or run thermocline doctor",
            parameter="device",
            value="cuda",
        )
    devices = [torch.device("cuda", shard % gpus) for shard in range(shards)]
    for device in set(devices):
        needed = sum(size for size, own in zip(layout.sizes_S, devices, strict=True) if own == device)
        check_fits(needed, f"'{source.checkpoint.folder}' on {device}", torch.cuda.mem_get_info(device)[0])
        connect(devices[0], device)
    source.checkpoint.verify()
    segments = [
        torch.empty(size, dtype=torch.uint8, device=device) for size, device in zip(layout.sizes_S, devices, strict=True)
    ]
    fill(source, layout, segments)
    return segments


def connect(reader: torch.device, owner: torch.device) -> None:
    """Map the memory of one GPU for the kernels of another."""
    if reader == owner:
        return
    if not torch.cuda.can_device_access_peer(reader, owner):
        raise BadInput(
            f"{reader} cannot read the memory of {owner} directly; use GPUs with peer access, or fewer of them",
            parameter="device",
        )
    torch.zeros(1, device=owner).to(reader)  # the first copy enables peer access


def fill(source: CheckpointSource, layout: ShardLayout, segments: Sequence[Tensor]) -> None:
    """Write every row to its shard."""
    for each in layout.tables:
        name = each.table.name
        if len(source.checkpoint.manifest.table(name).precisions) == 1:
            for first, codes_RB, meta_RW, _ in source.checkpoint.blocks(name):
                _put_block(each, segments, first, codes_RB.numpy(), meta_RW.numpy())
    source.put_rest(layout.tables, lambda each, *rows: _put_rows(each, segments, *rows))


def views(layout: ShardedTableLayout, segment: Tensor, shard: int) -> tuple[Tensor, Tensor]:
    """Codes and meta words of a table in a segment without records, by place."""
    places, codes, meta = layout.split.places(shard), layout.codes_S[shard], layout.meta_S[shard]
    codes_PB = segment[codes : codes + places * layout.stride].view(places, layout.stride)
    meta_PW = segment[meta : meta + places * layout.meta_stride].view(torch.int32).view(places, layout.meta_stride // 4)
    return codes_PB, meta_PW


def _put_block(layout: ShardedTableLayout, segments: Sequence[Tensor], begin: int, codes_RB: Bytes, meta_RW: Words) -> None:
    split, end = layout.split, begin + len(codes_RB)
    copied = split.copied_in(begin, end)
    for shard, segment in enumerate(segments):
        codes_PB, meta_PW = views(layout, segment, shard)
        for which, places in (split.owned_by(shard, begin, end), copied):
            if places.stop > places.start:
                codes_PB[places] = torch.from_numpy(codes_RB[which]).to(segment.device)
                meta_PW[places] = torch.from_numpy(meta_RW[which]).to(segment.device)


def _put_rows(layout: ShardedTableLayout, segments: Sequence[Tensor], rows_K: Rows, codes_KB: Bytes, meta_KW: Words) -> None:
    split = layout.split
    shard_K, place_K = split.owner_and_place(rows_K)
    rank_K = split.owned + np.searchsorted(split.copied_H, rows_K)
    copied_K = np.flatnonzero(np.isin(rows_K, split.copied_H))
    for shard, segment in enumerate(segments):
        codes_PB, meta_PW = views(layout, segment, shard)
        owned_K = np.flatnonzero(shard_K == shard) if not split.everywhere else copied_K[:0]
        for which_K, at_K in ((owned_K, place_K[owned_K]), (copied_K, rank_K[copied_K])):
            at = torch.from_numpy(at_K).to(segment.device)
            codes_PB[at] = torch.from_numpy(codes_KB[which_K]).to(segment.device)
            meta_PW[at] = torch.from_numpy(meta_KW[which_K]).to(segment.device)
