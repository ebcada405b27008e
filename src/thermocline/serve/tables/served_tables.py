"""Lookups in the version in use: what a group of shards and a front process over the same rows have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.serve.errors import NotReady, ShardDown
from thermocline.serve.served_model import ShardStatus, TensorMetadata

from .lookup import LookupResult, look_up_alone, look_up_batch
from .requests import KNOWN, OFFSETS, WEIGHTS, ParsedRequest, as_array, parse_request
from .version import TableVersion

if TYPE_CHECKING:
    from thermocline.kernels.serve.wire_cpu import WireLookup

Array = NDArray[Any]


class ServedTables:
    """The tables of one model. A subclass sets `name`, and replaces `_current`."""

    name: str
    _current: TableVersion | None = None

    @property
    def current(self) -> TableVersion:
        """The version in use. Take it once for lookups that belong together."""
        if (version := self._current) is None:
            raise NotReady(f"the shards of {self.name!r} are closed")
        return version

    @property
    def version(self) -> str:
        """The name of the version in use; empty after `close`."""
        return "" if self._current is None else self._current.name

    def shards(self) -> Sequence[ShardStatus]:
        """State, bytes, lookups and process of each shard."""
        raise NotImplementedError

    @property
    def inputs(self) -> list[TensorMetadata]:
        """Inputs of the served model."""
        kinds = (("", "INT64"), (OFFSETS, "INT64"), (WEIGHTS, "FP32"))
        return [TensorMetadata(name + end, kind, (-1,), True) for name in self.current.features for end, kind in kinds]

    @property
    def outputs(self) -> list[TensorMetadata]:
        """Outputs of the served model. Those of type BOOL are sent only if they are requested by name."""
        version = self.current
        rows = [TensorMetadata(name, "FP32", (-1, dim)) for name, dim in zip(version.features, version.dims, strict=True)]
        return rows + [TensorMetadata(version.features[n] + KNOWN, "BOOL", (-1,)) for n in sorted(version.elastic)]

    def infer(
        self, requests: Sequence[Mapping[str, Array]], version: TableVersion | None = None
    ) -> list[LookupResult | Exception]:
        """Results of a batch of requests, by default in the current version. An invalid request yields its exception."""
        version = self.current if version is None else version
        parsed: dict[int, ParsedRequest] = {}
        found: dict[int, LookupResult | Exception] = {}
        for number, request in enumerate(requests):
            try:
                parsed[number] = parse_request(version, request)
            except BadInput as error:
                found[number] = error.with_traceback(None)
        try:
            found |= zip(parsed, look_up_batch(version, list(parsed.values())), strict=True)
        except (BadInput, ShardDown):  # of one of the requests: look each up alone
            found |= {number: look_up_alone(version, request) for number, request in parsed.items()}
        return [found[number] for number in range(len(requests))]

    def wire_lookup(self) -> tuple[str, WireLookup | None]:
        """The current version's name, and its kernels for the fast path, if there are any."""
        version = self.current
        return version.name, version.wire_lookup

    def lookup(
        self, inputs: Mapping[str, Array | Tensor | Sequence[int]], outputs: Sequence[str] = ()
    ) -> dict[str, Tensor]:  # fmt: skip
        """Look up rows of features, or bags of rows.

        Args:
            inputs: ids by feature; with `"<feature>.offsets"` bags, and with `"<feature>.weights"` weighted sums
            outputs: names of the outputs, by default those of all features; `"<feature>.known"` says which ids of an elastic
                feature have rows of their own

        Returns:
            fp32 by feature: [ids, dim], or [bags, dim]; bool [ids] for `"<feature>.known"`

        Raises:
            BadInput: an input is unknown or invalid, or an id has no row
            ShardDown: a shard with a requested row is down
            NotReady: the group is closed

        Example:
            >>> group.lookup({"user": [3, 17], "item": [5, 6, 7], "item.offsets": [0, 2]})
        """
        request = {name: as_array(name, value) for name, value in inputs.items()}
        if isinstance(result := self.infer([request])[0], Exception):
            raise result
        found = result.only(outputs) if outputs else result
        return {name: torch.from_numpy(output) for name, output in found.items()}
