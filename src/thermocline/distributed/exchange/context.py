"""`ExchangeContext`: what all batches of a collection share in their exchanges; and lookup counts inside ids.

Caches need lookup counts, and a rank sees only its own batch. The upper bits of an id have room for the exponent of the largest
power of two in the count, `MAX_WEIGHT` at most, which is the resolution of the caches. Where a rank relays requests or sums
gradients, it adds counts up and encodes the sum, so all holders of replicas receive the same count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.local_shard import LocalShard, SummedGradients
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import ProcessGroups, RankGroup
from thermocline.kernels import sum_row_gradients
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.cache.reference import MAX_WEIGHT
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import NOWHERE, OTHER_NODES, ROW_BYTES, SAME_NODE, STRAIGHT, WORDS
from thermocline.kernels.layout import Layout
from thermocline.plan.model import Direction
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

from .host_numbers import to_device
from .routes import COUNT_BYTES, FLAT, LOCAL, Phase, Routes
from .traffic_meter import TrafficMeter

LARGE_MESSAGE = 1 << 18  # bytes that a rank sends at most, above which every peer gets its own message
COUNT_BITS = MAX_WEIGHT.bit_length().bit_length() - 1  # of the exponent
assert MAX_WEIGHT.bit_length() == 1 << COUNT_BITS


class AnnouncedCounts(NamedTuple):
    """What ranks announce before an exchange: ids from each member, the maximum of all members, and ids by part."""

    received_P: Counts
    most: int
    received_PK: Counts | None = None


def encode_counts(rows_N: Tensor, lookups_N: Tensor | None, id_type: torch.dtype) -> Tensor:
    """Rows and lookup counts as ids; rows alone without counts."""
    if lookups_N is None:
        return rows_N.to(id_type)
    exponent_N = torch.frexp(lookups_N.clamp(1, MAX_WEIGHT).float())[1].long() - 1
    return (rows_N | exponent_N << _shift(id_type)).to(id_type)


def decode_counts(ids_N: Tensor, counted: bool) -> tuple[Tensor, Tensor | None]:
    """Ids as rows and lookup counts."""
    rows_N, shift = ids_N.long(), _shift(ids_N.dtype)
    if not counted:
        return rows_N, None
    return rows_N & ((1 << shift) - 1), torch.ones_like(rows_N) << (rows_N >> shift)


def sum_counts(rows_V: Tensor, rows_M: Tensor, lookups_M: Tensor | None) -> Tensor | None:
    """Lookup counts of distinct rows, ascending, summed over several ranks."""
    if lookups_M is None:
        return None
    return torch.zeros_like(rows_V).index_add_(0, torch.searchsorted(rows_V, rows_M), lookups_M)


def _shift(id_type: torch.dtype) -> int:
    return 8 * id_type.itemsize - 1 - COUNT_BITS


class ExchangeContext:
    """Groups, row locations, local rows and routes of a collection. `*_K` tensors have a value per part."""

    def __init__(self, groups: ProcessGroups, shard: LocalShard, meter: TrafficMeter) -> None:
        self.groups, self.shard, self.meter = groups, shard, meter
        self.row_index: RowIndex = shard.row_index
        self.routes = Routes(self.row_index.parts, groups.nodes, groups.local_size, self.row_index.id_bytes)
        self.parts = len(self.row_index.parts)
        self.width = max(part.dim for part in self.row_index.parts)
        self.kernels: Any = implementation_for("exchange", shard.arena.meta)
        # With kernels and messages on one device, the host reads sizes once a step, and errors arrive with them.
        staged = groups.world.process_group is not None and groups.world.sends_from.type != self.row_index.device.type
        self.device_side = self.kernels.ON_DEVICE and not staged
        if self.device_side:
            from thermocline.kernels.gpu.errors import ErrorBuffer  # needs Triton, which CPU-only installations lack

            shard.errors = ErrorBuffer(self.row_index.device)
        self.id_type = torch.int32 if self.row_index.id_bytes == torch.int32.itemsize else torch.int64
        self.updated_elsewhere = False  # whether replicas update rows that no rank here requests
        self.counts = shard.cached  # whether ids carry lookup counts
        self.wire_bytes_K = (shard.wire_KF[:, ROW_BYTES] + 4 * shard.wire_KF[:, WORDS]).contiguous()  # of wire parts
        self.wire_bytes: Counts = self.wire_bytes_K.cpu().numpy()
        self._route_parts()
        arena = Arena([TableSpec(self.row_index.rows, self.width)], device="meta")  # one table of all rows, without memory
        fields = [list(field) for field in arena.layout.tables.features]
        self.all_rows = Layout.of(torch.tensor(fields, dtype=torch.int64, device=self.row_index.device), arena.spec)

    def _route_parts(self) -> None:
        routes, nodes, device = self.routes, self.groups.nodes, self.row_index.device
        tier_K, route_K = (torch.from_numpy(each).to(device) for each in (routes.tier_K, routes.route_K))
        self.replicated_K = tier_K < 3
        self.answered_K = tier_K > 1  # in the first all-to-all
        self.deferred_K = (tier_K == 2) & (nodes > 1)  # other nodes may have updated these rows
        bytes_K = routes.bytes_K["ids"] + routes.bytes_K["gradients"]
        self.update_bytes_K = torch.from_numpy(bytes_K).to(device)  # of a row's sum, with its id
        self.relayed_on_host_K = routes.relayed_K & (nodes > 1)
        self.relayed_K = torch.from_numpy(self.relayed_on_host_K).to(device)
        self.owner_pooled_K = torch.from_numpy(routes.owner_pooled_K).to(device)
        # The first all-to-all reaches all ranks, the second crosses nodes. Without training, rows of tier 1 are not sent.
        first_K = torch.where(route_K == FLAT, STRAIGHT, SAME_NODE)
        self.first_routes_K = {True: first_K, False: torch.where(route_K == LOCAL, NOWHERE, first_K)}
        synced_K = self.replicated_K if nodes > 1 else torch.zeros_like(self.replicated_K)
        second_K = {trains: self.relayed_K | synced_K if trains else self.relayed_K for trains in (True, False)}
        self.second_routes_K = {trains: torch.where(each_K, OTHER_NODES, NOWHERE) for trains, each_K in second_K.items()}
        self.crosses_nodes_K = second_K[True]
        self.crosses_nodes = bool(self.crosses_nodes_K.any())
        self.requests_rows = routes.flat or routes.in_node
        self.first_stays_in_node = nodes > 1 and not routes.flat

    def is_large(self, rows: int, phase: Phase, sums: bool = False) -> bool:
        """Whether messages of at most `rows` rows (or sums) per rank go to each peer separately."""
        bytes_K = self.routes.sum_bytes_K if sums else self.routes.bytes_K
        return rows * int(bytes_K[phase].max()) > LARGE_MESSAGE

    def is_owner_pooled(self, rows_N: Tensor) -> Tensor:
        """Which rows their owners pool."""
        return self.owner_pooled_K[self.row_index.locate(rows_N).part_N]

    def count_by_rank(self, group: RankGroup, member_N: Tensor, part_N: Tensor, kinds: int = 1) -> Counts:
        """Counts [member of the group, part]; with several kinds, [member, wire part]."""
        ranks, parts = len(group.ranks), kinds * len(self.row_index.parts)
        counts = torch.bincount(member_N * parts + part_N, minlength=ranks * parts)
        found: Counts = counts.view(ranks, parts).cpu().numpy()
        return found

    def exchange_counts(self, group: RankGroup, direction: Direction, sent_P: Counts, total: int) -> AnnouncedCounts:
        """Announce the ids for each member: the ids from each member, and the maximum `total` of all members."""
        received_PJ = self.exchange_numbers(group, direction, np.stack([sent_P, np.full_like(sent_P, total)], axis=1))
        return AnnouncedCounts(received_PJ[:, 0], int(received_PJ[:, 1].max()))

    def announce(self, group: RankGroup, direction: Direction, numbers_J: Tensor) -> Tensor:
        """Send J numbers on the device to all members: [member, J] of all."""
        ones, send_PJ = [1] * len(group.ranks), numbers_J.int().expand(len(group.ranks), -1)
        with self.meter.timed(direction):
            received_PJ = group.all_to_all(send_PJ, ones, ones)
        self.meter.add_untabled(direction, group.links, np.full(len(ones), numbers_J.numel() * COUNT_BYTES))
        return received_PJ

    def exchange_numbers(self, group: RankGroup, direction: Direction, numbers_PJ: Counts) -> Counts:
        """Send J numbers to each member, and return those that each member sent to this rank."""
        with self.meter.timed(direction):
            received_PJ = group.exchange_counts(numbers_PJ)
        self.meter.add_untabled(direction, group.links, np.full(len(numbers_PJ), numbers_PJ.shape[1] * COUNT_BYTES))
        return received_PJ

    def sum_rows(
        self, rows_M: Tensor, grads_MW: Tensor, lookups_M: Tensor | None, bags: Tensor | None = None,
        distinct: int | None = None,
    ) -> SummedGradients:  # fmt: skip
        """Distinct rows, ascending, with gradients summed in the given order, and summed lookup counts.

        With `bags`, the offsets of bags, the gradients are those of summed bags. A GPU waits unless it is given the number of
        `distinct` rows.
        """
        offsets = to_device(np.array([0, rows_M.numel()]), rows_M.device) if bags is None else bags
        call = LookupCall(rows_M, offsets, None, F.NONE if bags is None else F.SUM)
        winners = torch.empty(0, dtype=torch.int32, device=rows_M.device)
        found = sum_row_gradients(self.all_rows, call, winners, grads_MW.contiguous(), distinct)
        return SummedGradients(*found, sum_counts(found[0], rows_M, lookups_M))
