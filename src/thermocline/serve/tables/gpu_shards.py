"""Cards that are GPUs: their segments, filled a block at a time, and lookups that read all of them.

This process drives all cards of the host. A segment is one allocation on its card; with fewer GPUs than cards some share one.
The lookup runs on the first card and reads the others' memory: the driver maps it once (peer access), which a first small copy
between the two asks for. Rows go up in blocks: host memory holds one block, not the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.serve.fields import Bags

from .checkpoint_source import Source
from .row_split import Rows
from .segments import Arrangement, Bytes, Shelf, Words, check_fits
from .version import Version


def load(source: Source, arrangement: Arrangement, cards: int) -> list[Tensor]:
    """The segments of all cards, with every row in place. Checksums first."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BadInput(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU here; use 'cpu', or ask thermocline doctor"
        )
    devices = [torch.device("cuda", card % gpus) for card in range(cards)]
    for device in set(devices):
        needed = sum(size for size, mine in zip(arrangement.sizes_C, devices, strict=True) if mine == device)
        check_fits(needed, f"'{source.checkpoint.folder}' on {device}", torch.cuda.mem_get_info(device)[0])
        connect(devices[0], device)
    source.checkpoint.verify()
    segments = [
        torch.empty(size, dtype=torch.uint8, device=device) for size, device in zip(arrangement.sizes_C, devices, strict=True)
    ]
    fill(source, arrangement, segments)
    return segments


def connect(reader: torch.device, owner: torch.device) -> None:
    """Have the memory of one card mapped for the kernels of another."""
    if reader == owner:
        return
    if not torch.cuda.can_device_access_peer(reader, owner):
        raise BadInput(f"{reader} cannot read the memory of {owner} directly; use cards that are connected, or fewer of them")
    torch.zeros(1, device=owner).to(reader)


def fill(source: Source, arrangement: Arrangement, segments: Sequence[Tensor]) -> None:
    """Put every row in place."""
    for shelf in arrangement.shelves:
        name = shelf.table.name
        if len(source.checkpoint.manifest.table(name).precisions) == 1:
            for first, codes_RB, meta_RW, _ in source.checkpoint.blocks(name):
                _put_block(shelf, segments, first, codes_RB.numpy(), meta_RW.numpy())
    source.put_rest(arrangement.shelves, lambda shelf, *rows: _put_rows(shelf, segments, *rows))


def views(shelf: Shelf, segment: Tensor, card: int) -> tuple[Tensor, Tensor]:
    """Codes and meta words of a table in a segment, by place, where they lie apart."""
    places, codes, meta = shelf.split.places(card), shelf.codes_C[card], shelf.meta_C[card]
    codes_PB = segment[codes : codes + places * shelf.stride].view(places, shelf.stride)
    meta_PW = segment[meta : meta + places * shelf.meta_stride].view(torch.int32).view(places, shelf.meta_stride // 4)
    return codes_PB, meta_PW


def _put_block(shelf: Shelf, segments: Sequence[Tensor], begin: int, codes_RB: Bytes, meta_RW: Words) -> None:
    split, end = shelf.split, begin + len(codes_RB)
    copied = split.copied_in(begin, end)
    for card, segment in enumerate(segments):
        codes_PB, meta_PW = views(shelf, segment, card)
        for mine, into in (split.owned_by(card, begin, end), copied):
            if into.stop > into.start:
                codes_PB[into] = torch.from_numpy(codes_RB[mine]).to(segment.device)
                meta_PW[into] = torch.from_numpy(meta_RW[mine]).to(segment.device)


def _put_rows(shelf: Shelf, segments: Sequence[Tensor], rows_K: Rows, codes_KB: Bytes, meta_KW: Words) -> None:
    split = shelf.split
    card_K, place_K = split.owner_and_place(rows_K)
    rank_K = split.owned + np.searchsorted(split.copied_H, rows_K)
    copied_K = np.flatnonzero(np.isin(rows_K, split.copied_H))
    for card, segment in enumerate(segments):
        codes_PB, meta_PW = views(shelf, segment, card)
        owned_K = np.flatnonzero(card_K == card) if not split.everywhere else copied_K[:0]
        for mine_K, at_K in ((owned_K, place_K[owned_K]), (copied_K, rank_K[copied_K])):
            at = torch.from_numpy(at_K).to(segment.device)
            codes_PB[at] = torch.from_numpy(codes_KB[mine_K]).to(segment.device)
            meta_PW[at] = torch.from_numpy(meta_KW[mine_K]).to(segment.device)


def look_up(version: Version, bags: Bags, size: int) -> Tensor:
    """Answers to a micro-batch, brought to the host."""
    moved = bags.to(version.device)
    out = torch.empty(size, device=version.device)
    version.look_up(moved.rows_N, moved, out)
    return out.cpu()
